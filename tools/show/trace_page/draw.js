const record = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const AXIS = 24, GROUP_GAP = 8;
const state = { step: 0, from: 0, to: 1, extent: [0, 1], memory: true, hover: null, cursor: null, range: null,
  whole: false };
let panes = [], colours = palette();

function rowHeights(numRows) {
  const bar = numRows <= 10 ? 26 : numRows <= 20 ? 20 : numRows <= 40 ? 15 : 11;
  return { bar, lane: state.memory && panes.some((p) => p.data?.peak_bytes) ? (numRows <= 20 ? 12 : 8) : 0 };
}

// Geometry of one pane; rows have their top in `y`.
function layOut(view) {
  const width = view.canvas.clientWidth, narrow = width < 820;
  const { bar, lane } = rowHeights(view.data.rows.length);
  const gap = bar > 18 ? 5 : 3;
  let y = AXIS + 4, group = view.data.rows[0]?.group;
  for (const row of view.data.rows) {
    if (row.group !== group) { y += GROUP_GAP; group = row.group; }
    row.y = y;
    y += bar + lane + gap;
  }
  const labels = Math.max(...view.data.rows.map((row) => row.label.length), 3) * 7 + 14;
  const hasGroups = view.data.rows.some((row) => row.group);
  Object.assign(view, { width, height: y + 6, bar, lane, left: labels + (hasGroups ? 40 : 8), right: narrow ? 12 : 58 });
  view.canvas.style.height = `${view.height}px`;
  const ratio = window.devicePixelRatio || 1;
  view.canvas.width = Math.round(width * ratio);
  view.canvas.height = Math.round(view.height * ratio);
  view.context.setTransform(ratio, 0, 0, ratio, 0, 0);
}

const plotWidth = (view) => Math.max(40, view.width - view.left - view.right);
const xOf = (view, ns) => view.left + ((ns - state.from) / (state.to - state.from)) * plotWidth(view);
const nsOf = (view, x) => state.from + ((x - view.left) / plotWidth(view)) * (state.to - state.from);

function drawAxis(view) {
  const c = view.context, step = tickStep(state.to - state.from, plotWidth(view));
  c.font = "11.5px system-ui, sans-serif";
  c.textBaseline = "middle";
  c.textAlign = "center";
  for (let k = Math.ceil(state.from / step); k * step <= state.to; k++) {
    const x = Math.round(xOf(view, k * step)) + 0.5;
    c.fillStyle = colours.grid;
    c.fillRect(x, AXIS - 4, 1, view.height - AXIS);
    c.fillStyle = colours.muted;
    const text = tickText(k * step, step), end = x + c.measureText(text).width / 2;
    if (view.right > 40 ? end < view.width - 44 : x < view.width - view.right - 12) c.fillText(text, x, 11);
  }
  c.textAlign = "right";
  c.fillStyle = colours.muted;
  c.fillText(tickUnit(step).name, view.left - 18, 11);
}

function drawLabels(view) {
  const c = view.context, rows = view.data.rows;
  c.textBaseline = "middle";
  const size = view.bar >= 15 ? 12 : 10;
  for (const row of rows) {
    c.font = `${size}px system-ui, sans-serif`;
    c.fillStyle = state.hover?.view === view && state.hover.row === row ? colours.text : colours.muted;
    c.textAlign = "right";
    c.fillText(row.label, view.left - 9, row.y + view.bar / 2 + 0.5);
    if (view.right > 40) {
      const busy = view.data.busy[row.rank] ?? 0;
      c.textAlign = "right";
      c.fillStyle = colours.muted;
      c.fillText(`${Math.round(100 * busy)} %`, view.width - 13, row.y + view.bar / 2 + 0.5);
    }
  }
  if (view.right > 40) {
    c.font = "11.5px system-ui, sans-serif";
    c.fillText("busy", view.width - 13, 11);
  }
  for (let first = 0; first < rows.length; ) {
    let last = first;
    while (last + 1 < rows.length && rows[last + 1].group === rows[first].group) last++;
    if (rows[first].group) {
      const top = rows[first].y, bottom = rows[last].y + view.bar + view.lane;
      c.fillStyle = colours.line;
      c.fillRect(34, top, 2, bottom - top);
      c.font = "600 12px system-ui, sans-serif";
      c.textAlign = "right";
      c.fillStyle = colours.text;
      c.fillText(rows[first].group, 29, (top + bottom) / 2);
    }
    first = last + 1;
  }
}

