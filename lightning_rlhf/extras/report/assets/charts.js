"use strict";
/** Curves of the metrics, and quantiles of rewards. */
(() => {
  const { runs, labelled, element, section, button, choices, own, isMissing, short, known, colour, key, page, meaningOf, kept } = window.report;
  const FEATURED = ["reward/mean", "train/loss", "loss/distillation", "kl/ref", "policy/entropy", "rollout/response_tokens_mean",
    "env/turns", "env/tool_calls", "grad_norm/actor", "policy/clip_fraction", "value/explained_variance"];
  const FEATURED_VALIDATION = /^val\/(fraction_correct_greedy|fraction_correct_sampled|loss|pair_accuracy|divergence)$/;
  const FEATURED_SOURCE = /^mixture\/[^/]+\/(reward|loss)$/;
  const WHOLE = Array.from({ length: 30 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));  // distances of the marks of steps
  const FEW_POINTS = 40;  // points are drawn up to this number
  const drawn = [];

  // -- controls -------------------------------------------------------------------------------------------------------
  let search, smoothing, axis, log, reset, charts, others, quantiles;

  function addCurves() {
    const curves = section("curves", "Curves");
    search = element("input", { type: "search", placeholder: "metric", "aria-label": "search metrics", id: "search" });
    smoothing = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, id: "smoothing" });
    axis = choices("axis", [["step", "steps"], ["samples", "responses"], ["seconds", "seconds"]]);
    log = element("input", { type: "checkbox", id: "log" });
    [search, smoothing, axis, log].forEach(kept);
    reset = button("reset zoom", resetZoom, { id: "reset", hidden: "" });
    curves.append(
      element("div", { class: "controls" }, search, element("label", {}, "smoothing", smoothing), element("label", {}, "x-axis", axis),
        element("label", {}, log, "log scale"), reset),
      element("p", { class: "muted hint", text: "Drag over a chart to zoom; a double-click shows it whole again." }));
    charts = element("div", { class: "charts" });
    others = element("div", { class: "groups" });
    curves.append(charts, others);
    let waiting;
    const later = () => { clearTimeout(waiting); waiting = setTimeout(redraw, 120); };
    search.addEventListener("input", later);
    smoothing.addEventListener("input", later);
    for (const input of [axis, log]) input.addEventListener("change", redraw);
    new ResizeObserver(later).observe(page);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  function resetZoom() {
    for (const plot of drawn) plot.setData(plot.data);
    reset.hidden = true;
  }

  // -- data -----------------------------------------------------------------------------------------------------------
  function cumulative(values) { let sum = 0; return values.map((value) => sum += value || 0); }

  /** x-values of the rows of a table, "training" or "validation". */
  function positions(run, table) {
    const steps = run[table].step;
    if (axis.value === "step") return steps;
    const training = run.training;
    let amounts = training["time/step_s"];
    if (axis.value === "samples") {
      const tokens = training["rollout/response_tokens"], mean = training["rollout/response_tokens_mean"];
      amounts = tokens && mean ? tokens.map((value, i) => mean[i] ? Math.round(value / mean[i]) : 0) : null;
    }
    if (!amounts) return steps;
    const sums = cumulative(amounts);
    const at = new Map(training.step.map((step, i) => [step, sums[i]]));
    return steps.map((step) => at.get(step) ?? 0);
  }

  /** Exponential moving average without bias towards the start. */
  function smooth(values, weight) {
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (isMissing(value)) return null;
      sum = weight * sum + value;
      norm = weight * norm + 1;
      return sum / norm;
    });
  }

  const tableOf = (run, metric) => ["training", "validation"].find((table) => known(own(run[table], metric)).length);

  // -- colours --------------------------------------------------------------------------------------------------------
  /** The value of a colour in the current theme, for drawings on a canvas. */
  function resolved(value) {
    const probe = element("span");
    probe.style.color = value;
    page.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  const faded = (rgb, alpha) => rgb.replace("rgb(", "rgba(").replace(")", `, ${alpha})`);

  // -- drawing --------------------------------------------------------------------------------------------------------
  let intervals = new Set();  // metrics whose bounds have the same name with _low and _high

  /** Limits of a linear axis: a constant is in the middle between 0 and its double; 0 is near the lower end. */
  const limits = (_, low, high) => low === null ? [0, 1]
    : low < high ? uPlot.rangeNum(low, high, 0.1, true) : low === 0 ? [-0.1, 1] : [Math.min(0, 2 * low), Math.max(0, 2 * low)];
  const limitsOfSteps = (plot, low, high) => {
    const [steps] = plot.data;
    const only = steps[0] ?? 1, around = only / 2 || 1;
    return low < high && steps.length > 1 ? [low, high] : [only - around, only + around];
  };
  const limitsOfLog = (_, low, high) => low === null ? [0.1, 1] : low < high ? [low / 1.1, high * 1.1] : [low / 2, high * 2];

  /** Marks of a logarithmic axis: 1, 2 and 5 times powers of 10, or equal distances where these are fewer than three. */
  function marksOfLog(_, __, low, high) {
    const marks = [];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) marks.push(...[1, 2, 5].map((part) => part * 10 ** power));
    const inside = marks.filter((mark) => low <= mark && mark <= high);
    if (inside.length > 8) return inside.filter((mark) => Number.isInteger(Number(Math.log10(mark).toFixed(9))));
    if (inside.length > 2) return inside;
    const unit = 10 ** Math.floor(Math.log10((high - low) / 4));
    const step = [1, 2, 5, 10].map((part) => part * unit).find((distance) => (high - low) / distance <= 5), first = Math.ceil(low / step);
    return Array.from({ length: Math.floor(high / step) - first + 1 }, (___, i) => (first + i) * step);
  }

  /** The legend has the values under the pointer, else the last one of each curve. */
  function showLast(plot) {
    plot.setLegend({ idxs: plot.data.map((values) => values.findLastIndex((value) => !isMissing(value))) });
  }

  function draw(box, data, series, more = {}, isLog = false) {
    const width = Math.max(240, box.clientWidth - 16);
    const stroke = resolved("var(--muted)"), grid = { stroke: resolved("var(--line)"), width: 1 };
    const values = (_, marks) => marks.map(short), vertical = { stroke, grid, ticks: grid, size: 60, values };
    if (isLog) Object.assign(vertical, { splits: marksOfLog, filter: (_, marks) => marks });
    const hooks = {
      ready: [showLast],
      setLegend: [(plot) => { if (plot.legend.idx == null) showLast(plot); }],
      setSelect: [(plot) => { if (plot.select.width > 0) reset.hidden = false; }],
    };
    const plot = new uPlot({
      width, height: 190, hooks, series,
      scales: { x: { time: false, range: limitsOfSteps }, y: isLog ? { distr: 3, range: limitsOfLog } : { range: limits } },
      axes: [{ stroke, grid, ticks: grid, values, size: 34, incrs: WHOLE }, vertical],
      cursor: { sync: { key: "page" }, hover: { skip: [null, undefined], prox: 30 } },
      ...more,
    }, data, box);
    drawn.push(plot);
    box.plot = plot;
    const canvas = box.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", box.getAttribute("aria-label"));
  }

  function titleOf(metric) {
    const title = [element("h3", { text: metric })], definition = meaningOf(metric);
    if (definition) {
      const isNamed = definition.meaning.startsWith(definition.unit);  // "fraction of tokens ..." has its unit
      const text = isNamed ? definition.meaning : [definition.unit, definition.meaning].filter(Boolean).join(": ");
      title.push(element("p", { class: "muted definition", text }));
    }
    return title;
  }

  /** The first and last value of a curve, for readers who do not see it. */
  function inWords(name, steps, values) {
    const [first, last] = [values.findIndex((value) => !isMissing(value)), values.findLastIndex((value) => !isMissing(value))];
    return `${name}: ${short(values[first])} at step ${steps[first]}, ${short(values[last])} at step ${steps[last]}`;
  }

  function chart(metric, parent) {
    const present = runs.map((run, i) => ({ run, i, table: tableOf(run, metric) })).filter(({ table }) => table);
    if (!present.length) return;
    const weight = Number(smoothing.value), tables = [], series = [], bands = [];
    for (const { run, i, table } of present) {
      const raw = run[table][metric], stroke = resolved(colour(i)), columns = [positions(run, table)];
      const label = `${labelled ? run.name : metric.split("/").at(-1)}${weight ? " (smoothed)" : ""}`;
      const points = { show: raw.length < FEW_POINTS, size: 5 };
      // Of a curve that ends before others, the legend says where its value is.
      const place = (plot, at) => plot.cursor.left < 0 && at !== plot.data[0].length - 1 ? ` at ${short(plot.data[0][at])}` : "";
      const bounds = (plot, column, at) => !intervals.has(metric) ? ""
        : ` (95 %: ${short(plot.data[column + 1][at])} to ${short(plot.data[column + 2][at])})`;
      const value = (plot, number, column, at) => isMissing(number) ? "–" : `${short(number)}${bounds(plot, column, at)}${place(plot, at)}`;
      if (weight) {
        columns.push(raw);
        series.push({ class: "unlisted", stroke: faded(stroke, 0.3), width: 1, spanGaps: true, points: { show: false } });
      }
      columns.push(smooth(raw, weight));
      series.push({ label, stroke, width: 1.5, spanGaps: true, points, value });
      if (intervals.has(metric)) {
        columns.push(...["low", "high"].map((end) => smooth(own(run[table], `${metric}_${end}`) ?? raw.map(() => null), weight)));
        for (let end = 0; end < 2; end++) series.push({ class: "unlisted", stroke: "transparent", spanGaps: true, points: { show: false } });
        bands.push({ series: [series.length, series.length - 1], fill: faded(stroke, 0.2) });
      }
      tables.push(columns);
    }
    const words = present.map(({ run, table }) => inWords(labelled ? run.name : metric, run[table].step, run[table][metric]));
    const label = `${labelled ? `${metric}: ` : ""}${words.join("; ")}`;
    const box = element("div", { class: "chart", "data-metric": metric, role: "group", "aria-label": label }, ...titleOf(metric));
    const isLog = log.checked && tables.every(([, ...columns]) => columns.every((values) => known(values).every((number) => number > 0)));
    if (log.checked && !isLog) box.append(element("p", { class: "muted definition", text: "linear: it has values that are not above 0" }));
    parent.append(box);
    const shown = (_, number) => isMissing(number) ? "" : short(number);
    const joined = tables.length === 1 ? tables[0] : uPlot.join(tables);
    draw(box, joined, [{ label: axis.options[axis.selectedIndex].text, value: shown }, ...series], { bands }, isLog);
  }

  function redraw() {
    const names = new Set(runs.flatMap((run) => [...Object.keys(run.validation), ...Object.keys(run.training)]));
    intervals = new Set([...names].filter((name) => names.has(`${name}_low`) && names.has(`${name}_high`)));
    const isBound = (name) => /_(low|high)$/.test(name) && intervals.has(name.replace(/_(low|high)$/, ""));
    const all = [...names].filter((name) => name !== "step" && !isBound(name));
    const featured = [...all.filter((name) => FEATURED_VALIDATION.test(name)), ...FEATURED.filter((name) => all.includes(name)),
      ...all.filter((name) => FEATURED_SOURCE.test(name)).sort()];
    const rest = all.filter((name) => !featured.includes(name)).sort();
    for (const plot of drawn.splice(0)) plot.destroy();
    reset.hidden = true;
    charts.replaceChildren();
    const open = new Set([...others.querySelectorAll("details[open]")].map((group) => group.dataset.group));
    others.replaceChildren();
    const wanted = search.value.trim().toLowerCase();
    if (wanted) {
      for (const name of all.filter((metric) => metric.toLowerCase().includes(wanted)).slice(0, 60)) chart(name, charts);
      if (!charts.hasChildNodes()) charts.append(element("p", { class: "muted", text: "No metric has this in its name." }));
    } else {
      for (const name of featured) chart(name, charts);
      for (const group of new Set(rest.map((name) => name.split("/")[0]))) {
        const metrics = rest.filter((name) => name.split("/")[0] === group);
        const grid = element("div", { class: "charts" });
        const details = element("details", { "data-group": group }, element("summary", { text: `${group} (${metrics.length})` }), grid);
        details.addEventListener("toggle", () => { if (details.open && !grid.hasChildNodes()) metrics.forEach((name) => chart(name, grid)); });
        others.append(details);
        if (open.has(group)) details.open = true;
      }
      if (!all.length) charts.append(element("p", { class: "muted", text: "No metrics were written yet." }));
    }
    if (quantiles) drawQuantiles();
  }

  // -- rewards of responses -------------------------------------------------------------------------------------------
  function drawQuantiles() {
    quantiles.replaceChildren();
    runs.forEach((run, i) => {
      const rows = run.rewards.filter((row) => row.quantiles.length);
      if (!rows.length) return;
      const steps = rows.map((row) => row.step), stroke = resolved(colour(i)), points = { show: rows.length < FEW_POINTS, size: 5 };
      const columns = [0, 1, 2, 3, 4, 5, 6].map((number) => rows.map((row) => row.quantiles[number]));
      const words = inWords(`median reward${labelled ? ` of ${run.name}` : ""}`, steps, columns[3]);
      const box = element("div", { class: "chart", "data-metric": "reward quantiles", role: "group", "aria-label": words },
        element("h3", {}, key(i), labelled ? run.name : "reward"));
      quantiles.append(box);
      const value = (_, number) => short(number), hasPoints = (name) => name === "median" || rows.length === 1;
      const line = (label) => ({
        label, value, stroke: label === "median" ? stroke : "transparent", width: label === "median" ? 2 : 0,
        points: hasPoints(label) ? { ...points, stroke } : { show: false },
      });
      draw(box, [steps, ...columns],
        [{ label: "step" }, ...["least", "10 %", "25 %", "median", "75 %", "90 %", "largest"].map(line)],
        { bands: [[7, 1, 0.13], [6, 2, 0.2], [5, 3, 0.27]].map(([high, low, alpha]) => ({ series: [high, low], fill: faded(stroke, alpha) })) });
    });
    if (!quantiles.hasChildNodes()) quantiles.append(element("p", { class: "muted", text: "No rewards of responses were written yet." }));
  }

  function addQuantiles(parent) {
    quantiles = element("div", { class: "charts" });
    parent.append(quantiles);
  }

  Object.assign(window.report, { addCurves, addQuantiles, redraw });
})();
