// Where the seconds of some rounds went, worker by worker: computing, waiting for whom, transfer, all else.
"use strict";

G.KINDS = ["computing", "waiting", "transfer", "other"];

G.timeline = () => {
  const ROW = 20, LEFT = 30, TOP = 6, MOST = 64;
  const svg = G.mark("svg", { role: "img" }), box = G.make("div", { class: "plot" }, svg), tip = G.make("div", { class: "tip", hidden: "" });
  box.append(tip);
  const unique = `t${Math.random().toString(36).slice(2)}`;
  const fills = { computing: "var(--compute)", waiting: "var(--waiting)", transfer: `url(#${unique})`, other: "var(--other)" };
  let rows = [], bars = [];
  const numbers = G.data(() => [["round", "worker", "starts at s", "computing s", "waiting s", "for worker", "transfer s", "other s"], ...rows]);
  const key = G.make("div", { class: "key" });
  for (const kind of G.KINDS) {
    const swatch = G.mark("svg", { width: 14, height: 12, style: "display:inline-block;vertical-align:-1px;margin-right:.3em" },
      G.mark("rect", { width: 14, height: 12, fill: fills[kind], stroke: "var(--faint)" }));
    key.append(G.make("span", {}, swatch, kind));
  }
  const words = G.make("p", { class: "faint" });
  const node = G.make("div", { hidden: "" }, G.make("h3", {}, "Where the seconds go"), box, key, words, numbers);

  const hatch = () => G.mark("defs", {}, G.mark("pattern", { id: unique, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    G.mark("rect", { width: 5, height: 5, fill: "var(--card)" }), G.mark("rect", { width: 3, height: 5, fill: "var(--transfer)" })));

  const update = (moments, network) => {
    rows = [];
    for (const moment of moments) {
      for (const [worker, ...rest] of moment.seconds[network] || []) if (worker < MOST) rows.push([moment.round, worker, ...rest]);
    }
    node.hidden = !rows.length;
    if (!rows.length) return;
    draw(network);
  };

  const draw = (network) => {
    const width = Math.max(240, box.clientWidth || 480), workers = 1 + Math.max(...rows.map((row) => row[1]));
    const height = TOP + workers * ROW + 30;
    const low = Math.min(...rows.map((row) => row[2])), high = Math.max(...rows.map((row) => row[2] + row[3] + row[4] + row[6] + row[7]));
    const sx = (s) => LEFT + ((s - low) / (high - low || 1)) * (width - LEFT - 8);
    svg.setAttribute("width", width); svg.setAttribute("height", height); svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren(hatch());
    for (let worker = 0; worker < workers; worker += 1) svg.append(G.mark("text", { x: LEFT - 5, y: TOP + worker * ROW + 14, "text-anchor": "end" }, `${worker}`));
    const spent = { computing: 0, waiting: 0, transfer: 0, other: 0 }, paths = { computing: "", waiting: "", transfer: "", other: "" }, names = [];
    let ends = "";
    bars = [];  // a path for each kind, as thousands of bars of their own would take long to place
    for (const [round, worker, start, compute, waiting, peer, transfer, other] of rows) {
      let at = start;
      for (const [kind, seconds] of [["computing", compute], ["waiting", waiting], ["transfer", transfer], ["other", other]]) {
        spent[kind] += seconds;
        if (!(seconds > 0)) continue;
        const whom = kind === "waiting" && peer !== null ? (peer < 0 ? " for the server" : ` for worker ${peer}`) : "";
        const wide = sx(at + seconds) - sx(at), y = TOP + worker * ROW + 2;
        paths[kind] += `M${sx(at).toFixed(1)} ${y}h${Math.max(0.4, wide).toFixed(1)}v${ROW - 5}h${-Math.max(0.4, wide).toFixed(1)}z`;
        bars.push([worker, sx(at), sx(at) + wide, `worker ${worker}, round ${round}: ${kind}${whom} ${G.seconds(seconds)}`]);
        if (kind === "waiting" && whom && wide > 26) names.push(G.mark("text", { x: sx(at) + 4, y: y + 11 }, peer < 0 ? "server" : `${peer}`));
        at += seconds;
      }
      ends += `M${sx(at).toFixed(1)} ${TOP + worker * ROW}v${ROW - 1}`;
    }
    for (const kind of G.KINDS) svg.append(G.mark("path", { d: paths[kind], fill: fills[kind], stroke: kind === "waiting" ? "var(--faint)" : "none", "stroke-width": 0.7, "data-kind": kind }));
    svg.append(G.mark("path", { d: ends, stroke: "var(--ink)" }), ...names);
    const time = high - low < 600 ? (s) => `${+s.toPrecision(6)} s` : G.seconds;  // minutes would be alike at neighbouring ticks
    for (const s of G.ticks(low, high, width / 110)) svg.append(G.mark("text", { x: sx(s), y: height - 12, "text-anchor": "middle" }, time(s)));
    const total = Object.values(spent).reduce((a, b) => a + b, 0) || 1;
    words.textContent = `Rounds ${rows[0][0]} to ${rows[rows.length - 1][0]}${network ? ` on ${network}` : ", measured"}: `
      + G.KINDS.map((kind) => `${kind} ${Math.round((100 * spent[kind]) / total)} %`).join(", ") + ". A number in a waiting bar is the worker that is waited for.";
    svg.setAttribute("aria-label", words.textContent);
  };
  const hide = () => { tip.hidden = true; };
  svg.addEventListener("pointermove", (event) => {
    const area = svg.getBoundingClientRect(), x = event.clientX - area.left, y = event.clientY - area.top;
    const found = bars.find(([worker, from, to]) => worker === Math.floor((y - TOP) / ROW) && from <= x && x <= to);
    if (!found) { hide(); return; }
    tip.textContent = found[3];
    tip.hidden = false;
    tip.style.left = `${Math.max(0, Math.min(x + 12, box.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${y + 16}px`;
  });
  svg.addEventListener("pointerleave", hide);
  let last = null;
  new ResizeObserver(() => { if (last !== null && rows.length) draw(last); }).observe(box);
  return { node, update: (moments, network) => { last = network; update(moments, network); } };
};
