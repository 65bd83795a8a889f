// A chart of curves: hover or arrow keys read it, a drag (or + and -) zooms, a double click (or 0) shows all again.
"use strict";

G.chart = (title) => {
  const HEIGHT = 250, LEFT = 46, RIGHT = 16, TOP = 8, BOTTOM = 34;
  const svg = G.mark("svg", { role: "img", tabindex: "0", height: HEIGHT });
  const tip = G.make("div", { class: "tip", hidden: "" });
  const plot = G.make("div", { class: "plot" }, svg, tip);
  const whole = G.make("button", { type: "button", class: "small tools", "aria-pressed": "true", title: "show the beginning in full" }, "ends");
  const numbers = G.data(() => rows());
  const node = G.make("figure", { class: "card", style: "margin:0" },
    G.make("div", { class: "row" }, G.make("h3", {}, title), whole), plot, numbers);
  let spec = { curves: [], xLabel: "", log: false }, zoom = null, ends = true, cursor = null, drag = null, scales = null;

  // What an x is called: those of a logarithmic axis are exponents.
  const tell = (x) => (spec.tell ? spec.tell(x) : G.short(x));

  const shown = () => spec.curves.filter((curve) => !curve.hidden && curve.x.length);

  // A table with a column for each curve, at all x that any of them has.
  const rows = () => {
    const curves = shown(), at = new Map();
    curves.forEach((curve, k) => curve.x.forEach((x, i) => {
      if (x === null) return;
      if (!at.has(x)) at.set(x, Array(curves.length).fill(null));
      at.get(x)[k] = curve.y[i];
    }));
    return [[spec.xLabel, ...curves.map((curve) => curve.label)],
      ...[...at.keys()].sort((a, b) => a - b).map((x) => [x, ...at.get(x)])];
  };

  const ranges = (curves) => {
    const xs = curves.flatMap((curve) => curve.x.filter((x) => x !== null));
    let [low, high] = zoom || [Math.min(...xs), Math.max(...xs)];
    if (!(high > low)) high = low + 1;
    const inside = [];
    for (const curve of curves) {
      // The fall at the start, from initial values at 0, would leave the ends one line.
      const first = ends && !zoom ? Math.max(Math.floor(curve.x.length / 10), curve.x.length > 3 && curve.x[0] === 0 ? 1 : 0) : 0;
      for (let i = first; i < curve.x.length; i += 1) {
        if (curve.x[i] === null || curve.x[i] < low || curve.x[i] > high) continue;
        for (const y of [curve.y[i], curve.low?.[i], curve.high?.[i]]) if (y !== null && y !== undefined) inside.push(y);
      }
    }
    const positive = inside.filter((y) => y > 0), log = spec.log && positive.length > 0;
    const values = (log ? positive : inside).sort((a, b) => a - b);
    let bottom = values[0] ?? 0, top = values[values.length - 1] ?? 1;
    // A run that diverged would leave all others one line at the bottom.
    if (ends && !log && values.length > 20) top = Math.min(top, values[Math.floor(values.length * 0.97)] + 2 * (values[Math.floor(values.length * 0.9)] - bottom));
    if (log) { bottom /= 1.15; top *= 1.15; } else { const pad = 0.05 * (top - bottom || 1); bottom -= pad; top += pad; }
    return { low, high, bottom, top, log };
  };

  const drawn = (x, y) => x !== null && y !== null && y !== undefined && !(scales.log && y <= 0);

  const path = (curve, sx, sy) => {
    let d = "", pen = false;
    curve.x.forEach((x, i) => {
      const y = curve.y[i];
      if (!drawn(x, y)) { pen = false; return; }
      d += `${pen ? "L" : "M"}${sx(x).toFixed(1)} ${Math.max(-1e4, Math.min(1e4, sy(y))).toFixed(1)}`;
      pen = true;
    });
    return d;
  };

  const band = (curve, sx, sy) => {
    const known = curve.x.map((x, i) => [x, curve.low[i], curve.high[i]]).filter((point) => !point.includes(null) && !point.includes(undefined));
    if (known.length < 2) return "";
    const inside = (y) => sy(scales.log ? Math.max(y, scales.bottom) : y).toFixed(1);
    const up = known.map(([x, , high]) => `${sx(x).toFixed(1)} ${inside(high)}`);
    const down = known.reverse().map(([x, low]) => `${sx(x).toFixed(1)} ${inside(low)}`);
    return `M${up.join("L")}L${down.join("L")}Z`;
  };

  const draw = () => {
    const width = Math.max(220, plot.clientWidth || 440), curves = shown();
    svg.setAttribute("width", width);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren();
    node.hidden = !spec.curves.some((curve) => curve.x.length);
    if (!curves.length) return;
    scales = ranges(curves);
    const { low, high, bottom, top, log } = scales, right = width - RIGHT, base = HEIGHT - BOTTOM;
    const sx = (x) => LEFT + ((x - low) / (high - low)) * (right - LEFT);
    const flat = (y) => (log ? Math.log(y) : y);
    const sy = (y) => base - ((flat(y) - flat(bottom)) / (flat(top) - flat(bottom) || 1)) * (base - TOP);
    Object.assign(scales, { sx, sy, right, base });
    for (const y of log ? G.logTicks(bottom, top) : G.ticks(bottom, top, 5)) {
      svg.append(G.mark("line", { x1: LEFT, x2: right, y1: sy(y), y2: sy(y), stroke: "var(--grid)" }),
        G.mark("text", { x: LEFT - 5, y: sy(y) + 4, "text-anchor": "end" }, G.short(y)));
    }
    for (const x of G.ticks(low, high, Math.max(2, width / 90))) {
      svg.append(G.mark("line", { x1: sx(x), x2: sx(x), y1: TOP, y2: base, stroke: "var(--grid)" }),
        G.mark("text", { x: sx(x), y: base + 14, "text-anchor": spec.tell && sx(x) > right - 20 ? "end" : "middle" }, tell(x)));
    }
    svg.append(G.mark("text", { x: (LEFT + right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, spec.xLabel));
    const clip = `clip${Math.random().toString(36).slice(2)}`;
    svg.append(G.mark("clipPath", { id: clip }, G.mark("rect", { x: LEFT, y: TOP - 2, width: right - LEFT, height: base - TOP + 4 })));
    const lines = G.mark("g", { "clip-path": `url(#${clip})` });
    for (const curve of curves) {
      if (curve.low) lines.append(G.mark("path", { d: band(curve, sx, sy), fill: curve.colour, opacity: 0.16 }));
      lines.append(G.mark("path", {
        d: curve.dots ? "" : path(curve, sx, sy), fill: "none", stroke: curve.colour, "stroke-width": curve.strong ? 3 : curve.faint ? 1 : 1.7,
        "stroke-dasharray": curve.dash, opacity: curve.faint ? 0.3 : 1, "stroke-linejoin": "round", "data-curve": curve.label,
      }));
      const points = curve.x.map((x, i) => [x, curve.y[i]]).filter(([x, y]) => drawn(x, y));
      if (curve.dots || points.length === 1) {
        for (const [x, y] of points) lines.append(G.mark("circle", { cx: sx(x), cy: sy(y), r: 3, fill: curve.colour }));
      }
    }
    for (const mark of spec.marks || []) {
      if (mark.x < low || mark.x > high) continue;
      svg.append(G.mark("line", { x1: sx(mark.x), x2: sx(mark.x), y1: TOP, y2: base, stroke: "var(--faint)", "stroke-dasharray": "1 3", "data-mark": mark.label }, G.mark("title", {}, mark.label)));
    }
    svg.append(lines);
    const finals = curves.slice(0, 6).map((curve) => `${curve.label} ends at ${G.short(curve.y[curve.y.length - 1])}`);
    svg.setAttribute("aria-label", `${title} over ${spec.xLabel}. ${finals.join("; ")}. Arrow keys read values, + and - zoom, 0 shows all.`);
    if (cursor !== null) point(cursor);
  };

  // Shows the values at the x nearest to `at`.
  const point = (at) => {
    cursor = at;
    svg.querySelectorAll(".cursor").forEach((old) => old.remove());
    const { sx, sy, base } = scales, found = [];
    for (const curve of shown()) {
      let best = -1;
      curve.x.forEach((x, i) => {
        if (x !== null && curve.y[i] !== null && (best < 0 || Math.abs(x - at) < Math.abs(curve.x[best] - at))) best = i;
      });
      if (best >= 0) found.push([curve, curve.x[best], curve.y[best]]);
    }
    if (!found.length) { tip.hidden = true; return; }
    const x = found.map((one) => one[1]).reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
    const near = found.filter((one) => !one[0].faint || found.length < 9).sort((a, b) => a[2] - b[2]);
    svg.append(G.mark("line", { class: "cursor", x1: sx(x), x2: sx(x), y1: TOP, y2: base, stroke: "var(--faint)", "stroke-dasharray": "2 2" }));
    for (const [curve, cx, cy] of near.slice(0, 12)) {
      svg.append(G.mark("circle", { class: "cursor", cx: sx(cx), cy: sy(cy), r: 3.5, fill: curve.colour, stroke: "var(--card)" }));
    }
    tip.replaceChildren(G.make("div", { class: "faint" }, `${spec.xLabel}: ${tell(x)}`),
      ...near.slice(0, 12).map(([curve, , y]) => {
        const swatch = G.make("i", {});
        swatch.style.background = curve.colour;
        return G.make("div", {}, swatch, `${curve.label}  ${G.short(y)}`);
      }), ...(near.length > 12 ? [G.make("div", { class: "faint" }, `and ${near.length - 12} more`)] : []));
    tip.hidden = false;
    const left = sx(x) + 12;
    tip.style.left = left + tip.offsetWidth > plot.clientWidth ? `${Math.max(0, sx(x) - tip.offsetWidth - 12)}px` : `${left}px`;
    tip.style.top = "8px";
  };

  const inverse = (event) => {
    const box = svg.getBoundingClientRect(), { low, high, right } = scales;
    return low + ((event.clientX - box.left - LEFT) / (right - LEFT)) * (high - low);
  };
  const hide = () => { cursor = null; tip.hidden = true; svg.querySelectorAll(".cursor").forEach((old) => old.remove()); };
  svg.addEventListener("pointermove", (event) => { if (scales) point(inverse(event)); });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("pointerdown", (event) => { if (scales) drag = inverse(event); });
  svg.addEventListener("pointerup", (event) => {
    if (drag === null || !scales) return;
    const other = inverse(event), { low, high } = scales;
    if (Math.abs(other - drag) > 0.03 * (high - low)) { zoom = [Math.min(drag, other), Math.max(drag, other)]; draw(); }
    drag = null;
  });
  svg.addEventListener("dblclick", () => { zoom = null; draw(); });
  svg.addEventListener("keydown", (event) => {
    if (!scales) return;
    const { low, high } = scales, middle = cursor ?? (low + high) / 2, step = (high - low) / 60;
    const acts = {
      ArrowLeft: () => point(Math.max(low, middle - step)), ArrowRight: () => point(Math.min(high, middle + step)),
      "+": () => { zoom = [middle - (high - low) / 4, middle + (high - low) / 4]; draw(); },
      "-": () => { zoom = null; draw(); }, 0: () => { zoom = null; draw(); }, Escape: hide,
    };
    if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
  });
  whole.addEventListener("click", () => {
    ends = !ends;
    whole.textContent = ends ? "ends" : "all";
    whole.title = ends ? "show the beginning in full" : "show the ends larger";
    draw();
  });
  whole.removeAttribute("aria-pressed");
  new ResizeObserver(() => draw()).observe(plot);
  return {
    node,
    update: (next) => { if (next.xLabel !== spec.xLabel) zoom = null; spec = next; draw(); if (numbers.open) numbers.dispatchEvent(new Event("toggle")); },
  };
};
