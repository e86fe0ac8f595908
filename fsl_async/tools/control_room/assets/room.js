// Takes the server's events, keeps a copy of what they say, and draws it at most once a frame.
"use strict";

const STATES = ["training", "sending", "late", "hangs", "gone", "fetching", "done"];
const room = { nodes: new Map(), offset: 0, drawn: 0, events: 0, drawnAt: 0, connection: null };
window.room = room;

const megabytes = (count) => {
  if (count >= 1e9) return `${(count / 1e9).toFixed(2)} GB`;
  return count >= 1e6 ? `${(count / 1e6).toFixed(1)} MB` : `${(count / 1e3).toFixed(1)} kB`;
};
const whole = (value) => Math.round(value).toLocaleString("en-US");
const serverNow = () => Date.now() / 1000 + room.offset;
const span = (seconds) => {
  const value = Math.max(0, seconds);
  if (value < 120) return `${value.toFixed(0)} s`;
  return value < 7200 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
};

// Seconds that the node's times cover: times of more than a day are shown with their day.
const spanOf = (state) => Math.max(serverNow(), state.last_t) - state.begins_at;
const clockOf = (state, t) => timeline.clock(t, spanOf(state));

// --- a node of the run ---

const nodeOf = (id) => {
  let node = room.nodes.get(id);
  if (!node) {
    const article = document.getElementById("node").content.cloneNode(true).firstElementChild;
    document.getElementById("nodes").append(article);
    node = {
      id, article, state: null, rounds: emptyRounds(), bytes: null, timelines: new Map(),
      heldOut: [], chart: null, chartKey: "", bytesChart: null, dirty: new Set(),
    };
    article.querySelector("select.value").addEventListener("change", () => redraw(node, "rounds"));
    article.querySelector("select.axis").addEventListener("change", () => redraw(node, "rounds"));
    article.querySelector("select.span").addEventListener("change", () => redraw(node, "timeline"));
    room.nodes.set(id, node);
  }
  return node;
};

const emptyRounds = () => ({ every: 1, columns: {}, clients: new Map() });

let frame = 0;
const redraw = (node, ...parts) => {
  parts.forEach((part) => node.dirty.add(part));
  if (!frame) frame = requestAnimationFrame(drawAll);
};

room.idle = () => frame === 0 && room.drawn > 0;

const drawAll = () => {
  frame = 0;
  for (const node of room.nodes.values()) {
    const dirty = node.dirty;
    node.dirty = new Set();
    if (!node.state) continue;
    if (dirty.has("state")) drawState(node);
    if (dirty.has("timeline")) drawTimeline(node);
    if (dirty.has("rounds")) drawRounds(node);
    if (dirty.has("bytes")) drawBytes(node);
  }
  room.drawn += 1;
  room.drawnAt = Date.now();
};

// --- figures and tables ---

const setText = (parent, selector, text) => {
  const found = parent.querySelector(selector);
  if (found.textContent !== text) found.textContent = text;
  return found;
};

const fact = (name, text, kind) => {
  const box = document.createElement("div");
  const dt = document.createElement("dt");
  const dd = document.createElement("dd");
  dt.textContent = name;
  dd.textContent = text;
  if (kind) dd.className = kind;
  box.append(dt, dd);
  return box;
};

