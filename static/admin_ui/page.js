// Unfold's components under a Content-Security-Policy without unsafe-eval. Alpine's CSP build
// finds only what is registered, and no globals: what the templates name is given to them here.
document.addEventListener("alpine:init", () => {
  for (const component of [theme, searchForm, searchDropdown, searchCommand]) {
    Alpine.data(component.name, component);
  }

  Alpine.data("page", () => ({
    activeTab: "",
    sidebarMobileOpen: false,
    sidebarDesktopOpen: localStorage.getItem("sidebarDesktopOpen") !== "0",
    window: {
      location: {
        pathname: window.location.pathname,
        search: window.location.search,
      },
    },
    localStorage: {
      setItem: (name, value) => localStorage.setItem(name, value),
    },
    init() {
      const primary = this.$el.dataset.primaryTab;
      this.activeTab = primary ? getCurrentTab() || primary : "";
      this.$watch("sidebarDesktopOpen", (open) =>
        localStorage.setItem("sidebarDesktopOpen", open ? "1" : "0"),
      );
    },
  }));
});

// A group of the menu stays as its reader left it; the one of the page shown is open.
document.addEventListener("DOMContentLoaded", () => {
  for (const group of document.querySelectorAll(".menu-group")) {
    const name = `menu-${group.dataset.group}`;
    const kept = localStorage.getItem(name);
    if (kept !== null && !("current" in group.dataset)) group.open = kept === "1";
    group.querySelector("summary").addEventListener("click", () =>
      localStorage.setItem(name, group.open ? "0" : "1"),
    );
  }
});

// Names that the theme and its widgets leave out, for who cannot see what they stand beside.
function nameWhatHasNoName() {
  document
    .querySelector("#nav-sidebar-apps .simplebar-content-wrapper")
    ?.setAttribute("aria-label", "Menu");
  for (const chosen of document.querySelectorAll(".select2-selection__rendered")) {
    const select = chosen.closest(".select2")?.previousElementSibling;
    chosen.setAttribute("aria-label", select?.labels?.[0]?.textContent.trim() ?? "Choice");
  }
  for (const help of document.querySelectorAll(".help-tooltip[aria-label]")) {
    help.setAttribute("role", "img");
  }
  // Of a row in a table, also of the hidden one that new rows are made from.
  for (const cell of document.querySelectorAll("td[class*='field-']")) {
    const column = [...cell.classList].find((name) => name.startsWith("field-"));
    const heading = cell.closest("table")?.querySelector(`th.${column.replace("field-", "column-")}`);
    for (const input of heading ? cell.querySelectorAll("input, select, textarea") : []) {
      if (!input.labels?.length) input.setAttribute("aria-label", heading.innerText.trim());
    }
  }
  // What scrolls is reached by the keyboard.
  for (const box of document.querySelectorAll("pre")) {
    if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
  }
}
window.addEventListener("load", nameWhatHasNoName);

// What the theme opens by a click on a text or an icon: its account menu, panels and further buttons.
const ICON = ".material-symbols-outlined";
function makeReachable() {
  for (const element of document.querySelectorAll("[x-on\\:click], [x-on\\:click\\.prevent]")) {
    if (element.matches("button, a[href], input, label, summary, [tabindex]")) continue;
    if (element.querySelector("a, button, input, select, textarea")) continue;
    element.tabIndex = 0;
    element.setAttribute("role", "button");
    const words = element.cloneNode(true);
    for (const icon of words.querySelectorAll(ICON)) icon.remove();
    const name = element.matches(ICON) ? "" : words.textContent.trim();
    const byIcon = element.textContent.trim() === "close" ? "Close" : "More";
    element.setAttribute("aria-label", element.title || name.replace(/\s+/g, " ") || byIcon);
  }
}
window.addEventListener("load", makeReachable);
document.addEventListener("keydown", (event) => {
  const isPressed = event.key === "Enter" || event.key === " ";
  if (!isPressed || !event.target.matches?.("[role='button']:not(button, a[href])")) return;
  event.preventDefault();
  event.target.click();
});
// After the widgets, which are made when jQuery is ready.
window.django?.jQuery(nameWhatHasNoName);
