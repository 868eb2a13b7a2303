"use strict";
// GPU-hours = GPUs × steps × seconds per step / 3600, money = GPU-hours × price (ATTRIBUTION.md §9).
(() => {
  const { data, text } = bubblescope;
  const { number, milliseconds, money } = text;
  const base = data.whatif, DAY = 86400;
  const field = (id) => document.getElementById(id);
  const slider = (id) => document.getElementById(`${id}-slider`);
  // Price runs evenly, the others by powers: [least, most] of the slider.
  const RANGE = {
    price: [0, Math.max(10, 4 * (base.price ?? 0))],
    gpus: [1, Math.max(16384, base.gpus)],
    total: [1, Math.max(1e7, base.steps)],
    days: [base.step_s / DAY, Math.max(1e7, base.steps) * base.step_s / DAY],
  };
  const toSlider = (id, v) => { const [a, b] = RANGE[id]; return id === "price" ? 1000 * v / b : 1000 * Math.log(Math.max(v, a) / a) / Math.log(b / a); };
  const fromSlider = (id, s) => { const [a, b] = RANGE[id]; return id === "price" ? Math.round(b * s / 10) / 100 : a * (b / a) ** (s / 1000); };
  const tidy = (v) => String(Number(v.toPrecision(6)));
  const read = (id) => { const v = field(id).value; return v === "" || !Number.isFinite(Number(v)) || Number(v) < 0 ? null : Number(v); };

  function write(id, value) {
    field(id).value = value === null ? "" : tidy(id === "gpus" || id === "total" ? Math.max(1, Math.round(value)) : value);
  }
  function put(id, value) {
    write(id, value);
    syncSlider(id);
  }
  function syncSlider(id) {
    const value = read(id) ?? 0;
    slider(id).value = String(Math.round(toSlider(id, value)));
    speak(id);
  }
  const speak = (id) => slider(id).setAttribute("aria-valuetext", number(read(id)));

  function recompute() {
    const [price, gpus, steps] = ["price", "gpus", "total"].map(read);
    const known = gpus !== null && steps !== null;
    const hours = (s) => (s === null || !known ? null : gpus * steps * s / 3600);
    const cash = (h) => (h === null || price === null ? null : h * price);
    const all = hours(base.lost_s), days = known && base.step_s ? steps * base.step_s / DAY : null;
    field("out-hours").textContent = number(all);
    field("out-money").textContent = money(cash(all), base.currency);
    field("out-money-note").textContent = price === null ? "type a price to see it" : "in all";
    const perDay = all === null || !days ? null : all / days;
    field("out-day").textContent = price === null ? `${number(perDay)} GPU-hours` : money(cash(perDay), base.currency);
    fill("table-actions", base.actions, (a) => [milliseconds(a.now_s - a.saved_s), milliseconds(a.saved_s), number(hours(a.saved_s * a.share)), money(cash(hours(a.saved_s * a.share)), base.currency), number(known ? steps * a.saved_s * a.share / DAY : null)]);
    fill("table-costs", base.causes, (c) => [milliseconds(c.idle_s), number(hours(c.idle_s)), money(cash(hours(c.idle_s)), base.currency)]);
  }

  function fill(id, rows, cells) {
    for (const line of document.querySelectorAll(`#${id} tr[data-row]`)) {
      const values = cells(rows[Number(line.dataset.row)]);
      [...line.querySelectorAll("td")].forEach((cell, i) => { cell.textContent = values[i]; });
    }
  }

  // Steps and days are one thing in two units: where one is no number, nor is the other.
  const times = (value, by) => (value === null ? null : value * by);
  function follow(id) {
    if (id === "total") put("days", times(read("total"), base.step_s / DAY));
    if (id === "days") put("total", times(read("days"), DAY / base.step_s));
    recompute();
  }

  for (const id of Object.keys(RANGE)) {
    field(id).addEventListener("input", () => { syncSlider(id); follow(id); });
    field(id).addEventListener("change", () => {
      if (read(id) === null) write(id, null);
      if (id === "days") follow("total"); // whole steps
    });
    slider(id).addEventListener("input", () => {
      // The slider stays where it was put: rounding to whole GPUs must not pull it back.
      write(id, fromSlider(id, Number(slider(id).value)));
      speak(id);
      follow(id);
    });
  }
  field("sliders").addEventListener("submit", (event) => event.preventDefault());
  put("price", base.price);
  put("gpus", base.gpus);
  put("total", base.steps);
  put("days", base.steps * base.step_s / DAY);
  recompute();
})();
