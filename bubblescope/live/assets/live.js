"use strict";
// Keeps an open page up to date. The server sends the page as it is now; of it, only what changed is taken over, so
// that focus, scrolling and opened details stay. A reader may pause; while a bubble is looked at, its step stays.
(() => {
  const place = document.getElementById("connection"), pause = document.getElementById("pause");
  const timeline = bubblescope.data.timeline, lanes = document.getElementById("lanes"), story = document.getElementById("story");
  let version = place.dataset.version, paused = false, waiting = null;

  function say(message) { if (place.textContent !== message) place.textContent = message; }

  function adopt(element, fresh) {
    if (element && element.innerHTML !== fresh.innerHTML) element.replaceChildren(...fresh.childNodes);
  }
  // The fresh page decides what there is: this one has tables of its own (the story's).
  function replace(fresh, selector) {
    for (const element of fresh.querySelectorAll(selector)) adopt(document.getElementById(element.id), element);
  }
  function replaceLegends(fresh) {
    const now = document.querySelectorAll("#timeline .legend");
    fresh.querySelectorAll("#timeline .legend").forEach((element, i) => adopt(now[i], element));
  }

  // Whether the reader is inside the step shown: zoomed in, or reading a bubble's story.
  function reading() {
    if (!lanes?.dataset.view || !timeline.steps.length) return false;
    const [from, to] = lanes.dataset.view.split(" ").map(Number);
    return !story.hidden || to - from < 0.999 * timeline.steps[0].seconds / timeline.unit;
  }

  let held = null;
  function showStep(next, fresh) {
    if (reading()) { held = [next, fresh]; say("The timeline stays at this step while you look at it. Close the story and show the whole step to follow again."); return; }
    held = null;
    Object.assign(timeline, next);
    // Whole again in the unit of the new step, which may differ, before that step is shown.
    document.querySelector("[data-do=all]").click();
    replaceLegends(fresh);
    replace(fresh, "#step");
    document.getElementById("step").dispatchEvent(new Event("change"));
  }

  // A page of another layout is loaded anew; what the reader opened, and where the keyboard was in it, comes back.
  const OPENED = "bubblescope-opened";
  const name = (details) => details.querySelector("[id]")?.id ?? details.querySelector("summary").textContent;
  function loadAnew() {
    const opened = [...document.querySelectorAll("details[open]")].map((details) =>
      [name(details), [...details.querySelectorAll("*")].indexOf(document.activeElement)]);
    try { sessionStorage.setItem(OPENED, JSON.stringify(opened)); } catch { /* refused by the browser: they close */ }
    location.reload();
  }
  function openAgain() {
    let opened = [];
    try { opened = JSON.parse(sessionStorage.getItem(OPENED)) ?? []; sessionStorage.removeItem(OPENED); } catch { return; }
    for (const details of document.querySelectorAll("details")) {
      const [, focused] = opened.find(([known]) => known === name(details)) ?? [];
      if (focused === undefined) continue;
      details.open = true;
      details.querySelectorAll("*")[focused]?.focus();
    }
  }
  openAgain();

  function apply(event) {
    if (event.layout !== place.dataset.layout) { loadAnew(); return; }
    const fresh = new DOMParser().parseFromString(event.page, "text/html");
    version = event.version;
    document.title = fresh.title;
    say("");
    replace(fresh, "#now");
    replace(fresh, "table[id]:not(#bubbles)");
    replace(fresh, "#notices");
    if (!timeline) return;
    bubblescope.data.figures = event.figures;
    bubblescope.redrawCharts();
    showStep(event.timeline, fresh);
    document.body.dataset.version = version;
  }

  setInterval(() => { if (held && !paused && !reading()) { say(""); showStep(...held); } }, 500);

  pause?.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Paused" : "Pause";
    if (!paused && waiting) { apply(waiting); waiting = null; }
  });

  function listen() {
    const source = new EventSource(`events?have=${encodeURIComponent(version)}`);
    source.addEventListener("view", (message) => {
      const event = JSON.parse(message.data);
      if (paused) waiting = event; else apply(event);
    });
    source.addEventListener("open", () => { if (place.dataset.lost) { delete place.dataset.lost; say(""); } });
    // The browser tries again by itself; after a refusal (the watcher asks for its token anew) it does not.
    source.addEventListener("error", () => {
      place.dataset.lost = "yes";
      say("The connection to the watcher is lost. This page shows what it last knew, and tries again.");
      if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
    });
  }
  listen();
})();
