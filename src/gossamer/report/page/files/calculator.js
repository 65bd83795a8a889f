// Calculators: what each method costs on a network, and published settings. Every figure comes from the server, or from answers that
// were computed when the page was made.
"use strict";

G.calculator = (root, frozen) => {
  const part = (name, attributes = {}, ...children) => G.make(name, attributes, ...children);
  const banner = part("div", { role: "status" });
  const state = { plan: {}, published: {} };
  const bandwidth = (x) => G.rate(10 ** x);
  const short = (x) => (typeof x === "number" ? `${+x.toPrecision(6)}` : x);

  const ask = async (kind, values) => {
    if (frozen) return frozen.answers[kind][Object.values(values).map(short).join(" ")];
    const answer = await fetch(`${kind}.json?${new URLSearchParams(values)}`);
    if (!answer.ok) throw new TypeError(`the server answers ${answer.status}`);
    return answer.json();
  };

  const shown = (input, value) => (typeof value === "number" && input.unit === "bit/s" ? G.rate(value) : `${short(value)}${input.unit ? ` ${input.unit}` : ""}`);

  // A slider over the values of an input, or a list where they are names; nothing where there is one value only.
  const control = (input, values, changed) => {
    values[input.key] = input.start;
    const output = part("output", {}, shown(input, input.start));
    let field;
    const set = (value) => { values[input.key] = value; output.textContent = shown(input, value); };
    if (typeof input.values[0] === "string") {
      field = part("select", { "data-key": input.key, onchange: () => { set(field.value); changed(); } }, ...input.values.map((value) => part("option", { value }, value)));
      field.value = input.start;
    } else {
      field = part("input", { type: "range", min: 0, max: input.values.length - 1, value: input.values.indexOf(input.start), "data-key": input.key,
        oninput: () => { set(input.values[+field.value]); changed(); } });
    }
    const node = part("label", { class: "input" }, input.label, typeof input.values[0] === "string" ? null : output, field);
    node.hidden = input.values.length < 2;
    return { node, put: (value) => { set(value); if (field.tagName === "SELECT") field.value = value; else field.value = input.values.indexOf(value); } };
  };

  const table = (headings, rows, best = -1) => part("div", { class: "scroll" }, part("table", {},
    part("thead", {}, part("tr", {}, ...headings.map((heading) => part("th", { scope: "col" }, heading)))),
    part("tbody", {}, ...rows.map((cells, place) => part("tr", {}, ...cells.map((cell, column) =>
      part(column ? "td" : "th", { scope: column ? null : "row", class: place === best && column === 0 ? "best" : null }, cell)))))));

  const curvesOf = (curves, places, marks = {}) => Object.entries(curves).flatMap(([label, [x, y]]) => {
    const { colour, dash } = G.style(places[label]), log = (points) => points.map((one) => Math.log10(one));
    const dots = marks[label] ? [{ label: `${label}, published`, x: log(marks[label][0]), y: marks[label][1], colour, dots: true }] : [];
    return [{ label, x: log(x), y, colour, dash }, ...dots];
  });

  const keyOf = (curves) => part("div", { class: "key" }, ...curves.filter((curve) => !curve.dots).map((curve) => {
    const swatch = G.mark("svg", { width: 28, height: 8, "aria-hidden": "true" }, G.mark("path", { d: "M0 4H28", stroke: curve.colour, "stroke-width": 3, "stroke-dasharray": curve.dash }));
    return part("span", { class: "swatch" }, swatch, curve.label);
  }));

  // Asks for what the inputs say, one question at a time; what was moved meanwhile is asked for next.
  const asking = (kind, values, draw, problem) => {
    let busy = false, again = false;
    return async function changed() {
      if (busy) { again = true; return; }
      busy = true;
      const slow = setTimeout(() => { problem.textContent = "Computing …"; }, 300);
      try {
        const found = await ask(kind, values());
        problem.textContent = found.error || "";
        if (!found.error) draw(found);
        banner.replaceChildren();
      } catch (error) {
        problem.textContent = "";
        if (!(error instanceof TypeError)) throw error;
        banner.replaceChildren(part("p", { class: "note" }, "The server of this page does not answer. \"gossamer watch --plan\" starts it again."));
      } finally {
        clearTimeout(slow);
        busy = false;
        if (again) { again = false; changed(); }
      }
    };
  };

  const planPart = (inputs, all) => {
    const [moved, ...others] = inputs, values = state.plan, chart = G.chart("Share of the time spent computing");
    const rows = part("div", {}), key = part("div", {}), problem = part("p", {}), more = part("div", {});
    let found = null;
    const drawRows = () => {
      if (!found) return;
      const place = moved.values.indexOf(values[moved.key]);
      rows.replaceChildren(table(found.headings, found.rows[place], found.best[place]), part("p", { class: "faint" },
        `${found.parameters.toLocaleString("en")} parameters; ${found.summaries[place]} ★ is what gossamer plan would take of these: the lowest expected loss in the time, and within 0.005 nats of it the fastest. Loss is in nats above data parallelism after all tokens.`));
      more.replaceChildren();
    };
    const draw = (answer) => {
      found = answer;
      const curves = curvesOf(Object.fromEntries(Object.entries(answer.curves).map(([name, y]) => [name, [moved.values, y]])), answer.places);
      chart.update({ curves, xLabel: moved.label, log: false, tell: moved.unit === "bit/s" ? bandwidth : (x) => `${short(10 ** x)} times` });
      key.replaceChildren(keyOf(curves));
      drawRows();
    };
    const rest = () => Object.fromEntries(others.map((input) => [input.key, values[input.key]]));
    const changed = asking("plan", rest, draw, problem);
    const controls = [control(moved, values, drawRows), ...others.map((input) => control(input, values, changed))];
    const button = part("button", { type: "button", onclick: async () => {
      button.disabled = true;
      const answer = await ask("others", values).catch(() => ({ error: "The server of this page does not answer." }));
      button.disabled = false;
      more.replaceChildren(answer.error ? part("p", { class: "note" }, answer.error) : part("div", {}, table(answer.headings, answer.rows),
        ...answer.notes.map((sentence) => part("p", { class: "faint" }, sentence)),
        part("ul", { class: "plain" }, ...Object.entries(answer.unpriced).map(([name, why]) => part("li", {}, `no price: ${name}: ${why}`)))));
    } }, "price all other methods here");
    changed();
    return part("section", { "data-part": "plan" }, part("h2", {}, "What each method costs on a network"), part("div", { class: "inputs" }, ...controls.map((one) => one.node)),
      problem, chart.node, key, rows, all ? button : null, more);
  };

  const publishedPart = (inputs, presets) => {
    const values = state.published, chart = G.chart("Share of the time spent computing");
    const rows = part("div", {}), key = part("div", {}), problem = part("p", {}), assumed = part("ul", { class: "plain" });
    const draw = (answer) => {
      const curves = curvesOf(answer.curves, answer.places, answer.marks);
      chart.update({ curves, xLabel: "bandwidth", log: false, tell: bandwidth });
      key.replaceChildren(keyOf(curves), part("p", { class: "faint" }, Object.keys(answer.marks).length ? "Dots are the published figures." : "No figures were published for these values."));
      rows.replaceChildren(...(answer.rows.length ? [part("h3", {}, "Gbit/s needed to compute for this share of the time"), table(answer.headings, answer.rows)] : []));
      assumed.replaceChildren(...answer.assumptions.map((sentence) => part("li", {}, `assumed: ${sentence}`)));
    };
    const changed = asking("published", () => values, draw, problem);
    const controls = new Map(inputs.map((input) => [input.key, control(input, values, changed)]));
    const buttons = presets.map((preset) => part("button", { type: "button", onclick: () => {
      for (const [name, value] of Object.entries(preset.set)) controls.get(name).put(value);
      changed();
    } }, preset.label));
    changed();
    return part("section", { "data-part": "published" }, part("h2", {}, "Published settings"), part("div", { class: "controls" }, ...buttons),
      part("div", { class: "inputs" }, ...[...controls.values()].map((one) => one.node)), problem, chart.node, key, rows, assumed);
  };

  const begin = (contents) => {
    document.title = "What a network costs · gossamer";
    const links = contents.file ? "The links are those of the network file, all times one factor." : "Equal links, but for one slow uplink where you choose one.";
    root.replaceChildren(banner, part("h1", {}, "What a network costs"),
      part("p", { class: "verdict" }, `${links} Figures are those of gossamer plan and gossamer utilisation.`),
      planPart(contents.inputs.plan, contents.all), publishedPart(contents.inputs.published, contents.presets));
  };
  if (frozen) begin(frozen);
  else fetch("inputs.json").then((answer) => answer.json()).then(begin);
};

document.addEventListener("DOMContentLoaded", () => {
  const contents = document.getElementById("contents");
  G.calculator(document.getElementById("page"), contents ? JSON.parse(contents.textContent) : null);
});
