// Keeps one part of the page up to date: the element that `data-refresh` of this script's tag
// selects, every `data-every` seconds, from `data-from` or the page's own address. Nothing is
// fetched while nobody looks at it, and what has not changed is left as it is: where the reader has
// scrolled to, what is selected, checked or focused.
(() => {
  "use strict";

  const { refresh: selector, every, from = location.href } = document.currentScript.dataset;
  let etag = "";
  let timer = 0;
  let isBusy = false;

  const keyOf = (body) => body.querySelector("a[href*='/change/']")?.pathname ?? body.textContent;

  function isSelecting(element) {
    const selection = getSelection();
    return !selection.isCollapsed && selection.containsNode(element, true);
  }

  // Lines are known by what they link to, so that those that stay are not touched.
  function renewLines(table, fresh) {
    const left = new Map([...table.tBodies].map((body) => [keyOf(body), body]));
    // What the reader is at: the line that has the focus, or the first that she sees.
    const anchor =
      document.activeElement.closest("#result_list tbody") ??
      [...table.tBodies].find((body) => body.getBoundingClientRect().top >= 0);
    const top = anchor?.getBoundingClientRect().top;
    let place = table.tBodies[0] ?? null;
    for (const body of [...fresh.tBodies]) {
      const key = keyOf(body);
      const old = left.get(key);
      left.delete(key);
      if (old) {
        old.className = body.className;
        if (old.innerHTML !== body.innerHTML) renewLine(old, body);
      }
      const line = old ?? document.importNode(body, true);
      if (line === place) place = place.nextElementSibling;
      else table.insertBefore(line, place);
    }
    for (const gone of left.values()) gone.remove();
    if (scrollY === 0 || !anchor?.isConnected) return;
    const stay = () => scrollBy(0, anchor.getBoundingClientRect().top - top);
    stay();
    // The theme's box around the table grows a moment later.
    requestAnimationFrame(() => requestAnimationFrame(stay));
  }

  function renewLine(old, body) {
    const isFocused = old.contains(document.activeElement);
    const isChecked = old.querySelector("input[type=checkbox]")?.checked;
    old.replaceChildren(...body.childNodes);
    const box = old.querySelector("input[type=checkbox]");
    if (box) box.checked = isChecked;
    if (isFocused) old.querySelector("a")?.focus({ preventScroll: true });
  }

  const kindOf = (node) =>
    [node.nodeName, node.id, node.getAttribute?.("class")?.replace(/\bhtmx-\S+/g, "").trim()].join(" ");

  function renew(old, fresh) {
    // What htmx has fetched renews itself.
    if (old.isEqualNode(fresh) || old.attributes?.["hx-get"]) return;
    if (!old.childElementCount && !fresh.childElementCount) {
      old.replaceWith(document.importNode(fresh, true));
      return;
    }
    for (const { name, value } of fresh.attributes) old.setAttribute(name, value);
    let place = old.firstChild;
    for (const child of [...fresh.childNodes]) {
      let same = place;
      while (same && kindOf(same) !== kindOf(child)) same = same.nextSibling;
      if (!same) {
        const put = document.importNode(child, true);
        old.insertBefore(put, place);
        if (put.nodeType === Node.ELEMENT_NODE) window.htmx?.process(put);
        continue;
      }
      while (place !== same) place = removed(place);
      place = same.nextSibling;
      renew(same, child);
    }
    while (place) place = removed(place);
  }

  function removed(node) {
    const next = node.nextSibling;
    node.remove();
    return next;
  }

  async function look() {
    const element = document.querySelector(selector);
    if (element && isSelecting(element)) return true;
    const headers = { "X-Fragment": "1" };
    if (etag) headers["If-None-Match"] = etag;
    const answer = await fetch(from, { headers, cache: "no-store", credentials: "same-origin" });
    if (answer.status === 304) return true;
    // Signed out, or not allowed any more: asking on would not change that.
    if (answer.redirected || (answer.status >= 400 && answer.status < 500)) return false;
    if (!answer.ok) return true;
    const text = await answer.text();
    const fresh = new DOMParser().parseFromString(text, "text/html").querySelector(selector);
    // Where there was nothing there is no place to keep either.
    if (fresh && !element) location.reload();
    else if (fresh && element.nodeName === "TABLE") renewLines(element, fresh);
    else if (fresh) renew(element, fresh);
    etag = answer.headers.get("ETag") ?? "";
    return true;
  }

  async function turn() {
    clearTimeout(timer);
    if (document.hidden || isBusy) return;
    isBusy = true;
    const goesOn = await look().catch(() => true);
    isBusy = false;
    if (goesOn) timer = setTimeout(turn, Number(every) * 1000);
    else document.removeEventListener("visibilitychange", turn);
  }

  document.addEventListener("visibilitychange", turn);
  timer = setTimeout(turn, Number(every) * 1000);
})();
