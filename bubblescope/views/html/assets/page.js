"use strict";
// The theme follows the reader's system until the button says otherwise; nothing is stored.
(() => {
  const ORDER = ["system", "light", "dark"], root = document.documentElement, button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = 0;
  function recolour() { bubblescope.repaint?.(); bubblescope.redrawCharts(); }
  function applyTheme() { if (chosen) root.dataset.theme = ORDER[chosen]; else delete root.dataset.theme; recolour(); }
  // Paper is white and narrow: what the scripts draw must be drawn again for it, and again afterwards.
  function print(on) {
    root.toggleAttribute("data-paper", on);
    if (on) {
      root.dataset.theme = "light";
      bubblescope.drawAllCharts();
      bubblescope.repaint?.();
    } else applyTheme();
    bubblescope.fitCharts();
  }
  button.addEventListener("click", () => {
    chosen = (chosen + 1) % ORDER.length;
    button.textContent = `Theme: ${ORDER[chosen]}`;
    applyTheme();
  });
  dark.addEventListener("change", recolour);
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  matchMedia("print").addEventListener("change", (event) => print(event.matches));
  addEventListener("load", bubblescope.startCharts);
})();
