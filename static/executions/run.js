// The page of one execution: wrapping, the clock, and itself anew when the run has got on.
(() => {
  "use strict";

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-wrap]");
    const target = button && document.getElementById(button.dataset.wrap);
    if (target) {
      button.setAttribute("aria-pressed", String(target.classList.toggle("is-wrapped")));
    }
  });

  function inTime(milliseconds) {
    const seconds = Math.floor(milliseconds / 1000);
    if (seconds < 60) return `${seconds} s`;
    const minutes = Math.floor(seconds / 60);
    return minutes < 60 ? `${minutes} min ${seconds % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }

  // By the server's clock as it was then, and ours only for what has passed since.
  let began = performance.now();
  setInterval(() => {
    const clock = document.querySelector("[data-elapsed]");
    if (!clock || document.hidden) return;
    clock.textContent = inTime(Number(clock.dataset.elapsed) + performance.now() - began);
  }, 1000);

  async function fetched() {
    const answer = await fetch(location.pathname, { credentials: "same-origin", cache: "no-store" });
    if (!answer.ok || answer.redirected) return null;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    return page.getElementById("run");
  }

  function say() {
    const parts = [".run-status", ".run-took", ".run-error"].map((name) =>
      document.querySelector(`#run ${name}`)?.textContent.trim(),
    );
    document.getElementById("run-said").textContent = parts.filter(Boolean).join(", ");
  }

  const isPlaced = () => document.querySelector("#run [data-placed]") !== null;

  async function getOn(tries) {
    const fresh = await fetched().catch(() => null);
    if (!fresh || fresh.querySelector("[data-status]").dataset.status !== "running") return;
    began = performance.now();
    for (const part of document.querySelectorAll("#run [data-fresh]")) {
      const other = fresh.querySelector(`[data-fresh="${part.dataset.fresh}"]`);
      if (other && !part.isEqualNode(other)) part.replaceWith(other);
    }
    say();
    // Which sandbox it gets is known a moment after it has begun.
    if (!isPlaced() && tries > 1) setTimeout(getOn, 1000, tries - 1);
  }

  document.addEventListener("run:started", () => {
    if (document.querySelector("#run [data-status]")?.dataset.status === "queued") getOn(10);
  });

  document.addEventListener("run:done", async () => {
    const fresh = await fetched().catch(() => null);
    if (!fresh) {
      document.querySelector("[data-follow-note]").textContent = "It has ended. Reload the page.";
      return;
    }
    const focused = document.activeElement?.id;
    const place = document.querySelector("pre.code")?.scrollTop ?? 0;
    document.getElementById("run").replaceWith(fresh);
    const code = document.querySelector("pre.code");
    if (code) code.scrollTop = place;
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    say();
  });
})();
