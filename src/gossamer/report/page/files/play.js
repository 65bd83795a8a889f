// Eight workers to play with: live, where what a visitor presses is done before the next round, or a film of what somebody did.
"use strict";

G.play = (root, frozen) => {
  const SIZE = 400, NODE = 19, RING = 26, KEPT = 3, ASK_MS = 200, RECENT = 4;
  const COLOUR = { diloco: "var(--c0)", gossip: "var(--c2)", gasloc: "var(--c1)" };
  const part = (name, attributes = {}, ...children) => G.make(name, attributes, ...children);
  const state = { film: "", contents: null, frames: [], before: [], at: -1, follow: true, playing: true, speed: 1, now: null, timer: null, conditions: null };

  // --- asking -------------------------------------------------------------------------------------------------------

  const banner = part("div", { role: "status" });
  const problem = (...sentences) => banner.replaceChildren(...sentences.filter(Boolean).map((sentence) => part("p", { class: "note" }, sentence)));
  const gone = () => problem("The server of this page does not answer. \"gossamer play\" starts it again.");

  const send = async (what) => {
    try {
      const answer = await fetch("act.json", { method: "POST", body: JSON.stringify(what) });
      if (!answer.ok) problem(await answer.text());
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      gone();
    }
  };
  const act = (...actions) => send({ actions });

  // --- the parts of the page ----------------------------------------------------------------------------------------

  const caption = part("p", { class: "caption", "aria-live": "polite" });
  const map = G.mark("svg", { role: "img", viewBox: `0 0 ${SIZE} ${SIZE}`, width: "100%", class: "map" });
  const says = part("p", { class: "says" });
  const plane = G.mark("svg", { role: "img", viewBox: "0 0 240 240", width: "100%", class: "map" });
  const planeWords = part("p", { class: "faint" });
  const loss = G.chart("Validation loss of the mean model"), apart = G.chart("Disagreement of the workers (rms)"), timeline = G.timeline();
  const alike = part("figure", { class: "card", style: "margin:0" }, part("h3", {}, "Disagreement of the workers (rms)"), part("p", { class: "faint" }, "0: after each round all workers have the same parameters."));
  timeline.node.classList.add("card");
  const happened = part("ol", { class: "plain happened", reversed: "" });
  const tiles = part("dl", { class: "tiles" });
  const tile = (name) => { const value = part("dd", {}, "–"); tiles.append(part("div", {}, part("dt", {}, name), value)); return value; };
  const figures = { time: tile("priced time"), loss: tile("loss"), share: tile("computing"), apart: tile("disagreement"), sent: tile("sent per worker") };

  const button = (text, onclick, attributes = {}) => part("button", { type: "button", onclick, ...attributes }, text);
  const play = button("❚❚ pause", () => toggle(), { class: "main" });
  const step = button("one round", () => { if (state.contents.live) send({ step: true }); else { pause(); show(Math.min(state.at + 1, state.frames.length - 1)); } });
  const slider = part("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "round", oninput: () => { state.follow = false; if (!live()) pause(); show(+slider.value); } });
  const round = part("output", {}), newest = button("newest", () => { state.follow = true; show(state.frames.length - 1); }, { class: "small" });
  const speed = part("select", { "aria-label": "speed", onchange: () => { state.speed = +speed.value; if (live()) send({ speed: state.speed }); } });
  const again = button("begin again", () => { if (live()) send({ again: state.now.seed }); else { show(0); run(); } });
  const seed = button("another seed", () => send({ again: Math.floor(Math.random() * 1e6) }));
  const save = part("a", { href: "film.jsonl", download: "film.jsonl", class: "faint" }, "save this film");
  const live = () => state.contents && state.contents.live;

  const methods = part("div", { class: "choice", role: "group", "aria-label": "method" });
  const range = (label, name) => {
    const output = part("output", {}), field = part("input", { type: "range", "data-do": name });
    const node = part("label", { class: "input" }, label, output, field);
    let values = [0];
    field.addEventListener("input", () => { output.textContent = `${values[+field.value]}`; });
    field.addEventListener("change", () => act([name, values[+field.value]]));
    return { node, field, fill: (all) => { values = all; field.min = 0; field.max = all.length - 1; },
      put: (value) => { if (document.activeElement !== field || field.disabled) field.value = Math.max(0, values.indexOf(value)); output.textContent = value === null ? "none" : `${value}`; } };
  };
  const steps = range("local steps between two exchanges, H", "local_steps"), momentum = range("outer momentum", "momentum");
  const cut = button("cut the network in two", () => act([state.conditions.cut ? "heal" : "cut"]), { "data-do": "cut" });
  const mend = button("all in order again", () => act(["heal"], ...workers().map((i) => ["revive", i]), ...workers().map((i) => ["mend", i])));
  const workers = () => [...Array(state.contents.workers).keys()];
  const crew = part("div", { class: "crew" });
  const tries = part("div", { class: "controls tries" });
  const controls = part("section", { class: "card panel", "aria-label": "what you can do" });

  const build = () => {
    const { contents } = state, film = !contents.live;
    steps.fill(contents.local_steps);
    momentum.fill(contents.momenta);
    methods.replaceChildren(...contents.methods.map(({ key, name }) => button(name, () => act(["method", key]), { "data-method": key, style: `--own:${COLOUR[key]}` })));
    crew.replaceChildren(...workers().map((i) => part("div", { class: "one", "data-of": i }, part("b", {}, `${i}`),
      button("kill", () => act([state.conditions.alive.includes(i) ? "kill" : "revive", i]), { class: "small", "data-do": `kill-${i}` }),
      button("slow", () => act([state.conditions.slow.includes(i) ? "mend" : "slow", i]), { class: "small", "data-do": `slow-${i}` }))));
    const attempt = (text, ...actions) => button(text, () => act(...actions));
    const last = contents.workers - 1;
    tries.replaceChildren(part("span", {}, "Try"), attempt("one slow uplink under DiLoCo", ["method", "diloco"], ["slow", last]), attempt("the same with GASLoC", ["method", "gasloc"], ["slow", last]),
      attempt("a cut network under gossip", ["method", "gossip"], ["cut"]), attempt("too much momentum for pairs", ["method", "gasloc"], ["momentum", contents.momenta[contents.momenta.length - 1]]));
    controls.replaceChildren(...[part("h2", {}, film ? "What was done" : "What you can do"),
      part("h3", {}, "Method"), methods, part("div", { class: "inputs" }, steps.node, momentum.node),
      part("h3", {}, "Network"), part("div", { class: "controls" }, cut, mend),
      part("h3", {}, "Workers"), film ? null : part("p", { class: "faint" }, "Or press a worker in the picture to kill or revive it."), crew].filter(Boolean));
    for (const one of controls.querySelectorAll("button, input")) one.disabled = film;
    mend.hidden = film;
    tries.hidden = film;
    seed.hidden = film;
    save.hidden = !!frozen;
    const { head } = contents;
    root.replaceChildren(banner, part("header", {}, part("h1", {}, "Gossamer play"),
      part("p", { class: "verdict" }, film
        ? `A film: ${contents.workers} workers train one small language model over a slow network, and somebody kills, slows and cuts. "gossamer play" lets you do it yourself.`
        : `${contents.workers} workers train one small language model over a slow network, on this machine, now. Kill one, slow a link, cut the network, change the method, and see what it costs.`)),
    tries, part("div", { class: "controls transport" }, play, step, slider, round, newest, part("label", {}, "speed ", speed), again, seed, save),
    tiles, part("div", { class: "stage" }, part("section", { class: "card" }, caption, map, says, keys()),
      part("div", { class: "column" }, controls, part("figure", { class: "card plane" }, part("div", {}, part("h3", {}, "Where the workers' models are"), planeWords), plane))),
    part("div", { class: "charts" }, loss.node, apart.node, alike),
    part("div", { class: "charts below" }, timeline.node, part("section", { class: "card" }, part("h3", {}, "What happened"), happened)),
    part("footer", { class: "faint" }, `${head.parameters.toLocaleString("en")} parameters, ${G.bytes(head.payload_bytes)} to send; an inner step takes ${head.step_s} s, an uplink has ${G.rate(head.uplink_bps)}, and what these cost is priced, not slept. Training is real: the workers of gossamer simulate, seed ${head.seed}. A change of the method begins a branch: parameters and inner optimizers go on, the outer state is new. Gossamer ${head.gossamer}, torch ${head.torch}.`));
  };

  const keys = () => part("div", { class: "key" }, ...[["computing", "var(--compute)"], ["waiting", "var(--card)"], ["transfer", "var(--transfer)"]].map(([name, colour]) =>
    part("span", {}, part("i", { style: `background:${colour}` }), name)), part("span", {}, "a ring is the round of a worker"));

  // --- one round ----------------------------------------------------------------------------------------------------

  const arc = (x, y, radius, from, to, colour) => {
    if (to - from > 0.995) return G.mark("circle", { cx: x, cy: y, r: radius, fill: "none", stroke: colour, "stroke-width": 6 });
    const whole = to - from, angle = (share) => 2 * Math.PI * share - Math.PI / 2;
    const point = (share) => `${(x + radius * Math.cos(angle(share))).toFixed(1)} ${(y + radius * Math.sin(angle(share))).toFixed(1)}`;
    return G.mark("path", { d: `M${point(from)}A${radius} ${radius} 0 ${whole > 0.5 ? 1 : 0} 1 ${point(from + whole)}`, fill: "none", stroke: colour, "stroke-width": 6 });
  };

  const drawMap = (frame) => {
    const { contents } = state, site = workers().map((i) => (contents.sides[0].includes(i) ? 0 : 1));
    const at = G.places(contents.workers, site, 2, SIZE), middle = SIZE / 2;
    const slow = new Set(frame.slow), alive = new Set(frame.alive), there = new Set(frame.there);
    if (!map.childElementCount) map.append(G.mark("g"), ...workers().map((i) => workerMark(i, at[i])));
    const between = map.firstChild;
    between.replaceChildren();
    map.setAttribute("data-round", frame.round);
    if (frame.cut) {  // between the last of one side and the first of the other
      const edge = (i, j) => { const x = (at[i].x + at[j].x) / 2 - middle, y = (at[i].y + at[j].y) / 2 - middle, far = (SIZE / 2 - 4) / Math.hypot(x, y); return [middle + x * far, middle + y * far]; };
      const [a, b] = contents.sides, [x1, y1] = edge(a[a.length - 1], b[0]), [x2, y2] = edge(b[b.length - 1], a[0]);
      between.append(G.mark("path", { d: `M${x1} ${y1}L${x2} ${y2}`, class: "cut" }));
    }
    const colour = COLOUR[frame.method];
    if (frame.mean.length) {
      const x = frame.mean.reduce((sum, i) => sum + at[i].x, 0) / frame.mean.length, y = frame.mean.reduce((sum, i) => sum + at[i].y, 0) / frame.mean.length;
      for (const i of frame.mean) between.append(G.mark("line", { x1: at[i].x, y1: at[i].y, x2: x, y2: y, stroke: colour, class: slow.has(i) ? "flow slow" : "flow" }));
      between.append(G.mark("circle", { cx: x, cy: y, r: 30, fill: "var(--card)", stroke: colour, "stroke-width": 2 }), G.mark("text", { x, y: y + 4, "text-anchor": "middle", class: "ink" }, "mean"));
    }
    for (const [i, j] of frame.pairs) {
      between.append(G.mark("line", { x1: at[i].x, y1: at[i].y, x2: at[j].x, y2: at[j].y, stroke: colour, "data-pair": `${i}-${j}`, class: slow.has(i) || slow.has(j) ? "flow slow" : "flow" }));
    }
    for (const i of workers()) drawWorker(i, at[i], frame, { alive: alive.has(i), there: there.has(i), slow: slow.has(i) });
    map.setAttribute("aria-label", `Round ${frame.round}. ${frame.mean.length ? `A mean over ${frame.mean.length} workers.` : `${frame.pairs.length} pairs.`} ${frame.says}`);
  };

  // What takes a press is drawn once: a browser forgets a press whose mark a new round has replaced before the release.
  const workerMark = (i, { x, y }) => G.mark("g", { class: `worker${live() ? " live" : ""}`, "data-worker": i, onclick: () => { if (live()) act([state.conditions.alive.includes(i) ? "kill" : "revive", i]); } },
    G.mark("title"), G.mark("g", { class: "drawn" }), G.mark("circle", { cx: x, cy: y, r: RING + 4, class: "press" }));

  const drawWorker = (i, { x, y }, frame, is) => {
    const word = !is.alive ? "dead" : !is.there ? "waits" : is.slow ? "slow uplink" : "";
    const mark = map.querySelector(`[data-worker="${i}"]`), node = mark.querySelector(".drawn");
    mark.setAttribute("data-standing", word || "trains");
    mark.firstChild.textContent = !live() ? "" : is.alive ? `kill worker ${i}` : `revive worker ${i}`;
    node.replaceChildren();
    if (is.alive && frame.seconds[i]) {
      const [, compute, waiting, , transfer] = frame.seconds[i], all = compute + waiting + transfer || 1;
      node.append(G.mark("circle", { cx: x, cy: y, r: RING, fill: "none", stroke: "var(--line)", "stroke-width": 7 }), arc(x, y, RING, 0, 1, "var(--card)"));
      let from = 0;
      for (const [seconds, paint] of [[compute, "var(--compute)"], [waiting, null], [transfer, "var(--transfer)"]]) {
        if (paint && seconds > 0) node.append(arc(x, y, RING, from, from + seconds / all, paint));
        from += seconds / all;
      }
    }
    node.append(G.mark("circle", { cx: x, cy: y, r: NODE, fill: is.alive ? (is.there ? "var(--ink)" : "var(--other)") : "var(--card)", stroke: is.alive ? "none" : "var(--bad)", "stroke-width": 2, "stroke-dasharray": is.alive ? "" : "4 3" }),
      G.mark("text", { x, y: y + 5, "text-anchor": "middle", class: "number", style: `fill:${is.alive ? "var(--card)" : "var(--bad)"}` }, is.alive ? `${i}` : "✕"));
    if (word) node.append(G.mark("text", { x, y: y > SIZE / 2 ? y + RING + 16 : y - RING - 8, "text-anchor": "middle", class: is.slow && is.there ? "word slow" : "word" }, is.slow && !is.alive ? "dead" : word));
  };

  // Moves points that would cover each other, each pair by as much, so that each can be seen.
  const apartFrom = (points, least) => {
    for (let turn = 0; turn < 12; turn += 1) {
      points.forEach((a, i) => points.slice(0, i).forEach((b) => {
        const x = a[0] - b[0] || 0.01 * (i + 1), y = a[1] - b[1], far = Math.hypot(x, y), push = Math.max(0, least - far) / (2 * far);
        a[0] += x * push; a[1] += y * push;
        b[0] -= x * push; b[1] -= y * push;
      }));
    }
  };

  // A distance as it is drawn: what is near the usual disagreement can be distinguished, and what is far stays on the page.
  const USUAL = 0.004, REACH = 82;
  const drawPlane = (frame) => {
    if (!plane.querySelector("[data-dot]")) {
      plane.replaceChildren(...[0.25, 0.5, 0.75, 1].map((share) => G.mark("circle", { cx: 120, cy: 120, r: 26 + REACH * share, fill: "none", stroke: "var(--grid)" })),
        ...workers().map((i) => G.mark("g", { class: "dot", "data-dot": i }, G.mark("circle", { r: 9 }), G.mark("text", { y: 4, "text-anchor": "middle" }, `${i}`))));
    }
    const at = workers().map((i) => {
      const [x, y] = frame.places[i], far = Math.hypot(x, y), drawn = far ? REACH / (far + USUAL) : 0, turn = (2 * Math.PI * i) / state.contents.workers - Math.PI / 2;
      // Those that are in one place stand around it.
      return [120 + 17 * Math.cos(turn) + drawn * x, 120 + 17 * Math.sin(turn) + drawn * y];
    });
    apartFrom(at, 19);
    for (const i of workers()) {
      const node = plane.querySelector(`[data-dot="${i}"]`), alive = frame.alive.includes(i), there = frame.there.includes(i);
      node.style.transform = `translate(${at[i][0].toFixed(1)}px,${at[i][1].toFixed(1)}px)`;
      node.firstChild.setAttribute("style", `fill:${!alive ? "var(--card)" : there ? COLOUR[frame.method] : "var(--other)"};stroke:${alive ? "none" : "var(--bad)"}`);
      node.lastChild.setAttribute("style", `fill:${alive ? "var(--card)" : "var(--bad)"}`);
    }
    planeWords.textContent = frame.disagreement === null ? "Nobody trains." : frame.disagreement === 0 ? "All that train have the same parameters." : "Near each other: nearly the same parameters. The plane is that in which they differ most.";
    plane.setAttribute("aria-label", planeWords.textContent);
  };

  // A curve for each branch, which begins where the one before it ended; earlier films are faint.
  const curvesOf = (frames, key, faint) => {
    const curves = [], name = (method) => state.contents.methods.find((one) => one.key === method).name;
    let before = null;
    for (const frame of frames) {
      if (!before || before.method !== frame.method) {
        const count = curves.filter((curve) => curve.method === frame.method).length;
        curves.push({ method: frame.method, label: `${faint ? "before: " : ""}${name(frame.method)}${count ? `, branch ${count + 1}` : ""}`, x: before ? [before.clock_s] : [], y: before ? [before[key]] : [], colour: faint ? "var(--faint)" : COLOUR[frame.method], dash: faint ? "3 3" : "", faint });
      }
      const curve = curves[curves.length - 1];
      curve.x.push(frame.clock_s);
      curve.y.push(key === "disagreement" && frame[key] === 0 ? null : frame[key]);
      before = frame;
    }
    return curves;
  };

  const drawCharts = () => {
    const seen = state.frames.slice(0, state.at + 1);
    const marks = seen.filter((frame) => frame.actions.length).map((frame) => ({ x: frame.round ? state.frames[frame.round - 1].clock_s : 0, label: frame.told.join(" ") }));
    for (const [chart, key, log] of [[loss, "loss", false], [apart, "disagreement", true]]) {
      const curves = [...state.before.flatMap((frames) => curvesOf(frames, key, true)), ...curvesOf(seen, key, false)];
      chart.update({ curves: curves.filter((curve) => curve.y.some((y) => y !== null)), marks, xLabel: "priced seconds", log, tell: (s) => G.short(s) });
    }
    alike.hidden = !apart.node.hidden;
  };

  const drawTiles = (frame) => {
    const spent = frame.there.map((i) => frame.seconds[i]), all = spent.reduce((sum, one) => sum + one[1] + one[2] + one[4], 0);
    figures.time.textContent = frame.clock_s < 600 ? `${frame.clock_s.toFixed(1)} s` : `${(frame.clock_s / 60).toFixed(1)} min`;
    figures.loss.textContent = frame.loss === null ? "–" : frame.loss.toFixed(3);
    figures.share.textContent = all ? `${Math.round((100 * spent.reduce((sum, one) => sum + one[1], 0)) / all)} %` : "–";
    figures.apart.textContent = frame.disagreement === null ? "–" : frame.disagreement === 0 ? "0" : frame.disagreement.toPrecision(2);
    figures.sent.textContent = G.bytes(state.frames.slice(0, frame.round + 1).reduce((sum, one) => sum + one.sent_bytes, 0));
  };

  const drawControls = (conditions) => {
    const { contents } = state, dead = (i) => !conditions.alive.includes(i);
    for (const one of methods.children) one.setAttribute("aria-pressed", `${one.dataset.method === conditions.method}`);
    steps.put(conditions.local_steps);
    momentum.put(conditions.momentum);
    momentum.field.disabled = !contents.live || conditions.momentum === null;
    cut.textContent = conditions.cut ? "join the network again" : "cut the network in two";
    cut.setAttribute("aria-pressed", `${conditions.cut}`);
    for (const i of workers()) {
      const one = crew.children[i], [kill, slow] = one.querySelectorAll("button");
      kill.textContent = dead(i) ? "revive" : "kill";
      slow.textContent = conditions.slow.includes(i) ? "mend" : "slow";
      kill.setAttribute("aria-label", `${kill.textContent} worker ${i}`);
      slow.setAttribute("aria-label", `${slow.textContent} the uplink of worker ${i}`);
      kill.setAttribute("aria-pressed", `${dead(i)}`);
      slow.setAttribute("aria-pressed", `${conditions.slow.includes(i)}`);
    }
  };

  const show = (place) => {
    const frame = state.frames[place];
    slider.max = Math.max(0, state.frames.length - 1);
    newest.hidden = !live() || state.follow;
    if (!frame) { round.textContent = "the first round is being trained"; return; }
    state.at = place;
    slider.value = place;
    round.textContent = live() ? `round ${place}` : `round ${place} of ${state.frames.length - 1}`;
    drawMap(frame);
    says.textContent = frame.says;
    drawPlane(frame);
    drawTiles(frame);
    drawCharts();
    timeline.update(state.frames.slice(Math.max(0, place - RECENT + 1), place + 1).map((one) => ({
      round: one.round, seconds: { "this network": one.seconds.flatMap((s, i) => (s ? [[i, s[0], s[1], s[2], s[3], s[4], 0]] : [])) },
    })), "this network");
    const done = state.frames.slice(0, place + 1).filter((one) => one.told.length);
    const last = done[done.length - 1];
    caption.textContent = last && place - last.round < 8 ? last.told.join(" ") : state.contents.methods.find((one) => one.key === frame.method).name
      + (frame.mean.length ? ": a mean, and everybody in it waits for everybody." : frame.pairs.length ? ": random pairs, and each waits for its partner alone." : ".");
    caption.classList.toggle("news", !!last && place - last.round < 8);
    happened.replaceChildren(...done.slice(-14).reverse().map((one) => part("li", { value: one.round }, part("b", {}, `round ${one.round}: `), one.told.join(" "))));
    if (!state.contents.live) drawControls(frame);
  };

  // --- time ---------------------------------------------------------------------------------------------------------

  const toggle = () => { if (live()) send({ playing: !state.playing }); else if (state.timer) pause(); else run(); };
  const drawPlay = (playing) => { play.textContent = playing ? "❚❚ pause" : "▶ play"; };
  const pause = () => { clearTimeout(state.timer); state.timer = null; drawPlay(false); };
  const run = () => {  // of a film
    clearTimeout(state.timer);
    drawPlay(true);
    if (state.at >= state.frames.length - 1) show(0);
    const next = () => {
      if (state.at >= state.frames.length - 1) { pause(); return; }
      show(state.at + 1);
      state.timer = setTimeout(next, wait());
    };
    state.timer = setTimeout(next, wait());
  };
  const wait = () => {
    const { tempo } = state.contents, frame = state.frames[state.at], before = state.at > 0 ? state.frames[state.at - 1].clock_s : 0;
    const shown = Math.min(tempo.most_s, Math.max(tempo.least_s, tempo.share * (frame.clock_s - before)));
    return (1000 * shown) / state.speed;
  };
  const offer = (speeds) => {
    if (speed.children.length) return;
    speed.replaceChildren(...speeds.map((one) => part("option", { value: one }, `${one}×`)));
    speed.value = "1";
  };

  const begin = (contents) => {
    state.contents = contents;
    state.frames = [...contents.frames];
    state.at = -1;
    state.follow = true;
    document.title = contents.live ? "Gossamer play" : "Gossamer play: a film";
    plane.replaceChildren();
    map.replaceChildren();
    build();
    offer([0.5, 1, 2, 4]);
    if (!contents.live) { show(0); run(); }
  };

  const ask = async () => {
    let pause_ms = ASK_MS;
    try {
      const answer = await fetch(`play.json?film=${state.film}&have=${state.frames.length}`);
      if (!answer.ok) throw new TypeError(`the server answers ${answer.status}`);
      const now = await answer.json();
      if (now.contents) {
        if (state.frames.length > 1 && now.contents.live) state.before = [...state.before, state.frames].slice(-KEPT);
        begin(now.contents);
        if (!now.contents.live) return;
        state.film = now.film;
        show(state.frames.length - 1);
      } else if (now.frames && now.frames.length) {
        state.frames.push(...now.frames);
        if (state.follow) show(state.frames.length - 1);
        else slider.max = state.frames.length - 1;
      }
      if (!state.contents) {
        root.replaceChildren(banner, part("h1", {}, "Gossamer play"), part("p", {}, "The workers are being made …"));
        problem(now.problem);
      } else {
        Object.assign(state, { now, conditions: now.conditions, playing: now.playing });
        drawControls(now.conditions);
        drawPlay(now.playing);
        problem(now.problem && `${now.problem} "begin again" starts a new film.`, ...now.warnings.map((sentence) => `Expected: ${sentence}.`));
      }
    } catch (error) {
      pause_ms = 2000;
      if (!(error instanceof TypeError)) throw error;
      gone();
    }
    setTimeout(ask, document.hidden ? 1000 : pause_ms);
  };

  if (frozen) begin(frozen);
  else ask();
};

document.addEventListener("DOMContentLoaded", () => {
  const contents = document.getElementById("contents");
  G.play(document.getElementById("page"), contents ? JSON.parse(contents.textContent) : null);
});
