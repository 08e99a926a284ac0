"use strict";
// Draws the picture of a job (picture.py). Everything from the job is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const PHASES = ["training", "saving", "starting", "idle", "repeating", "waiting", "recovering", "stuck", "gone"];
const USES = { // use of time -> the phase whose colour it has
  "useful steps": "training", "repeated steps": "repeating", "save stalls": "saving", stuck: "stuck",
  "re-forming": "recovering", "waiting for nodes": "waiting", "starting and ending": "starting",
};
const PLAIN = new Set(["time", "node", "event", "what", "what happened", "as told", "where"]); // columns whose values need no name
const SHOWN = 60; // events, before the button that shows all
const ROWS = 60; // of a table that stands for a curve
const picture = JSON.parse(document.getElementById("picture").textContent);
const live = document.documentElement.dataset.live === "1";
const view = { axis: "time", scale: "linear", at: null, row: null, all: false };
const $ = (id) => document.getElementById(id);

function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}
function svg(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}
function setText(id, text) { $(id).textContent = text; }

/** The spans of a timeline; the last one of a live node lasts until now. */
function spans(timeline) { return timeline.spans.map(([from, to, phase]) => [from, to === null ? picture.range[1] : to, phase]); }

// ---- words ----

const pad = (number) => String(number).padStart(2, "0");
/** The zone of this browser at a time, such as UTC+02:00. */
function zone(time_s) {
  const east = -new Date(1000 * time_s).getTimezoneOffset(), size = Math.abs(east);
  return `UTC${east ? `${east < 0 ? "-" : "+"}${pad(Math.floor(size / 60))}:${pad(size % 60)}` : ""}`;
}
/** A time with its date; with its zone where that is not the one of the page's tables. */
function clock(time_s) {
  if (!time_s) return "-";
  const at = new Date(1000 * time_s);
  const day = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  const time = `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  return `${day} ${time}${zone(time_s) === here() ? "" : ` ${zone(time_s)}`}`;
}
const here = () => zone(picture.range[1]);
const moment = (time_s) => `${clock(time_s)} ${here()}`;
function length(seconds) {
  const s = Math.max(0, seconds);
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(1)} h`;
  return `${(s / 86400).toFixed(1)} days`;
}
const brief = (seconds) => seconds < 0.995 ? `${Math.round(1000 * seconds)}\u00a0ms` : length(seconds).replace(" ", "\u00a0");
function size(bytes) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(bytes, 1)) / 10)));
  return `${Number((bytes / 1024 ** power).toPrecision(3))}\u00a0${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
function since(seconds) { // of a tick
  const s = Math.round(10 * seconds) / 10;
  if (s < 60) return `${s} s`;
  if (s < 3600) return s % 60 ? `${Math.floor(s / 60)}:${pad(s % 60)}` : `${s / 60} min`;
  if (s < 86400) return s % 3600 ? `${Math.floor(s / 3600)} h ${pad(Math.round((s % 3600) / 60))}` : `${s / 3600} h`;
  return s % 86400 ? `${Math.floor(s / 86400)} d ${Math.round((s % 86400) / 3600)} h` : `${s / 86400} d`;
}
const after = (seconds) => `${seconds < 0 ? "" : "+"}${seconds.toFixed(3)} s`;
function amount(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

// ---- scales ----

function steps(low, high, count, units) {
  const rough = Math.max((high - low) / Math.max(count, 1), 1e-12);
  let step = units && units.find((unit) => unit >= rough);
  if (!step) {
    const power = 10 ** Math.floor(Math.log10(rough));
    step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  }
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}
const TIMES = [0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000];

/** The place of `value` in the ascending list `values`, between two of them if need be. */
function place(values, value) {
  let low = 0, high = values.length - 1;
  if (high < 0 || value <= values[0]) return 0;
  if (value >= values[high]) return high;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle; else high = middle;
  }
  return low + (value - values[low]) / ((values[high] - values[low]) || 1);
}
function at(values, where) {
  const low = Math.floor(where), high = Math.min(low + 1, values.length - 1);
  return values[low] + (values[high] - values[low]) * (where - low);
}

/** Where a time is across the charts, in pixels, whichever axis is shown; and back. */
function across(left, right) {
  const { step, time } = picture.curve, [from, to] = picture.range, wide = right - left;
  if (view.axis === "time" || step.length < 2) {
    const span = to - from || 1;
    return {
      x: (time_s) => left + (wide * (Math.min(Math.max(time_s, from), to) - from)) / span,
      time: (x) => from + (span * (x - left)) / wide,
    };
  }
  const first = step[0], span = step[step.length - 1] - first || 1;
  return {
    x: (time_s) => left + (wide * (at(step, place(time, time_s)) - first)) / span,
    time: (x) => at(time, place(step, first + (span * (x - left)) / wide)),
  };
}

// ---- the charts ----

const TALL = { loss: 176, rate: 92, axis: 36, strip: 20, gap: 24 };
let drawn = null; // the geometry of the last drawing

function geometry() {
  const wide = Math.max(280, $("charts").clientWidth), small = wide < 560;
  const left = small ? 64 : 92, right = wide - (small ? 6 : 14);
  return { wide, left, right, small, ...across(left, right) };
}

function chart(root, where, top, tall, title, columns, css) {
  const { left, right, x } = where, { time } = picture.curve;
  const [middle, low, high] = columns;
  const log = css === "loss" && view.scale === "log" && middle.every((v) => v === null || v > 0);
  const turn = log ? Math.log10 : (v) => v;
  const all = [...low, ...high].filter((v) => v !== null && (!log || v > 0)).map(turn);
  root.append(svg("text", { x: where.small ? 0 : left, y: top - 8, class: "title" }, title));
  if (!all.length) {
    root.append(svg("text", { x: (left + right) / 2, y: top + tall / 2, "text-anchor": "middle" }, "not reported"));
    root.append(svg("line", { x1: left, x2: right, y1: top + tall, y2: top + tall, class: "base" }));
    return;
  }
  let least = css === "rate" ? 0 : all.reduce((a, b) => Math.min(a, b)), most = all.reduce((a, b) => Math.max(a, b));
  if (most === least) { most += Math.abs(most) / 10 || 1; if (css !== "rate") least -= Math.abs(least) / 10 || 1; }
  const room = (most - least) * 0.05;
  if (css !== "rate") least -= room;
  most += room;
  const y = (v) => top + tall - (tall * (turn(v) - least)) / (most - least);
  for (const tick of steps(least, most, tall / (css === "rate" ? 31 : 38))) {
    const value = log ? 10 ** tick : tick, height = top + tall - (tall * (tick - least)) / (most - least);
    root.append(svg("line", { x1: left, x2: right, y1: height, y2: height, class: "gridline" }));
    root.append(svg("text", { x: left - 8, y: height + 4, "text-anchor": "end" }, amount(value)));
  }
  const points = middle.map((value, i) => (value === null ? null : [x(time[i]), y(value)]));
  let path = "", pen = "M";
  for (const point of points) {
    if (point === null) { pen = "M"; continue; }
    const flat = css === "rate" && pen === "L"; // a rate is of the time up to its point
    path += flat ? `V${point[1].toFixed(1)}H${point[0].toFixed(1)}` : `${pen}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    pen = "L";
  }
  if (picture.curve.stride > 1 && css === "loss") { // what each point stands for
    const known = time.map((_, i) => i).filter((i) => low[i] !== null && (!log || low[i] > 0));
    const up = known.map((i) => `${x(time[i]).toFixed(1)} ${y(high[i]).toFixed(1)}`);
    const down = known.reverse().map((i) => `${x(time[i]).toFixed(1)} ${y(low[i]).toFixed(1)}`);
    if (up.length > 1) root.append(svg("path", { d: `M${up.join("L")}L${down.join("L")}Z`, class: "envelope" }));
  }
  root.append(svg("line", { x1: left, x2: right, y1: top + tall, y2: top + tall, class: "base" }));
  root.append(svg("path", { d: path || "M0 0", class: `curve ${css}` }));
}

