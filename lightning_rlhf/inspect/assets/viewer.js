"use strict";
(() => {
  const { runs, element, key, short, segmentsOf, section, labelled, update } = window.report;
  const viewer = section("responses", "Responses");
  document.getElementById("rewards").before(viewer);
  const controls = element("div", { class: "controls" });
  const list = element("div", { class: "list", id: "list" });
  const detail = element("div", { class: "samples", id: "detail" });
  const legend = element("div", { class: "legend muted", id: "legend" });
  viewer.append(controls, list, legend, detail);
  const control = (text, input) => { controls.append(element("label", {}, text, input)); return input; };
  const choices = (id, values) => { const made = element("select", { id }); for (const [value, text] of values) made.append(element("option", { value, text })); return made; };
  const run = control("run", choices("run", runs.map((own, i) => [i, own.name])));
  if (!labelled) run.parentElement.hidden = true;
  const step = control("step", choices("step", []));
  const order = control("sort", choices("order", [["group", "by prompt"], ["-reward", "best first"], ["reward", "worst first"], ["-length", "longest first"], ["length", "shortest first"]]));
  const only = control("show", choices("only", [["all", "all"], ["truncated", "cut at the limit"], ["differing", "prompts with different rewards"]]));
  const text = control("text", element("input", { type: "search", id: "text" }));
  const colour = control("colour", choices("colour", [["advantage", "advantage"], ["logprob", "log-probability"], ["kl", "KL to the reference"], ["entropy", "entropy"], ["ratio", "actor / engine"], ["weight", "importance weight"], ["in_loss", "in the loss"], ["version", "policy version"], ["none", "none"]]));
  let rows = [], chosen = [], common = 0;  // common: characters at the beginning of all prompts

  const length = (row) => row.tokens ? row.tokens.ids.length : (row.response || "").length;
  const reward = (row) => row.reward ?? 0;
  const orders = { group: (a, b) => (a.group ?? 0) - (b.group ?? 0) || reward(b) - reward(a), reward: (a, b) => reward(a) - reward(b), "-reward": (a, b) => reward(b) - reward(a), length: (a, b) => length(a) - length(b), "-length": (a, b) => length(b) - length(a) };

  function shown() {
    const wanted = text.value.trim().toLowerCase();
    const rewards = new Map();
    rows.forEach((row) => rewards.set(row.group, (rewards.get(row.group) || new Set()).add(reward(row))));
    return rows.filter((row) => (only.value !== "truncated" || row.truncated) && (only.value !== "differing" || rewards.get(row.group).size > 1)
      && (!wanted || `${row.prompt}\n${row.response}`.toLowerCase().includes(wanted))).sort(orders[order.value]);
  }

  /** The prompt without the beginning that all prompts of the step have in common, such as worked examples. */
  function ownPart(prompt) {
    const cut = prompt.lastIndexOf(" ", common) + 1;
    return cut > 20 ? `… ${prompt.slice(cut)}` : prompt;
  }

  function commonLength(texts) {
    let length = texts.length > 1 ? texts[0].length : 0;
    for (const own of texts) while (!own.startsWith(texts[0].slice(0, length))) length = Math.floor(length * 0.9);
    return length;
  }

  function drawList() {
    if (!rows.length && !step.options.length) {
      list.replaceChildren(element("p", { class: "muted", text: "This run has written no responses: the callback RolloutLog writes them, by default in every run with RolloutLoop." }));
      return;
    }
    const found = shown();
    list.replaceChildren(element("div", { class: "muted", text: `${found.length} of ${rows.length} responses` }),
      element("div", { class: "line heading" }, ...["reward", "tokens", "prompt", "response"].map((name, i) => element("span", { text: name, class: i < 2 ? "number" : "" }))));
    for (const row of found) {
      const line = element("button", { class: chosen.includes(row) ? "line chosen" : "line" },
        element("span", { class: "number", text: short(reward(row)) }), element("span", { class: "number", text: String(length(row)) }),
        element("span", { class: "cut", text: ownPart(row.prompt ?? "") }), element("span", { class: "cut", text: row.response ?? "" }));
      line.addEventListener("click", () => {
        chosen = chosen.includes(row) ? chosen.filter((own) => own !== row) : [...chosen.slice(-1), row];
        drawList();
        drawDetail();
      });
      list.append(line);
    }
  }

  // -- tokens ---------------------------------------------------------------------------------------------------------
  const values = {
    advantage: (tokens, i) => tokens.advantage[i], logprob: (tokens, i) => tokens.logprob[i],
    kl: (tokens, i) => tokens.logprob[i] - tokens.ref_logprob[i], entropy: (tokens, i) => tokens.entropy ? tokens.entropy[i] : null, ratio: (tokens, i) => tokens.logprob[i] - tokens.rollout_logprob[i],
    weight: (tokens, i) => Math.log(Math.max(tokens.weight[i], 1e-6)), in_loss: (tokens, i) => tokens.in_loss[i] ? 1 : 0, version: (tokens, i) => tokens.version[i],
  };

  /** The numbers of the sampled tokens of a response by the chosen value, null for others. */
  function numbersOf(row) {
    const value = values[colour.value];
    return row.tokens.ids.map((_, i) => value && row.tokens.sampled[i] ? value(row.tokens, i) : null);
  }

  /** The origin of the colours, their least and largest number, and the one of the strongest colour, for all selected responses. */
  function scaleOf() {
    const numbers = chosen.filter((row) => row.tokens).flatMap(numbersOf).filter((number) => number !== null);
    if (!numbers.length) return null;
    const origin = colour.value === "version" ? numbers.reduce((a, b) => Math.min(a, b)) : 0;
    const least = numbers.reduce((a, b) => Math.min(a, b), origin) - origin, largest = numbers.reduce((a, b) => Math.max(a, b), origin) - origin;
    const strongest = colour.value === "logprob" ? 5 : colour.value === "version" ? Math.max(1, largest) : Math.max(1e-9, -least, largest);
    return { origin, least, largest, strongest };
  }

  const marks = { weight: (number) => short(Math.exp(number)), version: (number) => `version ${number}`, in_loss: (number) => number ? "in the loss" : "not in the loss", advantage: short };
  const nats = (number) => `${short(number)} nats`;

  function drawLegend(scale) {
    legend.replaceChildren();
    if (!scale) {
      if (colour.value === "entropy" && chosen.some((row) => row.tokens)) legend.append("The files of this run have no entropies.");
      return;
    }
    const ends = [scale.least < 0 ? -scale.strongest : 0, scale.largest > 0 || scale.least === 0 ? scale.strongest : 0];
    const bar = element("span", { class: "scale" });
    bar.style.background = `linear-gradient(to right, ${[ends[0], 0, ends[1]].filter((end, i) => i !== 1 || ends[0] < 0 && ends[1] > 0).map((end) => paint(end, scale.strongest)).join(", ")})`;
    const [left, right] = ends.map((end) => (marks[colour.value] || nats)(end + scale.origin));
    legend.append(element("span", { text: left }), bar, element("span", { text: right }));
  }

  /** Blue for values above 0, orange below; log-probabilities are orange, the darker the less likely. */
  function paint(value, largest) {
    const strength = Math.min(1, Math.abs(value) / (largest || 1));
    return `rgba(${value >= 0 ? "31, 120, 209" : "224, 123, 0"}, ${(0.75 * strength).toFixed(3)})`;
  }

  function tokensOf(row, other, scale) {
    const tokens = row.tokens, parts = [], numbers = numbersOf(row);
    const common = other && other.tokens ? matches(tokens.texts, other.tokens.texts) : null;
    tokens.texts.forEach((own, i) => {
      if (i === 0 || tokens.sampled[i] !== tokens.sampled[i - 1]) parts.push(element("pre", { class: `tokens ${tokens.sampled[i] ? "policy" : "environment"}` }));
      const kinds = `${tokens.sampled[i] ? "" : "written "}${common && !common[i] ? "differs" : ""}`;
      const span = element("span", { text: own, class: kinds });
      if (scale && numbers[i] !== null) span.style.backgroundColor = paint(numbers[i] - scale.origin, scale.strongest);
      span.title = [`token ${tokens.ids[i]}`, ...["logprob", "rollout_logprob", "ref_logprob", "entropy", "advantage", "weight"].filter((name) => tokens[name]).map((name) => `${name} ${short(tokens[name][i])}`),
        `KL ${short(values.kl(tokens, i))}`, `version ${tokens.version[i]}`, tokens.sampled[i] ? (tokens.in_loss[i] ? "in the loss" : "not in the loss") : "written by the environment"].join("\n");
      parts.at(-1).append(span);
    });
    return parts;
  }

  /** Whether each text is part of a longest common subsequence with the others. */
  function matches(texts, others) {
    const n = texts.length, m = others.length, best = Array.from({ length: n + 1 }, () => new Uint16Array(m + 1));
    for (let i = n - 1; i >= 0; i--) for (let j = m - 1; j >= 0; j--) best[i][j] = texts[i] === others[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
    const found = new Array(n).fill(false);
    for (let i = 0, j = 0; i < n && j < m;) {
      if (texts[i] === others[j]) { found[i] = true; i++; j++; } else if (best[i + 1][j] >= best[i][j + 1]) i++; else j++;
    }
    return found;
  }

  function drawDetail() {
    detail.replaceChildren();
    const scale = scaleOf();
    drawLegend(scale);
    chosen.forEach((row, i) => {
      const parts = Object.entries(row.rewards || {}).map(([name, value]) => `${name} ${short(value)}`).join(", ");
      const card = element("div", { class: "sample" }, element("b", { text: `reward ${short(reward(row))}` }), ` ${parts}${row.truncated ? " (cut at the limit)" : ""}, KL ${short(row.kl)}`,
        element("pre", { class: "environment", text: row.prompt ?? "" }));
      if (row.tokens) card.append(...tokensOf(row, chosen.length === 2 ? chosen[1 - i] : null, scale));
      else if (row.segments) card.append(...segmentsOf(row.segments));
      else card.append(element("pre", { class: "policy", text: row.response ?? "" }));
      if (row.ground_truth !== undefined) card.append(element("div", { class: "muted", text: "correct answer:" }), element("pre", { text: String(row.ground_truth) }));
      detail.append(card);
    });
    if (!chosen.length && rows.length) detail.append(element("p", { class: "muted", text: "Select one response, or two to compare them." }));
  }

  // -- data -----------------------------------------------------------------------------------------------------------
  async function load() {
    const wanted = `${run.value}/${step.value}`;
    if (step.value === "") { rows = []; chosen = []; drawList(); drawDetail(); return; }
    const answer = await fetch(`responses/${wanted}`);
    if (!answer.ok || wanted !== `${run.value}/${step.value}`) return;
    rows = await answer.json();
    common = new Set(rows.map((row) => row.prompt)).size > 1 ? commonLength(rows.map((row) => row.prompt ?? "")) : 0;
    chosen = [];
    drawList();
    drawDetail();
  }

  function fillSteps() {
    const known = runs[run.value].rewards.map((own) => own.step);
    const isNewest = step.selectedIndex <= 0;
    const before = step.value;
    step.replaceChildren(...known.toReversed().map((number) => element("option", { value: number, text: String(number) })));
    if (!isNewest) step.value = before;
    return step.value !== before;
  }

  run.addEventListener("change", () => { fillSteps(); load(); });
  step.addEventListener("change", load);
  for (const input of [order, only]) input.addEventListener("change", drawList);
  text.addEventListener("input", drawList);
  colour.addEventListener("change", drawDetail);
  fillSteps();
  load();

  const note = element("span", { class: "muted", id: "note", role: "status" });
  document.querySelector("nav a[href='#rewards']").before(element("a", { href: "#responses", text: "Responses" }));
  document.querySelector("nav").append(note);
  async function refresh() {
    try {
      const answer = await fetch("data");
      if (!answer.ok) throw new Error(await answer.text());
      const fresh = await answer.json();
      note.textContent = "";
      if (update(fresh) && fillSteps() && !chosen.length) load();
    } catch (error) { note.textContent = error instanceof TypeError ? "the inspector has ended" : error.message; }
    setTimeout(refresh, 3000);
  }
  setTimeout(refresh, 3000);
})();
