"use strict";
// Numbers and elements, written as the Python side writes them (bubblescope/views/format.py).
const bubblescope = {};

(() => {
  const MISSING = "–", MINUS = "\u2212";

  function grouped(value, decimals) {
    const [whole, rest] = Math.abs(value).toFixed(decimals).split(".");
    const text = whole.replace(/\B(?=(\d{3})+$)/g, ",") + (rest ? "." + rest : "");
    return (value < 0 ? MINUS : "") + text;
  }

  function number(value, digits = 3) {
    if (value === null || !Number.isFinite(value)) return MISSING;
    if (value === 0) return "0";
    return grouped(value, Math.min(9, Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))))));
  }

  function unitOf(seconds) {
    const size = Math.abs(seconds);
    return size >= 1 ? ["s", 1] : size >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  }

  function seconds(value) {
    if (value === null || !Number.isFinite(value)) return MISSING;
    if (Math.abs(value) < 1e-9) return "0 s";
    const [unit, scale] = unitOf(value);
    return `${number(value * scale)} ${unit}`;
  }

  function milliseconds(value) {
    if (value === null || !Number.isFinite(value)) return MISSING;
    if (Math.abs(value) < 5e-7) return "0";
    const size = Math.abs(value) * 1e3;
    return grouped(value * 1e3, size < 10 ? 3 : size < 100 ? 2 : size < 1000 ? 1 : 0);
  }

  function money(value, currency) {
    if (value === null || !Number.isFinite(value)) return MISSING;
    const unit = currency ? currency + " " : "";
    if (value !== 0 && Math.abs(value) < 0.005) return `under ${unit}0.01`;
    const amount = grouped(Math.abs(value), Math.abs(value) < 100 ? 2 : 0);
    return (value < 0 ? MINUS : "") + unit + amount;
  }

  // Parts rounded to the precision of their total so that what is printed still adds up (largest remainder).
  function split(parts, total) {
    const [unit, scale] = unitOf(total);
    const size = Math.abs(total * scale);
    const decimals = size === 0 ? 0 : Math.max(1, 2 - Math.floor(Math.log10(size)));
    const grain = 10 ** decimals;
    const exact = parts.map((part) => part * scale * grain);
    const whole = exact.map(Math.floor);
    let left = Math.round(total * scale * grain) - whole.reduce((a, b) => a + b, 0);
    const order = exact.map((_, i) => i).sort((a, b) => (exact[b] - whole[b]) - (exact[a] - whole[a]) || a - b);
    for (let k = 0; left > 0; k = (k + 1) % order.length, left--) whole[order[k]] += 1;
    for (let k = order.length - 1; left < 0; k = (k || order.length) - 1, left++) whole[order[k]] -= 1;
    return {
      total: `${grouped(Math.round(total * scale * grain) / grain, decimals)} ${unit}`,
      parts: whole.map((w) => (w === 0 ? "" : `${grouped(w / grain, decimals)} ${unit}`)),
    };
  }

  // Text only ever enters the page as text nodes: no name can become markup.
  function element(tag, attributes = {}, ...children) {
    const made = tag.startsWith("svg:")
      ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
      : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children);
    return made;
  }

  bubblescope.text = { number, seconds, milliseconds, money, split, grouped, element };
})();
