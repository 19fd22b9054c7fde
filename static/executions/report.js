// Says how far a report is that is being made, and shows its page anew when it is done.
const progress = document.querySelector(".report-progress");

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

// The list has several: it shows where they were when it was opened.
if (progress && document.querySelectorAll(".report-progress").length === 1) setTimeout(look, 1000);
