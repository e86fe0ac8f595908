// The timeline of a node's sites: one row each, one path for each state.
"use strict";

const timeline = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 1000;
  const HEIGHT = 14;
  const SLIVER = 0.6; // narrower segments are drawn so wide, or not at all behind another sliver

  const element = (name, attributes) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  const clock = (t, span) => {
    const date = new Date(t * 1000);
    const time = date.toLocaleTimeString([], { hour12: false });
    if (span <= 86400) return time;
    const day = date.toLocaleDateString("en-US", { month: "short", day: "numeric" });
    return `${day} ${time.slice(0, 5)}`;
  };

  // words: a time as text
  // line: {t: [...], states: [...], marks: [[t, what], ...]}
  const row = (line, begin, end, words) => {
    const scale = WIDTH / Math.max(end - begin, 1e-3);
    const paths = new Map();
    let count = 0;
    let filledTo = -1;
    for (let at = 0; at < line.t.length; at++) {
      const until = at + 1 < line.t.length ? line.t[at + 1] : end;
      if (until < begin || line.t[at] > end) continue;
      count += 1;
      const x = Math.max(0, (line.t[at] - begin) * scale);
      const right = Math.min(WIDTH, (until - begin) * scale);
      if (right - x < SLIVER && x < filledTo) continue;
      const width = Math.max(SLIVER, right - x);
      filledTo = x + width;
      const state = line.states[at];
      const path = `M${x.toFixed(1)} 0h${width.toFixed(1)}v${HEIGHT}h-${width.toFixed(1)}z`;
      paths.set(state, (paths.get(state) || "") + path);
    }
    const svg = element("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
    });
    svg.dataset.segments = count;
    for (const [state, path] of paths) svg.append(element("path", { class: state, d: path }));
    let marks = "";
    let marked = 0;
    for (const [t, what] of line.marks) {
      if (what !== "relaunched" && what !== "launched" || t < begin || t > end) continue;
      const x = (t - begin) * scale;
      marks += `M${(x - 4).toFixed(1)} 0h8l-4 7z`;
      marked += 1;
    }
    svg.dataset.marks = marked;
    if (marks) svg.append(element("path", { class: "mark", d: marks }));
    const last = line.states[line.states.length - 1];
    const title = element("title", {});
    const launches = line.marks.map(([t, what]) => `${words(t)} ${what}`).slice(-8).join(", ");
    title.textContent = `${last || "-"}${launches ? `; ${launches}` : ""}`;
    svg.append(title);
    return svg;
  };

  const draw = (holder, lines, begin, end, words) => {
    const names = [...lines.keys()].sort();
    const made = document.createDocumentFragment();
    for (const name of names) {
      const label = document.createElement("div");
      label.className = "label";
      label.textContent = name;
      label.title = name;
      const svg = row(lines.get(name), begin, end, words);
      svg.dataset.site = name;
      made.append(label, svg);
    }
    const axis = document.createElement("div");
    axis.className = "axis";
    for (const t of [begin, end]) {
      const text = document.createElement("span");
      text.textContent = words(t);
      axis.append(text);
    }
    made.append(axis);
    holder.replaceChildren(made);
  };

  return { draw, clock };
})();
