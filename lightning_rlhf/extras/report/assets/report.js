"use strict";
/** The parts of the page of one or more runs, from top to bottom. */
(() => {
  const { runs, labelled, live, page, element, section, own, short, counted, known, total, duration, age, stateOf, key, colour, ownParts, marked, box, card,
    expandButton, find, NO_RESPONSES, addCurves, addQuantiles, addPrompts, redraw, ready } = window.report;
  const MOST_REWARDS = 6;  // metrics of rewards among the figures
  const fills = [];  // functions that fill the sections with the data of the runs

  const tail = (text) => text.length > 160 ? `… ${text.slice(text.indexOf(" ", text.length - 160) + 1)}` : text;
  const change = (values) => {
    const present = known(values);
    return present.length > 1 ? `${short(present[0])} → ${short(present.at(-1))}` : present.map(short).join("");
  };

  /** The last change of a metric since the first validation, with its 95 % interval; empty where it is not logged. */
  const changeOfPrompts = ({ validation }, name) => {
    const signed = (value) => `${value > 0 ? "+" : ""}${short(value)}`;
    const [mean, low, high] = ["", "_low", "_high"].map((end) => known(own(validation, `${name}_change${end}`)).at(-1));
    return low === undefined ? [] : [element("div", { class: "muted", text: `change ${signed(mean)} (${signed(low)} to ${signed(high)})` })];
  };

  // -- header ---------------------------------------------------------------------------------------------------------
  page.append(element("h1", { text: labelled ? `Report of ${runs.length} runs` : `Report of ${runs[0].name}` }));
  page.append(element("p", { class: "runs" }, ...runs.map((run, i) => element("span", { title: run.path }, key(i), run.path))));
  const navigation = element("nav"), summary = element("div");
  page.append(navigation, summary);
  // In the inspector of a folder, the address ends with run/3/ or compare/1,2/ after that of the table.
  if (live && /\/(run|compare)\/[^/]+\/$/.test(location.pathname)) navigation.append(element("a", { href: "../../", text: "All runs" }));

  function stepsOf(run) {
    const steps = run.training.step.at(-1) ?? 0, limit = Number(run.config["trainer.max_steps"]);
    return limit > steps ? `${steps} of ${limit}` : String(steps);
  }

  /** Names of the held-out metrics that are figures: correct responses, losses, and means of rewards with other values. */
  function validationsOf({ validation }) {
    const main = ["val/fraction_correct_greedy", "val/fraction_correct_sampled", "val/loss", "val/pair_accuracy"];
    const isRepeated = (name) => change(validation[name]) === change(own(validation, name.replace(/[^/]+_/, "fraction_correct_")));
    const rewards = Object.keys(validation).filter((name) => /^val\/[^/]+_(greedy|sampled)$/.test(name) && !main.includes(name) && !isRepeated(name));
    return [...main, ...rewards.slice(0, MOST_REWARDS)];
  }

  /** A table of the correct responses to the prompts of each source, before and after; nothing with fewer than two sources. */
  function sourcesOf(run) {
    const kinds = ["greedy", "sampled"], nameOf = (source, kind) => `val/${source}/fraction_correct_${kind}`;
    const names = Object.keys(run.validation).map((name) => /^val\/([^/]+)\/fraction_correct_(greedy|sampled)$/.exec(name)).filter(Boolean);
    const sources = [...new Set(names.map((match) => match[1]))].sort();
    if (sources.length < 2) return [];
    const cell = (source, kind) => element("td", { class: "nowrap", text: change(own(run.validation, nameOf(source, kind))) }, ...changeOfPrompts(run, nameOf(source, kind)));
    return [element("div", { class: "scroll" }, element("table", { class: "sources" },
      element("tr", {}, ...["source", ...kinds.map((kind) => `fraction correct, ${kind}`)].map((text) => element("th", { text }))),
      ...sources.map((source) => element("tr", {}, element("td", { class: "name", text: source }), ...kinds.map((kind) => cell(source, kind))))))];
  }

  function summarise() {
    const values = [...new Set(runs.flatMap(validationsOf))];
    const figures = runs.map((run) => ({
      state: stateOf(run),
      "last metrics": run.state === "running" ? `${duration(age(run.modified))} ago` : "",
      steps: stepsOf(run),
      "time of the steps": run.training["time/step_s"] ? duration(total(run.training["time/step_s"])) : "",
      "reward/mean": change(run.training["reward/mean"]),
      "train/loss": change(run.training["train/loss"]),
      ...Object.fromEntries(values.map((name) => [name, change(run.validation[name])])),
    }));
    const headings = Object.keys(figures[0]).filter((name) => figures.some((run) => run[name]));
    const kind = (run, name) => name === "state" && run.state === "failed" ? "failed" : "";
    if (labelled) {
      const table = element("table", {}, element("tr", {}, element("th"), ...headings.map((text) => element("th", { text }))));
      figures.forEach((run, i) => table.append(element("tr", {}, element("td", { class: "name" }, key(i), runs[i].name),
        ...headings.map((name) => element("td", { text: run[name], class: `nowrap ${kind(run, name)}` })))));
      summary.replaceChildren(element("div", { class: "scroll" }, table));
    } else {
      const [run] = figures;
      summary.replaceChildren(element("div", { class: "figures" }, ...headings.map((name) => element("div", { class: `figure ${kind(run, name)}` },
        element("b", { text: run[name] }), element("span", { class: "muted", text: name }), ...changeOfPrompts(runs[0], name)))), ...sourcesOf(runs[0]));
    }
  }
  fills.push(summarise);

  // -- health ---------------------------------------------------------------------------------------------------------
  /** Which checks ran, and why the others did not. */
  function checksOf(run) {
    const checks = run.checks ?? [];
    if (!checks.length) return [];
    const count = (state) => checks.filter((check) => check.state === state).length, parts = [];
    const [failed, recovered, without, early, other] = ["failed", "recovered", "no data", "too early", "not applicable"].map(count);
    if (without) parts.push(`${without} had no data`);
    if (early) parts.push(`${early} ${early === 1 ? "needs" : "need"} more steps`);
    if (other) parts.push(`${other} ${other === 1 ? "does" : "do"} not apply to this run`);
    if (recovered) parts.unshift(`${recovered} recovered`);
    const ran = `${counted(failed + recovered + count("passed"), "check")} ran${failed ? `, ${failed} of them failed` : ""}`;
    const rows = checks.map((check) => element("tr", {}, ...["name", "state", "note"].map((name) =>
      element("td", { text: String(check[name] ?? ""), class: check[name] === "failed" ? "failed" : "" }))));
    return [element("details", { class: "checks" }, element("summary", { text: [ran, ...parts].join(", ") }),
      element("div", { class: "scroll" }, element("table", {}, ...rows)))];
  }

  /** The responses that show a finding, folded. */
  function responsesOf(found, run) {
    if (!found.responses?.length) return [];
    const title = `${counted(found.responses.length, "response")} of step ${found.step}`;
    return [element("details", {}, element("summary", { text: title }),
      element("div", { class: "samples" }, ...found.responses.map((row) => card(row, run))))];
  }

  const health = element("div");
  section("health", "Health checks").append(health);
  fills.push(() => {
    const open = [...health.querySelectorAll("details")].map((details) => details.open);
    health.replaceChildren();
    runs.forEach((run, i) => {
      if (labelled) health.append(element("h3", {}, key(i), run.name));
      if (run.error) health.append(element("div", { class: `finding ${run.state}` },
        element("b", { text: run.state === "interrupted" ? "The run was interrupted" : "The run failed" }), box(run.error)));
      const ran = (run.checks ?? []).some((check) => check.state === "passed");
      if (!run.findings.length && !run.error) health.append(element("p", { class: "healthy", text: ran ? "No check failed." : "No check has run yet." }));
      for (const found of run.findings) {
        const now = known(own(run.training, found.metric)).at(-1);
        health.append(element("div", { class: "finding" },
          element("b", { text: `${found.check}, step ${found.step}` }), element("div", { text: `${found.message}.` }),
          element("div", { class: "muted", text: `${found.remedy}.` }),
          ...(now === undefined ? [] : [element("div", { class: "muted", text: `At the last step, ${found.metric} was ${short(now)}.` })]),
          ...responsesOf(found, i)));
      }
      health.append(...checksOf(run));
    });
    [...health.querySelectorAll("details")].forEach((details, i) => { details.open = Boolean(open[i]); });
  });

  // -- curves, rewards and groups -------------------------------------------------------------------------------------
  addCurves();
  if (live || runs.some((run) => run.rewards.length)) {
    const rewards = section("rewards", "Rewards of responses");
    const explanation = "Quantiles of the logged responses of each step: least and largest, 10 to 90 %, 25 to 75 %, median.";
    rewards.append(element("p", { class: "muted", text: explanation }));
    addQuantiles(rewards);
    const groups = element("div");
    rewards.append(groups);
    fills.push(() => groups.replaceChildren(...runs.flatMap(groupsOf)));
  }

  /** The best and worst prompts of the last step. */
  function groupsOf(run) {
    if (!run.groups.length || run.groups.every((group) => group.rewards.length < 2)) return [];
    const equal = run.groups.filter((group) => group.rewards.at(-1) - group.rewards[0] < 1e-9);
    const headings = ["mean", "least", "largest", "prompt"].map((text, i) => element("th", { text, class: i < 3 ? "number" : "" }));
    const table = element("table", {}, element("tr", {}, ...headings));
    const shown = run.groups.length > 8 ? [...run.groups.slice(0, 4), ...run.groups.slice(-4)] : run.groups;
    const prompts = ownParts(shown.map((group) => group.prompt));
    for (const [i, group] of shown.entries()) {
      const numbers = [group.mean, group.rewards[0], group.rewards.at(-1)].map((value) => element("td", { class: "number", text: short(value) }));
      table.append(element("tr", {}, ...numbers, element("td", { dir: "auto", class: "text" }, ...marked(tail(prompts[i])))));
    }
    return [element("h3", { text: `${labelled ? `${run.name}: ` : ""}Prompts of the last step` }),
      element("p", { text: `${equal.length} of ${run.groups.length} logged prompts have the same reward for all responses.` }),
      element("div", { class: "scroll" }, table)];
  }

  // -- time -----------------------------------------------------------------------------------------------------------
  const parts = {
    "time/generate_s": "generate", "time/update_s": "update", "time/evaluate_s": "evaluate the models",
    "time/reward_s": "compute rewards", "time/sync_s": "sync weights", "time/check_s": "compare engine and actor",
  };
  const time = element("div");
  section("time", "Time").append(time);
  fills.push(() => {
    time.replaceChildren();
    runs.forEach((run, i) => {
      const whole = total(run.training["time/step_s"]);
      if (!whole) return;
      if (labelled) time.append(element("h3", {}, key(i), run.name));
      const table = element("table");
      const seconds = Object.entries(parts).map(([name, text]) => [text, total(run.training[name])]);
      const named = seconds.reduce((sum, [, value]) => sum + value, 0);
      seconds.push([named ? "other" : "all of the steps", whole - named]);
      for (const [text, value] of seconds.filter(([, amount]) => amount > 0.0005 * whole)) {
        const bar = element("span", { class: "bar" });
        bar.style.width = `${(100 * value / whole).toFixed(1)}%`;
        bar.style.background = colour(i);
        table.append(element("tr", {}, element("td", { text }), element("td", { class: "number", text: duration(value) }),
          element("td", { class: "number", text: `${(100 * value / whole).toFixed(0)} %` }), element("td", { class: "bars" }, bar)));
      }
      time.append(element("div", { class: "scroll" }, table));
    });
    if (!time.hasChildNodes()) time.append(element("p", { class: "muted", text: "The metrics have no times of the steps." }));
  });

  addPrompts();

  // -- samples --------------------------------------------------------------------------------------------------------
  if (!live) {
    const samples = section("responses", "Responses");
    if (runs.some((run) => run.samples.length)) addSamples(samples);
    else samples.append(element("p", { class: "muted", text: NO_RESPONSES }));
  }

  function addSamples(samples) {
    const text = element("input", { type: "search", placeholder: "text", "aria-label": "search in the responses", id: "text" });
    const note = element("span", { class: "muted", role: "status" });
    samples.append(element("div", { class: "controls" }, text, expandButton(samples), note));
    for (const [number, run] of runs.entries()) {
      for (const { step, rows } of run.samples) {
        const grid = element("div", { class: "samples" }, ...rows.map((row) => card(row, number)));
        samples.append(element("details", {}, element("summary", { text: `${labelled ? `${run.name}: ` : ""}step ${step}, best to worst` }), grid));
      }
    }
    const newest = [...samples.children].filter((child) => child.matches("details")).at(-1);
    newest.open = true;
    text.addEventListener("input", () => {
      const places = find(samples, text.value);
      note.textContent = text.value.trim() ? counted(places, "place") : "";
    });
  }

  // -- configuration --------------------------------------------------------------------------------------------------
  const configuration = section("configuration", "Configuration and environment");
  function table(title, rows, open) {
    const made = element("table", { class: "config" });
    if (labelled) made.append(element("tr", {}, element("th", { text: "" }), ...runs.map((run) => element("th", { text: run.name }))));
    for (const [name, values] of rows) {
      made.append(element("tr", { class: new Set(values).size > 1 ? "differs" : "" }, element("td", { text: name }),
        ...values.map((text) => element("td", { dir: "auto" }, ...marked(String(text))))));
    }
    const details = element("details", {}, element("summary", { text: `${title} (${rows.length})` }), element("div", { class: "scroll" }, made));
    if (open) details.open = true;
    configuration.append(details);
  }
  const options = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  const settings = options.map((name) => [name, runs.map((run) => own(run.config, name) ?? "")]);
  // A run from Python has no configuration, whose absence is no difference.
  const configured = runs.map((run) => Object.keys(run.config).length > 0);
  const differing = settings.filter(([, values]) => new Set(values.filter((_, i) => configured[i])).size > 1);
  if (labelled) table("differences", differing, true);
  if (settings.length) table("all settings", settings, false);
  const facts = runs.map((run) => {
    const { packages = {}, command = [], cuda_devices = [], ...plain } = run.environment;
    const text = (value) => typeof value === "string" ? value : JSON.stringify(value);
    return { command: command.join(" "), GPUs: cuda_devices.map(text).join(", ") || "none",
      ...Object.fromEntries(Object.entries(plain).map(([name, value]) => [name, text(value)])), ...packages };
  });
  const namesOfFacts = [...new Set(facts.flatMap((fact) => Object.keys(fact)))];
  table("environment", namesOfFacts.map((name) => [name, facts.map((fact) => own(fact, name) ?? "")]), false);

  for (const made of page.querySelectorAll("section")) {
    navigation.append(element("a", { href: `#${made.id}`, text: made.querySelector("h2").textContent }));
  }

  function fill() {
    fills.forEach((one) => one());
    redraw();
  }

  /** Shows new data of the same runs; returns whether a run has changed. */
  function update(fresh) {
    const parts = ["state", "training", "validation", "rewards", "validations"];
    const changed = (run, i) => parts.some((name) => JSON.stringify(run[name]) !== JSON.stringify(runs[i][name]));
    const any = fresh.some(changed);
    fresh.forEach((run, i) => Object.assign(runs[i], run));
    if (any) fill(); else summarise();
    return any;
  }

  fill();
  Object.assign(window.report, { update, summarise });
  if (!live) ready();
})();
