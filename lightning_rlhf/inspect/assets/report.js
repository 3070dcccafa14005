"use strict";
(() => {
  const runs = JSON.parse(document.getElementById("data").textContent).runs;
  const fills = [];  // functions that fill the sections with the data of the runs
  const page = document.getElementById("page");
  // Colours that differ in lightness too, for readers who do not distinguish red and green.
  const colours = ["#1f78d1", "#e07b00", "#6a51a3", "#008a7a", "#c2387e", "#7a6a00", "#4b5563", "#a3bffa"];
  const labelled = runs.length > 1;
  const live = document.body.dataset.live === "yes";  // a page of the inspector, which has a viewer of responses
  const main = ["reward/mean", "train/loss", "kl/ref", "policy/entropy", "rollout/response_tokens_mean",
    "env/turns", "env/tool_calls", "grad_norm/actor", "policy/clip_fraction", "value/explained_variance"];

  /** Creates an element; text is never parsed as HTML. */
  function element(tag, options = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(options)) {
      if (name === "text") made.textContent = value;
      else if (name === "class") made.className = value;
      else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  /** The parts of a conversation, with the rewards of turns before the last. */
  const segmentsOf = (segments) => segments.flatMap((part) => [
    element("pre", { class: part.from === "policy" ? "policy" : "environment", text: part.text }),
    ...(part.reward ? [element("div", { class: "muted", text: `reward of this turn: ${short(part.reward)}` })] : []),
  ]);

  function section(id, title) {
    const made = element("section", { id }, element("h2", { text: title }));
    page.append(made);
    return made;
  }

  const short = (value) => value === null || value === undefined ? "–"
    : Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
  const tail = (text) => text.length > 160 ? `… ${text.slice(text.indexOf(" ", text.length - 160) + 1)}` : text;
  const last = (values) => (values || []).filter((value) => value !== null).at(-1);
  const total = (values) => (values || []).reduce((sum, value) => sum + (value || 0), 0);
  const key = (i) => { const mark = element("span", { class: "key" }); mark.style.background = colours[i % colours.length]; return mark; };

  function duration(seconds) {
    if (seconds < 120) return `${seconds.toFixed(0)} s`;
    return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
  }

  // -- header ---------------------------------------------------------------------------------------------------------
  page.append(element("h1", { text: labelled ? `Report of ${runs.length} runs` : `Report of ${runs[0].name}` }));
  const names = element("p", { class: "runs" });
  runs.forEach((run, i) => names.append(element("span", { title: run.path }, key(i), run.path)));
  page.append(names);
  const navigation = element("nav");
  page.append(navigation);
  const summary = element("div");
  page.append(summary);
  const change = (values) => !values ? "" : values.length === 1 ? short(values[0]) : `${short(values[0])} → ${short(last(values))}`;
  const stepsOf = (run) => {
    const steps = last(run.training.step) ?? 0, limit = Number(run.config["trainer.max_steps"]);
    return limit > steps ? `${steps} of ${limit}` : String(steps);
  };
  const summarise = () => {
    const figures = runs.map((run) => ({
      state: run.state,
      "last metrics": run.state === "running" ? `${duration(run.seconds)} ago` : "",
      steps: stepsOf(run),
      "time of the steps": run.training["time/step_s"] ? duration(total(run.training["time/step_s"])) : "",
      "reward/mean": change(run.training["reward/mean"]),
      "train/loss": change(run.training["train/loss"]),
      ...Object.fromEntries(["val/greedy", "val/sampled", "val/loss", "val/pair_accuracy"].map((name) => [name, change(run.validation[name])])),
    }));
    const headings = Object.keys(figures[0]).filter((name) => figures.some((own) => own[name]));
    if (labelled) {
      const table = element("table", {}, element("tr", {}, element("th"), ...headings.map((text) => element("th", { text }))));
      figures.forEach((own, i) => table.append(element("tr", {}, element("td", {}, key(i), runs[i].name), ...headings.map((name) => element("td", { text: own[name] })))));
      summary.replaceChildren(element("div", { class: "scroll" }, table));
    } else {
      summary.replaceChildren(element("div", { class: "figures" }, ...headings.map((name) =>
        element("div", { class: "figure" }, element("b", { text: figures[0][name] }), element("span", { class: "muted", text: name })))));
    }
  };
  fills.push(summarise);

  // -- health ---------------------------------------------------------------------------------------------------------
  const health = element("div");
  section("health", "Health checks").append(health);
  fills.push(() => {
    health.replaceChildren();
    runs.forEach((run, i) => {
      if (labelled) health.append(element("h3", {}, key(i), run.name));
      if (run.error) health.append(element("div", { class: "finding" }, element("b", { text: "The run failed" }), element("pre", { text: run.error })));
      if (!run.findings.length && !run.error) health.append(element("p", { class: "healthy", text: "No check failed." }));
      for (const found of run.findings) {
        const now = last(run.training[found.metric]);
        health.append(element("div", { class: "finding" },
          element("b", { text: `${found.check}, step ${found.step}` }), element("div", { text: `${found.message}.` }),
          element("div", { class: "muted", text: `${found.remedy}.` }),
          ...(now === undefined ? [] : [element("div", { class: "muted", text: `At the last step, ${found.metric} was ${short(now)}.` })])));
      }
    });
  });

  // -- curves ---------------------------------------------------------------------------------------------------------
  const curves = section("curves", "Curves");
  const search = element("input", { type: "search", placeholder: "metric", "aria-label": "search metrics", id: "search" });
  const smoothing = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, id: "smoothing" });
  const axis = element("select", { id: "axis" });
  for (const [value, text] of [["step", "steps"], ["samples", "responses"], ["seconds", "seconds"]]) axis.append(element("option", { value, text }));
  curves.append(element("div", { class: "controls" }, search, element("label", {}, "smoothing", smoothing), element("label", {}, "x-axis", axis)));
  const charts = element("div", { class: "charts" });
  const others = element("div", { class: "groups" });
  curves.append(charts, others);

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
      if (value === null) return null;
      sum = weight * sum + value;
      norm = weight * norm + 1;
      return sum / norm;
    });
  }

  /** The value of a colour in the current theme, for drawings on a canvas. */
  function resolved(name) {
    const probe = element("span");
    probe.style.color = `var(${name})`;
    page.append(probe);
    const value = getComputedStyle(probe).color;
    probe.remove();
    return value;
  }

  function axes() {
    const stroke = resolved("--muted"), grid = { stroke: resolved("--line"), width: 1 };
    return [{ stroke, grid, ticks: grid }, { stroke, grid, ticks: grid, size: 60, values: (_, marks) => marks.map(short) }];
  }

  const drawn = [];
  let intervals = new Set();  // metrics whose bounds have the same name with _low and _high
  /** Limits of an axis: a single value is in its middle. */
  const limits = (pad) => (_, low, high) => low === null ? [0, 1]
    : low < high ? uPlot.rangeNum(low, high, pad, pad > 0) : [low - (Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];

  const showLast = (plot) => plot.setLegend({ idx: plot.data[0].length - 1 });

  function draw(box, data, series, more = {}) {
    const width = Math.max(240, box.clientWidth - 16);
    const scales = { x: { time: false, range: (...given) => given[1] < given[2] ? [given[1], given[2]] : limits(0)(...given) }, y: { range: limits(0.1) } };
    // The legend has the values under the pointer, else the last ones.
    const hooks = { ready: [showLast], setLegend: [(plot) => { if (plot.legend.idx == null) showLast(plot); }] };
    const plot = new uPlot({ width, height: 190, hooks, scales, axes: axes(), cursor: { sync: { key: "page" } }, series, ...more }, data, box);
    drawn.push(plot);
    box.plot = plot;
  }

  function chart(metric, parent) {
    const table = metric.startsWith("val/") ? "validation" : "training";
    const present = runs.map((run, i) => [run, i]).filter(([run]) => run[table][metric]);
    const names = intervals.has(metric) ? [metric, `${metric}_low`, `${metric}_high`] : [metric];
    const tables = present.map(([run]) => [positions(run, table), ...names.map((name) => smooth(run[table][name] ?? run[table][metric].map(() => null), Number(smoothing.value)))]);
    const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
    const title = axis.options[axis.selectedIndex].text;
    const box = element("div", { class: "chart", "data-metric": metric }, element("h3", { text: metric }));
    parent.append(box);
    const points = { show: data[0].length < 40, size: 5 };
    const shown = (_, number) => number === null || number === undefined ? "" : short(number), value = shown;
    const series = present.flatMap(([run, i]) => {
      const label = labelled ? run.name : metric.split("/").at(-1), stroke = colours[i % colours.length];
      const bound = (name) => ({ label: name, stroke: "transparent", spanGaps: true, points: { show: false }, value });
      return [{ label, stroke, width: 1.5, spanGaps: true, points, value }, ...(names.length > 1 ? [bound("95 % from"), bound("to")] : [])];
    });
    const bands = names.length > 1 ? present.map(([, i], n) => ({ series: [3 * n + 3, 3 * n + 2], fill: `${colours[i % colours.length]}33` })) : [];
    draw(box, data, [{ label: title, value: shown }, ...series], { bands });
  }

  function redraw() {
    const names = new Set(runs.flatMap((run) => [...Object.keys(run.validation), ...Object.keys(run.training)]));
    intervals = new Set([...names].filter((name) => names.has(`${name}_low`) && names.has(`${name}_high`)));
    const all = [...names].filter((name) => name !== "step" && !(/_(low|high)$/.test(name) && intervals.has(name.replace(/_(low|high)$/, ""))));
    const validations = all.filter((name) => name.startsWith("val/"));
    const featured = [...validations.filter((name) => /val\/(greedy|sampled|loss|pair_accuracy)$/.test(name)), ...main.filter((name) => all.includes(name))];
    const rest = all.filter((name) => !featured.includes(name)).sort();
    for (const plot of drawn.splice(0)) plot.destroy();
    charts.replaceChildren();
    const open = new Set([...others.querySelectorAll("details[open]")].map((group) => group.dataset.group));
    others.replaceChildren();
    const wanted = search.value.trim().toLowerCase();
    if (wanted) {
      for (const name of all.filter((metric) => metric.toLowerCase().includes(wanted)).slice(0, 60)) chart(name, charts);
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
    }
    extras.forEach((draws) => draws());
  }

  // -- rewards and groups ---------------------------------------------------------------------------------------------
  const extras = [];
  if (live || runs.some((run) => run.rewards.length)) {
    const rewards = section("rewards", "Rewards of responses");
    rewards.append(element("p", { class: "muted", text: "Quantiles of the logged responses of each step: least and largest, 10 to 90 %, 25 to 75 %, median." }));
    const grid = element("div", { class: "charts" });
    rewards.append(grid);
    extras.push(() => {
      grid.replaceChildren();
      runs.forEach((run, i) => {
        const rows = run.rewards.filter((row) => row.quantiles.length);
        if (!rows.length) return;
        const box = element("div", { class: "chart", "data-metric": "reward quantiles" }, element("h3", {}, key(i), labelled ? run.name : "reward"));
        grid.append(box);
        const stroke = colours[i % colours.length];
        const line = (label, width) => ({ label, stroke: width ? stroke : "transparent", width, points: { show: false }, value: (_, value) => short(value) });
        draw(box, [rows.map((row) => row.step), ...[0, 1, 2, 3, 4, 5, 6].map((q) => rows.map((row) => row.quantiles[q]))],
          [{ label: "step" }, line("least", 0), line("10 %", 0), line("25 %", 0), line("median", 2), line("75 %", 0), line("90 %", 0), line("largest", 0)],
          { bands: [{ series: [7, 1], fill: stroke + "22" }, { series: [6, 2], fill: stroke + "33" }, { series: [5, 3], fill: stroke + "44" }] });
      });
    });
    const groups = element("div");
    rewards.append(groups);
    fills.push(() => {
      groups.replaceChildren();
      for (const run of runs) {
        if (!run.groups.length || run.groups.every((group) => group.rewards.length < 2)) continue;
        const equal = run.groups.filter((group) => group.rewards.at(-1) - group.rewards[0] < 1e-9);
        groups.append(element("h3", { text: `${labelled ? `${run.name}: ` : ""}prompts of the last step` }));
        groups.append(element("p", { text: `${equal.length} of ${run.groups.length} logged prompts have the same reward for all responses.` }));
        const table = element("table", {}, element("tr", {}, ...["mean", "least", "largest", "prompt"].map((text, i) => element("th", { text, class: i < 3 ? "number" : "" }))));
        const shown = run.groups.length > 8 ? [...run.groups.slice(0, 4), ...run.groups.slice(-4)] : run.groups;
        for (const group of shown) {
          table.append(element("tr", {}, ...[group.mean, group.rewards[0], group.rewards.at(-1)].map((value) => element("td", { class: "number", text: short(value) })), element("td", { text: tail(group.prompt) })));
        }
        groups.append(element("div", { class: "scroll" }, table));
      }
    });
  }

  // -- time -----------------------------------------------------------------------------------------------------------
  const parts = { "time/generate_s": "generate", "time/update_s": "update", "time/evaluate_s": "evaluate the models", "time/reward_s": "compute rewards", "time/sync_s": "sync weights", "time/check_s": "compare engine and actor" };
  const time = element("div");
  section("time", "Time").append(time);
  fills.push(() => {
    time.replaceChildren();
    for (const run of runs) {
      const whole = total(run.training["time/step_s"]);
      if (!whole) continue;
      if (labelled) time.append(element("h3", { text: run.name }));
      const table = element("table");
      const seconds = Object.entries(parts).map(([name, text]) => [text, total(run.training[name])]);
      seconds.push(["other", whole - seconds.reduce((sum, [, value]) => sum + value, 0)]);
      for (const [text, value] of seconds.filter(([, own]) => own > 0.0005 * whole)) {
        const bar = element("span", { class: "bar" });
        bar.style.width = `${(200 * value / whole).toFixed(0)}px`;
        table.append(element("tr", {}, element("td", { text }), element("td", { class: "number", text: duration(value) }), element("td", { class: "number", text: `${(100 * value / whole).toFixed(0)} %` }), element("td", {}, bar)));
      }
      time.append(element("div", { class: "scroll" }, table));
    }
  });

  // -- samples --------------------------------------------------------------------------------------------------------
  if (!live && runs.some((run) => run.samples.length)) {
    const samples = section("responses", "Responses");
    for (const run of runs) {
      for (const { step, rows } of run.samples) {
        const grid = element("div", { class: "samples" });
        for (const row of rows) {
          const rewards = Object.entries(row.rewards).map(([name, value]) => `${name} ${short(value)}`).join(", ");
          const card = element("div", { class: "sample" }, element("b", { text: `reward ${short(row.reward)}` }), ` ${rewards}${row.truncated ? " (cut at the limit)" : ""}`,
            element("pre", { class: "environment", text: row.prompt }));
          if (row.segments.length) card.append(...segmentsOf(row.segments));
          else card.append(element("pre", { class: "policy", text: row.response }));
          if (row.ground_truth) card.append(element("div", { class: "muted", text: "correct answer:" }), element("pre", { text: row.ground_truth }));
          grid.append(card);
        }
        samples.append(element("details", {}, element("summary", { text: `${labelled ? `${run.name}: ` : ""}step ${step}, best to worst` }), grid));
      }
    }
    const newest = [...samples.querySelectorAll("details")].at(-1);
    if (newest) newest.open = true;
  }

  // -- configuration --------------------------------------------------------------------------------------------------
  const configuration = section("configuration", "Configuration and environment");
  function table(title, rows, open) {
    const made = element("table", { class: "config" });
    if (labelled) made.append(element("tr", {}, element("th", { text: "" }), ...runs.map((run) => element("th", { text: run.name }))));
    for (const [name, values] of rows) {
      made.append(element("tr", { class: new Set(values).size > 1 ? "differs" : "" }, element("td", { text: name }), ...values.map((text) => element("td", { text }))));
    }
    const details = element("details", {}, element("summary", { text: `${title} (${rows.length})` }), element("div", { class: "scroll" }, made));
    if (open) details.open = true;
    configuration.append(details);
  }
  const options = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  const settings = options.map((name) => [name, runs.map((run) => run.config[name] ?? "")]);
  const differing = settings.filter(([, values]) => new Set(values).size > 1);
  if (labelled) table("differences", differing, true);
  table("all settings", settings, false);
  const facts = runs.map((run) => {
    const { packages = {}, command = [], cuda_devices = [], ...plain } = run.environment;
    return { command: command.join(" "), GPUs: cuda_devices.map((device) => typeof device === "string" ? device : JSON.stringify(device)).join(", ") || "none",
      ...Object.fromEntries(Object.entries(plain).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)])), ...packages };
  });
  const known = [...new Set(facts.flatMap((own) => Object.keys(own)))];
  table("environment", known.map((name) => [name, facts.map((own) => own[name] ?? "")]), false);

  for (const made of page.querySelectorAll("section")) navigation.append(element("a", { href: `#${made.id}`, text: made.querySelector("h2").textContent }));

  let waiting;
  const later = () => { clearTimeout(waiting); waiting = setTimeout(redraw, 120); };
  search.addEventListener("input", later);
  smoothing.addEventListener("input", later);
  axis.addEventListener("change", redraw);
  new ResizeObserver(later).observe(page);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  function fill() {
    fills.forEach((own) => own());
    redraw();
  }

  fill();
  window.report = {
    runs, element, key, short, segmentsOf, section, colours, labelled,
    /** Shows new data of the same runs; returns whether a run has changed. */
    update(fresh) {
      const changed = (run, i) => ["state", "training", "validation"].some((name) => JSON.stringify(run[name]) !== JSON.stringify(runs[i][name]));
      const any = fresh.some(changed);
      fresh.forEach((run, i) => Object.assign(runs[i], run));
      if (any) fill(); else summarise();
      return any;
    },
  };
  document.documentElement.dataset.ready = "yes";
})();
