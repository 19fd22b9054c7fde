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
// After the widgets, which are made when jQuery is ready.
window.django?.jQuery(nameWhatHasNoName);
