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
