"use strict";
// plotly's figures, drawn when they come into view, in the colours of the page's theme.
(() => {
  const drawn = new Set();

  // plotly.js sets some style attributes as text, which the page's policy forbids; setting the same text through
  // the style object is allowed, so no 'unsafe-inline' is needed.
  const setAttribute = Element.prototype.setAttribute;
  Element.prototype.setAttribute = function (name, value) {
    if (name === "style" && this.style) this.style.cssText = value;
    else setAttribute.call(this, name, value);
  };

  function themed(layout) {
    const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
    const axis = (a) => ({ ...a, gridcolor: of("--line"), linecolor: of("--line"), tickcolor: of("--line") });
    const xaxis = axis(layout.xaxis);
    // Labels beside the bars need more of a narrow page.
    if (innerWidth < 560 && xaxis.range) xaxis.range = [xaxis.range[0], xaxis.range[1] * 1.35];
    return {
      ...layout, font: { ...layout.font, color: of("--ink") }, xaxis, yaxis: axis(layout.yaxis),
      hoverlabel: { bgcolor: of("--panel"), bordercolor: of("--soft"), font: { color: of("--ink") } },
    };
  }

  function tinted(traces) {
    const style = getComputedStyle(document.documentElement), zero = style.getPropertyValue("--cell-zero").trim();
    return traces.map((trace) => (trace.type === "heatmap" ? { ...trace, colorscale: [trace.colorscale[0], [0.5, zero], trace.colorscale[2]] } : trace));
  }

  function draw(div) {
    if (typeof Plotly === "undefined") return;
    const figure = bubblescope.data.figures[div.dataset.figure];
    drawn.add(div);
    Plotly.react(div, tinted(figure.data), themed(figure.layout), {
      displayModeBar: false, responsive: true, scrollZoom: false, showSendToCloud: false, plotlyServerURL: "", doubleClick: false, showTips: false,
    }).then(() => { div.dataset.drawn = "yes"; });
  }

  bubblescope.startCharts = () => {
    const watch = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) { watch.unobserve(entry.target); draw(entry.target); }
    }, { rootMargin: "400px" });
    for (const div of document.querySelectorAll("[data-figure]")) watch.observe(div);
  };
  bubblescope.drawAllCharts = () => document.querySelectorAll("[data-figure]").forEach(draw);
  // plotly.js keeps the width that it first found until it is told to measure again.
  bubblescope.fitCharts = () => drawn.forEach((div) => Plotly.relayout(div, { autosize: true }));
  bubblescope.redrawCharts = () => drawn.forEach(draw);
})();