const factsOf = (state) => {
  const found = [];
  const now = serverNow();
  if (state.role === "ps") {
    found.push(fact("version", state.version >= 0 ? whole(state.version) : "none yet"));
    found.push(fact(`${state.counts} merged`, whole(state.tokens)));
  } else if (state.role === "server") found.push(fact("newest round", String(state.version)));
  const here = state.sites.filter((one) => one.here).length;
  if (state.role === "ps" || state.role === "server") {
    found.push(fact("sites", `${here} of ${state.sites.length} connected`));
  }
  const open = state.window;
  if (open && open.open && !state.ended) {
    found.push(fact("open round", `${open.answered} of ${open.called} sent a delta`));
    if (open.waiting) {
      const names = open.waited_for.slice(0, 5).join(", ");
      const more = open.waiting > 5 ? ` and ${open.waiting - 5} more` : "";
      found.push(fact("waits for", names + more));
    }
    if (open.closes_at !== null) {
      found.push(fact("grace window closes in", span(open.closes_at - now)));
    } else if (open.waiting) {
      const why = open.quorum_at === null ? "no quorum yet" : "quorum reached, window not known";
      found.push(fact("grace window", why));
    }
  }
  if (open && open.late.length) {
    const more = open.late.length > 5 ? ` and ${open.late.length - 5} more` : "";
    found.push(fact("late", open.late.slice(0, 5).join(", ") + more, "warning"));
  }
  if (state.next_sync_at) found.push(fact("next sync in", span(state.next_sync_at - now)));
  if (state.role === "ps") {
    const words = `${megabytes(state.raw)} raw, ${megabytes(state.coded)} coded`;
    found.push(fact("deltas and versions", words));
  }
  const sockets = state.bytes["sockets up"] + state.bytes["sockets down"];
  if (sockets) found.push(fact("on sockets", megabytes(sockets)));
  if (state.pending) found.push(fact("pending deltas", whole(state.pending)));
  if (state.cosine !== null) found.push(fact("deltas agree", `cosine ${state.cosine.toFixed(2)}`));
  if (state.job) found.push(fact("Slurm job", `${state.job}, requeued ${state.requeues} times`));
  if (state.starts > 1) found.push(fact("starts", String(state.starts)));
  if (state.encrypted === false) found.push(fact("connections", "not encrypted", "warning"));
  if (state.garbage) found.push(fact("refused or foreign", whole(state.garbage)));
  if (state.audit) {
    const kind = { true: "good", false: "bad", null: "" }[state.audit.clean];
    found.push(fact("audit", state.audit.words, kind));
  }
  for (const relay of state.relays) {
    const words = `${relay.open} of ${relay.accepted} connections open, ` +
      `${megabytes(relay.up)} up, ${megabytes(relay.down)} down`;
    found.push(fact(`to ${relay.server}`, words));
  }
  for (const words of state.groups) found.push(fact("groups", words.replace(/^groups: /, "")));
  return found;
};

const digits = (value, most) => (value === null ? "-" : String(+value.toPrecision(most)));
const COLUMNS = [
  ["site", (s) => s.name, "name"],
  ["state", (s) => stateWords(s), "state"],
  ["version", (s) => (s.version >= 0 ? String(s.version) : "-"), "number", "ps"],
  ["loss", (s) => digits(s.loss, 4), "number"],
  ["tokens/s", (s) => (s.tokens_per_s ? whole(s.tokens_per_s) : "-"), "number", "ps"],
  ["tokens", (s) => whole(s.tokens), "number", "ps"],
  ["merged", (s) => whole(s.merged), "number", "ps"],
  ["uploads", (s) => whole(s.uploads), "number", "server"],
  ["raw", (s) => (s.raw ? megabytes(s.raw) : "-"), "number", "ps"],
  ["coded", (s) => (s.coded ? megabytes(s.coded) : "-"), "number", "ps"],
  ["refused", (s) => String(s.refused), "number", "ps", (s) => s.refused > 0],
  ["held", (s) => String(s.held), "number", "ps", (s) => s.held > 0],
  ["clipped", (s) => String(s.clipped), "number", "ps", (s) => s.clipped > 0],
  ["relaunches", (s) => String(s.relaunches), "number", "", (s) => s.relaunches > 0],
  ["job", (s, state) => jobWords(s, state), "", "ps", (s) => s.launch !== null],
  ["rank", (s) => digits(s.rank, 4), "number", "ps", (s) => s.rank !== null],
  ["moves products by", (s) => digits(s.norm, 3), "number", "ps", (s) => s.norm !== null],
  ["epsilon", (s) => digits(s.epsilon, 3), "number", "ps", (s) => s.epsilon !== null],
  ["labels", (s) => Object.entries(s.labels).map(([k, v]) => `${k} ${Math.round(v * 100)} %`)
    .join(", ") || "-", "", "ps", (s) => Object.keys(s.labels).length > 0],
  ["left out", (s) => whole(s.left_out), "number", "", (s) => s.left_out > 0],
  ["loop lag ms", (s) => digits(s.lag_ms, 3), "number", "ps", (s) => s.lag_ms !== null],
];