function firstVisible(row) {
  let low = 0, high = row.ends.length;
  while (low < high) { const mid = (low + high) >> 1; if (row.ends[mid] < state.from) low = mid + 1; else high = mid; }
  return low;
}

function drawWait(c, x, y, width, height) {
  c.fillStyle = colours.wait;
  c.fillRect(x, y + height * 0.36, width, height * 0.28);
}

// Actions of micro-batches that carry pieces have a line along their foot; those of the sample under the pointer a frame.
function drawPiece(c, view, row, x, width, inHover) {
  c.fillStyle = c.strokeStyle = colours.selected;
  c.globalAlpha = inHover ? 1 : c.globalAlpha * 0.6;
  const foot = view.bar > 18 ? 3 : 2;
  c.fillRect(x, row.y + view.bar - foot, width, foot);
  if (!inHover) return;
  c.lineWidth = 1;
  c.strokeRect(x + 0.5, row.y + 0.5, Math.max(width - 1, 1), view.bar - 1);
}

function drawRow(view, row) {
  const c = view.context, data = view.data, flow = state.hover?.flow ?? null, sample = state.hover?.sample ?? null;
  c.fillStyle = colours.row;
  c.fillRect(view.left, row.y, plotWidth(view), view.bar);
  const font = view.bar >= 18 ? 11 : 9.5;
  c.font = `${font}px system-ui, sans-serif`;
  c.textAlign = "center";
  c.textBaseline = "middle";
  let drawn = -Infinity, fill = null;
  for (let k = firstVisible(row); k < row.spans.length; k++) {
    const i = row.spans[k];
    if (data.start_ns[i] > state.to) break;
    const x = Math.max(view.left, xOf(view, data.start_ns[i]));
    const end = Math.min(view.left + plotWidth(view), xOf(view, data.end_ns[i]));
    if (end < drawn + 0.75) continue;  // nothing of it would be seen; keeps a zoomed-out large run fluent
    const kind = data.kind[i], label = data.labels[data.label[i]], match = data.parsed[data.label[i]];
    const width = Math.max(end - x, 0.6), inset = width > 4 ? 0.5 : 0;
    drawn = Math.max(drawn, end);
    const inHover = sample !== null && data.sample[i] === sample;
    const alpha = flow !== null && data.flow[i] !== flow && !inHover ? colours.dim : 1;
    if (c.globalAlpha !== alpha) c.globalAlpha = alpha;
    if (kind === "wait") {
      drawWait(c, x, row.y, width, view.bar);
      fill = null;
    } else {
      const shade = data.shade[data.shape[i]], chunk = data.chunk[i];
      if (fill !== colours.fills[kind][chunk][shade]) c.fillStyle = fill = colours.fills[kind][chunk][shade];
      c.fillRect(x + inset, row.y, width - 2 * inset, view.bar);
      if (data.carried[i]) {
        drawPiece(c, view, row, x + inset, width - 2 * inset, inHover);
        c.globalAlpha = alpha;
        fill = null;
      }
      if (width < 8) continue;
      const short = match ? match[3] : label;
      const long = match && data.numChunks === 1 ? `${match[2]}${match[3]}` : label;  // with its stage where ranks have several
      const text = width > long.length * font * 0.66 + 10 ? long : width > short.length * font * 0.62 + 3 ? short : "";
      if (text && view.bar >= 11) {
        c.fillStyle = fill = colours.inks[kind][chunk][shade];
        c.fillText(text, x + width / 2, row.y + view.bar / 2 + 0.5);
      }
    }
  }
  c.globalAlpha = 1;
}

// Bytes held by a rank as steps: each span says what is held right after it.
function drawMemory(view, row, most) {
  const c = view.context, data = view.data, base = row.y + view.bar + view.lane, height = view.lane - 2;
  const path = [];
  let held = 0, drawn = -Infinity;
  for (const i of row.spans) {
    if (data.end_ns[i] < state.from) { held = data.bytes[i]; continue; }
    if (data.start_ns[i] > state.to) break;
    const x = xOf(view, Math.min(data.end_ns[i], state.to));
    if (!path.length) path.push([view.left, held]);
    if (x - drawn < 0.5 && path.length > 1) path[path.length - 1][1] = Math.max(path[path.length - 1][1], data.bytes[i]);
    else { path.push([x, data.bytes[i]]); drawn = x; }
    held = data.bytes[i];
  }
  if (!path.length) path.push([view.left, held]);
  const right = Math.min(view.left + plotWidth(view), Math.max(view.left, xOf(view, data.last)));
  c.beginPath();
  path.forEach(([x, value], k) => {
    const y = base - (value / most) * height;
    if (k) c.lineTo(x, base - (path[k - 1][1] / most) * height);
    c.lineTo(x, y);
  });
  c.lineTo(right, base - (path[path.length - 1][1] / most) * height);
  c.strokeStyle = colours.memory;
  c.lineWidth = 1;
  c.stroke();
  c.lineTo(right, base);
  c.lineTo(view.left, base);
  c.closePath();
  c.fillStyle = colours["memory-fill"];
  c.globalAlpha = 0.55;
  c.fill();
  c.globalAlpha = 1;
}

