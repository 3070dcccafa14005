"use strict";
/** Responses whose tokens are coloured by one of their values. */
(() => {
  const { element, own, short, isMissing, whole, marked, block, box, comparison, segmentBlocks, responseBlocks } = window.report;
  const KINDS = [["advantage", "advantage"], ["logprob", "log-probability"], ["kl", "KL to the reference"], ["entropy", "entropy"],
    ["ratio", "actor / engine"], ["weight", "importance weight"], ["in_loss", "in the loss"], ["version", "policy version"],
    ["none", "none"], ["text", "whole text, folded"]];
  const MISSING = "No values of tokens were written for this response: raise max_token_values of RolloutLog";

  const values = {
    advantage: (tokens, i) => tokens.advantage[i],
    logprob: (tokens, i) => tokens.logprob[i],
    kl: (tokens, i) => tokens.ref_logprob ? tokens.logprob[i] - tokens.ref_logprob[i] : null,
    entropy: (tokens, i) => tokens.entropy ? tokens.entropy[i] : null,
    ratio: (tokens, i) => tokens.logprob[i] - tokens.rollout_logprob[i],
    weight: (tokens, i) => Math.log(Math.max(tokens.weight[i], 1e-6)),
    in_loss: (tokens, i) => tokens.in_loss[i] ? 1 : 0,
    version: (tokens, i) => tokens.version[i],
  };

  /** The numbers of the sampled tokens of a response, null for others. */
  function numbersOf(row, kind) {
    const value = own(values, kind);
    return row.tokens.ids.map((_, i) => value && row.tokens.sampled[i] ? value(row.tokens, i) : null);
  }

  /** The origin of the colours, their least and largest number, and the one of the strongest colour, for all these rows. */
  function scaleOf(rows, kind) {
    const numbers = rows.filter((row) => row.tokens).flatMap((row) => numbersOf(row, kind)).filter((number) => number !== null);
    if (!numbers.length) return null;
    const origin = kind === "version" ? numbers.reduce((a, b) => Math.min(a, b)) : 0;
    const least = numbers.reduce((a, b) => Math.min(a, b), origin) - origin, largest = numbers.reduce((a, b) => Math.max(a, b), origin) - origin;
    const strongest = kind === "logprob" ? 5 : kind === "version" ? Math.max(1, largest) : Math.max(1e-9, -least, largest);
    return { kind, origin, least, largest, strongest };
  }

  const units = {
    weight: (number) => short(Math.exp(number)), version: (number) => `version ${number}`, advantage: short,
    in_loss: (number) => number ? "in the loss" : "not in the loss",
  };
  const nats = (number) => `${short(number)} nats`;

  function legendOf(scale) {
    const ends = [scale.least < 0 ? -scale.strongest : 0, scale.largest > 0 || scale.least === 0 ? scale.strongest : 0];
    const bar = element("span", { class: "scale" });
    const stops = [ends[0], 0, ends[1]].filter((end, i) => i !== 1 || (ends[0] < 0 && ends[1] > 0)).map((end) => paint(end, scale.strongest));
    bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    const [left, right] = ends.map((end) => (units[scale.kind] || nats)(end + scale.origin));
    return [element("span", { text: left }), bar, element("span", { text: right })];
  }

  /** Blue for values above 0, orange below; log-probabilities are orange, the darker the less likely. */
  function paint(value, largest) {
    const strength = Math.min(1, Math.abs(value) / (largest || 1));
    return `rgba(${value >= 0 ? "31, 120, 209" : "224, 123, 0"}, ${(0.75 * strength).toFixed(3)})`;
  }

  function describe(tokens, i) {
    const names = ["logprob", "rollout_logprob", "ref_logprob", "entropy", "advantage", "weight"];
    return [`token ${tokens.ids[i]}`, ...names.filter((name) => tokens[name]).map((name) => `${name} ${short(tokens[name][i])}`),
      ...(tokens.ref_logprob ? [`KL ${short(values.kl(tokens, i))}`] : []), `version ${tokens.version[i]}`,
      tokens.sampled[i] ? (tokens.in_loss[i] ? "in the loss" : "not in the loss") : "written by the environment"];
  }

  /** Blocks of the tokens, of policy and environment in turn; ``tell`` gets the numbers of the token that is chosen. */
  function tokenBlocks(row, other, scale, tell) {
    const tokens = row.tokens, numbers = numbersOf(row, scale?.kind), blocks = [], spans = [];
    const common = other?.tokens ? comparison(row, other) : null;
    let turn = 0, box;
    tokens.texts.forEach((text, i) => {
      if (i === 0 || tokens.sampled[i] !== tokens.sampled[i - 1]) {
        if (tokens.sampled[i]) turn += 1;
        box = element("pre", { class: "tokens", dir: "auto", tabindex: 0, "aria-label": "tokens: arrow keys show the numbers of one" });
        const label = !tokens.sampled[i] ? "environment" : tokens.sampled.includes(false) ? `policy, turn ${turn}` : "policy";
        blocks.push(block(tokens.sampled[i] ? "policy" : "environment", label, box));
      }
      const span = element("span", {}, ...marked(text));
      span.classList.toggle("written", !tokens.sampled[i]);
      span.classList.toggle("differs", Boolean(common) && !common[i]);
      span.classList.toggle("newline", text.includes("\n"));
      if (scale && numbers[i] !== null) span.style.backgroundColor = paint(numbers[i] - scale.origin, scale.strongest);
      span.title = describe(tokens, i).join("\n");
      spans.push(span);
      box.append(span);
    });
    chooseWith(blocks, spans, (i) => tell([JSON.stringify(tokens.texts[i]), ...describe(tokens, i)].join(", ")));
    return blocks;
  }

  /** A click, or the arrow keys in a block, choose a token. */
  function chooseWith(blocks, spans, tell) {
    let current = -1;
    const choose = (i) => {
      spans[current]?.classList.remove("current");
      current = i;
      spans[i].classList.add("current");
      spans[i].scrollIntoView({ block: "nearest" });
      tell(i);
    };
    for (const made of blocks) {
      const box = made.querySelector("pre"), inside = () => spans.indexOf(box.querySelector(":scope > span"));
      box.addEventListener("click", (event) => {
        const span = event.target.closest(".tokens > span");
        if (span) choose(spans.indexOf(span));
      });
      box.addEventListener("focus", () => { if (spans[current]?.parentElement !== box && box.matches(":focus-visible")) choose(inside()); });
      box.addEventListener("keydown", (event) => {
        const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!by) return;
        event.preventDefault();
        const first = inside(), last = first + box.childElementCount - 1;
        choose(Math.min(Math.max((spans[current]?.parentElement === box ? current : first - by) + by, first), last));
      });
    }
  }

  /** The number of characters of a text that these tokens wrote; texts of special tokens and parts of characters are not in it. */
  function written(text, texts) {
    let end = 0;
    for (const own of texts) {
      const part = own.trim(), at = part ? text.indexOf(part, end) : -1;
      if (at >= 0 && at - end <= 8) end = at + part.length;
    }
    return end;
  }

  /** What the response has after the tokens with values. */
  function restBlocks(row) {
    if (!row.segments?.length) {
      const text = String(row.response ?? "");
      return [block("policy", "policy, the rest", box(text.slice(written(text, row.tokens.texts))))];
    }
    let skipped = written(row.segments.map((part) => part.text).join(""), row.tokens.texts);
    const rest = row.segments.map((part) => {
      const text = part.text.slice(skipped);
      skipped = Math.max(0, skipped - part.text.length);
      return { ...part, text };
    });
    const first = rest.findIndex((part) => part.text);
    return first < 0 ? [] : segmentBlocks(rest.slice(first), row.segments.slice(0, first).filter((part) => part.from === "policy").length);
  }

  /** The blocks of a response with coloured tokens where values were written, and a sentence where they were not. */
  function colouredBlocks(row, other, scale, kind, tell) {
    if (kind === "text") return responseBlocks(row);
    if (!row.tokens?.ids.length) return [element("p", { class: "muted note", text: `${MISSING}.` }), ...responseBlocks(row)];
    const count = row.tokens.ids.length, blocks = tokenBlocks(row, other, scale, tell);
    if (isMissing(row.response_tokens) || row.response_tokens <= count) return blocks;
    const text = `The first ${whole(count)} of ${whole(row.response_tokens)} tokens have values; the rest follows without: `
      + "raise max_token_values of RolloutLog.";
    return [...blocks, element("p", { class: "muted note", text }), ...restBlocks(row)];
  }

  Object.assign(window.report, { KINDS, scaleOf, legendOf, colouredBlocks });
})();