// Once a site is back it does not matter any more what Slurm said of its job.
const jobWords = (site, state) => {
  if (!site.launch) return "-";
  const [what, t, text] = site.launch;
  return `${what} ${clockOf(state, t)}${text && !site.here ? `: ${text}` : ""}`;
};

const stateWords = (site) => {
  if (site.gone_at !== null) return `gone for ${span(serverNow() - site.gone_at)} (${site.why})`;
  let words = site.catching_up ? "catching up" : site.state;
  if (site.trouble) words += `, trains badly: ${site.trouble}`;
  return words;
};

const drawTable = (node) => {
  const state = node.state;
  const columns = COLUMNS.filter(([, , , role, when]) =>
    (!role || role === state.role) && (!when || state.sites.some(when)));
  const head = node.article.querySelector(".sites thead tr");
  head.replaceChildren(...columns.map(([title, , kind]) => {
    const cell = document.createElement("th");
    cell.textContent = title.replace("tokens", state.counts);
    cell.className = kind;
    return cell;
  }));
  const rows = state.sites.map((site) => {
    const row = document.createElement("tr");
    row.dataset.site = site.name;
    for (const [, words, kind] of columns) {
      const cell = document.createElement("td");
      cell.className = kind;
      if (kind === "state") {
        const dot = document.createElement("span");
        dot.className = `dot ${STATES.includes(site.state) ? site.state : "fetching"}`;
        cell.append(dot);
      }
      const text = words(site, state);
      if (kind === "name") cell.title = text;
      cell.append(text);
      row.append(cell);
    }
    return row;
  });
  node.article.querySelector(".sites tbody").replaceChildren(...rows);
  const more = node.article.querySelector(".more");
  more.hidden = !state.hidden;
  more.textContent = `and ${state.hidden} more`;
  node.article.querySelector(".sites-part").hidden = !state.sites.length;
};

const drawState = (node) => {
  const { article, state } = node;
  setText(article, ".title", `${state.role_words} ${state.title}`);
  setText(article, ".header", state.header);
  setText(article, ".alive", state.alive);
  article.querySelector(".facts").replaceChildren(...factsOf(state));
  const complaints = article.querySelector(".complaints");
  const found = (state.audit ? state.audit.complaints : []).slice();
  if (state.alarm) found.unshift(`ALARM (${state.alarms}): ${state.alarm}`);
  complaints.hidden = !found.length;
  complaints.replaceChildren(...found.map((words) => {
    const line = document.createElement("p");
    line.textContent = words;
    return line;
  }));
  const loading = article.querySelector(".loading");
  loading.hidden = !state.loading;
  loading.textContent = state.loading ? "reading the journal" : "";
  setText(article, ".held-out", state.held_out_words);
  for (const option of article.querySelectorAll('option[value="tokens"]')) {
    option.textContent = state.counts;
  }
  drawTable(node);
  const held = article.querySelector(".held-part");
  held.hidden = !state.held.length;
  held.querySelector(".held").replaceChildren(...state.held.map(([key, why]) => {
    const line = document.createElement("li");
    line.textContent = `delta ${key}: ${why}`;
    return line;
  }));
  article.querySelector(".news").replaceChildren(...state.news.slice().reverse().map((one) => {
    const line = document.createElement("li");
    const time = document.createElement("time");
    const text = document.createElement("span");
    time.textContent = clockOf(state, one.t);
    text.textContent = one.text;
    if (one.level === "warning") text.className = "warning";
    line.append(time, text);
    return line;
  }));
  for (const part of ["timeline-part", "rounds-part"]) {
    article.querySelector(`.${part}`).hidden = state.role === "relay" || state.role === "client";
  }
};

