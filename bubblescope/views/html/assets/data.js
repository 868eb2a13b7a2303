"use strict";
// The data block of the page, and the unpacking of a step's columns (bubblescope/views/html/payload.py).
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const TYPES = { i32: Int32Array, i16: Int16Array, u8: Uint8Array };

  async function unpack(block) {
    const packed = Uint8Array.from(atob(block.data), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const buffer = await new Response(stream).arrayBuffer();
    const columns = {};
    for (const [name, [type, at, length]] of Object.entries(block.columns)) columns[name] = new TYPES[type](buffer, at, length);
    return columns;
  }

  function ranges(rows, count) {
    const first = new Int32Array(count + 1);
    for (const row of rows ?? []) first[row + 1] += 1;
    for (let i = 0; i < count; i++) first[i + 1] += first[i];
    return first;
  }

  const kept = new WeakMap();

  // A step with, for each row, the range of its operations and gaps; unpacked once.
  async function load(block, rowCount) {
    if (!kept.has(block)) {
      kept.set(block, unpack(block).then((columns) => ({
        ...columns,
        opFirst: ranges(columns.op_row, rowCount),
        gapFirst: ranges(columns.gap_row, rowCount),
        partFirst: ranges(columns.part_gap, columns.gap_row ? columns.gap_row.length : 0),
      })));
    }
    return kept.get(block);
  }

  bubblescope.data = data;
  bubblescope.load = load;
})();