function drawHover(view) {
  const c = view.context;
  if (state.cursor !== null) {
    const x = Math.round(xOf(view, state.cursor)) + 0.5;
    if (x >= view.left && x <= view.left + plotWidth(view)) {
      c.fillStyle = colours.cursor;
      c.globalAlpha = 0.5;
      c.fillRect(x, AXIS - 6, 1, view.height - AXIS);
      c.globalAlpha = 1;
    }
  }
  const twin = state.hover && (state.hover.view === view ? state.hover.index : counterpart(state.hover, view));
  if (twin === null || twin === undefined) return;
  const row = view.data.rows.find((r) => r.rank === view.data.rank[twin]);
  const x = Math.max(view.left, xOf(view, view.data.start_ns[twin]));
  const end = Math.min(view.left + plotWidth(view), xOf(view, view.data.end_ns[twin]));
  if (end < view.left || x > view.left + plotWidth(view)) return;
  c.strokeStyle = colours.selected;
  c.lineWidth = 2;
  c.strokeRect(x, row.y - 1, Math.max(end - x, 2), view.bar + 2);
}

const counterpart = (hover, view) =>
  view.data?.byName.get(`${hover.view.data.rank[hover.index]} ${hover.label}`) ?? null;

function draw() {
  const shown = panes.filter((view) => view.data?.rows.length);
  const most = Math.max(1, ...shown.map((view) => view.data.peak_bytes));
  for (const view of shown) {
    view.context.clearRect(0, 0, view.width, view.height);
    drawAxis(view);
    const top = view.canvas.getBoundingClientRect().top;
    for (const row of view.data.rows) {
      if (!state.whole && (top + row.y > innerHeight + 60 || top + row.y < -120)) continue;  // drawn when scrolled to
      drawRow(view, row);
      if (view.lane) drawMemory(view, row, most);
    }
    drawLabels(view);
    drawHover(view);
  }
  byId("reset").disabled = state.from === state.extent[0] && state.to === state.extent[1];
}

let pending = 0;
function redraw() {
  if (!pending) pending = requestAnimationFrame(() => { pending = 0; draw(); });
}

// Every figure is set with textContent: names come from files and are never markup.
function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}
const figure = (name, value) => element("span", "figure", `${name} `, element("b", "", value));

function microBatchText(counts) {
  const entries = Object.entries(counts), total = entries.reduce((sum, [, n]) => sum + n, 0);
  if (entries.length < 2) return integer.format(total);
  const eachNamed = entries.map(([name, n]) => `${name || "unnamed"}: ${n}`);
  if (entries.length <= 4) return `${integer.format(total)} (${eachNamed.join(", ")})`;
  const each = entries.map(([, n]) => n), [low, high] = [Math.min(...each), Math.max(...each)];
  return `${integer.format(total)} (${low === high ? low : `${low}–${high}`} a replica)`;
}

function buildPane(section, data) {
  const name = section.dataset.pane === "measured" ? "Measured" : "Simulated";
  const head = element("div", "pane-head", element("h2", "", name));
  const view = { section, data, canvas: null };
  section.replaceChildren(head);
  section.hidden = record.steps.every((step) => !step[section.dataset.pane]);
  if (!data || !data.rows.length) {
    section.append(element("p", "empty", data ? "No spans were recorded for this step." :
      `There is no ${name.toLowerCase()} trace for this step.`));
    return view;
  }
  head.append(figure("makespan", timeText(data.makespan_ns)), figure("bubble ratio", percent(data.bubble_ratio)),
    figure("micro-batches", microBatchText(data.micro_batches)), figure("ranks", integer.format(data.rows.length)));
  if (data.peak_bytes) head.append(figure("peak held", bytes(data.peak_bytes)));
  view.canvas = element("canvas");
  view.canvas.tabIndex = 0;
  view.canvas.setAttribute("role", "application");
  view.canvas.setAttribute("aria-label", `${name} timeline of ${data.rows.length} ranks, makespan ` +
    `${timeText(data.makespan_ns)}, bubble ${percent(data.bubble_ratio)}. Arrow keys walk over spans.`);
  view.context = view.canvas.getContext("2d");
  section.append(view.canvas);
  listen(view);
  return view;
}

