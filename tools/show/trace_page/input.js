// Pointer, wheel, keyboard, and the address: #step=1&pane=measured&rank=2&span=1F3&from_ms=10&to_ms=40 opens that view.

function zoomTo(from, to) {
  const [low, high] = state.extent, least = Math.max(1, (high - low) * 1e-5);
  const span = Math.min(high - low, Math.max(least, to - from));
  state.from = Math.min(Math.max(low, from), high - span);
  state.to = state.from + span;
  redraw();
}

function zoomBy(factor, at = (state.from + state.to) / 2) {
  zoomTo(at - (at - state.from) * factor, at + (state.to - at) * factor);
}

const panBy = (ns) => zoomTo(state.from + ns, state.to + ns);
const resetZoom = () => zoomTo(...state.extent);

function hide() {
  state.hover = null;
  state.cursor = null;
  byId("card").hidden = true;
}

function spanAt(view, x, y) {
  const row = view.data.rows.find((r) => y >= r.y - 1 && y <= r.y + view.bar + view.lane + 1);
  if (!row || x < view.left || x > view.left + plotWidth(view)) return null;
  const ns = nsOf(view, x), reach = (nsOf(view, x + 1.5) - ns);
  let found = null;
  for (let k = firstVisible(row); k < row.spans.length; k++) {
    const i = row.spans[k];
    if (view.data.start_ns[i] > ns + reach) break;
    // The latest start wins: a span nested in another is the one on top.
    if (view.data.end_ns[i] >= ns - reach) found = i;
  }
  return found === null ? null : { view, row, index: found };
}

function select(found) {
  const { view, index } = found, data = view.data;
  state.hover = { ...found, label: data.labels[data.label[index]], flow: data.flow[index],
    sample: data.sample[index] };
  fillCard();
}

function fillCard() {
  const { view, row, index, label } = state.hover, data = view.data;
  const match = data.parsed[data.label[index]], kind = data.kind[index];
  const shape = data.shapes[data.shape[index]], duration = data.end_ns[index] - data.start_ns[index];
  const swatch = element("i");
  swatch.style.background = kind === "wait" ? colours.wait :
    colours.fills[kind][data.chunk[index]][data.shade[data.shape[index]]];
  const rows = [];
  const line = (name, value) => rows.push(element("dt", "", name), element("dd", "", value));
  if (match) { line("micro-batch", match[3]); line("stage", match[1]); }
  if (shape.length) {
    const [count, encoder = 0, decoder = 0] = shape;
    const sides = decoder ? [count, encoder, decoder] : [count, encoder];
    line("shape", sides.map((n) => integer.format(n)).join(" × "));
    line("", decoder ? "rows × encoder × decoder" : "rows × encoder");
    line("padded tokens", integer.format(data.tokens[data.shape[index]]));
  }
  line("duration", timeText(duration));
  const other = panes.find((pane) => pane !== view && pane.data?.rows.length);
  const twin = other ? counterpart(state.hover, other) : null;
  if (twin !== null) {
    const theirs = other.data.end_ns[twin] - other.data.start_ns[twin];
    line(other.section.dataset.pane, timeText(theirs));
  }
  line("CPU time", timeText(data.cpu_ns[index]) +
    (duration ? ` (${Math.round((100 * data.cpu_ns[index]) / duration)} %)` : ""));
  if (data.peak_bytes) line("bytes held after", bytes(data.bytes[index]));
  line("start", timeText(data.start_ns[index]));
  line("end", timeText(data.end_ns[index]));
  const list = element("dl", "", ...rows);
  const heading = element("h3", "", swatch, label, ` ${KIND_NAMES[kind] === label ? "" : KIND_NAMES[kind]}`);
  const piece = data.carried[index] ? [element("p", "carried", pieceText(data.carried[index]))] : [];
  const where = element("p", "where", `${row.name}, ${view.section.dataset.pane}`);
  byId("card").replaceChildren(heading, where, ...piece, list);
  byId("card").hidden = false;
}

function moveCard(x, y) {
  const card = byId("card"), box = card.getBoundingClientRect();
  const left = x + 18 + box.width > innerWidth - 8 ? x - 18 - box.width : x + 18;
  card.style.left = `${Math.max(8, left)}px`;
  card.style.top = `${Math.max(8, Math.min(y + 18, innerHeight - box.height - 8))}px`;
}

// Put the card beside a span that was chosen without a pointer, zoomed so that the span can be seen.
function reveal() {
  const { view, row, index } = state.hover, data = view.data;
  if (data.start_ns[index] >= state.to || data.end_ns[index] <= state.from) {
    const half = (state.to - state.from) / 2, middle = (data.start_ns[index] + data.end_ns[index]) / 2;
    zoomTo(middle - half, middle + half);
  }
  state.cursor = null;
  const box = view.canvas.getBoundingClientRect();
  moveCard(box.left + xOf(view, Math.min(data.end_ns[index], state.to)) - 8, box.top + row.y + view.bar);
  redraw();
}

