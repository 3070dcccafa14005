"use strict";
/** The table of the runs below a folder: states, settings that differ, and values of metrics. */
(() => {
  const { data, live, page, element, section, button, choices, own, short, counted, known, isMissing, duration, age, stateOf,
    compare, meaningOf, kept, ready } = window.report;
  let { runs } = data.project;
  const FEATURED = ["val/fraction_correct_greedy", "val/fraction_correct_sampled", "reward/mean", "train/loss", "val/loss", "val/pair_accuracy",
    "kl/ref", "policy/entropy", "rollout/response_tokens_mean"];
  const MOST_COMPARED = 8;
  const FEW_SETTINGS = 4;  // more than these are to the right of the metrics
  const NEW_DATA = 10_000, NEW_DATA_OF_HIDDEN = 60_000;  // ms between requests
  const selected = new Set(), opened = new Set();  // numbers of runs; groups of seeds
  let order = { name: "name", descending: false };

  page.classList.add("wide");
  page.append(element("h1", { text: `Runs in ${data.project.path}` }));
  const place = section("runs", "Runs");
  const words = element("input", { type: "search", id: "words", placeholder: "e.g. ppo lr=0.001", "aria-label": "filter the runs" });
  const states = choices("state", [["", "all"], ...[...new Set(runs.map(stateOf))].map((state) => [state, state])]);
  const checks = choices("checks", [["", "all"], ["failed", "failed"], ["passed", "none failed"]]);
  const names = element("input", { type: "search", id: "names", placeholder: "main ones", "aria-label": "names of metrics and settings" });
  const single = element("input", { type: "checkbox", id: "single" });
  [words, states, checks, names, single].forEach(kept);
  const note = element("span", { class: "muted", role: "status" });
  const comparison = element("span", { id: "comparison", role: "status" });
  place.append(element("div", { class: "controls" }, element("label", {}, "show", words), element("label", {}, "state", states),
    element("label", {}, "checks", checks), element("label", {}, "columns", names),
    element("label", {}, single, "each run in a row"), comparison, note));
  const count = element("p", { class: "muted", role: "status" });
  const table = element("table", { class: "project" });
  place.append(count, element("div", { class: "runs-table" }, table));
  place.append(element("p", { class: "muted", text: "Metrics: first → last value; of runs that differ in the seed alone, mean ± "
    + `standard deviation of the last values (number of runs). Settings: those that differ between the runs.`
    + `${live ? ` Select up to ${MOST_COMPARED} runs to compare them.` : ""}` }));

  // -- rows -----------------------------------------------------------------------------------------------------------
  function columnsOf() {
    const wanted = names.value.trim().toLowerCase();
    const settings = [...new Set(runs.flatMap((run) => Object.keys(run.config)))]
      .filter((name) => new Set(runs.map((run) => own(run.config, name) ?? "")).size > 1 && name.toLowerCase().includes(wanted))
      .map((name) => ({ name, value: (run) => settingValue(own(run.config, name)), isSetting: true }));
    const namesOfMetrics = [...new Set(runs.flatMap((run) => Object.keys(run.last)))].sort();
    const shown = wanted ? namesOfMetrics.filter((name) => name.toLowerCase().includes(wanted)).slice(0, 30)
      : FEATURED.filter((name) => namesOfMetrics.includes(name));
    return [
      { name: "name", value: (run) => run.name },
      { name: "state", value: stateOf },
      { name: "failed checks", value: (run) => run.failed_checks, isNumber: true },
      { name: "steps", value: (run) => run.steps, isNumber: true },
      ...(settings.length > FEW_SETTINGS ? [] : settings),
      ...shown.map((name) => ({ name, value: (run) => own(run.last, name), isNumber: true, isMetric: true })),
      { name: "seed", value: (run) => run.seed, isNumber: true },
      { name: "last metrics", value: (run) => run.modified ? age(run.modified) : null, isNumber: true },
      ...(settings.length > FEW_SETTINGS ? settings : []),
    ];
  }

  /** Settings that are numbers are sorted as numbers. */
  const settingValue = (text) => text === undefined || text === "" ? null : Number.isNaN(Number(text)) ? text : Number(text);

  function isShown(run) {
    const text = [run.name, stateOf(run), ...Object.entries(run.config).map(([name, value]) => `${name}=${value}`)].join("\n").toLowerCase();
    return words.value.toLowerCase().split(/\s+/).every((word) => text.includes(word)) && (!states.value || stateOf(run) === states.value)
      && (!checks.value || (run.failed_checks > 0) === (checks.value === "failed"));
  }

  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const deviation = (values) => Math.sqrt(values.reduce((sum, value) => sum + (value - mean(values)) ** 2, 0) / (values.length - 1));

  /** [{runs}]: the runs of a group of seeds are one row, if several of them are shown. */
  function rowsOf(found) {
    if (single.checked) return found.map((run) => ({ runs: [run] }));
    const groups = Map.groupBy(found, (run) => run.group ?? run.name);
    return [...groups].map(([group, members]) => ({ group, runs: members }));
  }

  /** The value of a row by which it is sorted: of a group the mean, the lowest name, or the only value. */
  function valueOf({ runs: members }, column) {
    const values = known(members.map(column.value));
    if (members.length > 1 && column.isNumber) return values.length ? mean(values) : null;
    return values.length ? values.toSorted((a, b) => compare(a, b))[0] : null;
  }

  // -- cells ----------------------------------------------------------------------------------------------------------
  function address(run) {
    const found = new URL(live ? run.link : `./${run.link}`, document.baseURI);
    return found.protocol === location.protocol ? found.href : "";
  }

  function nameCell(row, isMember) {
    const [run] = row.runs;
    if (row.runs.length > 1) {
      const isOpen = opened.has(row.group);
      return [button(`${isOpen ? "▾" : "▸"}\u00a0${run.name} and ${counted(row.runs.length - 1, "other run")}`, () => {
        if (isOpen) opened.delete(row.group); else opened.add(row.group);
        draw();
      }, { class: "sort", "aria-expanded": String(isOpen), "data-group": row.group })];
    }
    const name = run.link && address(run) ? element("a", { href: address(run), text: run.name }) : run.name;
    const isEmpty = run.state === "damaged" || (!run.modified && run.error);
    const reason = isEmpty ? [element("div", { class: "reason muted", text: run.error ?? "" })] : [];
    return isMember ? [element("span", { class: "member" }, name)] : [name, ...reason];
  }

  function stateCell(row) {
    return [...Map.groupBy(row.runs, stateOf)].sort().flatMap(([state, same], i) => {
      const text = row.runs.length > 1 ? `${same.length} ${state}` : state;
      return [i ? ", " : "", element("span", { class: ["failed", "damaged"].includes(state) ? "failed" : "", text, title: same[0].error ?? "" })];
    });
  }

  function cellOf(row, column, isMember) {
    const [run] = row.runs, values = known(row.runs.map(column.value)), isGroup = row.runs.length > 1;
    if (column.name === "name") return nameCell(row, isMember);
    if (column.name === "state") return stateCell(row);
    if (column.name === "seed") return [values.length ? values.join(", ") : "–"];
    if (!values.length) return ["–"];
    if (column.name === "last metrics") return [`${duration(Math.min(...values))} ago`];
    if (column.name === "failed checks") return [String(values.reduce((sum, value) => sum + value, 0))];
    if (column.name === "steps") return [stepsOf(run, Math.min(...values), Math.max(...values))];
    if (column.isSetting) return [String(own(run.config, column.name))];
    if (isGroup && values.length === 1) return [`${short(values[0])} (1)`];
    if (isGroup) return [`${short(mean(values))} ± ${Number(deviation(values).toPrecision(2))} (${values.length})`];
    const first = column.isMetric ? own(run.first, column.name) : undefined;
    return [isMissing(first) ? short(values[0]) : `${short(first)} → ${short(values[0])}`];
  }

  function stepsOf({ limit }, least, most) {
    const steps = least < most ? `${least} to ${most}` : String(most);
    return limit > least ? `${steps} of ${limit}` : steps;
  }

  function boxOf(row) {
    const numbers = row.runs.map((run) => runs.indexOf(run));
    const box = element("input", { type: "checkbox", "aria-label": `compare ${row.runs.map((run) => run.name).join(", ")}` });
    box.checked = numbers.every((number) => selected.has(number));
    box.addEventListener("change", () => {
      for (const number of numbers) if (box.checked) selected.add(number); else selected.delete(number);
      draw();
    });
    return box;
  }

  function line(row, columns, isMember = false) {
    const cells = columns.map((column) => {
      const made = element("td", { dir: "auto" }, ...cellOf(row, column, isMember));
      made.classList.toggle("fixed", column.name === "name");
      made.classList.toggle("number", Boolean(column.isNumber));
      made.classList.toggle("failed", column.name === "failed checks" && valueOf(row, column) > 0);
      return made;
    });
    return element("tr", { class: isMember ? "of-group" : "" }, ...(live ? [element("td", {}, ...(row.runs.every((run) => run.link) ? [boxOf(row)] : []))] : []), ...cells);
  }

  function headingOf(column) {
    const arrow = order.name !== column.name ? "" : order.descending ? " ↓" : " ↑";
    const sort = button(`${column.name.replaceAll("init_args.", "")}${arrow}`, () => {
      order = { name: column.name, descending: order.name === column.name ? !order.descending : Boolean(column.isNumber) };
      draw();
    }, { class: "sort", "data-column": column.name });
    const definition = column.isMetric ? meaningOf(column.name) : undefined;
    sort.title = definition ? [definition.unit, definition.meaning].filter(Boolean).join(": ") : column.name;
    const sorted = { "aria-sort": !arrow ? "none" : order.descending ? "descending" : "ascending" };
    return element("th", { class: column.isNumber ? "number" : column.name === "name" ? "fixed" : "", ...sorted }, sort);
  }

  function drawComparison() {
    const numbers = [...selected].sort((a, b) => a - b);
    if (!numbers.length) comparison.replaceChildren();
    else if (numbers.length > MOST_COMPARED) comparison.textContent = `${numbers.length} runs are selected: at most ${MOST_COMPARED} can be compared`;
    else comparison.replaceChildren(element("a", { href: `compare/${numbers.join(",")}/`, text: `compare ${counted(numbers.length, "run")}` }));
  }

  function draw() {
    const focused = table.contains(document.activeElement) ? document.activeElement : null;
    const columns = columnsOf(), found = runs.filter(isShown);
    const column = columns.find(({ name }) => name === order.name) ?? columns[0];
    const rows = rowsOf(found).sort((a, b) => compare(valueOf(a, column), valueOf(b, column), order.descending));
    count.textContent = runs.length ? `${found.length} of ${counted(runs.length, "run")}` : "No run below this folder has metrics yet.";
    table.replaceChildren(element("thead", {}, element("tr", {}, ...(live ? [element("th")] : []), ...columns.map(headingOf))),
      element("tbody", {}, ...rows.flatMap((row) => [line(row, columns),
        ...(row.runs.length > 1 && opened.has(row.group) ? row.runs.map((run) => line({ runs: [run] }, columns, true)) : [])])));
    table.hidden = !runs.length;
    if (focused) again(focused)?.focus();
    if (live) drawComparison();
  }

  /** The control of the new table that stands for one of the former. */
  function again(former) {
    return [...table.querySelectorAll("button, input")].find((one) => former.dataset.column ? one.dataset.column === former.dataset.column
      : former.dataset.group ? one.dataset.group === former.dataset.group : one.ariaLabel && one.ariaLabel === former.ariaLabel);
  }

  let tag = "";
  async function refresh() {
    try {
      const answer = await fetch("data", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.ok) {
        tag = answer.headers.get("ETag") ?? "";
        const fresh = await answer.json();
        Object.assign(data, fresh);
        ({ runs } = fresh.project);
      }
      draw();
      note.textContent = "";
    } catch { note.textContent = "the inspector has ended"; }
    setTimeout(refresh, document.hidden ? NEW_DATA_OF_HIDDEN : NEW_DATA);
  }

  for (const input of [words, names]) input.addEventListener("input", draw);
  for (const input of [states, checks, single]) input.addEventListener("change", draw);
  draw();
  if (live) setTimeout(refresh, NEW_DATA);
  ready();
})();
