"use strict";
/** What all scripts of the pages use: elements, numbers, colours, sorting, and the state that the address keeps. */
window.report = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const COLOURS = 8;  // --series-0 to --series-7 of report.css

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

  function section(id, title) {
    const made = element("section", { id }, element("h2", { text: title }));
    page.append(made);
    return made;
  }

  function button(text, action, options = {}) {
    const made = element("button", { type: "button", text, ...options });
    made.addEventListener("click", action);
    return made;
  }

  function choices(id, values) {
    const made = element("select", { id });
    for (const [value, text] of values) made.append(element("option", { value, text }));
    return made;
  }

  /** A value of an object that has this name itself: names of metrics may be those of JavaScript's own methods. */
  const own = (object, name) => object && Object.hasOwn(object, name) ? object[name] : undefined;

  const isMissing = (value) => value === null || value === undefined || Number.isNaN(value);

  function short(value) {
    if (isMissing(value)) return "–";
    return Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
  }

  const whole = (number) => number.toLocaleString("en-US");
  const counted = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
  const known = (values) => (values || []).filter((value) => !isMissing(value));
  const total = (values) => known(values).reduce((sum, value) => sum + value, 0);

  function duration(seconds) {
    if (seconds < 120) return `${seconds.toFixed(0)} s`;
    if (seconds < 172_800) return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
    return `${(seconds / 86_400).toFixed(0)} days`;
  }

  const live = document.body.dataset.live === "yes";  // a page of the inspector, which has a server
  /** The state of a run, which a page in a file cannot know of one that has not ended. */
  const stateOf = (run) => run.state === "running" && !live ? "running or killed" : run.state;

  /** The seconds since a Unix time. */
  const age = (time) => Math.max(0, Date.now() / 1000 - time);

  /** Order of two values, numbers or texts; missing ones are last in both directions. */
  function compare(a, b, descending) {
    if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
    const order = typeof a === "number" && typeof b === "number" ? a - b
      : String(a).localeCompare(String(b), "en", { numeric: true });
    return descending ? -order : order;
  }

  const colour = (i) => `var(--series-${i % COLOURS})`;

  /** The mark of a run in its colour. */
  function key(i) {
    const mark = element("span", { class: "key" });
    mark.style.background = colour(i);
    return mark;
  }

  const meaningOf = (metric) => own(data.definitions, metric);

  // -- state in the address -------------------------------------------------------------------------------------------
  // "#health&smoothing=0.5": the section, if one was chosen, and the controls that differ from their defaults.
  const state = new URLSearchParams(location.hash.slice(1));

  function writeState() {
    const parts = [...state].map(([name, value]) => [name, value].filter(Boolean).map(encodeURIComponent).join("="));
    history.replaceState(null, "", `#${parts.join("&")}`);
  }

  function remember(name, value) {
    if (value) state.set(name, value); else state.delete(name);
    writeState();
  }

  /** Sets a control to its value in the address, and keeps its later values there. */
  function kept(input) {
    const property = input.type === "checkbox" ? "checked" : "value";
    const initial = input[property];
    if (state.has(input.id)) input[property] = property === "checked" ? true : state.get(input.id);
    if (input.selectedIndex === -1) input.value = initial;
    input.addEventListener("change", () => remember(input.id, input[property] === initial ? "" : String(input[property])));
    return input;
  }

  /** Number of characters at the beginning of all texts; 0 for a single text. */
  function commonLength(texts) {
    let length = texts.length > 1 ? texts[0].length : 0;
    for (const text of texts) {
      let same = 0;
      while (same < length && text[same] === texts[0][same]) same++;
      length = same;
    }
    return length;
  }

  /** Texts without the words at their beginning and end that all of them share, such as worked examples. */
  function ownParts(texts) {
    if (new Set(texts).size < 2) return texts;
    const reverse = (text) => Array.from(text).reverse().join("");
    const whole = (text, length) => { while (length > 0 && !/\s/.test(text[length - 1])) length--; return length; };
    const start = whole(texts[0], commonLength(texts)), reversed = texts.map((text) => reverse(text.slice(start)));
    const end = whole(reversed[0], commonLength(reversed));
    return reversed.map((text) => reverse(text.slice(end)));
  }

  const sectionOfState = () => [...state].find(([name, value]) => !value && document.getElementById(name))?.[0];

  addEventListener("hashchange", () => {
    const chosen = location.hash.slice(1);
    if (!document.getElementById(chosen)) return;
    const controls = [...state].filter(([, value]) => value);
    for (const name of [...state.keys()]) state.delete(name);
    for (const [name, value] of [[chosen, ""], ...controls]) state.set(name, value);
    writeState();
  });

  /** Marks the page as complete, and shows the section that the address names. */
  function ready() {
    const chosen = sectionOfState();
    if (chosen) document.getElementById(chosen).scrollIntoView();
    document.documentElement.dataset.ready = "yes";
  }

  return {
    data, page, runs: data.runs ?? [], labelled: (data.runs ?? []).length > 1,
    live,
    element, section, button, choices, own, isMissing, short, whole, counted, known, total, duration, age, stateOf, compare, colour, key,
    ownParts, meaningOf, state, remember, kept, ready,
  };
})();
