// A button with data-copy="ID" copies the text of that element as it is shown, and says so for a
// moment. Numbers of lines and names of streams, which stand beside the text, are left out.
// `copyText` does the same with another text.
(() => {
  "use strict";

  const SAID_SECONDS = 2;
  const BESIDE = ".line > a, .stream-name";

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-copy]");
    const source = button && document.getElementById(button.dataset.copy);
    if (source) copyText(button, textOf(source));
  });

  function textOf(element) {
    const copy = element.cloneNode(true);
    for (const extra of copy.querySelectorAll(BESIDE)) extra.remove();
    return copy.textContent.replace(/\n$/, "");
  }

  async function copyText(button, text) {
    button.dataset.label ??= button.textContent;
    button.textContent = (await toClipboard(text)) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = button.dataset.label), SAID_SECONDS * 1000);
  }

  async function toClipboard(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Over plain http there is no clipboard, but the old way.
      const field = document.createElement("textarea");
      field.value = text;
      field.className = "sr-only";
      document.body.append(field);
      field.select();
      const isDone = document.execCommand("copy");
      field.remove();
      return isDone;
    }
  }

  globalThis.copyText = copyText;
})();
