// Puts the parts together. A report has its contents in the page; a live page asks its server for them.
"use strict";

G.page = (root, frozen) => {
  const MANY = 12, OPEN = 4;
  const SOONEST_MS = 1000, LATEST_MS = 15000, SHARE = 1 / 200;  // of one core for drawing, as a run may train on the same machine
  const state = { axis: null, hidden: new Set(), focus: null, seeds: "spread", charts: new Map(), cards: new Map(), contents: null, sort: null, seen: false };
  const part = (name, attributes = {}) => G.make(name, attributes);
  const banner = part("div", { role: "status" }), head = part("header"), notes = part("div"), controls = part("div", { class: "controls" });
  const legend = part("ul", { class: "legend", "aria-label": "runs: press one to hide it" }), charts = part("div", { class: "charts" });
  const table = part("div", { class: "scroll card" }), runs = part("div", { class: "runs" }), foot = part("footer", { class: "faint" });
  const title = (words) => G.make("h2", {}, words);
  const curvesHead = title("Curves"), runsHead = title("Who talks to whom, and who waits");
  root.replaceChildren(banner, head, notes, table, curvesHead, controls, legend, charts, runsHead, runs, foot);

  // --- curves -------------------------------------------------------------------------------------------------------

  const ofRun = (view, key) => (key === "training" || key === "own" ? view[key] : view.evals);

  // What is drawn for a key of the figures: a curve for each method with its spread, or one for each run.
  const lines = () => {
    const { runs: views, groups, places } = state.contents;
    const grouped = state.seeds === "spread" && groups.some((group) => group.mean);
    // The seeds of a method have its colour, each with its own dashes.
    const seeds = groups.flatMap((group) => group.runs.map((run, k) => [run, places[group.label] + k * G.COLOURS]));
    const placeOf = new Map(seeds);
    if (!grouped) return views.map((view, run) => ({ name: view.label, place: placeOf.get(run), of: (key) => ofRun(view, key) }));
    return groups.map((group) => {
      const place = places[group.label];
      const first = views[group.runs[0]];
      return {
        name: group.label, place, group,
        of: (key) => (group.mean && key in group.mean.y ? group.mean : ofRun(first, key)),
      };
    });
  };

  const faint = (names) => {
    if (names.length <= MANY || state.seen) return new Set();
    return new Set(names.slice(6));
  };

  const curvesOf = (figure) => {
    const all = lines(), pale = faint(all.map((one) => one.name));
    return all.map(({ name, place, group, of }) => {
      const source = of(figure.key) || { x: {}, y: {} }, key = figure.key === "training" ? "loss" : figure.key;
      const x = source.x[state.axis], y = source.y[key];
      const ok = x && y, { colour, dash } = G.style(place);
      const spread = ok && group && group.mean === source;
      return {
        label: name, x: ok ? x : [], y: ok ? y : [], low: spread ? group.low[key] : null, high: spread ? group.high[key] : null,
        colour: pale.has(name) ? "var(--faint)" : colour, dash, faint: pale.has(name) || (state.focus && state.focus !== name), strong: state.focus === name, hidden: state.hidden.has(name),
      };
    });
  };

  const drawCharts = () => {
    const { figures, axes } = state.contents, label = (axes.find((axis) => axis.key === state.axis) || { label: state.axis }).label;
    for (const [order, figure] of figures.entries()) {
      if (!state.charts.has(figure.key)) {
        const chart = G.chart(figure.title);
        chart.node.dataset.figure = figure.key;
        state.charts.set(figure.key, chart);
        charts.append(chart.node);
      }
      state.charts.get(figure.key).node.style.order = order;
      state.charts.get(figure.key).update({ curves: curvesOf(figure), xLabel: label, log: figure.log });
    }
    curvesHead.hidden = controls.hidden = !figures.length;
  };

  const drawLegend = () => {
    const all = lines(), pale = faint(all.map((one) => one.name));
    const content = JSON.stringify([all.map((one) => one.name), [...state.hidden], [...pale]]);
    if (legend.dataset.content === content) return;
    legend.dataset.content = content;
    legend.replaceChildren(...all.map(({ name, place }) => {
      const { colour, dash } = G.style(place);
      const swatch = G.mark("svg", { width: 28, height: 8, "aria-hidden": "true" }, G.mark("path", { d: "M0 4H28", stroke: pale.has(name) ? "var(--faint)" : colour, "stroke-width": 3, "stroke-dasharray": dash }));
      const button = G.make("button", { type: "button", "aria-pressed": `${!state.hidden.has(name)}`,
        onclick: () => { if (!state.hidden.delete(name)) state.hidden.add(name); drawLegend(); drawCharts(); },
        onpointerenter: () => { state.focus = name; drawCharts(); }, onpointerleave: () => { state.focus = null; drawCharts(); },
      }, swatch, name);
      return G.make("li", {}, button);
    }));
    if (all.length > MANY) {
      legend.append(G.make("li", {}, G.make("button", { type: "button", onclick: () => { state.seen = !state.seen; drawLegend(); drawCharts(); } },
        state.seen ? "colour the first six only" : "colour all")));
    }
  };

  const drawControls = () => {
    const { axes, groups } = state.contents, content = JSON.stringify([axes, groups.some((group) => group.mean)]);
    if (controls.dataset.content === content) return;
    controls.dataset.content = content;
    const over = G.make("select", { id: "axis", onchange: () => { state.axis = over.value; drawCharts(); } },
      ...axes.map((axis) => G.make("option", { value: axis.key }, axis.label)));
    if (!axes.some((axis) => axis.key === state.axis)) state.axis = state.contents.axis;
    over.value = state.axis;
    controls.replaceChildren(G.make("label", {}, "over ", over));
    if (groups.some((group) => group.mean)) {
      const seeds = G.make("select", { id: "seeds", onchange: () => { state.seeds = seeds.value; drawLegend(); drawCharts(); } },
        G.make("option", { value: "spread" }, "mean and range"), G.make("option", { value: "each" }, "each"));
      controls.append(G.make("label", {}, "seeds: ", seeds));
    }
    controls.append(G.make("span", { class: "faint" }, "Drag over a chart to zoom, double click to see all."));
  };

  // --- table --------------------------------------------------------------------------------------------------------

  // What a cell is sorted by: the number it begins with, in plain units.
  const worth = (text) => {
    const unit = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, s: 1, min: 60, h: 3600, d: 86400 };
    const found = [...text.matchAll(/([-+]?[\d.]+(?:e[-+]?\d+)?) ?([a-zA-Z]+)?/g)];
    if (!found.length) return Infinity;
    const span = found.slice(0, 2).filter(([, , name]) => name in unit);
    return span.length ? span.reduce((sum, [, number, name]) => sum + number * unit[name], 0) : +found[0][1];
  };

  // Headings and what folds are made once: an element that an update replaces loses a press, the keyboard's focus and its fold.
  const columns = G.make("tr"), body = G.make("tbody");
  table.append(G.make("table", {}, G.make("thead", {}, columns), body), G.data(() => [state.contents.table.headings, ...state.contents.table.rows]));
  const sortBy = (column) => { state.sort = { column, up: !(state.sort && state.sort.column === column && state.sort.up) }; drawTable(); };

  const drawTable = () => {
    const { headings, rows, best } = state.contents.table;
    const order = rows.map((cells, place) => ({ cells, best: place === best }));
    if (state.sort) {
      const { column, up } = state.sort;
      order.sort((a, b) => (column ? worth(a.cells[column]) - worth(b.cells[column]) || 0 : a.cells[0].localeCompare(b.cells[0])) * (up ? 1 : -1));
    }
    if (columns.childElementCount !== headings.length) {
      columns.replaceChildren(...headings.map((_, column) => G.make("th", {
        scope: "col", tabindex: "0",
        onclick: () => sortBy(column), onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sortBy(column); } },
      })));
    }
    headings.forEach((heading, column) => {
      const cell = columns.children[column];
      if (cell.textContent !== heading) cell.textContent = heading;
      cell.setAttribute("aria-sort", state.sort && state.sort.column === column ? (state.sort.up ? "ascending" : "descending") : "none");
    });
    body.replaceChildren(...order.map(({ cells, best: wins }) => G.make("tr", {}, ...cells.map((cell, column) =>
      G.make(column ? "td" : "th", { class: wins && column === 1 ? "best" : null, scope: column ? null : "row" }, cell)))));
    table.hidden = !rows.length;
  };

  // --- runs ---------------------------------------------------------------------------------------------------------

  const momentOf = async (place, round) => {
    if (frozen) return (frozen.moments[place] || {})[round] || null;
    try {
      const answer = await fetch(`round.json?run=${place}&round=${round}`);
      return answer.ok ? await answer.json() : null;
    } catch (error) {  // the server is gone, of which the banner tells
      if (!(error instanceof TypeError)) throw error;
      return null;
    }
  };

  const card = (place) => {
    const known = { round: null, follow: true, playing: null, view: null, thin: false }, kept = new Map();
    const name = G.make("span", {}), about = G.make("p", { class: "faint" }), problems = G.make("div", {});
    const slider = G.make("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "round" });
    const number = G.make("output", {}), newest = G.make("button", { type: "button", class: "small" }, "newest");
    const play = G.make("button", { type: "button", class: "small", "aria-label": "play the rounds" }, "▶");
    const network = G.make("select", { "aria-label": "network" });
    const gossip = G.gossip(), timeline = G.timeline(), losses = G.chart("Training loss by worker"), people = G.make("div", { class: "scroll" });
    const crew = { summary: G.make("summary"), table: G.make("table"), draw: () => {} };
    crew.fold = G.make("details", { ontoggle: () => { if (crew.fold.open) crew.draw(); } }, crew.summary, crew.table);
    people.append(crew.fold);
    losses.node.classList.remove("card");
    const happened = G.make("ul", { class: "plain" });
    const tools = G.make("div", { class: "controls" }, "round", slider, number, play, newest, network);
    const body = G.make("div", { class: "inner" }, about, problems, tools, gossip.node, timeline.node, losses.node, people, happened);
    const node = G.make("details", { "data-run": place }, G.make("summary", {}, name), body);
    const available = () => (frozen ? Object.keys(frozen.moments[place] || {}).map(Number).sort((a, b) => a - b) : null);

    // What everybody has behind it changes no more, and is asked for once.
    const moment = async (round) => {
      if (kept.has(round)) return kept.get(round);
      const found = await momentOf(place, round);
      if (found && Object.keys(found.seconds).length && Math.min(...known.view.rounds_of) > round + 1) {
        kept.set(round, found);
        if (kept.size > 64) kept.delete(kept.keys().next().value);
      }
      return found;
    };

    const show = async (round) => {
      const list = available();
      known.round = list ? list.reduce((a, b) => (Math.abs(b - round) < Math.abs(a - round) ? b : a), list[0]) : round;
      if (known.round === undefined) { tools.hidden = true; return; }
      const wanted = known.round;
      slider.value = list ? list.indexOf(wanted) : wanted;
      number.textContent = known.view.rounds === null ? `${wanted}` : `${wanted} of 0–${known.view.rounds - 1}`;
      const around = [wanted, wanted + 1, wanted + 2, wanted + 3].filter((r) => (list ? list.includes(r) : r < known.view.done));
      if (around.length < 4 && !list) for (let r = wanted - 1; r >= 0 && around.length < 4; r -= 1) around.unshift(r);
      if (around.length < 4 && list) for (let r = wanted - 1; list.includes(r) && around.length < 4; r -= 1) around.unshift(r);
      const moments = (await Promise.all(around.map(moment))).filter(Boolean);
      const now = moments.find((moment) => moment.round === wanted);
      if (!now || known.round !== wanted) return;
      known.thin = !now.pairs.length && !now.everyone;  // what is still being read, or written
      gossip.update(known.view, now, network.value);
      timeline.update(moments, network.value in now.seconds ? network.value : Object.keys(now.seconds)[0] || "");
    };
    const stop = () => { clearInterval(known.playing); known.playing = null; play.textContent = "▶"; };
    slider.addEventListener("input", () => { known.follow = false; const list = available(); show(list ? list[+slider.value] : +slider.value); });
    newest.addEventListener("click", () => { stop(); known.follow = true; show(known.view.done - 1); });
    network.addEventListener("change", () => show(known.round));
    play.addEventListener("click", () => {
      if (known.playing) { stop(); return; }
      known.follow = false;
      play.textContent = "❚❚";
      known.playing = setInterval(() => {
        const last = +slider.max, next = +slider.value >= last ? 0 : +slider.value + 1, list = available();
        show(list ? list[next] : next);
      }, 700);
    });
    node.addEventListener("toggle", () => { if (node.open && known.view) fill(); });

    // The parts below the summary are drawn while they are open only.
    const fill = () => {
      const view = known.view, list = available(), names = Object.keys(view.networks);
      if (network.dataset.content !== names.join()) {
        network.dataset.content = names.join();
        network.replaceChildren(...names.map((one) => G.make("option", { value: one }, one)));
        const wanted = frozen ? frozen.axis.replace("time:", "") : names[0];
        if (names.includes(wanted)) network.value = wanted;
      }
      network.hidden = !names.length;
      slider.max = list ? Math.max(0, list.length - 1) : Math.max(0, view.done - 1);
      tools.hidden = gossip.node.hidden = !view.done;
      const by = view.by_worker;
      losses.update({ xLabel: "rounds", log: false, curves: by.losses.map((y, worker) => ({
        label: `worker ${worker}`, x: by.round, y, colour: G.style(worker).colour, dash: by.losses.length > MANY ? "" : G.style(worker).dash, faint: by.losses.length > MANY,
      })) });
      workers(view);
      happened.replaceChildren(...view.happenings.slice(-12).reverse().map(([round, sentence]) => G.make("li", {}, `round ${round}: ${sentence}`)));
      if (!view.done) return;
      const start = frozen ? (list.find((round) => round > 0) ?? list[0] ?? 0) : view.done - 1;
      if (known.round === null) show(start);
      else if (!frozen && (known.follow || known.thin)) show(known.follow ? view.done - 1 : known.round);
    };

    const workers = (view) => {
      const clock = Object.keys(view.spent)[0], kinds = clock === undefined ? null : view.spent[network.value in view.spent ? network.value : clock].kinds;
      const waits = clock === undefined ? [] : view.spent[network.value in view.spent ? network.value : clock].waits;
      const most = (worker) => { const one = waits.find(([i]) => i === worker); return one ? (one[1] < 0 ? "server" : `${one[1]}`) : "–"; };
      const rows = view.standings.slice(0, 64).map((word, worker) => [`${worker}`, word, `${view.rounds_of[worker]}`, view.store ? view.holders[worker] : G.short(view.last_losses[worker]),
        ...(kinds ? kinds[worker].map((s) => G.seconds(s)) : []), ...(kinds ? [most(worker)] : [])]);
      const headings = ["worker", "standing", "rounds", view.store ? "slot held by" : "training loss", ...(kinds ? [...G.KINDS, "waits most for"] : [])];
      crew.summary.textContent = `workers: ${counted(view.standings)}`;
      crew.draw = () => crew.table.replaceChildren(
        G.make("thead", {}, G.make("tr", {}, ...headings.map((heading) => G.make("th", { scope: "col" }, heading)))),
        G.make("tbody", {}, ...rows.map((cells) => G.make("tr", {}, ...cells.map((cell) => G.make("td", {}, cell))))));
      if (crew.fold.open) crew.draw();
    };

    const update = (view, fresh = true) => {
      if (known.view && view.done < known.view.done) kept.clear();  // the run went back to a checkpoint
      known.view = view;
      if (view.empty) { name.textContent = view.label; about.textContent = ""; body.hidden = false; for (const one of [tools, gossip.node, timeline.node, losses.node, people]) one.hidden = true; }
      else {
        people.hidden = false;
        losses.node.hidden = !!view.store;
        name.textContent = `${view.label}: ${frozen && view.state !== "finished" ? "not ended" : view.state}, ${view.done} of ${view.rounds} rounds`;
        const rates = Object.entries(view.tokens_per_s).map(([clock, rate]) => `${G.short(rate)} tokens/s${clock ? ` on ${clock}` : " measured"}`);
        about.textContent = [`${view.method}${view.topology ? ` on ${view.topology}` : ""}, ${view.workers} workers, ${view.simulated ? "simulated" : "real processes"}`,
          view.sent_bytes === null ? null : `${G.bytes(view.sent_bytes)} sent per worker`, ...rates,
          !frozen && view.age_s !== null && view.state !== "finished" ? `last ${view.store ? "sign of life" : "line"} ${G.seconds(view.age_s)} ago` : null,
          view.progress < 1 ? `read to ${Math.round(100 * view.progress)} %` : null].filter(Boolean).join(" · ");
      }
      problems.replaceChildren(...view.complaints.map((sentence) => G.make("p", { class: "note" }, sentence)));
      if (node.open && !view.empty && fresh) fill();
    };
    return { node, update, known };
  };

  const counted = (words) => {
    const numbers = new Map();
    words.forEach((word) => numbers.set(word, (numbers.get(word) || 0) + 1));
    return [...numbers].map(([word, count]) => `${count} ${word}`).join(", ");
  };

  const drawRuns = () => {
    const views = state.contents.runs, first = new Set(state.contents.groups.slice(0, OPEN).map((group) => group.runs[0]));
    views.forEach((view, place) => {
      if (!state.cards.has(place)) {
        const made = card(place);
        state.cards.set(place, made);
        runs.append(made.node);
        made.node.style.order = first.has(place) ? 0 : 1;  // what is open stands together
        if (first.has(place) || view.empty) made.node.open = true;
      }
      state.cards.get(place).update(view);
    });
    runsHead.hidden = !views.length;
  };

  // --- all of it ----------------------------------------------------------------------------------------------------

  const draw = (contents) => {
    state.contents = contents;
    document.title = contents.live ? `${contents.title} · gossamer watch` : contents.title;
    head.replaceChildren(G.make("h1", {}, contents.title), G.make("p", { class: "verdict" }, contents.verdict));
    drawNotes(contents.notes || []);
    drawTable();
    drawControls();
    drawLegend();
    drawCharts();
    drawRuns();
    foot.textContent = `${contents.live ? "Read" : "Recorded until"} ${contents.date} · gossamer ${contents.version}${contents.command ? ` · ${contents.command}` : ""}`;
  };
  const drawNotes = (sentences) => notes.replaceChildren(...sentences.map((sentence) => G.make("p", { class: "note" }, sentence)));

  // What time alone changes while nothing new is written.
  const pulse = (answer) => {
    drawNotes(answer.notes);
    answer.pulse.forEach((one, place) => {
      const view = state.contents.runs[place];
      if (!view || view.empty) return;
      const changed = view.standings.join() !== one.standings.join();
      Object.assign(view, { age_s: one.age_s, standings: one.standings, progress: one.progress });
      if (view.state !== "finished" && !one.standings.includes("training")) view.state = one.standings.includes("held") ? "held" : view.done ? "silent" : "starting";
      state.cards.get(place).update(view, changed);
    });
  };

  // How long drawing took until now, with what the browser does after the script.
  const drawn = (begun) => new Promise((tell) => requestAnimationFrame(() => setTimeout(() => tell(performance.now() - begun))));

  let revision = "", answered = null;
  const ask = async () => {
    let wait = SOONEST_MS;
    try {
      const answer = await fetch(`data.json?have=${encodeURIComponent(revision)}`);
      if (!answer.ok) throw new TypeError(`the server answers ${answer.status}`);
      const found = await answer.json();
      answered = new Date();
      banner.replaceChildren();
      if (found.pulse) pulse(found);
      else {
        const begun = performance.now();
        draw(found);
        revision = found.revision;
        if (found.runs.some((run) => run.progress < 1)) wait = 50;
        else if (!document.hidden) wait = Math.min(LATEST_MS, Math.max(SOONEST_MS, await drawn(begun) / SHARE));
      }
    } catch (error) {
      wait = 3000;
      if (!(error instanceof TypeError)) throw error;  // TypeError is what fetch says of a server that is gone
      const since = answered ? ` What is shown is as of ${answered.toLocaleTimeString()}.` : "";
      const again = state.contents && state.contents.command ? ` "${state.contents.command}" shows it again.` : "";
      banner.replaceChildren(G.make("p", { class: "note" }, `The server of this page does not answer.${since}${again}`));
    } finally {
      setTimeout(ask, wait);
    }
  };

  if (frozen) draw(frozen);
  else ask();
};

document.addEventListener("DOMContentLoaded", () => {
  const contents = document.getElementById("contents");
  G.page(document.getElementById("page"), contents ? JSON.parse(contents.textContent) : null);
});