function axis(root, where, top) {
  const { left, right, x, small } = where, [from, to] = picture.range, { step, time } = picture.curve;
  const count = (right - left) / (small ? 78 : 110);
  const times = steps(0, to - from, count, TIMES).map((s) => [x(from + s), since(s)]);
  const last = step.length - 1;
  const numbers = last < 1 ? [] : steps(step[0], step[last], count)
    .map(Math.round).filter((n, i, all) => n >= step[0] && n !== all[i - 1])
    .map((n) => [x(at(time, place(step, n))), n.toLocaleString("en")]);
  const rows = view.axis === "step" ? [["step", numbers], ["time", times]] : [["time", times], ["step", numbers]];
  rows.forEach(([name, ticks], row) => {
    let free = left - 1;
    root.append(svg("text", { x: left - 8, y: top + 14 + 16 * row, "text-anchor": "end" }, name));
    for (const [px, label] of ticks) {
      const half = label.length * 3.4 + 5, middle = Math.min(Math.max(px, left + half - 5), right - half + 5);
      if (middle - half + 5 < free) continue;
      free = middle + half;
      if (row === 0) root.append(svg("line", { x1: px, x2: px, y1: top, y2: top + 4, class: "base" }));
      root.append(svg("text", { x: middle, y: top + 14 + 16 * row, "text-anchor": "middle" }, label));
    }
  });
}

