"use strict";
// The timeline: a canvas, because a step of a large job has more operations than a page can hold elements.
// Up to 32 GPUs each have a row; more are drawn by stage, and a stage opens into its GPUs.
(() => {
  const { data, load, text } = bubblescope;
  const { element, seconds, milliseconds, split } = text;
  const t = data.timeline;
  const canvas = document.getElementById("lanes");
  const pick = document.getElementById("step");
  if (!t.steps.length || !t.rows.length) {
    document.getElementById("lanes-frame").hidden = true;
    document.getElementById("lanes-status").textContent = "There is no step to draw.";
    return;
  }
  const context = canvas.getContext("2d");
  const story = document.getElementById("story");
  const status = document.getElementById("lanes-status");
  const byStage = t.rows.length > 32;
  const AXIS = 26, MOST_HEIGHT = 620;
  const state = {
    block: null, step: null, ideal: null, from: 0, to: 1, top: 0, row: 0, gap: -1,
    open: new Set(), messages: false, showIdeal: Boolean(t.ideal),
  };
  let rows = [], hits = [];

  // ---- rows ------------------------------------------------------------------------------------------------
  function labels(rank, stage) {
    return byStage || stage < 0 ? { label: `GPU ${rank}`, small: "" } : { label: `stage ${stage}`, small: `GPU ${rank}` };
  }
  function layout() {
    const stages = new Map();
    t.rows.forEach(([, stage], i) => stages.set(stage, [...(stages.get(stage) ?? []), i]));
    rows = [];
    for (const [stage, members] of stages) {
      if (byStage) rows.push({ type: "stage", stage, members, height: 46, label: stage < 0 ? "stage ?" : `stage ${stage}`, count: members.length });
      if (!byStage || state.open.has(stage)) {
        for (const i of members) rows.push({ type: "gpu", index: i, height: byStage ? 16 : 30, ...labels(t.rows[i][0], stage) });
      }
    }
    if (state.ideal && state.showIdeal) {
      rows.push({ type: "title", height: 30, label: `The ideal schedule, replayed with equal stages and free transfers: ${seconds(t.ideal.seconds)}` });
      t.ideal.rows.forEach(([rank, stage], i) => rows.push({ type: "ideal", index: i, height: 20, label: `stage ${stage}`, small: "" }));
    }
    let y = 0;
    for (const row of rows) { row.y = y; y += row.height + 3; }
    state.contentHeight = y;
    state.row = Math.min(state.row, rows.length - 1);
  }

  const gutter = () => (canvas.clientWidth >= 560 ? 116 : byStage ? 84 : 62);
  const viewHeight = () => Math.min(MOST_HEIGHT, state.contentHeight);
  const length = () => Math.round(Math.max(state.block.seconds, state.showIdeal && t.ideal ? t.ideal.seconds : 0) / t.unit);
  const toX = (time) => gutter() + (time - state.from) / (state.to - state.from) * (canvas.clientWidth - gutter() - 8);
  const toTime = (x) => state.from + (x - gutter()) / (canvas.clientWidth - gutter() - 8) * (state.to - state.from);

  // ---- colours ---------------------------------------------------------------------------------------------
  let palette = {};
  function readPalette() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    palette = { ink: of("--ink"), soft: of("--soft"), line: of("--line"), panel: of("--panel"), focus: of("--focus"), opInk: of("--op-ink") };
    palette.ops = t.kinds.map((k) => of(`--op-${"FBIW".includes(k) ? k : "other"}`));
    palette.causes = t.causes.map((c) => patterned(c.colour, c.pattern));
  }

  const STROKES = {
    "/": [[-2, 2, 2, -2], [0, 8, 8, 0], [6, 10, 10, 6]], "\\": [[-2, 6, 2, 10], [0, 0, 8, 8], [6, -2, 10, 2]],
    x: [[0, 0, 8, 8], [8, 0, 0, 8]], "-": [[0, 2, 8, 2], [0, 6, 8, 6]], "|": [[2, 0, 2, 8], [6, 0, 6, 8]], "+": [[4, 0, 4, 8], [0, 4, 8, 4]],
  };

  function patterned(colour, shape) {
    if (!shape) return colour;
    const ratio = Math.max(1, Math.round(devicePixelRatio)), tile = document.createElement("canvas");
    tile.width = tile.height = 8 * ratio;
    const c = tile.getContext("2d");
    c.scale(ratio, ratio);
    c.fillStyle = colour;
    c.fillRect(0, 0, 8, 8);
    c.strokeStyle = c.fillStyle = "rgba(255,255,255,.7)";
    c.lineWidth = 1.2;
    for (const [x1, y1, x2, y2] of STROKES[shape] ?? []) { c.beginPath(); c.moveTo(x1, y1); c.lineTo(x2, y2); c.stroke(); }
    if (shape === ".") for (const [x, y] of [[2, 2], [6, 6]]) { c.beginPath(); c.arc(x, y, 1.1, 0, 7); c.fill(); }
    const made = context.createPattern(tile, "repeat");
    made.setTransform(new DOMMatrix().scale(1 / ratio));
    return made;
  }

  // ---- drawing ---------------------------------------------------------------------------------------------
  let asked = 0;
  function draw() {
    if (!asked) asked = requestAnimationFrame(() => { asked = 0; paint(); });
  }

  function paint() {
    if (!state.step) return;
    const width = canvas.clientWidth, height = viewHeight() + AXIS, ratio = devicePixelRatio;
    canvas.height = Math.round(height * ratio);
    canvas.width = Math.round(width * ratio);
    canvas.style.height = `${height}px`;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.textBaseline = "middle";
    hits = [];
    paintAxis(width, height);
    context.save();
    context.beginPath();
    context.rect(0, AXIS, width, height - AXIS);
    context.clip();
    for (const [i, row] of rows.entries()) {
      const y = AXIS + row.y - state.top;
      if (y + row.height < AXIS || y > height) continue;
      PAINTERS[row.type](row, y);
      paintLabel(row, y, i);
    }
    if (state.messages) paintMessages();
    paintChosen();
    context.restore();
    if (state.contentHeight > viewHeight() + 1) {
      const share = viewHeight() / state.contentHeight;
      context.fillStyle = palette.soft;
      context.fillRect(width - 5, AXIS + state.top * share, 4, Math.max(16, viewHeight() * share));
    }
    canvas.dataset.view = `${state.from} ${state.to}`;
  }

  function paintAxis(width, height) {
    const span = (state.to - state.from) * t.unit;
    const [unit, scale] = span >= 2 ? ["s", 1] : span >= 2e-3 ? ["ms", 1e3] : ["µs", 1e6];
    const wanted = span * scale / Math.max(2, (width - gutter()) / 110), power = 10 ** Math.floor(Math.log10(wanted));
    const tick = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= wanted);
    const perTick = tick / scale / t.unit;
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "center";
    for (let k = Math.ceil(state.from / perTick); k * perTick <= state.to; k++) {
      const x = toX(k * perTick);
      context.fillStyle = palette.line;
      context.fillRect(Math.round(x), AXIS - 5, 1, height);
      context.fillStyle = palette.soft;
      const label = `${Number((k * tick).toPrecision(10))}`;
      if (x > gutter() + 14 && x < width - 26) context.fillText(label, x, 11);
    }
    context.textAlign = "left";
    context.fillStyle = palette.soft;
    context.fillText(unit, 10, 11);
  }

  function paintLabel(row, y, i) {
    if (row.type === "title") return;
    context.fillStyle = palette.panel;
    context.fillRect(0, y - 2, gutter() - 1, row.height + 4);
    if (i === state.row && document.activeElement === canvas) {
      context.fillStyle = palette.focus;
      context.fillRect(0, y, 4, row.height);
    }
    context.fillStyle = palette.ink;
    context.textAlign = "left";
    context.font = "12.5px system-ui, sans-serif";
    const middle = y + row.height / 2;
    const mark = row.type === "stage" ? (state.open.has(row.stage) ? "▾ " : "▸ ") : "";
    if (row.type === "stage") {
      context.fillText(mark + row.label, 10, middle - 7);
      context.fillStyle = palette.soft;
      context.font = "11px system-ui, sans-serif";
      context.fillText(`${row.count} GPUs`, 22, middle + 8);
    } else {
      context.fillText(row.label, byStage && row.type === "gpu" ? 22 : 10, middle);
      if (row.small && gutter() > 100) {
        context.fillStyle = palette.soft;
        context.font = "11px system-ui, sans-serif";
        context.textAlign = "right";
        context.fillText(row.small, gutter() - 8, middle);
      }
    }
  }

  // First item of a row that ends after `time`: items of a row are in order and do not overlap.
  function firstAfter(ends, low, high, time) {
    while (low < high) { const middle = (low + high) >> 1; if (ends[middle] <= time) low = middle + 1; else high = middle; }
    return low;
  }

  function paintOps(columns, first, index, y, height) {
    const right = canvas.clientWidth - 8, left = gutter();
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    for (let i = firstAfter(columns.op_end, first[index], first[index + 1], state.from); i < first[index + 1] && columns.op_start[i] < state.to; i++) {
      const a = Math.max(left, toX(columns.op_start[i])), b = Math.min(right, toX(columns.op_end[i]));
      context.fillStyle = palette.ops[columns.op_kind[i]];
      context.fillRect(a, y, Math.max(b - a - (b - a > 3 ? 1 : 0), 0.6), height);
      if (b - a > 15 && height >= 14) {
        const kind = t.kinds[columns.op_kind[i]], batch = columns.op_microbatch[i];
        const label = batch >= 0 ? `${kind}${batch}` : kind;
        if (context.measureText(label).width < b - a - 2) { context.fillStyle = palette.opInk; context.fillText(label, (a + b) / 2, y + height / 2 + 0.5); }
      }
    }
  }

  function paintGpu(row, y) {
    const s = state.step, right = canvas.clientWidth - 8, left = gutter();
    for (let i = firstAfter(s.gap_end, s.gapFirst[row.index], s.gapFirst[row.index + 1], state.from); i < s.gapFirst[row.index + 1] && s.gap_start[i] < state.to; i++) {
      const a = Math.max(left, toX(s.gap_start[i])), b = Math.min(right, toX(s.gap_end[i]));
      context.fillStyle = palette.causes[s.gap_cause[i]];
      context.fillRect(a, y, Math.max(b - a - (b - a > 3 ? 1 : 0), 0.6), row.height);
      hits.push({ gap: i, a, b, y, height: row.height });
    }
    paintOps(s, s.opFirst, row.index, y, row.height);
  }

  // Share of a stage's GPUs in each kind of work and each cause, by columns of 2 pixels; kept until the view moves.
  const summed = new Map();
  function shares(row) {
    const key = `${row.stage} ${state.block.step} ${state.from} ${state.to} ${canvas.clientWidth}`;
    const known = summed.get(row.stage);
    if (known && known.key === key) return known;
    const s = state.step, bins = Math.max(1, Math.floor((canvas.clientWidth - gutter() - 8) / 2)), kinds = t.kinds.length;
    const layers = Array.from({ length: kinds + t.causes.length }, () => new Float32Array(bins));
    const width = (state.to - state.from) / bins;
    const add = (layer, start, end) => {
      const a = Math.max(0, (start - state.from) / width), b = Math.min(bins, (end - state.from) / width);
      for (let k = Math.floor(a); k < b; k++) layer[k] += Math.min(b, k + 1) - Math.max(a, k);
    };
    for (const index of row.members) {
      for (let i = firstAfter(s.op_end, s.opFirst[index], s.opFirst[index + 1], state.from); i < s.opFirst[index + 1] && s.op_start[i] < state.to; i++) add(layers[s.op_kind[i]], s.op_start[i], s.op_end[i]);
      for (let i = firstAfter(s.gap_end, s.gapFirst[index], s.gapFirst[index + 1], state.from); i < s.gapFirst[index + 1] && s.gap_start[i] < state.to; i++) add(layers[kinds + s.gap_cause[i]], s.gap_start[i], s.gap_end[i]);
    }
    const made = { key, bins, layers };
    summed.set(row.stage, made);
    return made;
  }

  function paintStage(row, y) {
    const { bins, layers } = shares(row), fills = [...palette.ops, ...palette.causes];
    const heights = new Float32Array(bins);
    layers.forEach((layer, k) => {
      context.fillStyle = fills[k];
      context.beginPath();
      for (let x = 0; x < bins; x++) {
        const h = layer[x] / row.members.length * row.height;
        if (h > 0) { context.rect(gutter() + 2 * x, y + row.height - heights[x] - h, 2, h); heights[x] += h; }
      }
      context.fill();
    });
  }

  const PAINTERS = {
    gpu: paintGpu, stage: paintStage,
    ideal: (row, y) => paintOps(state.ideal, state.ideal.opFirst, row.index, y, row.height),
    title: (row, y) => {
      context.fillStyle = palette.panel;
      context.fillRect(0, y, canvas.clientWidth, row.height);
      context.fillStyle = palette.soft;
      context.font = "12.5px system-ui, sans-serif";
      context.textAlign = "left";
      context.fillText(canvas.clientWidth < 560 ? "ideal schedule, replayed" : row.label, 10, y + row.height - 11);
    },
  };

  const MOST_ARROWS = 1500;
  function paintMessages() {
    const s = state.step, place = new Map(rows.filter((r) => r.type === "gpu").map((r) => [r.index, AXIS + r.y - state.top + r.height / 2]));
    if (!s.message_src) return;
    let drawn = 0, hidden = 0;
    context.save();
    context.beginPath();
    context.rect(gutter(), 0, canvas.clientWidth, canvas.clientHeight);
    context.clip();
    for (let i = 0; i < s.message_src.length; i++) {
      if (s.message_send[i] > state.to || s.message_done[i] < state.from || !place.has(s.message_src[i]) || !place.has(s.message_dst[i])) continue;
      if (++drawn > MOST_ARROWS) { hidden++; continue; }
      arrow(toX(s.message_send[i]), place.get(s.message_src[i]), toX(s.message_done[i]), place.get(s.message_dst[i]), s.message_grad[i]);
    }
    context.restore();
    say(hidden ? `${hidden} more P2P arrows are not drawn: zoom in.` : drawn || !byStage ? "" : "Open two neighbouring stages to see P2P arrows.");
  }

  function arrow(x1, y1, x2, y2, grad) {
    const angle = Math.atan2(y2 - y1, x2 - x1);
    context.strokeStyle = context.fillStyle = palette.ink;
    context.lineWidth = 1.1;
    context.setLineDash(grad ? [4, 3] : []);
    context.beginPath(); context.moveTo(x1, y1); context.lineTo(x2, y2); context.stroke();
    context.setLineDash([]);
    context.beginPath(); context.moveTo(x2, y2);
    for (const turn of [-0.4, 0.4]) context.lineTo(x2 - 7 * Math.cos(angle + turn), y2 - 7 * Math.sin(angle + turn));
    context.fill();
  }

  function paintChosen() {
    const hit = hits.find((h) => h.gap === state.gap);
    if (!hit) return;
    context.lineWidth = 2.5;
    context.strokeStyle = palette.panel;
    context.strokeRect(hit.a - 2.5, hit.y - 2.5, Math.max(3, hit.b - hit.a) + 5, hit.height + 5);
    context.strokeStyle = palette.ink;
    context.strokeRect(hit.a - 1, hit.y - 1, Math.max(3, hit.b - hit.a) + 2, hit.height + 2);
  }

  // ---- moving ----------------------------------------------------------------------------------------------
  function view(from, to) {
    const whole = length(), span = Math.min(Math.max(to - from, Math.max(20, whole / 1e5)), whole);
    state.from = Math.min(Math.max(0, from), whole - span);
    state.to = state.from + span;
    draw();
  }
  function zoom(factor, at = (state.from + state.to) / 2) {
    view(at - (at - state.from) * factor, at + (state.to - at) * factor);
  }
  const pan = (share) => view(state.from + share * (state.to - state.from), state.to + share * (state.to - state.from));

  function scrollTo(row) {
    if (row.y < state.top) state.top = row.y;
    if (row.y + row.height > state.top + viewHeight()) state.top = row.y + row.height - viewHeight();
  }
  function chooseRow(by) {
    let next = state.row + by;
    while (rows[next] && rows[next].type === "title") next += by;
    if (!rows[next]) return;
    state.row = next;
    scrollTo(rows[next]);
    const row = rows[next];
    say(row.type === "stage" ? `stage ${row.stage}, ${row.count} GPUs, ${state.open.has(row.stage) ? "open" : "closed"}` : row.type === "ideal" ? `ideal ${row.label}` : `${row.label} ${row.small}`);
    draw();
  }
  function toggle(row) {
    if (state.open.has(row.stage)) state.open.delete(row.stage); else state.open.add(row.stage);
    layout();
    state.top = Math.max(0, Math.min(state.top, state.contentHeight - viewHeight()));
    say(`stage ${row.stage} ${state.open.has(row.stage) ? "opened: its GPUs have a row each" : "closed"}`);
    draw();
  }
  // The longest gap in view among those numbered first..last-1, -1 when none is in view.
  function longest(first, last) {
    const s = state.step;
    let best = -1;
    for (let i = first; i < last; i++) {
      const visible = s.gap_end[i] > state.from && s.gap_start[i] < state.to;
      if (visible && (best < 0 || s.gap_end[i] - s.gap_start[i] > s.gap_end[best] - s.gap_start[best])) best = i;
    }
    return best;
  }
  function enter() {
    const row = rows[state.row], s = state.step;
    if (row.type === "stage") return toggle(row);
    if (row.type !== "gpu") return;
    const best = longest(s.gapFirst[row.index], s.gapFirst[row.index + 1]);
    if (best >= 0) choose(best); else say("No bubble of this row is in view.");
  }
  function neighbour(by) {
    const s = state.step;
    if (!s.gap_row || !s.gap_row.length) return;
    let next = state.gap + by;
    if (state.gap < 0) next = longest(0, s.gap_row.length);
    choose((next + s.gap_row.length) % s.gap_row.length);
  }
  function say(message) { status.textContent = message; }

  // ---- the story of a gap ----------------------------------------------------------------------------------
  function choose(gap) {
    const s = state.step;
    state.gap = gap;
    const stage = t.rows[s.gap_row[gap]][1];
    if (byStage && !state.open.has(stage)) { state.open.add(stage); layout(); }
    state.row = rows.findIndex((r) => r.type === "gpu" && r.index === s.gap_row[gap]);
    scrollTo(rows[state.row]);
    if (s.gap_start[gap] < state.from || s.gap_end[gap] > state.to) {
      const span = Math.max(state.to - state.from, (s.gap_end[gap] - s.gap_start[gap]) * 1.5), middle = (s.gap_start[gap] + s.gap_end[gap]) / 2;
      view(middle - span / 2, middle + span / 2);
    }
    tell(gap);
    draw();
  }

  function who(rank, stage) { return stage < 0 ? `GPU ${rank}` : `stage ${stage} (GPU ${rank})`; }
  const capital = (words) => words[0].toUpperCase() + words.slice(1);

  function rungWords(gap) {
    const s = state.step, producer = s.gap_producer[gap], op = t.texts[s.gap_producer_op[gap]];
    const row = t.rows.find(([rank]) => rank === producer);  // an optimizer belongs to no stage, its GPU does
    const other = producer < 0 ? "" : who(producer, s.gap_producer_stage[gap] >= 0 || !row ? s.gap_producer_stage[gap] : row[1]);
    const before = t.texts[s.gap_before[gap]];
    if (/^[FBIW]\d/.test(before)) return [
      other ? `${other} was still computing ${op || "it"}` : "what it needs was still being computed",
      other ? `${other} had it, but its host had not sent it` : "the other host had not sent it",
      "this GPU had not posted the receive yet",
      "transfer",
      "launch or data loading on this host",
    ];
    return [
      `${other || "other GPUs"} had not finished ${other && before && op ? op : "the step"}`,
      "other hosts had not launched what comes next",
      "this GPU had not posted the receive yet",
      "messages and collectives",
      "launch or data loading on this host",
    ];
  }

  function tell(gap) {
    const s = state.step, [rank, stage] = t.rows[s.gap_row[gap]], before = t.texts[s.gap_before[gap]];
    const rungs = t.rungs.map((name) => s[`gap_${name}`][gap] * t.unit);
    const total = (s.gap_end[gap] - s.gap_start[gap]) * t.unit, printed = split(rungs, total), words = rungWords(gap);
    const told = rungs.map((value, i) => ({ value, text: printed.parts[i], words: words[i] })).filter((r) => r.text);
    const causes = [];
    for (let i = s.partFirst[gap]; i < s.partFirst[gap + 1]; i++) causes.push([s.part_cause[i], s.part_amount[i] * t.unit]);
    causes.sort((a, b) => b[1] - a[1]);
    const printedCauses = split(causes.map((c) => c[1]), total);
    const known = s.gap_known[gap] === 1;
    const reasons = known ? `: ${told.map((r) => `${r.text} ${r.words}`).join(", ")}.` : ". What it waited for is unavailable: that needs both ends of its messages, in one step.";
    const sentence = `${capital(who(rank, stage))} waited ${printed.total} ${!before ? "at the end of the step" : /^[FBIW]\d/.test(before) ? `for ${before}` : `before ${before}`}${reasons}`;
    story.hidden = false;
    story.replaceChildren(
      element("h3", {}, sentence),
      element("p", { class: "note" }, `Phase: ${t.phases[s.gap_phase[gap]]}. Starts ${seconds(s.gap_start[gap] * t.unit)} into step ${state.block.step}.`),
      element("div", { class: "two" },
        !known ? "" : element("div", {}, element("h4", {}, "What it waited for"), parts(told, total, printed.total, "story-rungs")),
        element("div", {}, element("h4", {}, "Why: causes, signed"), parts(causes.map(([cause, value], i) => ({ value, text: printedCauses.parts[i], words: t.causes[cause].label, colour: t.causes[cause].colour })).filter((c) => c.text), total, printed.total, "story-causes"))),
      element("p", {}, element("button", { type: "button", class: "link", onclick: close }, "Close")));
    story.dataset.units = s.gap_end[gap] - s.gap_start[gap];
    story.dataset.known = known;
    story.dataset.rungs = t.rungs.map((name) => s[`gap_${name}`][gap]).join(" ");
  }

  function parts(lines, total, sum, id) {
    const body = lines.map((line) => element("tr", {},
      element("td", { class: "n" }, line.text), element("td", {}, line.words),
      element("td", { class: "bar-cell" }, element("svg:svg", { width: "100%", height: 12, "aria-hidden": "true" },
        element("svg:rect", { width: `${Math.max(0, Math.min(100, 100 * Math.abs(line.value) / total))}%`, height: 12, ...(line.colour ? { fill: line.colour } : { class: "part-fill" }), ...(line.value < 0 ? { "fill-opacity": 0.45 } : {}) })))));
    body.push(element("tr", {}, element("td", { class: "n" }, element("b", {}, sum)), element("td", {}, element("b", {}, "together")), element("td", {})));
    return element("table", { id }, element("tbody", {}, ...body));
  }

  function close() {
    story.hidden = true;
    state.gap = -1;
    canvas.focus({ preventScroll: true });
    draw();
  }

  // ---- the table of the longest gaps -----------------------------------------------------------------------
  function fillTable() {
    const s = state.step, body = document.querySelector("#bubbles tbody");
    const order = [...(s.gap_row ?? []).keys()].sort((a, b) => (s.gap_end[b] - s.gap_start[b]) - (s.gap_end[a] - s.gap_start[a]) || a - b).slice(0, 12);
    body.replaceChildren(...order.map((gap) => {
      const [rank, stage] = t.rows[s.gap_row[gap]], before = t.texts[s.gap_before[gap]];
      return element("tr", {},
        element("th", { scope: "row" }, element("button", { type: "button", class: "link", onclick: () => { choose(gap); canvas.scrollIntoView({ block: "center" }); } }, stage < 0 ? `GPU ${rank}` : `stage ${stage}, GPU ${rank}`)),
        element("td", {}, before || "end of step"), element("td", {}, t.phases[s.gap_phase[gap]]), element("td", {}, t.causes[s.gap_cause[gap]].label),
        ...[s.gap_start[gap], s.gap_end[gap] - s.gap_start[gap], ...t.rungs.map((name) => (s.gap_known[gap] ? s[`gap_${name}`][gap] : null))].map((v) => element("td", { class: "n" }, v === null ? "unavailable" : milliseconds(v * t.unit))));
    }));
  }

  // ---- picking a step --------------------------------------------------------------------------------------
  async function show(i) {
    const block = t.steps[i];
    story.hidden = true;
    const step = await load(block, t.rows.length);
    const whole = state.block && state.from === 0 && state.to === length();
    Object.assign(state, { block, step, gap: -1 });
    summed.clear();
    layout();
    if (whole || state.to <= 1) view(0, length()); else view(state.from, state.to);
    fillTable();
    canvas.setAttribute("aria-label", `Timeline of step ${block.step}: ${rows.length} rows, ${seconds(block.seconds)}, idle share ${text.grouped(100 * block.idle, 1)} %`);
    canvas.dataset.step = block.step;
    draw();
  }
  function stepBy(by) {
    const next = Number(pick.value) + by;
    if (next >= 0 && next < t.steps.length) { pick.value = String(next); show(next); say(`Step ${t.steps[next].step}`); }
  }

  // ---- input -----------------------------------------------------------------------------------------------
  const KEYS = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => chooseRow(-1), ArrowDown: () => chooseRow(1),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => view(0, length()), Enter: enter, " ": enter,
    n: () => neighbour(1), p: () => neighbour(-1), N: () => neighbour(1), P: () => neighbour(-1),
    "[": () => stepBy(-1), "]": () => stepBy(1), Escape: close,
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  for (const name of ["focus", "blur"]) canvas.addEventListener(name, draw);

  const DO = { in: () => zoom(0.6), out: () => zoom(1 / 0.6), left: () => pan(-0.3), right: () => pan(0.3), all: () => view(0, length()), next: () => neighbour(1), previous: () => neighbour(-1) };
  for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => DO[button.dataset.do]());
  pick.addEventListener("change", () => show(Number(pick.value)));
  document.getElementById("messages").addEventListener("change", (event) => { state.messages = event.target.checked; say(""); draw(); });
  document.getElementById("ideal")?.addEventListener("change", (event) => { state.showIdeal = event.target.checked; layout(); view(state.from, state.to); });

  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY / 300), toTime(event.offsetX));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / canvas.clientWidth);
    else if (state.contentHeight > viewHeight()) {
      const top = Math.max(0, Math.min(state.contentHeight - viewHeight(), state.top + event.deltaY));
      if (top === state.top) return; // at an end: let the page scroll
      state.top = top;
      draw();
    } else return;
    event.preventDefault();
  }, { passive: false });

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.offsetX, y: event.offsetY, from: state.from, to: state.to, top: state.top, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return;
    if (Math.abs(event.offsetX - drag.x) + Math.abs(event.offsetY - drag.y) > 4) drag.moved = true;
    if (!drag.moved) return;
    state.top = Math.max(0, Math.min(state.contentHeight - viewHeight(), drag.top - (event.offsetY - drag.y)));
    const by = (drag.x - event.offsetX) / (canvas.clientWidth - gutter() - 8) * (drag.to - drag.from);
    view(drag.from + by, drag.to + by);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) press(event.offsetX, event.offsetY);
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("dblclick", (event) => zoom(0.5, toTime(event.offsetX)));

  function press(x, y) {
    const at = y - AXIS + state.top, index = rows.findIndex((r) => at >= r.y && at < r.y + r.height + 3);
    if (index < 0) return;
    state.row = index;
    if (rows[index].type === "stage") return toggle(rows[index]);
    const near = hits.filter((h) => y >= h.y && y < h.y + h.height && x >= h.a - 4 && x <= h.b + 4);
    near.sort((a, b) => Math.abs((a.a + a.b) / 2 - x) - (a.b - a.a) / 2 - (Math.abs((b.a + b.b) / 2 - x) - (b.b - b.a) / 2));
    if (near.length) choose(near[0].gap); else draw();
  }

  // ---- start -----------------------------------------------------------------------------------------------
  bubblescope.repaint = () => { readPalette(); paint(); };
  new ResizeObserver(draw).observe(document.getElementById("lanes-frame"));
  (async () => {
    readPalette();
    if (typeof DecompressionStream === "undefined") return say("This browser is too old to unpack the timeline (DecompressionStream is missing). The tables hold its numbers.");
    if (t.ideal) state.ideal = { ...(await load(t.ideal, t.ideal.rows.length)) };
    await show(Number(pick.value));
  })();
})();
