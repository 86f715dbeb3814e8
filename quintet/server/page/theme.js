/** Light or dark as the user has chosen, else as the system is. No module: it runs before the page is drawn. */

(() => {
  const NAME = "quintet.theme";
  const THEMES = ["light", "dark"]; // anything else follows the system

  function stored() {
    try {
      return localStorage.getItem(NAME);
    } catch {
      return null;
    }
  }

  function apply(theme) {
    if (THEMES.includes(theme)) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    const field = document.getElementById("theme");
    if (field) field.value = document.documentElement.dataset.theme ?? "";
  }

  function store(theme) {
    try {
      if (theme) localStorage.setItem(NAME, theme);
      else localStorage.removeItem(NAME);
    } catch {
      // A browser that keeps nothing: the choice ends with the tab.
    }
  }

  apply(stored());
  addEventListener("storage", ({ key }) => (key === null || key === NAME) && apply(stored()));
  addEventListener("DOMContentLoaded", () => {
    apply(document.documentElement.dataset.theme);
    document.getElementById("theme").addEventListener("change", ({ target }) => {
      store(target.value);
      apply(target.value);
    });
  });
})();