function strips(root, where, top) {
  const { left, right, x } = where, { time, workers } = picture.curve;
  const label = (text, row) => root.append(svg("text", { x: left - 8, y: top + 14 + TALL.strip * row, "text-anchor": "end" }, text));
  label(where.small ? "world" : "world size", 0);
  for (let i = 0; i < time.length; ) {
    let end = i;
    while (end + 1 < time.length && workers[end + 1] === workers[i]) end += 1;
    const from = i ? x(time[i - 1]) : left, to = end + 1 < time.length ? x(time[end]) : right;
    root.append(svg("rect", { x: from + 0.5, width: Math.max(1, to - from - 1), y: top + 2, height: 15, rx: 3, class: "worker" }));
    const text = String(workers[i]);
    if (to - from > text.length * 7 + 6) root.append(svg("text", { x: (from + to) / 2, y: top + 13.5, "text-anchor": "middle", class: "inside" }, text));
    i = end + 1;
  }
  label(where.small ? "saved" : "checkpoints", 1);
  const middle = top + TALL.strip + 10;
  let path = "", last = -9;
  for (const [, time_s, , , , , , inMemory] of picture.checkpoints.rows) {
    const px = x(time_s);
    if (inMemory || time_s < picture.range[0] || px - last < 3) continue;
    last = px;
    path += `M${px.toFixed(1)} ${middle - 5}l4.5 5l-4.5 5l-4.5 -5z`;
  }
  root.append(svg("line", { x1: left, x2: right, y1: middle, y2: middle, class: "gridline" }));
  root.append(svg("path", { d: path || "M0 0", class: "mark" }));
  troubles(where.small).forEach(([name, kinds], row) => {
    label(name, 2 + row);
    const y = top + TALL.strip * (2 + row) + 4;
    root.append(svg("line", { x1: left, x2: right, y1: y + 6, y2: y + 6, class: "gridline" }));
    for (const one of picture.problems.filter((found) => kinds.includes(found.kind))) {
      const from = Math.min(x(one.from_s), right - 3), to = x(one.to_s === null ? picture.range[1] : one.to_s);
      root.append(svg("rect", { x: from, width: Math.max(3, to - from), y, height: 12, class: "trouble" }));
    }
  });
}

/** The rows of what was wrong with the whole job: a name, and the kinds of problems. */
function troubles(small) {
  const rows = [["no step", ["stuck", "dead link"]], [small ? "no saves" : "saves fail", ["saves fail"]], [small ? "no etcd" : "etcd away", ["etcd away"]]];
  return rows.filter(([, kinds]) => picture.problems.some((one) => kinds.includes(one.kind)));
}

/** What was wrong with single nodes, while the job went on. */
function slow() { return picture.problems.filter((one) => one.steps && one.kind !== "etcd away" && one.nodes.length); }

function bands(root, where, top, bottom) {
  const labels = [];
  for (const one of picture.recoveries) {
    const from = Math.min(where.x(one.from_s), where.right - 2), to = Math.max(where.x(one.to_s), from + 2);
    root.append(svg("rect", { x: from, width: to - from, y: top, height: bottom - top, class: "band" }));
    const text = attempts(one);
    if (to - from > text.length * 6.6 + 10) labels.push(svg("text", { x: (from + to) / 2, y: top + 17, "text-anchor": "middle", class: "inside over" }, text));
  }
  return labels;
}
function attempts(one) {
  if (!one.failures) return "change";
  return one.failures === 1 ? "failure" : `${one.failures} failures`;
}

function drawCharts() {
  const where = geometry(), { curve } = picture;
  const high = curve.loss.some((v) => v !== null) ? TALL.loss : 40;
  const loss = 24, rate = loss + high + TALL.gap + 6, below = rate + TALL.rate;
  const tall = below + TALL.axis + (2 + troubles().length) * TALL.strip + 6;
  const root = svg("svg", { width: where.wide, height: tall, "aria-hidden": "true" });
  const labels = bands(root, where, loss, below);
  chart(root, where, loss, high, curve.stride > 1 ? `Loss, mean and range of ${curve.stride} steps` : "Loss", [curve.loss, curve.low, curve.high], "loss");
  chart(root, where, rate, TALL.rate, `Throughput, ${curve.unit}`, [curve.rate, curve.rate, curve.rate], "rate");
  root.append(...labels);
  axis(root, where, below);
  strips(root, where, below + TALL.axis);
  const cursor = svg("line", { y1: loss, y2: below, class: "cursor", visibility: "hidden" });
  root.append(cursor);
  $("charts").replaceChildren(root);
  drawn = { ...where, cursor };
  drawTimelines(where);
  $("charts").setAttribute("aria-valuemax", Math.max(0, curve.time.length - 1));
}