const drawTimeline = (node) => {
  const lines = node.timelines;
  let begin = Infinity;
  for (const line of lines.values()) if (line.t.length) begin = Math.min(begin, line.t[0]);
  if (begin === Infinity) return;
  const end = node.state.ended || serverNow() > node.state.last_t + 60
    ? node.state.last_t : serverNow();
  const chosen = Number(node.article.querySelector("select.span").value);
  if (chosen) begin = Math.max(begin, end - chosen);
  const holder = node.article.querySelector(".timeline");
  timeline.draw(holder, lines, begin, Math.max(end, begin + 1), (t) => clockOf(node.state, t));
};

// --- charts ---

// Where a version is on the axis: bucket r closes with version r + 1. Null: it is not known.
const placeOf = (version, axis, { columns, every }) => {
  if (axis === "rounds") return version;
  if (version === 0) return axis === "tokens" ? 0 : null;
  const first = columns.rounds && columns.rounds.length ? columns.rounds[0] / every : 0;
  const found = (columns[axis] || [])[Math.floor((version - 1) / every) - first];
  return found === undefined ? null : found;
};

const heldOutLines = (node, axis) => {
  const lines = new Map();
  for (const one of node.heldOut) {
    if (one.version < 0 || one.version > node.state.version || one.loss === null) continue;
    const x = placeOf(one.version, axis, node.rounds);
    if (x === null) continue;
    const mean = one.of === "weights" ? "" : `, ${one.of} of late versions`;
    const label = `held out${one.data ? ` on ${one.data}` : ""}${mean}`;
    if (!lines.has(label)) lines.set(label, new Map());
    lines.get(label).set(x, one.loss);
  }
  return [...lines].sort(([a], [b]) => (a < b ? -1 : 1));
};

const roundData = (node) => {
  const value = node.article.querySelector("select.value").value;
  const axis = node.article.querySelector("select.axis").value;
  const { columns, clients } = node.rounds;
  const xs = columns[axis] || [];
  const keep = [];
  let before = -Infinity;
  xs.forEach((x, at) => {
    // uPlot needs a rising axis. A round that made no version has no tokens and no time.
    if (x === null || x === undefined || x < before) return;
    before = x;
    keep.push(at);
  });
  const heldOut = value === "loss" ? heldOutLines(node, axis) : [];
  // [x, bucket]; a place of a held-out loss alone has no bucket.
  const known = new Set(keep.map((at) => xs[at]));
  const alone = new Set(heldOut.flatMap(([, line]) => [...line.keys()]));
  const places = keep.map((at) => [xs[at], at]);
  for (const x of alone) if (!known.has(x)) places.push([x, null]);
  places.sort(([a], [b]) => a - b);
  // A null is a gap in the line, and undefined is not.
  const pick = (column) => places.map(([, at]) => {
    if (at === null) return undefined;
    const found = column ? column[at] : null;
    return found === undefined ? null : found;
  });
  const series = [];
  const data = [places.map(([x]) => x)];
  const names = [...clients.keys()].sort();
  names.forEach((name, at) => {
    series.push({ label: name, stroke: charts.colorOf(at), width: names.length > 12 ? 1 : 1.5 });
    data.push(pick(clients.get(name)[value]));
  });
  if (value === "loss") {
    if (node.state.role === "ps" && names.length > 1) {
      series.push({ label: "mean", stroke: charts.style("--text"), width: 2.5 });
      data.push(pick(columns.loss));
    }
    heldOut.forEach(([label, line], at) => {
      const stroke = at ? charts.colorOf(names.length + at) : charts.style("--bad");
      series.push({ label, stroke, width: 2, dash: [5, 4], points: "all" });
      data.push(places.map(([x]) => line.get(x)));
    });
  }
  return { series, data, axis, value };
};