function walk(view, key) {
  const rows = view.data.rows, hover = state.hover?.view === view ? state.hover : null;
  if (!hover) {
    select({ view, row: rows[0], index: rows[0].spans[0] });
  } else if (key === "ArrowLeft" || key === "ArrowRight") {
    const at = hover.row.spans.indexOf(hover.index) + (key === "ArrowRight" ? 1 : -1);
    if (at in hover.row.spans) select({ view, row: hover.row, index: hover.row.spans[at] });
  } else {
    const row = rows[rows.indexOf(hover.row) + (key === "ArrowDown" ? 1 : -1)];
    if (row) {
      const distance = (i) => Math.abs(view.data.start_ns[i] - view.data.start_ns[hover.index]);
      select({ view, row, index: row.spans.reduce((best, i) => (distance(i) < distance(best) ? i : best)) });
    }
  }
  reveal();
}

function onKey(view, event) {
  const tenth = (state.to - state.from) / 10;
  const actions = {
    "+": () => zoomBy(0.7), "=": () => zoomBy(0.7), "-": () => zoomBy(1 / 0.7), 0: resetZoom,
    Escape: () => { hide(); redraw(); },
  };
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.shiftKey && event.key === "ArrowLeft") panBy(-tenth);
  else if (event.shiftKey && event.key === "ArrowRight") panBy(tenth);
  else if (event.key.startsWith("Arrow")) walk(view, event.key);
  else if (event.key in actions) actions[event.key]();
  else return;
  event.preventDefault();
}

function listen(view) {
  const { canvas } = view;
  let dragged = null;
  canvas.addEventListener("wheel", (event) => {
    // Over the names and figures beside the plot the wheel scrolls the page, which many ranks make long.
    if (event.offsetX < view.left || event.offsetX > view.left + plotWidth(view)) return;
    event.preventDefault();
    const nsPerPixel = (state.to - state.from) / plotWidth(view);
    if (event.shiftKey) panBy((event.deltaY || event.deltaX) * nsPerPixel);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) panBy(event.deltaX * nsPerPixel);
    else zoomBy(Math.exp(Math.max(-240, Math.min(240, event.deltaY)) * 0.0022), nsOf(view, event.offsetX));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    dragged = { x: event.offsetX, from: state.from };
    canvas.setPointerCapture(event.pointerId);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, () => { dragged = null; canvas.classList.remove("dragging"); });
  }
  canvas.addEventListener("pointermove", (event) => {
    if (dragged) {
      canvas.classList.add("dragging");
      const from = dragged.from - ((event.offsetX - dragged.x) / plotWidth(view)) * (state.to - state.from);
      hide();
      zoomTo(from, from + state.to - state.from);
      return;
    }
    const found = spanAt(view, event.offsetX, event.offsetY);
    if (!found) hide();
    else if (state.hover?.view !== view || state.hover.index !== found.index) select(found);
    state.cursor = event.offsetX >= view.left ? nsOf(view, event.offsetX) : null;
    if (found) moveCard(event.clientX, event.clientY);
    redraw();
  });
  canvas.addEventListener("pointerleave", () => { if (!dragged) { hide(); redraw(); } });
  canvas.addEventListener("blur", () => { hide(); redraw(); });
  canvas.addEventListener("dblclick", resetZoom);
  canvas.addEventListener("keydown", (event) => onKey(view, event));
}

function openAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const step = Number(wanted.get("step") ?? state.step);
  if (step in record.steps && step !== state.step) showStep(step);
  if (wanted.has("from_ms") && wanted.has("to_ms")) zoomTo(wanted.get("from_ms") * 1e6, wanted.get("to_ms") * 1e6);
  const view = panes.find((pane) => pane.section.dataset.pane === (wanted.get("pane") ?? "measured"));
  const index = wanted.has("span") ? view?.data?.byName.get(`${wanted.get("rank")} ${wanted.get("span")}`) : undefined;
  if (index !== undefined) {
    select({ view, row: view.data.rows.find((row) => row.rank === view.data.rank[index]), index });
    reveal();
  }
}

byId("step").append(...record.steps.map((step, k) => new Option(step.name, String(k))));
byId("step").addEventListener("change", () => showStep(Number(byId("step").value)));
byId("previous").addEventListener("click", () => showStep(state.step - 1));
byId("next").addEventListener("click", () => showStep(state.step + 1));
byId("zoom-in").addEventListener("click", () => zoomBy(0.6));
byId("zoom-out").addEventListener("click", () => zoomBy(1 / 0.6));
byId("reset").addEventListener("click", resetZoom);
const largest = Math.max(0, ...record.steps.flatMap((s) => [s.measured, s.simulated]).map((p) => new Set(p?.rank).size));
state.memory = byId("memory").checked = largest <= 20;
byId("memory").addEventListener("change", () => { state.memory = byId("memory").checked; resize(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = palette(Math.max(1, ...panes.map((view) => view.data?.numChunks ?? 1)));
  buildLegend();
  draw();
});
new ResizeObserver(resize).observe(byId("panes"));
addEventListener("hashchange", openAddress);
addEventListener("scroll", redraw, { passive: true });
addEventListener("resize", resize);
// Paper has no scrolling: rows outside the window are drawn too.
for (const [event, whole] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => { state.whole = whole; draw(); });
}
showStep(0);
openAddress();
