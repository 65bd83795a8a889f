// Who sends to whom: the workers of a run by site, and the pairs of one round.
"use strict";

// Places on a circle, the workers of a site next to each other, with a gap between sites. Worker 0 begins at the top.
G.places = (workers, site, sites, size) => {
  const order = [...Array(workers).keys()].sort((a, b) => site[a] - site[b] || a - b);
  const gaps = sites > 1 ? sites : 0, turn = (2 * Math.PI) / (workers + gaps * 0.9), radius = size / 2 - 40, found = [];
  let angle = -Math.PI / 2, before = site[order[0]];
  for (const worker of order) {
    if (site[worker] !== before) { angle += 0.9 * turn; before = site[worker]; }
    found[worker] = { x: size / 2 + radius * Math.cos(angle), y: size / 2 + radius * Math.sin(angle), angle };
    angle += turn;
  }
  return found;
};

G.gossip = () => {
  const SIZE = 340;
  const svg = G.mark("svg", { role: "img", viewBox: `0 0 ${SIZE} ${SIZE}`, width: "100%", style: "max-width:430px;margin:0 auto" });
  const words = G.make("p", { class: "faint", "aria-live": "polite" });
  const node = G.make("div", {}, svg, words);
  const titles = new WeakMap();  // titles of marks under the pointer: few of many hundreds are ever shown
  svg.addEventListener("pointerover", ({ target }) => {
    if (titles.has(target) && !target.hasChildNodes()) target.append(G.mark("title", {}, titles.get(target)));
  });

  // A line for each two workers that exchanged, whichever sent.
  const together = (moment) => {
    const pairs = new Map();
    for (const [i, j, size] of moment.pairs) {
      const key = `${Math.min(i, j)}-${Math.max(i, j)}`, known = pairs.get(key) || { i: Math.min(i, j), j: Math.max(i, j), size: 0 };
      known.size += size;
      pairs.set(key, known);
    }
    return [...pairs.values()];
  };

  const update = (run, moment, network) => {
    const net = run.networks[network] || null;
    const site = net ? net.site : Array(run.workers).fill(0), sites = net ? Math.max(1, net.sites.length) : 1;
    const at = G.places(run.workers, site, sites, SIZE), middle = { x: SIZE / 2, y: SIZE / 2 };
    const pairs = together(moment), failed = new Set(moment.failed.map(([i, j]) => `${i}-${j}`));
    const served = pairs.some((pair) => pair.i < 0);
    svg.replaceChildren();
    svg.setAttribute("data-round", moment.round);
    const most = Math.max(1, ...pairs.map((pair) => pair.size));
    if (moment.everyone) {
      for (const place of at) svg.append(G.mark("line", { x1: place.x, y1: place.y, x2: middle.x, y2: middle.y, stroke: "var(--c0)", "stroke-width": 1.2, opacity: 0.6, class: "mean" }));
    }
    for (const { i, j, size } of pairs) {
      const from = i < 0 ? middle : at[i], to = at[j], lost = failed.has(`${i}-${j}`);
      svg.append(G.mark("line", {
        x1: from.x, y1: from.y, x2: to.x, y2: to.y, "data-pair": `${i}-${j}`,
        stroke: lost ? "var(--bad)" : "var(--c0)", "stroke-width": (1 + 2 * Math.sqrt(size / most)).toFixed(2),
        "stroke-dasharray": lost ? "3 4" : "", opacity: run.workers > 32 ? 0.5 : 0.85,
      }));
      titles.set(svg.lastChild, `${i < 0 ? "server" : `worker ${i}`} and worker ${j}: ${G.bytes(size)}${lost ? ", not counted" : ""}`);
    }
    for (const key of failed) {
      if (pairs.some((pair) => `${pair.i}-${pair.j}` === key)) continue;
      const [i, j] = key.split("-").map(Number);
      if (at[i] && at[j]) svg.append(G.mark("line", { x1: at[i].x, y1: at[i].y, x2: at[j].x, y2: at[j].y, "data-failed": key, stroke: "var(--bad)", "stroke-dasharray": "3 4" }));
    }
    if (moment.everyone || served) {
      svg.append(G.mark("circle", { cx: middle.x, cy: middle.y, r: 23, fill: "var(--card)", stroke: "var(--c0)" }),
        G.mark("text", { x: middle.x, y: middle.y + 4, "text-anchor": "middle", class: "ink" }, moment.everyone ? "mean" : "server"));
    }
    nodes(run, moment, at, net, middle);
    labels(net, at, site);
    words.textContent = moment.words || wording(run, moment, pairs, failed);
    svg.setAttribute("aria-label", words.textContent);
  };

  const nodes = (run, moment, at, net, middle) => {
    const radius = Math.max(2.5, Math.min(13, 190 / run.workers));
    const speeds = net ? net.uplink_bps.filter((bps) => bps !== null) : [], usual = [...speeds].sort((a, b) => a - b)[Math.floor(speeds.length / 2)];
    const there = new Set(moment.pairs.flat().filter((_, k) => k % 3 < 2));  // whoever has gone later was there in this round
    at.forEach((place, worker) => {
      const word = run.standings[worker], away = moment.alive && !moment.alive.includes(worker);
      const gone = away || (["gone", "left", "empty"].includes(word) && !there.has(worker) && !moment.everyone), doubtful = word === "silent";
      const slow = net && net.uplink_bps[worker] !== null && net.uplink_bps[worker] < 0.7 * usual;
      const speed = net ? `, uplink ${G.rate(net.uplink_bps[worker])}, downlink ${G.rate(net.downlink_bps[worker])}` : "";
      svg.append(G.mark("circle", {
        cx: place.x, cy: place.y, r: radius, fill: gone ? "var(--card)" : doubtful ? "var(--other)" : slow ? "var(--transfer)" : "var(--compute)",
        stroke: gone ? "var(--bad)" : "var(--ink)", "stroke-width": gone || slow ? 2 : 0.8, "stroke-dasharray": gone ? "3 2" : slow ? "2 2" : "", "data-worker": worker, "data-standing": gone ? "gone" : word,
      }));
      titles.set(svg.lastChild, `worker ${worker}: ${word}, ${run.rounds_of[worker]} rounds${speed}`);
      if (radius >= 7) svg.append(G.mark("text", { x: place.x, y: place.y + 4, "text-anchor": "middle", style: `fill:${gone ? "var(--bad)" : "var(--card)"};font-weight:600;pointer-events:none` }, `${worker}`));
      if ((slow || gone) && run.workers <= 40) {
        // Above or below, as there is no room for it beside those at the edges.
        const y = place.y < middle.y - 9 ? place.y - radius - 6 : place.y + radius + 14;
        svg.append(G.mark("text", { x: place.x, y, "text-anchor": "middle" },
          gone ? (away && word !== "left" ? "away" : word) : G.rate(net.uplink_bps[worker])));
      }
    });
  };

  // The name of each site, outside of the middle of its workers.
  const labels = (net, at, site) => {
    (net ? net.sites : []).forEach((name, place) => {
      const own = at.filter((_, worker) => site[worker] === place);
      if (!own.length) return;
      const angle = (own[0].angle + own[own.length - 1].angle) / 2, radius = SIZE / 2 - 12;
      svg.append(G.mark("text", { x: SIZE / 2 + radius * Math.cos(angle), y: SIZE / 2 + radius * Math.sin(angle) + 4, class: "ink",
        "text-anchor": Math.cos(angle) > 0.3 ? "end" : Math.cos(angle) < -0.3 ? "start" : "middle" }, name));
    });
  };

  const wording = (run, moment, pairs, failed) => {
    const parts = [`Round ${moment.round}:`];
    if (moment.everyone) parts.push(`a mean over everyone, ${G.bytes(moment.mean_bytes)} sent by each.`);
    if (pairs.length) {
      const names = pairs.map(({ i, j }) => `${i < 0 ? "server" : i}–${j}`);
      parts.push(`${pairs.length} pair${pairs.length > 1 ? "s" : ""}${run.workers <= 16 ? ` ${names.join(", ")}` : ""}.`);
    }
    if (!pairs.length && !moment.everyone) parts.push("nobody sent anything.");
    if (moment.left_out) parts.push(`${moment.left_out} more messages are not drawn.`);
    if (failed.size) parts.push(`Not counted: ${[...failed].map((key) => key.replace("-", "–")).join(", ")}.`);
    return parts.join(" ");
  };

  return { node, update };
};