const xWords = (axis, state) => (x) => {
  if (axis === "t") return clockOf(state, x);
  return axis === "tokens" ? `${whole(x)} ${state.counts}` : `round ${whole(x)}`;
};

const NAMED = 12;
const drawLegend = (node, series) => {
  const entries = series.length <= NAMED ? series
    : series.slice(0, NAMED - 2).concat(series.slice(-1));
  const items = entries.map((one) => {
    const item = document.createElement("li");
    const dot = document.createElement("span");
    dot.className = "dot";
    dot.style.background = one.stroke;
    item.append(dot, one.dash ? `${one.label} (dashed)` : one.label);
    return item;
  });
  if (entries.length < series.length) {
    const more = document.createElement("li");
    more.textContent = `and ${series.length - entries.length} more: point at a line`;
    items.push(more);
  }
  node.article.querySelector(".rounds-legend").replaceChildren(...items);
};

const drawRounds = (node) => {
  const { series, data, axis, value } = roundData(node);
  const holder = node.article.querySelector(".rounds");
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const names = series.map((one) => one.label);
  const clock = (t) => clockOf(node.state, t);
  const key = JSON.stringify([axis, value, names, dark, holder.clientWidth]);
  if (node.chart && node.chartKey === key) {
    node.chart.setData(data);
    return;
  }
  if (node.chart) node.chart.destroy();
  node.chart = null;
  node.chartKey = key;
  drawLegend(node, data[0].length ? series : []);
  if (!data[0].length || !series.length) return;
  node.chart = charts.draw(holder, series, data, { time: axis === "t", clock }, (u) => {
    setText(node.article, ".readout", charts.readout(u, xWords(axis, node.state)));
  });
};

// Up is drawn solid, down dashed; see the key in the page.
const BYTES = ["raw up", "coded up", "sockets up", "raw down", "coded down", "sockets down"];

const drawBytes = (node) => {
  const part = node.article.querySelector(".bytes-part");
  const found = node.bytes;
  part.hidden = !found || !found.t.length || node.state.role === "relay";
  if (part.hidden) return;
  const data = [found.t, ...BYTES.map((name) => found[name])];
  const holder = part.querySelector(".chart");
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const key = `${dark} ${holder.clientWidth}`;
  if (node.bytesChart && node.bytesKey === key) {
    node.bytesChart.setData(data);
    return;
  }
  if (node.bytesChart) node.bytesChart.destroy();
  node.bytesKey = key;
  const colors = ["--training", "--sending", "--late", "--training", "--sending", "--late"];
  const series = BYTES.map((label, at) => ({
    label, stroke: charts.style(colors[at]), dash: at >= 3 ? [4, 4] : undefined,
  }));
  const clock = (t) => clockOf(node.state, t);
  node.bytesChart = charts.draw(holder, series, data, { time: true, clock, height: 200 }, (u) => {
    const at = u.cursor.idx;
    if (at === null || at === undefined || u.cursor.left < 0) return;
    const words = BYTES.map((label, index) => `${label} ${megabytes(u.data[index + 1][at])}`);
    setText(part, ".readout-bytes", `${clock(u.data[0][at])}: ${words.join(", ")}`);
  });
};

// --- events ---

const takeRounds = (node, found) => {
  const rounds = node.rounds;
  if (found.every !== rounds.every) node.rounds = emptyRounds();
  node.rounds.every = found.every;
  const columns = node.rounds.columns;
  for (const name of ["rounds", "t", "tokens", "loss", "cosine", "merged"]) {
    columns[name] = (columns[name] || []).slice(0, found.begin).concat(found[name]);
  }
};

