"use strict";
/** The inspector's viewer: a list of the responses of a step, and those that are selected in it. */
(() => {
  const { runs, data, element, section, button, choices, own, short, isMissing, whole, compare, state, remember, ownParts, labelled, update, summarise, ready,
    marked, card, expand, find, stopOf, KINDS, scaleOf, legendOf, colouredBlocks, NO_RESPONSES, loadPrompts } = window.report;
  const NEW_DATA = 3000, NEW_DATA_OF_ENDED = 10_000, NEW_DATA_OF_HIDDEN = 30_000;  // ms between requests
  const CELL = 300;  // characters of a text in the list
  const viewer = section("responses", "Responses");
  document.getElementById("rewards").before(viewer);
  const controls = element("div", { class: "controls" });
  const count = element("div", { class: "muted", role: "status", text: "" });
  const heading = element("div", { class: "line heading" });
  const lines = element("div", { class: "lines" });
  const list = element("div", { class: "list", id: "list" });
  const legend = element("div", { class: "legend muted", id: "legend" });
  const detail = element("div", { class: "samples", id: "detail" });
  const told = element("div", { class: "told", id: "told", role: "status" });
  viewer.append(controls, list, legend, detail, told);
  const control = (text, input) => { controls.append(element("label", {}, text, input)); return input; };
  const run = control("run", choices("run", runs.map((one, i) => [i, one.name])));
  if (!labelled) run.parentElement.hidden = true;
  const step = control("step", choices("step", []));
  const only = control("show", choices("only", []));
  const text = control("text", element("input", { type: "search", id: "text" }));
  const colour = control("colour", choices("colour", KINDS));
  const all = button("expand all", () => { showWhole(all.ariaPressed !== "true"); }, { "aria-pressed": "false", id: "expand" });
  controls.append(all);
  let rows = [], shownRun = 0, chosen = [], questions = new Map();  // prompts of the rows without the words that all of them share
  let columns = [], order = { name: "prompt", descending: false };

  // -- list -----------------------------------------------------------------------------------------------------------
  const numeric = (name, value) => ({ name, value, isNumber: true });

  /** The columns that the rows have: numbers first, then texts. */
  function columnsOf() {
    const has = (value) => rows.some((row) => !isMissing(value(row)) && value(row) !== "");
    const parts = [...new Set(rows.flatMap((row) => Object.keys(row.rewards || {})))];
    const tokens = (row) => row.response_tokens ?? row.tokens?.ids.length;
    return [
      numeric("reward", (row) => row.reward),
      ...parts.map((name) => numeric(name, (row) => own(row.rewards, name))),
      ...[["advantage", (row) => row.advantage], ["tokens", tokens], ["turns", (row) => row.turns], ["tool calls", (row) => row.tool_calls]]
        .filter(([, value]) => has(value)).map(([name, value]) => numeric(name, value)),
      ...(has(stopOf) ? [{ name: "end", value: stopOf }] : []),
      { name: "prompt", value: (row) => row.group, least: "9em", share: "1fr", nodes: (row) => cell(questions.get(row)) },
      { name: "response", value: (row) => row.response, least: "14em", share: "2fr", nodes: responseCell },
    ];
  }

  const cut = (own) => String(own ?? "").slice(0, CELL);
  const cell = (own) => marked(cut(own));

  /** The beginning of a response; the parts of a conversation are apart. */
  function responseCell(row) {
    if (!row.segments?.length) return cell(row.response);
    const kind = (part) => part.from === "policy" ? "part" : "part muted";
    return row.segments.slice(0, 12).map((part) => element("span", { class: kind(part) }, ...marked(cut(part.text))));
  }

  const filters = {
    all: () => true,
    truncated: (row) => row.truncated,
    differing: (row, rewards) => (rewards.get(row.group)?.size ?? 0) > 1,
    fault: (row) => ["fault", "malformed"].includes(row.stop),
  };

  function shown() {
    const wanted = text.value.trim().toLowerCase(), rewards = new Map();
    // A response without a reward differs from no other.
    rows.filter((row) => !isMissing(row.reward)).forEach((row) => rewards.set(row.group, (rewards.get(row.group) || new Set()).add(row.reward)));
    const filter = own(filters, only.value) ?? ((row) => `end: ${stopOf(row)}` === only.value);
    const { value } = columns.find((column) => column.name === order.name);
    const found = rows.filter((row) => filter(row, rewards) && (!wanted || `${row.prompt}\n${row.response}`.toLowerCase().includes(wanted)));
    // Responses to a prompt are sorted by their rewards.
    return found.sort((a, b) => compare(value(a), value(b), order.descending) || compare(a.group, b.group) || compare(a.reward, b.reward, true));
  }

  function sortBy(name) {
    const isText = name === "prompt" || name === "response" || name === "end";
    order = { name, descending: order.name === name ? !order.descending : !isText };
    drawHeading();
    drawLines();
  }

  function drawHeading() {
    const focused = heading.contains(document.activeElement) ? document.activeElement.dataset.column : null;
    heading.replaceChildren(...columns.map(({ name, isNumber }) => {
      const arrow = order.name === name ? (order.descending ? " ↓" : " ↑") : "";
      return button(`${name}${arrow}`, () => sortBy(name), { class: isNumber ? "sort number" : "sort", "data-column": name,
        title: "sort", "aria-pressed": String(Boolean(arrow)) });
    }));
    [...heading.children].find((one) => one.dataset.column === focused)?.focus();
    const widths = columns.map((column) => column.least ?? `${widthOf(column).toFixed(1)}ch`);
    list.style.setProperty("--columns", columns.map((column, i) => column.share ? `minmax(${widths[i]}, ${column.share})` : widths[i]).join(" "));
    list.style.setProperty("--least", `calc(${widths.join(" + ")} + ${columns.length}em)`);
  }

  /** The characters of the widest cell of a column; lines that are out of sight have no width of their own. */
  function widthOf({ name, value, isNumber }) {
    return rows.reduce((widest, row) => Math.max(widest, String(isNumber ? short(value(row)) : value(row)).length), 0.9 * (name.length + 2));
  }

  function drawFilters() {
    const stops = [...new Set(rows.map(stopOf).filter(Boolean))].sort(), before = only.value;
    const options = [["all", "all"], ["truncated", "cut at the limit"], ["differing", "prompts with different rewards"],
      ...(rows.some(filters.fault) ? [["fault", "faults and malformed calls"]] : []), ...stops.map((stop) => [`end: ${stop}`, `end: ${stop}`])];
    only.replaceChildren(...options.map(([value, name]) => element("option", { value, text: name })));
    only.value = options.some(([value]) => value === before) ? before : "all";
  }

  function drawList() {
    if (!list.hasChildNodes()) list.append(count, heading, lines);
    heading.hidden = !rows.length;
    controls.hidden = !rows.length && !step.options.length;
    if (controls.hidden) {
      count.textContent = NO_RESPONSES;
      lines.replaceChildren();
      return;
    }
    columns = columnsOf();
    if (!columns.some((column) => column.name === order.name)) order = { name: "prompt", descending: false };
    drawFilters();
    drawHeading();
    drawLines();
  }

  function drawLines() {
    const found = shown();
    count.textContent = `${whole(found.length)} of ${whole(rows.length)} responses`;
    lines.replaceChildren(...found.map((row, i) => {
      const line = element("button", { type: "button", class: "line", tabindex: i ? -1 : 0 }, ...columns.map((column) => cellOf(column, row)));
      line.row = row;
      return line;
    }));
    markChosen();
  }

  function cellOf({ value, isNumber, nodes }, row) {
    if (isNumber) return element("span", { class: "number", text: short(value(row)) });
    return element("span", { class: nodes ? "cut" : "nowrap", dir: "auto" }, ...(nodes ? nodes(row) : cell(value(row))));
  }

  function markChosen() {
    for (const line of lines.children) {
      const isChosen = chosen.includes(line.row);
      line.classList.toggle("chosen", isChosen);
      line.setAttribute("aria-pressed", String(isChosen));
    }
  }

  function select(row) {
    chosen = chosen.includes(row) ? chosen.filter((one) => one !== row) : [...chosen.slice(-1), row];
    markChosen();
    drawDetail();
    rememberPlace();
  }

  lines.addEventListener("click", (event) => {
    const line = event.target.closest(".line");
    if (!line) return;
    enter(line);
    select(line.row);
  });

  lines.addEventListener("keydown", (event) => {
    const line = document.activeElement, others = {
      ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling, Home: lines.firstElementChild, End: lines.lastElementChild,
    };
    if (!Object.hasOwn(others, event.key)) return;
    event.preventDefault();
    if (others[event.key]) enter(others[event.key]);
  });

  /** One line is reached by Tab, the others by the arrow keys. */
  function enter(line) {
    lines.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
    line.tabIndex = 0;
    line.focus();
  }

  // -- selected responses ---------------------------------------------------------------------------------------------
  function drawDetail() {
    told.textContent = "";
    const scale = scaleOf(chosen, colour.value);
    legend.replaceChildren(...(scale ? legendOf(scale) : []));
    if (!scale && colour.value === "entropy" && chosen.some((row) => row.tokens)) legend.append("The files of this run have no entropies.");
    const tell = (numbers) => { told.textContent = numbers; };
    detail.replaceChildren(...chosen.map((row, i) => card(row, shownRun, colouredBlocks(row, chosen[1 - i], scale, colour.value, tell))));
    if (!chosen.length && rows.length) detail.append(element("p", { class: "muted", text: "Select one response, or two to compare them." }));
    if (all.ariaPressed === "true") expand(detail, true);
    find(detail, text.value);
  }

  function showWhole(isWhole) {
    all.ariaPressed = String(isWhole);
    expand(detail, isWhole);
  }

  // -- data -----------------------------------------------------------------------------------------------------------
  /** The address leads to this step and these responses. */
  function rememberPlace() {
    const place = chosen.map((row) => rows.indexOf(row)).join(","), isPlain = !place && step.selectedIndex <= 0;
    remember("run", Number(run.value) && (place || !isPlain) ? run.value : "");
    remember("step", isPlain ? "" : step.value);
    remember("row", place);
  }

  async function load() {
    const wanted = `${run.value}/${step.value}`, wantedRun = Number(run.value);
    if (step.value === "") { rows = []; chosen = []; drawList(); drawDetail(); return; }
    const answer = await fetch(`responses/${wanted}`);
    if (!answer.ok || wanted !== `${run.value}/${step.value}`) return;
    rows = await answer.json();
    shownRun = wantedRun;
    const prompts = rows.map((row) => String(row.prompt ?? "")), parts = ownParts(prompts);
    questions = new Map(rows.map((row, i) => [row, prompts[i].length - parts[i].length > 20 ? `… ${parts[i].trim()}` : prompts[i]]));
    chosen = [];
    drawList();
    drawDetail();
  }

  function fillSteps() {
    const steps = runs[run.value].rewards.map((one) => one.step);
    const isNewest = step.selectedIndex <= 0;
    const before = step.value;
    step.replaceChildren(...steps.toReversed().map((number) => element("option", { value: number, text: String(number) })));
    if (!isNewest) step.value = before;
    return step.value !== before;
  }

  run.addEventListener("change", async () => { fillSteps(); await load(); rememberPlace(); });
  step.addEventListener("change", async () => { await load(); rememberPlace(); });
  only.addEventListener("change", drawLines);
  text.addEventListener("input", () => { drawLines(); find(detail, text.value); });
  colour.addEventListener("change", drawDetail);

  async function start() {
    const wanted = (state.get("row") ?? "").split(",").filter(Boolean).map(Number);
    if (Object.hasOwn(runs, state.get("run"))) run.value = state.get("run");
    fillSteps();
    if ([...step.options].some((option) => option.value === state.get("step"))) step.value = state.get("step");
    await load();
    wanted.slice(0, 2).filter((number) => number in rows).forEach((number) => select(rows[number]));
  }

  // -- a run that continues -------------------------------------------------------------------------------------------
  const note = element("span", { class: "muted", id: "note", role: "status" });
  document.querySelector("nav a[href='#rewards']").before(element("a", { href: "#responses", text: "Responses" }));
  document.querySelector("nav").append(note);
  let tag = "", timer;

  async function refresh() {
    clearTimeout(timer);
    let wait = NEW_DATA;
    try {
      const answer = await fetch("data", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 304) summarise();
      else if (!answer.ok) throw new Error(await answer.text());
      else {
        tag = answer.headers.get("ETag") ?? "";
        const fresh = await answer.json();
        data.definitions = fresh.definitions;
        if (update(fresh.runs) && fillSteps() && !chosen.length) load();
        loadPrompts();
      }
      note.textContent = "";
      if (runs.every((one) => one.state !== "running")) wait = NEW_DATA_OF_ENDED;
    } catch (error) { note.textContent = error instanceof TypeError ? "the inspector has ended" : error.message; }
    clearTimeout(timer);
    timer = setTimeout(refresh, document.hidden ? NEW_DATA_OF_HIDDEN : wait);
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
  timer = setTimeout(refresh, NEW_DATA);
  start();
  ready();
})();
