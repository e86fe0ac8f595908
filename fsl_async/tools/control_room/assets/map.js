// The map of a run: servers, their sites, the links between them, groups and relays.
//
// Each server is a box; its sites stand in one column (narrow) or in columns on both sides, so that
// names never overlap, whatever their number. A link is as wide as what went over it: 1 px, and one
// more for each factor of ten from 100 kB on. Colors are classes of the style sheet.
"use strict";

const runMap = (() => {
  const ROW = 18;
  const TOP = 14;
  const HUB_HEIGHT = 64;
  const NARROW = 640; // below this width all sites stand in one column
  const MAX_NAME = 26;
  const CHARACTER = 7.2;

  // Text from the network is set as text and as values of attributes only, never as markup.
  const element = (name, attributes, ...inside) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...inside);
    return made;
  };
  const title = (words) => element("title", {}, words);
  const word = (state) => state.replace(/[^A-Za-z]/g, ""); // a class of the style sheet

  const short = (text, length) => {
    if (text.length <= length) return text;
    const tail = Math.min(6, Math.max(1, Math.floor(length / 3)));
    return `${text.slice(0, Math.max(1, length - tail - 1))}…${text.slice(-tail)}`;
  };

  const stroke = (size) => (size > 0 ? 1 + Math.max(0, Math.log10(size / 1e5)) : 1);

  const curve = (begin, end, site) => {
    const bend = (begin.x + end.x) / 2;
    return element("path", {
      class: `link ${site.here ? "" : "away "}${word(site.state)}`,
      d: `M${begin.x} ${begin.y}C${bend} ${begin.y} ${bend} ${end.y} ${end.x} ${end.y}`,
      "stroke-width": stroke(site.coded).toFixed(1),
    });
  };

  // side: 1 to the right of its server, -1 to the left. width: px from there to the edge
  const labelOf = (site, { x, y }, side, width) => {
    const sent = site.coded ? megabytes(site.coded) : "";
    const fits = Math.max(4, Math.floor(width / CHARACTER) - 2);
    const shown = short(site.name, Math.min(MAX_NAME, fits));
    const choices = [sent ? `${site.state} · ${sent}` : site.state, site.state, ""];
    const words = choices.find((one) => !one || shown.length + one.length + 2 <= fits);
    const anchor = side > 0 ? "start" : "end";
    const made = element("g", { class: `site ${word(site.state)}`, "data-site": site.name },
      title(`${site.name}: ${site.state}${sent ? `, sent ${sent}` : ""}`),
      element("circle", { cx: x, cy: y, r: 5 }),
      element("text", { x: x + side * 10, y: y + 4, "text-anchor": anchor }, shown,
        element("tspan", { class: "dim", dx: 6 }, words)));
    return made;
  };

  const hubOf = (node, x, y, width) => {
    const sum = (name) => node.relays.reduce((all, one) => all + one[name], 0);
    const isRelay = node.role === "relay";
    const figures = isRelay ? `${sum("open")} connections`
      : `${node.role === "ps" ? "version" : "round"} ${node.version}`;
    const moved = isRelay ? sum("up") + sum("down")
      : (node.bytes["sockets up"] || 0) + (node.bytes["sockets down"] || 0);
    const most = Math.floor(width / CHARACTER);
    const lines = [
      short(node.title, most - 1),
      short(node.role_words, most - 1),
      short(`${figures}, ${megabytes(moved)}`, most + 1),
    ];
    return element("g", { class: `hub ${node.ended ? "ended" : "alive"}` },
      title(`${node.title}: ${node.alive}`),
      element("rect", { x, y, width, height: HUB_HEIGHT, rx: 8 }),
      ...lines.map((line, at) => element("text", {
        x: x + width / 2, y: y + 20 + 16 * at, "text-anchor": "middle", class: at ? "dim" : "name",
      }, line)));
  };

  // A server with its sites, its height, and the middle of its box.
  const blockOf = (node, width, top) => {
    const isNarrow = width < NARROW;
    const rows = Math.ceil(node.sites.length / (isNarrow ? 1 : 2));
    const height = Math.max(rows * ROW, HUB_HEIGHT + 8);
    const hubWidth = isNarrow ? 112 : 176;
    const hubX = isNarrow ? 4 : (width - hubWidth) / 2;
    const middle = { x: hubX + hubWidth / 2, y: top + height / 2 };
    const links = [];
    const labels = [];
    node.sites.forEach((site, at) => {
      const side = isNarrow || at >= rows ? 1 : -1;
      const y = middle.y + ((at % rows) - (rows - 1) / 2) * ROW;
      const away = hubWidth / 2 + (isNarrow ? 52 : Math.min(120, width * 0.1));
      const place = { x: middle.x + side * away, y };
      links.push(curve({ x: middle.x + (side * hubWidth) / 2, y: middle.y }, place, site));
      labels.push(labelOf(site, place, side, side > 0 ? width - place.x - 8 : place.x - 8));
    });
    const hub = hubOf(node, hubX, middle.y - HUB_HEIGHT / 2, hubWidth);
    return { made: element("g", { class: "block" }, ...links, ...labels, hub), height, middle };
  };

  const draw = (holder, nodes, width) => {
    const blocks = [];
    const rings = []; // below the boxes
    let before = null;
    let y = TOP;
    for (const node of nodes) {
      const { made, height, middle } = blockOf(node, width, y);
      if (before) {
        const areGroups = node.role === "ps" && nodes[0].role === "ps";
        rings.push(element("path", {
          class: "ring", "stroke-width": areGroups ? 2 : 1,
          d: `M${before.x} ${before.y}L${middle.x} ${middle.y}`,
        }, ...(areGroups ? [title("groups of one run")] : [])));
      }
      before = middle;
      blocks.push(made);
      y += height + ROW;
    }
    const sites = nodes.reduce((all, node) => all + node.sites.length, 0);
    const words = nodes.length > 1 ? `${nodes.length} servers and ${sites} sites` : `${sites} sites`;
    holder.replaceChildren(element("svg", {
      class: "map", viewBox: `0 0 ${width} ${y}`, width, height: y, role: "img", "aria-label": words,
    }, title(words), ...rings, ...blocks));
  };

  return { draw };
})();