const takeClients = (node, message) => {
  for (const [name, columns] of Object.entries(message.clients)) {
    const mine = node.rounds.clients.get(name) || {};
    for (const [key, values] of Object.entries(columns)) {
      const before = (mine[key] || []).slice(0, message.begin);
      while (before.length < message.begin) before.push(null);
      mine[key] = before.concat(values);
    }
    node.rounds.clients.set(name, mine);
  }
};

const takeTimelines = (node, found) => {
  for (const [name, line] of Object.entries(found)) {
    const mine = node.timelines.get(name) || { t: [], states: [], marks: [] };
    node.timelines.set(name, {
      t: mine.t.slice(0, line.begin).concat(line.t),
      states: mine.states.slice(0, line.begin).concat(line.states),
      marks: line.marks,
    });
  }
};

const takeSeries = (message) => {
  const node = nodeOf(message.node);
  if (message.rounds) takeRounds(node, message.rounds);
  if (message.clients) takeClients(node, message);
  if (message.bytes) node.bytes = message.bytes;
  for (const name of message.dropped || []) node.timelines.delete(name);
  if (message.timelines) takeTimelines(node, message.timelines);
  redraw(node, "rounds", "bytes", "timeline");
};

// The map is drawn again only where it changes: the times of a state do at each event.
let mapKey = "";
const drawMap = () => {
  const holder = document.getElementById("map");
  const width = Math.min(2000, Math.max(300, holder.clientWidth));
  const nodes = [...room.nodes.values()].map((node) => node.state).filter(Boolean);
  const key = JSON.stringify([width, nodes.map((one) => [
    one.title, one.alive, one.ended, one.version, one.bytes, one.relays,
    one.sites.map((site) => [site.name, site.state, site.here, site.coded]),
  ])]);
  if (key !== mapKey) runMap.draw(holder, nodes, width);
  mapKey = key;
};

const connect = () => {
  const source = new EventSource("/events");
  const link = document.getElementById("link");
  const on = (name, take) => source.addEventListener(name, (event) => {
    room.events += 1;
    take(JSON.parse(event.data));
  });
  on("state", (message) => {
    room.offset = message.now - Date.now() / 1000;
    for (const state of message.nodes) {
      const node = nodeOf(state.id);
      node.state = state;
      redraw(node, "state");
    }
    drawMap();
  });
  on("series", takeSeries);
  on("held_out", (message) => {
    const node = nodeOf(message.node);
    node.heldOut = message.rows;
    redraw(node, "rounds");
  });
  on("drawn", () => { document.body.dataset.complete = "yes"; });
  source.onopen = () => { link.textContent = "connected"; link.className = ""; };
  source.onerror = () => {
    link.className = "lost";
    link.textContent = source.readyState === EventSource.CLOSED
      ? "closed by the server: open the printed address again"
      : "no answer: does fsl-node status --web still run?";
  };
  return { source };
};

// A browser opens six connections to one host: a tab that is not shown gives its one back.
const disconnect = () => {
  if (!room.connection) return;
  room.connection.source.close();
  room.connection = null;
  const link = document.getElementById("link");
  link.textContent = "paused: this tab is not shown";
  link.className = "";
};
const follow = () => {
  if (document.hidden) disconnect();
  else if (!room.connection) room.connection = connect();
};

const legend = document.getElementById("legend");
for (const state of STATES) {
  const item = document.createElement("li");
  const dot = document.createElement("span");
  dot.className = `dot ${state}`;
  item.append(dot, state);
  legend.append(item);
}

follow();
document.addEventListener("visibilitychange", follow);
let resized = 0;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => {
    drawMap();
    for (const node of room.nodes.values()) redraw(node, "rounds", "bytes", "timeline");
  }, 300);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const node of room.nodes.values()) redraw(node, "rounds", "bytes");
});
setInterval(() => {
  for (const node of room.nodes.values()) if (node.state) redraw(node, "state", "timeline");
}, 1000);
