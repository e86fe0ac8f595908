// Charts of one node. A null is a gap; a value between two gaps is drawn as a point.
"use strict";

const charts = (() => {
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Colors by the golden angle: neighbors differ, whatever their number.
  const colorOf = (at) => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    return `hsl(${Math.round((at * 137.508 + 205) % 360)} 62% ${dark ? 64 : 40}%)`;
  };

  const short = (value) => {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(4)} G`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)} M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)} k`;
    return String(+value.toPrecision(5));
  };

  const all = (u, seriesIndex) => {
    const found = [];
    u.data[seriesIndex].forEach((value, at) => {
      if (value !== null && value !== undefined) found.push(at);
    });
    return found;
  };

  const single = (u, seriesIndex, show) => {
    const values = u.data[seriesIndex];
    // The value beside `at`; places of other series alone (undefined) are passed.
    const beside = (at, step) => {
      let other = at + step;
      while (other >= 0 && other < values.length && values[other] === undefined) other += step;
      return other < 0 || other >= values.length ? null : values[other];
    };
    return all(u, seriesIndex).filter((at) =>
      (beside(at, -1) === null && beside(at, 1) === null) || (show && values.length <= 60));
  };

  const axis = (extra) => ({
    stroke: style("--dim"),
    grid: { stroke: style("--line"), width: 1 },
    ticks: { stroke: style("--line"), width: 1 },
    font: "12px system-ui, sans-serif",
    ...extra,
  });

  // series: [{label, stroke, width, dash, points}]; points: "all", or those alone.
  // data: [x, ...columns]
  const draw = (holder, series, data, options, report) => {
    const width = Math.max(240, holder.clientWidth);
    const chart = new uPlot({
      width,
      height: options.height || 260,
      scales: { x: { time: Boolean(options.time) } },
      focus: { alpha: 0.25 },
      cursor: { focus: { prox: 24 }, drag: { x: true, y: false } },
      legend: { show: false },
      axes: [
        axis({
          space: options.time ? 90 : 50,
          size: 32,
          values: (_, ticks) => ticks.map((x) => (options.time ? options.clock(x) : short(x))),
        }),
        axis({ size: 58, values: (_, ticks) => ticks.map(short) }),
      ],
      series: [{}].concat(series.map((one) => ({
        label: one.label,
        stroke: one.stroke,
        width: one.width || 1.5,
        dash: one.dash,
        spanGaps: false,
        points: { show: true, size: 5, filter: one.points === "all" ? all : single },
      }))),
      hooks: {
        setCursor: [(u) => report(u)],
        setSeries: [(u) => report(u)],
      },
    }, data, holder);
    return chart;
  };

  const readout = (u, xWords) => {
    const at = u.cursor.idx;
    if (at === null || at === undefined || u.cursor.left < 0) return "";
    const named = [];
    u.series.forEach((one, index) => {
      if (index === 0) return;
      const value = u.data[index][at];
      if (value !== null && value !== undefined) {
        named.push([one._focus === true ? 0 : 1, `${one.label} ${short(value)}`]);
      }
    });
    named.sort((a, b) => a[0] - b[0]);
    const more = named.length > 8 ? ` and ${named.length - 8} more` : "";
    return `${xWords(u.data[0][at])}: ${named.slice(0, 8).map((one) => one[1]).join(", ")}${more}`;
  };

  return { colorOf, draw, readout, short, style };
})();
