// Says how far a report is that is being made, and shows its page anew when it is done.
document.addEventListener("DOMContentLoaded", () => {
  const shown = document.querySelectorAll(".report-progress");
  // A list shows several, as far as they were when it was opened.
  if (shown.length !== 1) return;
  const [progress] = shown;

  async function look() {
    const answer = await fetch(progress.dataset.url, { headers: { Accept: "application/json" } });
    if (!answer.ok) return;
    const report = await answer.json();
    if (report.state === "ready" || report.state === "failed") {
      window.location.reload();
      return;
    }
    progress.textContent = report.progress;
    setTimeout(look, 2000);
  }

  setTimeout(look, 1000);
});
