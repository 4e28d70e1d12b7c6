// What is shown, without any drawing: data in columns to rows, colours and text.

const KIND_NAMES = {
  F: "forward", B: "backward", I: "input gradient", W: "weight gradient",
  reduce: "reduction, optimizer", wait: "wait", other: "other",
};
const pieceText = ([sample, number, count, start, end]) =>
  `sample ${sample}, piece ${number} of ${count}, tokens ${start}-${end - 1}`;
const KIND_COLOURS = { F: "f", B: "b", I: "i", W: "w", reduce: "r", other: "o" };
// From a rank's first stage to its last: degrees of hue, and factor of lightness (a forward's blue has neighbours in hue).
const STAGE_TURNS = { F: [12, 0.68], B: [26, 1], I: [-40, 1], W: [42, 1], reduce: [0, 1], other: [0, 1] };
const SHADES = 9;
const ACTION = /^(\d+)([FBIW])(\d+)$/;

const integer = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function timeText(ns) {
  if (ns >= 1e10) return `${(ns / 1e9).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 })} s`;
  const ms = ns / 1e6;
  const digits = ms === 0 || ms >= 1000 ? 0 : ms >= 100 ? 1 : ms >= 1 ? 2 : 4;
  return `${ms.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ms`;
}

// Powers of ten, as memory limits are given everywhere else.
function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = count > 0 ? Math.min(units.length - 1, Math.floor(Math.log10(count) / 3 + 1e-12)) : 0;
  const value = count / 1000 ** power;
  return power ? `${value.toFixed(value < 10 ? 2 : 1)} ${units[power]}` : `${count} B`;
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

// The stages of each rank, ascending.
function stagesOf(pane, parsed) {
  const found = new Map();
  pane.rank.forEach((rank, i) => {
    const match = parsed[pane.label[i]];
    if (match) found.set(rank, (found.get(rank) ?? new Set()).add(Number(match[1])));
  });
  return new Map([...found].map(([rank, stages]) => [rank, [...stages].sort((a, b) => a - b)]));
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
  const carried = pane.rank.map((_, i) => pane.pieces?.[pane.piece[i]] ?? null);
  const stages = stagesOf(pane, parsed);
  const held = (i) => (parsed[pane.label[i]] ? stages.get(pane.rank[i]) : [0]);
  const numChunks = Math.max(1, ...[...stages.values()].map((one) => one.length));
  return {
    ...pane, rows, parsed, tokens, numChunks,
    chunk: pane.rank.map((_, i) => Math.max(0, held(i).indexOf(Number(parsed[pane.label[i]]?.[1])))),
    kind: pane.label.map((label) => pane.kinds[label]),
    flow: pane.rank.map((_, i) => flow(i)),
    carried, sample: carried.map((piece) => piece?.[0] ?? null),
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

// Shade 0 (small) to SHADES - 1 (large) on a square-root scale: sizes in one batch span orders of magnitude. Sizes
// within a factor of `FULL_RANGE` use as much less of the scale, around its middle: what is nearly equal looks so.
const FULL_RANGE = 4, MIDDLE = 0.6;
function shadeOf(tokens, range) {
  if (!range || !tokens || range.high === range.low) return Math.round((SHADES - 1) * MIDDLE);
  const part = (Math.sqrt(tokens) - Math.sqrt(range.low)) / (Math.sqrt(range.high) - Math.sqrt(range.low));
  const used = Math.min(1, Math.log(range.high / range.low) / Math.log(FULL_RANGE));
  return Math.round((MIDDLE + (part - MIDDLE) * used) * (SHADES - 1));
}

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// The colour with its hue turned by some degrees and its lightness times a factor, saturation kept (HSL).
function turned([r, g, b], degrees, factor) {
  const most = Math.max(r, g, b) / 255, least = Math.min(r, g, b) / 255, range = most - least;
  if (!range) return [r, g, b];
  const middle = (most + least) / 2, saturation = range / (1 - Math.abs(2 * middle - 1)), light = middle * factor;
  const sector = most === r / 255 ? ((g - b) / 255 / range) % 6
    : most === g / 255 ? (b - r) / 255 / range + 2 : (r - g) / 255 / range + 4;
  const hue = (sector * 60 + degrees + 720) % 360;
  return [0, 8, 4].map((n) => {
    const k = (n + hue / 30) % 12, a = saturation * Math.min(light, 1 - light);
    return 255 * (light - a * Math.max(-1, Math.min(k - 3, 9 - k, 1)));
  });
}

// Fill and text colour of every kind, stage of a rank (`numChunks` of them) and shade under the colour scheme in force.
function palette(numChunks = 1) {
  const style = getComputedStyle(document.documentElement);
  const variable = (name) => style.getPropertyValue(`--${name}`).trim();
  const fills = {}, inks = {};
  for (const [kind, letter] of Object.entries(KIND_COLOURS)) {
    const [small, large] = [channels(variable(`${letter}0`)), channels(variable(`${letter}1`))];
    const mixed = Array.from({ length: SHADES }, (_, s) => small.map((c, k) => c + ((large[k] - c) * s) / (SHADES - 1)));
    const [degrees, factor] = STAGE_TURNS[kind], part = (chunk) => chunk / Math.max(1, numChunks - 1);
    const chunks = Array.from({ length: numChunks }, (_, chunk) =>
      mixed.map((rgb) => turned(rgb, degrees * part(chunk), factor ** part(chunk))));
    fills[kind] = chunks.map((shades) => shades.map((rgb) => `rgb(${rgb.map(Math.round).join(" ")})`));
    // Weights of relative luminance; 0.52 is where black and white text are about equally readable.
    inks[kind] = chunks.map((shades) => shades.map(([r, g, b]) =>
      ((0.2126 * r + 0.7152 * g + 0.0722 * b) / 255 > 0.52 ? "#10161f" : "#ffffff")));
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

const tickUnit = (step) => (step >= 1e9 ? { ns: 1e9, name: "s" } : { ns: 1e6, name: "ms" });

function tickText(ns, step) {
  const unit = tickUnit(step).ns;
  const digits = Math.max(0, Math.min(6, Math.ceil(Math.log10(unit / step) - 1e-9)));
  return (ns / unit).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
