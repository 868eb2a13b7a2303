"use strict";
// The theme follows the reader's system until the button says otherwise; nothing is stored.
(() => {
  const ORDER = ["system", "light", "dark"], root = document.documentElement, button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = 0;
  function recolour() { bubblescope.repaint?.(); bubblescope.redrawCharts(); }
  button.addEventListener("click", () => {
    chosen = (chosen + 1) % ORDER.length;
    if (chosen) root.dataset.theme = ORDER[chosen]; else delete root.dataset.theme;
    button.textContent = `Theme: ${ORDER[chosen]}`;
    recolour();
  });
  dark.addEventListener("change", recolour);
  addEventListener("beforeprint", () => { bubblescope.drawAllCharts(); recolour(); });
  addEventListener("afterprint", recolour);
  addEventListener("load", bubblescope.startCharts);
})();