function drawTimelines(where) {
  const { timelines } = picture, { left, right, x, wide, small } = where;
  const tall = Math.max(5, Math.min(20, Math.floor(440 / (timelines.length || 1)))), bar = tall > 9 ? tall - 4 : tall - 1;
  const root = svg("svg", { width: wide, height: tall * timelines.length + 8, "aria-hidden": "true" });
  const paths = Object.fromEntries(PHASES.map((phase) => [phase, ""])), every = Math.ceil(14 / tall), most = small ? 6 : 12;
  timelines.forEach((timeline, row) => {
    const top = row * tall + 3;
    if (row % every === 0) {
      const name = timeline.node.length > most ? `…${timeline.node.slice(1 - most)}` : timeline.node;
      root.append(svg("text", { x: left - 8, y: top + Math.max(bar, 8) / 2 + 4, "text-anchor": "end" }, name));
    }
    for (const [from, to, phase] of spans(timeline)) {
      const start = Math.min(x(from), right - 1.5), width = Math.max(x(to) - start, phase === "training" ? 0.2 : 1.5);
      const thin = phase === "idle" ? bar / 3 : 0; // so that colour is not all that tells
      paths[phase in paths ? phase : "idle"] += `M${start.toFixed(1)} ${(top + thin).toFixed(1)}h${width.toFixed(1)}v${(bar - 2 * thin).toFixed(1)}h${(-width).toFixed(1)}z`;
    }
  });
  for (const phase of PHASES) if (paths[phase]) root.append(svg("path", { d: paths[phase], class: `phase-${phase}` }));
  const rows = new Map(timelines.map((timeline, row) => [timeline.node, row]));
  for (const [{ from_s, to_s }, node] of slow().flatMap((one) => one.nodes.map((node) => [one, node]))) {
    if (!rows.has(node)) continue;
    const px = x(from_s), top = rows.get(node) * tall + 3, wide = x(to_s === null ? picture.range[1] : to_s) - px;
    root.append(svg("rect", { x: px, y: top + bar - 2, width: Math.max(wide, 2), height: 3, class: "straggler" }));
    root.append(svg("path", { d: `M${px} ${top + bar}l5 -${Math.max(bar, 8)}h-10z`, class: "straggler" }));
  }
  const cursor = svg("line", { y1: 0, y2: tall * timelines.length + 4, class: "cursor", visibility: "hidden" });
  root.append(cursor);
  $("timelines").replaceChildren(root);
  drawn.timelines = cursor;
  drawn.tall = tall;
}

function drawLegend() {
  const used = new Set(picture.timelines.flatMap((timeline) => timeline.spans.map((span) => span[2])));
  const items = PHASES.filter((phase) => used.has(phase)).map((phase) => {
    const box = svg("svg", { width: 16, height: 12, "aria-hidden": "true" });
    box.append(svg("rect", { width: 16, height: 12, rx: 2, class: `phase-${phase}` }));
    return el("li", {}, box, phase);
  });
  const sign = (path, css, text) => {
    const box = svg("svg", { width: 16, height: 12, "aria-hidden": "true" });
    box.append(svg("path", { d: path, class: css }));
    items.push(el("li", {}, box, text));
  };
  if (picture.checkpoints.rows.some((row) => !row[7])) sign("M8 1l4.5 5l-4.5 5l-4.5 -5z", "mark", "checkpoint");
  if (picture.recoveries.length) sign("M0 0h16v12h-16z", "band", "no step");
  if (troubles().length) sign("M0 0h16v12h-16z", "trouble", "no step, failing saves, or etcd away");
  if (slow().length) sign("M8 11l5 -10h-10z", "straggler", "slow node");
  $("legend").replaceChildren(...items);
}

// ---- the position that the reader points at ----

