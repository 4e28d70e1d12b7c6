// What is shown, without any drawing: data in columns to rows, colours and text.

const KIND_NAMES = {
  F: "forward", B: "backward", I: "input gradient", W: "weight gradient",
  reduce: "reduction, optimizer", wait: "wait", other: "other",
};
const KIND_COLOURS = { F: "f", B: "b", I: "i", W: "w", reduce: "r", other: "o" };
const SHADES = 9;
const ACTION = /^(\d+)([FBIW])(\d+)$/;

const integer = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function milliseconds(ns) {
  const ms = ns / 1e6;
  const digits = ms === 0 || ms >= 1000 ? 0 : ms >= 100 ? 1 : ms >= 1 ? 2 : 4;
  return `${ms.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ms`;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = count > 0 ? Math.min(units.length - 1, Math.floor(Math.log2(count) / 10)) : 0;
  return power ? `${(count / 1024 ** power).toFixed(count / 1024 ** power < 10 ? 2 : 1)} ${units[power]}` : `${count} B`;
}

// "dp0 pp1 tp0" as coordinates; a rank without such a name sorts last, by number.
function place(rank, names) {
  const name = names[rank] ?? `rank ${rank}`;
  const at = (axis) => { const m = name.match(new RegExp(`\\b${axis}(\\d+)\\b`)); return m ? Number(m[1]) : null; };
  return { rank, name, dp: at("dp"), pp: at("pp"), tp: at("tp") };
}

// Rows of a pane in order of replica, pipeline rank, tensor rank, with the offsets of their spans sorted by start.
function rowsOf(pane, names) {
  const spans = new Map();
  pane.rank.forEach((rank, i) => { if (!spans.has(rank)) spans.set(rank, []); spans.get(rank).push(i); });
  const rows = [...spans.keys()].map((rank) => place(rank, names));
  const order = (value) => value ?? Infinity;
  rows.sort((a, b) => {
    for (const axis of ["dp", "pp", "tp"]) if (order(a[axis]) !== order(b[axis])) return order(a[axis]) - order(b[axis]);
    return a.rank - b.rank;
  });
  const axes = ["pp", "tp"].filter((axis) => axis === "pp" || new Set(rows.map((row) => row.tp)).size > 1);
  for (const row of rows) {
    const { start_ns: starts, end_ns: ends } = pane;
    row.spans = spans.get(row.rank).sort((a, b) => starts[a] - starts[b] || ends[b] - ends[a]);
    // Running maximum of ends, so that the first visible span is found by bisection even where spans nest.
    let last = -Infinity;
    row.ends = row.spans.map((i) => (last = Math.max(last, pane.end_ns[i])));
    const short = axes.filter((axis) => row[axis] !== null).map((axis) => `${axis}${row[axis]}`).join(" ");
    row.label = row.pp === null ? row.name : short;
    row.group = row.pp === null || row.dp === null ? "" : `dp${row.dp}`;
  }
  return rows;
}

function paddedTokens(shape) {
  return shape.length ? shape[0] * (shape.slice(1).reduce((sum, n) => sum + n, 0) || 1) : 0;
}

// Adds to a pane what drawing needs: rows, micro-batch and size of each span, and the index by rank and label.
function prepare(pane, names) {
  const parsed = pane.labels.map((label) => label.match(ACTION));
  const tokens = pane.shapes.map(paddedTokens);
  const rows = rowsOf(pane, names);
  const replica = new Map(rows.map((row) => [row.rank, row.group]));
  const flow = (i) => {
    const match = parsed[pane.label[i]];
    return match ? `${replica.get(pane.rank[i])}/${match[3]}` : null;
  };
  return {
    ...pane, rows, parsed, tokens,
    kind: pane.label.map((label) => pane.kinds[label]),
    flow: pane.rank.map((_, i) => flow(i)),
    byName: new Map(pane.rank.map((rank, i) => [`${rank} ${pane.labels[pane.label[i]]}`, i])),
    first: pane.start_ns.reduce((least, ns) => Math.min(least, ns), Infinity),
    last: pane.end_ns.reduce((most, ns) => Math.max(most, ns), -Infinity),
  };
}

function tokenRange(panes) {
  let low = Infinity, high = 0;
  for (const pane of panes) for (const n of pane.tokens) if (n > 0) { low = Math.min(low, n); high = Math.max(high, n); }
  return high ? { low, high } : null;
}

// Shade 0 (small) to SHADES - 1 (large) on a square-root scale: sizes in one batch span orders of magnitude.
function shadeOf(tokens, range) {
  if (!range || !tokens || range.high === range.low) return Math.round((SHADES - 1) * 0.6);
  const part = (Math.sqrt(tokens) - Math.sqrt(range.low)) / (Math.sqrt(range.high) - Math.sqrt(range.low));
  return Math.round(part * (SHADES - 1));
}

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// Fill and text colour of every kind and shade under the colour scheme in force.
function palette() {
  const style = getComputedStyle(document.documentElement);
  const variable = (name) => style.getPropertyValue(`--${name}`).trim();
  const fills = {}, inks = {};
  for (const [kind, letter] of Object.entries(KIND_COLOURS)) {
    const [small, large] = [channels(variable(`${letter}0`)), channels(variable(`${letter}1`))];
    const mixed = Array.from({ length: SHADES }, (_, s) => small.map((c, k) => c + ((large[k] - c) * s) / (SHADES - 1)));
    fills[kind] = mixed.map((rgb) => `rgb(${rgb.map(Math.round).join(" ")})`);
    // Weights of relative luminance; 0.52 is where black and white text are about equally readable.
    inks[kind] = mixed.map(([r, g, b]) => ((0.2126 * r + 0.7152 * g + 0.0722 * b) / 255 > 0.52 ? "#10161f" : "#ffffff"));
  }
  const names = ["surface", "line", "grid", "text", "muted", "row", "accent", "cursor", "memory", "memory-fill",
    "selected", "wait"];
  const plain = Object.fromEntries(names.map((name) => [name, variable(name)]));
  return { ...plain, fills, inks, dim: Number(variable("dim")) };
}

// Round steps (1, 2, 5) for about one tick each 90 px.
function tickStep(span, width) {
  const rough = (span * 90) / Math.max(width, 90);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5, 10].find((m) => m * power >= rough) ?? 10);
}

function tickText(ns, step) {
  const digits = Math.max(0, Math.min(6, 6 - Math.floor(Math.log10(step) + 1e-9)));
  return (ns / 1e6).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