const ordinal = (n) => `${n}${["th", "st", "nd", "rd"][n % 100 > 10 && n % 100 < 14 ? 0 : n % 10] ?? "th"}`;

function buildLegend() {
  const numChunks = Math.max(1, ...panes.map((view) => view.data?.numChunks ?? 1));
  const kinds = new Set(panes.flatMap((view) => (view.data ? view.data.kind : [])));
  const entries = Object.keys(KIND_NAMES).filter((kind) => kinds.has(kind)).map((kind) => {
    const swatch = element("i");
    swatch.style.background = kind === "wait" ? colours.wait : colours.fills[kind][0][Math.round(SHADES * MIDDLE)];
    if (kind === "wait") swatch.style.height = "5px";
    const letter = kind.length === 1 ? `${kind} ` : "";
    return element("span", "", swatch, `${letter}${KIND_NAMES[kind]}`);
  });
  for (let chunk = 0; chunk < numChunks && numChunks > 1; chunk++) {
    const swatches = ["F", "B", "I", "W"].filter((kind) => kinds.has(kind)).map((kind) => {
      const swatch = element("i", "chunk");
      swatch.style.background = colours.fills[kind][chunk][Math.round(SHADES * MIDDLE)];
      return swatch;
    });
    entries.push(element("span", "", ...swatches, `${ordinal(chunk + 1)} stage of a rank`));
  }
  if (panes.some((view) => view.data?.carried.some((piece) => piece))) {
    const swatch = element("i", "piece");
    swatch.style.background = colours.fills.F[0][Math.round(SHADES * MIDDLE)];
    entries.push(element("span", "", swatch, "carries a piece of a cut sample"));
  }
  if (state.range && state.range.low !== state.range.high) {
    const ramp = element("i", "shade");
    const ends = [state.range.low, state.range.high].map((tokens) => shadeOf(tokens, state.range));
    ramp.style.background = `linear-gradient(90deg, ${colours.fills.F[0].slice(ends[0], ends[1] + 1).concat(
      colours.fills.F[0][ends[1]]).join(", ")})`;
    entries.push(element("span", "", ramp,
      `${integer.format(state.range.low)} to ${integer.format(state.range.high)} padded tokens`));
  }
  byId("legend").replaceChildren(...entries);
}

function buildVerdict([measured, simulated]) {
  const ratio = measured?.makespan_ns && simulated?.makespan_ns ? measured.makespan_ns / simulated.makespan_ns : null;
  byId("verdict").replaceChildren(...(ratio === null ? [] :
    [element("span", "", "measured ÷ simulated makespan"), element("b", "", `${ratio.toFixed(3)}×`)]));
}

function showStep(index) {
  const step = record.steps[index] ?? { measured: null, simulated: null };
  state.step = index;
  hide();
  const data = [step.measured, step.simulated].map((pane) => pane && prepare(pane, record.rank_names));
  const filled = data.filter((pane) => pane?.rows.length);
  state.range = tokenRange(filled);
  // Both panes start at their own first span: clocks of a run and of a simulation share no zero.
  for (const pane of filled) {
    pane.shade = pane.tokens.map((tokens) => shadeOf(tokens, state.range));
    pane.start_ns = pane.start_ns.map((ns) => ns - pane.first);
    pane.end_ns = pane.end_ns.map((ns) => ns - pane.first);
    for (const row of pane.rows) row.ends = row.ends.map((ns) => ns - pane.first);
    pane.last -= pane.first;
  }
  state.extent = [0, Math.max(1, ...filled.map((pane) => pane.last)) * 1.005];
  [state.from, state.to] = state.extent;
  colours = palette(Math.max(1, ...filled.map((pane) => pane.numChunks)));
  panes = ["measured", "simulated"].map((name, k) => buildPane(document.querySelector(`.pane[data-pane=${name}]`), data[k]));
  byId("step").value = String(index);
  byId("previous").disabled = index <= 0;
  byId("next").disabled = index >= record.steps.length - 1;
  byId("memory").disabled = !filled.some((pane) => pane.peak_bytes);
  buildLegend();
  buildVerdict(data);
  resize();
}

function resize() {
  for (const view of panes) if (view.canvas) layOut(view);
  draw();
}