function point(time_s, row) {
  view.at = time_s;
  view.row = row;
  const out = $("readout"), { curve } = picture;
  const lines = drawn ? [drawn.cursor, drawn.timelines] : [];
  if (time_s === null) {
    lines.forEach((line) => line.setAttribute("visibility", "hidden"));
    out.textContent = "Point at the charts, or focus them and press the arrow keys.";
    return;
  }
  const px = drawn.x(time_s);
  for (const line of lines) {
    line.setAttribute("x1", px);
    line.setAttribute("x2", px);
    line.setAttribute("visibility", "visible");
  }
  const parts = [moment(time_s)];
  if (curve.time.length) {
    const i = Math.round(place(curve.time, time_s));
    parts.push(`step ${curve.step[i].toLocaleString("en")}`);
    if (curve.loss[i] !== null) parts.push(`loss ${amount(curve.loss[i])}`);
    if (curve.rate[i] !== null) parts.push(`${amount(curve.rate[i])} ${curve.unit}`);
    if (curve.workers[i]) parts.push(`world size ${curve.workers[i]}`);
    $("charts").setAttribute("aria-valuenow", i);
  }
  const timeline = row === null ? null : picture.timelines[row];
  if (timeline) {
    const span = spans(timeline).find(([from, to]) => time_s >= from && time_s <= to);
    parts.push(`${timeline.node}: ${span ? `${span[2]} for ${length(span[1] - span[0])}` : "not there"}`);
  } else {
    const one = picture.recoveries.find((r) => time_s >= r.from_s && time_s <= r.to_s);
    if (one) parts.push(`${attempts(one)}, no step for ${length(one.to_s - one.from_s)}: ${one.cause}`);
    for (const bad of picture.problems) {
      if (time_s >= bad.from_s && time_s <= (bad.to_s === null ? picture.range[1] : bad.to_s)) parts.push(`${bad.kind}: ${bad.text}`);
    }
  }
  out.replaceChildren(el("b", {}, parts[0]), parts.length > 1 ? ` · ${parts.slice(1).join(" · ")}` : "");
  $("charts").setAttribute("aria-valuetext", parts.join(", "));
}
function pointer(event, timelines) {
  const box = $("charts").getBoundingClientRect(), px = event.clientX - box.left;
  if (px < drawn.left - 4 || px > drawn.right + 4) return point(null, null);
  let row = null;
  if (timelines) {
    row = Math.floor((event.clientY - $("timelines").getBoundingClientRect().top + $("timelines").scrollTop - 3) / drawn.tall);
    if (!picture.timelines[row]) row = null;
  }
  point(drawn.time(Math.min(Math.max(px, drawn.left), drawn.right)), row);
}
function keys(event) {
  const { time } = picture.curve, last = time.length - 1;
  const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 20, PageDown: -20 };
  if (event.key === "Escape") return point(null, null);
  if (last < 0 || !(event.key in moves || event.key === "Home" || event.key === "End")) return;
  event.preventDefault();
  const now = view.at === null ? (moves[event.key] > 0 ? -1 : last + 1) : Math.round(place(time, view.at));
  const next = event.key === "Home" ? 0 : event.key === "End" ? last : now + moves[event.key];
  point(time[Math.min(Math.max(next, 0), last)], view.row);
}

// ---- tables ----

function table(heads, rows, numeric = []) {
  const head = el("tr", {}, ...heads.map((text, i) => el("th", { scope: "col", class: numeric.includes(i) ? "n" : "" }, text)));
  const body = rows.map((row) => el("tr", {}, ...row.map((cell, i) => {
    const made = cell instanceof HTMLTableCellElement ? cell : el("td", {}, cell);
    if (numeric.includes(i)) made.classList.add("n");
    const [label, of] = heads[i].split(", UTC"); // for a table that does not fit
    made.dataset.label = PLAIN.has(label) ? "" : `${label} `;
    made.dataset.zone = of === undefined ? "" : ` UTC${of}`;
    return made;
  })));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
}
function fill(id, count, text, make) {
  $(id).replaceChildren(count ? make() : el("p", { class: "empty" }, text));
  fit($(id));
}
/** A table that is wider than its place shows each row as a paragraph: no column is ever cut. */
function fit(place) {
  for (const made of place.querySelectorAll("table")) {
    made.classList.remove("rows");
    made.classList.toggle("rows", made.scrollWidth > made.parentElement.clientWidth || made.parentElement.scrollWidth > made.parentElement.clientWidth);
  }
}
function tight(text) { return el("td", { class: "tight" }, text); }

function curveTable() {
  const { curve } = picture, every = Math.max(1, Math.ceil(curve.step.length / ROWS));
  const rows = curve.step.map((_, i) => i).filter((i) => i % every === 0 || i === curve.step.length - 1);
  return table(["step", `time, ${here()}`, "loss", curve.unit, "workers"], rows.map((i) => [
    curve.step[i].toLocaleString("en"), tight(clock(curve.time[i])), amount(curve.loss[i]), amount(curve.rate[i]), String(curve.workers[i]),
  ]), [0, 2, 3, 4]);
}
function timelineTable() {
  const rows = picture.timelines.flatMap((timeline) => spans(timeline).map(([from, to, phase]) => [tight(timeline.node), phase, tight(clock(from)), length(to - from)]));
  const shown = table(["node", "phase", `from, ${here()}`, "for"], rows.slice(0, 1000), [3]);
  return rows.length > 1000 ? el("div", {}, shown, el("p", { class: "empty" }, `The first 1,000 of ${rows.length.toLocaleString("en")} spans.`)) : shown;
}
function openTables() {
  for (const [id, make] of [["curve-table", curveTable], ["timeline-table", timelineTable]]) {
    if (!$(id).open) continue;
    $(id).lastElementChild.replaceChildren(make());
    fit($(id));
  }
}

