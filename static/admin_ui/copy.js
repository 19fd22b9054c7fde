// A button with data-copy="#id" copies that element's text, and says so. Beyond localhost a browser
// has a clipboard over https alone: elsewhere the text is selected, to be copied by hand.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  const source = button && document.querySelector(button.dataset.copy);
  if (!source) {
    return;
  }
  const text = source.textContent.trim();
  const said = button.querySelector("[data-said]") || button;
  try {
    await navigator.clipboard.writeText(text);
    said.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(source);
    said.textContent = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C";
  }
});