function drawJob() {
  const { job } = picture;
  document.title = `${job.name}: ${job.state}`;
  setText("name", job.name);
  setText("state", job.state);
  const tone = { ACTIVE: "", DONE: "", STOPPED: "", FORMING: "warn", "not begun": "" }[job.state];
  $("state").className = `badge ${tone === undefined ? "bad" : tone}`;
  setText("now", [job.ended ? job.cause || job.now : job.now, job.stop, job.note].filter(Boolean).join("; "));
  const lasted = length(job.to_s - job.from_s);
  const ran = job.ended ? `, ended ${clock(job.to_s)} after ${lasted}` : `, ${lasted} ago`;
  setText("since", job.from_s ? `Started ${moment(job.from_s)}${ran}${job.owner ? `, by ${job.owner}` : ""}` : "");
  if (live) return age();
  setText("made", `report of ${moment(job.made_s)}`);
}
function age() {
  setText("made", `updated ${length(Math.round(Date.now() / 1000 - heard_s)).replace(".0", "")} ago`);
}
/** What is wrong now, at the head of the page. */
function drawWrong() {
  const now = picture.problems.filter((one) => one.to_s === null);
  $("wrong").hidden = !now.length;
  $("wrong").replaceChildren(...now.map((one) => el("li", {}, el("b", {}, one.kind), ` since ${clock(one.from_s)}: ${one.text}`)));
}
function drawTiles() {
  $("tiles").replaceChildren(...picture.tiles.map((tile) => el("div", { class: "tile" },
    el("dt", {}, tile.label), el("dd", { class: "value" }, tile.value), el("dd", { class: "note" }, tile.note))));
}
function drawUses() {
  fill("uses", picture.uses.length, "No time is accounted for yet.", () => {
    const css = (use) => `use-${USES[use] || "idle"}`;
    const uses = [...picture.uses].sort((a, b) => b.part - a.part);
    const stack = el("div", { class: "stack", "aria-hidden": "true" }, ...uses.map((use) => {
      const part = el("span", { class: css(use.use) });
      part.style.flexGrow = use.part;
      return part;
    }));
    const rows = uses.map((use) => [
      el("td", { class: "text" }, el("span", { class: `swatch ${css(use.use)}`, "aria-hidden": "true" }), use.use, el("span", { class: "meaning" }, use.meaning)),
      `${(100 * use.part).toFixed(1)} %`, length(use.time_s),
    ]);
    return el("div", {}, stack, table(["use of all nodes' time", "part", "time"], rows, [1, 2]));
  });
}
function drawRecoveries() {
  const found = [...picture.recoveries].reverse();
  setText("recoveries-count", found.length || "");
  fill("recoveries", found.length, "No round has ended before the job.", () => el("div", {}, ...found.map((one) => {
    const made = el("details", { class: "recovery" }, el("summary", {},
      el("span", { class: "why" }, el("span", { class: one.failures ? "tone bad" : "tone" }, attempts(one)), ` ${one.failures > 1 ? "in a row, the last: " : ""}${one.cause}`),
      el("span", { class: "took" }, one.over ? length(one.to_s - one.from_s) : `${length(one.to_s - one.from_s)}, no step since`),
      el("span", { class: "muted when" }, moment(one.from_s))));
    made.addEventListener("toggle", () => {
      if (!made.open || made.children.length > 1) return;
      const parts = one.phases.map(([phase, took, note]) => [tight(phase), tight(took < 1 ? `${Math.round(1000 * took)} ms` : length(took)), el("td", { class: "text" }, note)]);
      const rows = one.events.map(([offset, node, kind, text]) => [tight(after(offset)), tight(node), tight(kind), el("td", { class: "text" }, text)]);
      if (one.over) rows.push([tight(after(one.to_s - one.from_s)), "", "step", el("td", { class: "text" }, "the first step of the next round has ended")]);
      made.append(el("div", { class: "fits" }, table(["phase", "time", "what it led to"], parts, [1]), table(["after", "node", "event", "what happened"], rows)));
      fit(made);
    });
    return made;
  })));
}
function drawNodes() {
  const { timelines } = picture;
  setText("nodes-count", timelines.length || "");
  const hosts = timelines.some((timeline) => timeline.host && timeline.host !== timeline.node);
  const devices = timelines.some((timeline) => timeline.devices);
  const heads = ["node", "state", "ranks", "step", "loss", "address", ...(hosts ? ["host"] : []), ...(devices ? ["devices"] : [])];
  fill("nodes", timelines.length, "No node has been seen yet.", () => table(heads, timelines.map((timeline) => {
    const tone = { running: "", done: "", spare: "", gone: picture.job.ended ? "" : "warn", draining: "warn", left: "warn" }[timeline.condition];
    return [tight(timeline.node), el("td", { class: `tone ${tone === undefined ? "bad" : tone}` }, timeline.condition), tight(timeline.ranks || "-"),
      timeline.step === null ? "-" : timeline.step.toLocaleString("en"), amount(timeline.loss), timeline.address || "-", ...(hosts ? [timeline.host || "-"] : []), ...(devices ? [timeline.devices || "-"] : [])];
  }), [3, 4]));
  if (live) {
    const chosen = $("node").value, names = timelines.filter((timeline) => timeline.alive).map((timeline) => timeline.node);
    $("node").replaceChildren(...names.map((name) => el("option", {}, name)));
    if (names.includes(chosen)) $("node").value = chosen;
    $("control").hidden = picture.job.ended;
  }
}
function drawCheckpoints() {
  const { rows, saved, kept } = picture.checkpoints;
  const there = rows.filter((row) => !row[7]).length;
  const count = saved ? (saved > there ? `newest ${there} of ${saved}` : `${saved}`) : "";
  setText("checkpoints-count", kept ? `${count || "0"} on disk, ${kept.toLocaleString("en")} in memory` : count);
  fill("checkpoints", rows.length, "No checkpoint is recorded.", () => table(
    ["step", "where", `committed, ${here()}`, "read and verified", "size", "stall", "write", "publish", "samples", "checkpoint", "digest"],
    [...rows].reverse().map(([step, time_s, samples, tag, digest, read, written, inMemory]) => [
      step.toLocaleString("en"), inMemory ? "memory" : "disk", tight(clock(time_s)),
      read ? el("td", { class: "tight", title: moment(read[1]) }, `by round ${read[0]}${read[2] ? ` in ${brief(read[2])}` : ""}`) : el("td", { class: "tight muted" }, "not read"),
      ...(written ? [size(written[0]), ...written.slice(1).map(brief)] : ["-", "-", "-", "-"]),
      samples.toLocaleString("en"), el("td", { class: "tight" }, el("code", {}, tag)),
      el("td", { class: "tight" }, el("code", { title: digest }, digest.slice(0, 8))),
    ]), [0, 4, 5, 6, 7, 8]));
}
function drawPaces() {
  const { rows, left_out: more } = picture.paces;
  $("paces-panel").hidden = !rows.length;
  setText("paces-count", more ? `${more.toLocaleString("en")} faster ranks left out` : "");
  const longest = Math.max(...rows.map((row) => row[4]));
  fill("paces", rows.length, "", () => table(["steps of", "count", "p50", "p90", "p99", "up to p50, p90, p99"], rows.map(([of, count, p50, p90, p99]) => {
    const bar = el("div", { class: "range", "aria-hidden": "true" });
    [p50, p90 - p50, p99 - p90, longest - p99].forEach((part, i) => {
      bar.append(el("span", { class: `range-${i}` }));
      bar.lastChild.style.flexGrow = part;
    });
    const exact = [p50, p90, p99].map((took_s) => tight(`${Number(took_s.toPrecision(3))} s`));
    exact.forEach((cell) => cell.classList.add("n"));
    return [tight(of), count.toLocaleString("en"), ...exact, el("td", { class: "wide" }, bar)];
  }), [1, 2, 3, 4]));
}
function drawProblems() {
  const held = (one) => one.to_s === null, found = [...picture.problems].reverse();
  const rows = [...found.filter(held), ...found.filter((one) => !held(one))];
  $("problems-panel").hidden = !rows.length;
  setText("problems-count", found.filter(held).length ? `${found.filter(held).length} now` : "none now");
  fill("problems", rows.length, "", () => table(["what", `since, ${here()}`, "until", "nodes", "as told"], rows.map((one) => [
    el("td", { class: `tight tone ${held(one) ? "bad" : ""}` }, one.kind), tight(clock(one.from_s)),
    held(one) ? el("td", { class: "tight tone bad" }, "holds now") : tight(`${clock(one.to_s)} (${length(one.to_s - one.from_s)})`),
    el("td", { class: "names" }, one.nodes.length > 6 ? `${one.nodes.length} nodes` : one.nodes.join(", ") || "all"), el("td", { class: "text" }, one.text)])));
}
function drawEvents() {
  const word = $("find").value.trim().toLowerCase(), matters = $("matters").checked;
  const found = picture.events.filter(([, , node, kind, text, tone]) =>
    (!matters || tone) && (!word || `${node} ${kind} ${text}`.toLowerCase().includes(word))).reverse();
  setText("events-count", `${found.length.toLocaleString("en")} of ${picture.events.length.toLocaleString("en")}`);
  const shown = view.all ? found : found.slice(0, SHOWN);
  fill("events", shown.length, "No such event.", () => table([`time, ${here()}`, "round", "node", "event", "what happened"],
    shown.map(([time_s, round, node, kind, text, tone]) => [
      tight(clock(time_s)), round, tight(node), el("td", { class: `tight tone ${tone}` }, kind), el("td", { class: "text" }, text)])));
  $("more").hidden = shown.length === found.length;
  setText("more", `Show all ${found.length.toLocaleString("en")}`);
}
function drawWords() {
  const { words, timeline_age_s: late } = picture;
  setText("words", [words.loss, words.rate, words.timelines, late > 15 ? `Timelines are up to ${length(late)} old.` : ""].filter(Boolean).join(" "));
}

const SECTIONS = [
  [drawJob, ["job"]], [drawTiles, ["tiles"]], [drawUses, ["uses"]],
  [drawCharts, ["range", "curve", "timelines", "recoveries", "checkpoints", "problems"]],
  [drawLegend, ["timelines", "recoveries", "checkpoints", "problems"]], [openTables, ["curve", "timelines"]],
  [drawRecoveries, ["recoveries"]], [drawNodes, ["timelines", "job"]], [drawCheckpoints, ["checkpoints"]], [drawPaces, ["paces"]],
  [drawProblems, ["problems"]], [drawWrong, ["problems"]], [drawEvents, ["events"]], [drawWords, ["words", "timeline_age_s"]],
];
function draw(changed) {
  for (const [make, of] of SECTIONS) if (!changed || of.some((name) => name in changed)) make();
  if (!changed || view.at === null || changed.curve || changed.range) point(view.at, view.row);
}

// ---- the live page ----

let heard_s = Date.now() / 1000, trouble = "", lost = false;
function listen() {
  const source = new EventSource("stream");
  source.addEventListener("picture", (message) => {
    heard_s = Date.now() / 1000;
    const changed = JSON.parse(message.data);
    if ("trouble" in changed || lost) {
      trouble = "trouble" in changed ? changed.trouble : trouble;
      lost = false;
      $("trouble").hidden = !trouble;
      setText("trouble", trouble);
    }
    for (const [name, values] of Object.entries(changed.patches || {})) {
      for (const [where, value] of values) picture[name][where] = value;
      changed[name] = picture[name];
    }
    delete changed.patches;
    delete changed.trouble;
    Object.assign(picture, changed);
    draw(changed);
  });
  source.onerror = () => {
    lost = true;
    $("trouble").hidden = false;
    setText("trouble", "The dashboard does not answer. The page shows the job as it was, and tries again.");
  };
  setInterval(age, 1000);
}
async function act(path, body, question, verb) {
  if (!$("token").value) { setText("answer", "Enter the token first."); return $("token").focus(); }
  setText("sure-text", question);
  setText("sure-yes", verb);
  $("sure").returnValue = "no";
  $("sure").showModal();
  await new Promise((done) => $("sure").addEventListener("close", done, { once: true }));
  if ($("sure").returnValue !== "yes") return;
  try {
    const reply = await fetch(path, {
      method: "POST", body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${$("token").value}` },
    });
    setText("answer", (await reply.json()).said);
  } catch (error) {
    setText("answer", "The dashboard did not answer; nothing is known of the request.");
  }
}

// ---- begin ----

for (const input of document.querySelectorAll("fieldset input")) {
  input.addEventListener("change", () => { view[input.name] = input.value; drawCharts(); point(view.at, view.row); });
}
$("charts").addEventListener("pointermove", (event) => pointer(event, false));
$("timelines").addEventListener("pointermove", (event) => pointer(event, true));
for (const id of ["charts", "timelines"]) $(id).addEventListener("pointerleave", () => point(null, null));
$("charts").addEventListener("keydown", keys);
for (const id of ["curve-table", "timeline-table"]) $(id).addEventListener("toggle", openTables);
$("find").addEventListener("input", () => { view.all = false; drawEvents(); });
$("matters").addEventListener("change", drawEvents);
$("more").addEventListener("click", () => { view.all = true; drawEvents(); });
$("stop").addEventListener("click", () => act("stop", {}, `Stop job ${picture.job.name}? It saves a checkpoint and ends; it cannot go on under this name.`, "Stop the job"));
$("drain").addEventListener("click", () => act("drain", { node: $("node").value }, `Drain node ${$("node").value}? It leaves at its next step boundary.`, "Drain the node"));
let resized = 0, wide = 0;
new ResizeObserver(() => {
  if ($("charts").clientWidth === wide) return;
  wide = $("charts").clientWidth;
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(() => { drawCharts(); point(view.at, view.row); fit(document); });
}).observe($("charts"));
draw(null);
if (live) listen();
