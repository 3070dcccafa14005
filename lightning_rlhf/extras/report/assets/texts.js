"use strict";
/** Texts of prompts and responses: marks for invisible characters, folded parts, and the card of a response. */
(() => {
  const { runs, live, element, button, own, short, counted, isMissing } = window.report;
  // Control characters, and those that reverse the direction of writing or have no width. \r\n is the end of a line.
  const HIDDEN = /\r(?!\n)|[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b\u2028-\u202e\u2060-\u2069\ufeff]/g;
  const LEFT_OUT = /\n… [\d,]+ characters left out[^\n]*…\n/;
  const FOLDED = /<(think|tool_call|tool_response)>[^]*?(?:<\/\1>|$)/g;
  const TITLES = { think: "thinking", tool_call: "tool call", tool_response: "result of a tool" };
  const THUMBNAIL = /^images\/([0-9a-f]{16}\.jpg)$/, JPEG = /^data:image\/jpeg;base64,[A-Za-z0-9+/=]+$/;
  const MOST_IMAGES = 16, MOST_READ = 500;  // of a prompt; thumbnails that are kept
  const LONG = 900;  // characters of a text that may be higher than its box
  const NO_RESPONSES = "No responses were written: the callback RolloutLog writes those of each step, by default in every "
    + "run with RolloutLoop.";

  function hiddenMark(character) {
    const code = character.codePointAt(0), name = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
    return element("span", { class: "mark", title: name, text: code < 0x20 ? String.fromCodePoint(0x2400 + code) : name });
  }

  /** The nodes of a text. A mark replaces each invisible character, so that it cannot change the text around it. */
  function marked(text) {
    const nodes = [];
    let end = 0;
    for (const found of text.matchAll(HIDDEN)) {
      nodes.push(text.slice(end, found.index), hiddenMark(found[0]));
      end = found.index + found[0].length;
    }
    return [...nodes, text.slice(end)].filter((node) => node !== "");
  }

  /** The box of a text; ``leftOut`` says whether characters of its middle were left out. */
  function box(text, leftOut) {
    const made = element("pre", { dir: "auto" }), mark = leftOut ? text.match(LEFT_OUT) : null;
    if (!mark) made.append(...marked(text));
    else {
      made.append(...marked(text.slice(0, mark.index)), element("span", { class: "left-out", text: mark[0].trim() }),
        ...marked(text.slice(mark.index + mark[0].length)));
    }
    return made;
  }

  /** A text that is closed until a reader or the search opens it. */
  function fold(title, text, leftOut) {
    const summary = element("summary", { text: `${title}, ${counted(text.length, "character")}` });
    return element("details", { class: "fold" }, summary, box(text, leftOut));
  }

  /** [title, text] of the parts of a text: "thinking" and others that are folded, or "" for what is between them. */
  function partsOf(text) {
    const parts = [], closing = text.indexOf("</think>"), opening = text.indexOf("<think>");
    let end = 0;
    if (closing >= 0 && (opening < 0 || opening > closing)) {  // the prompt has the opening mark
      end = closing + "</think>".length;
      parts.push(["thinking", text.slice(0, end)]);
    }
    for (const found of text.matchAll(FOLDED)) {
      if (found.index < end) continue;
      parts.push(["", text.slice(end, found.index)], [TITLES[found[1]], found[0]]);
      end = found.index + found[0].length;
    }
    return [...parts, ["", text.slice(end)]].filter(([, part]) => part.trim());
  }

  /** A block of one writer, "policy" or "environment", with its label. */
  function block(writer, label, ...content) {
    const kind = writer === "policy" ? "policy" : "environment";
    return element("div", { class: `block ${kind}` }, element("div", { class: "label", text: label }), ...content);
  }

  function foldedText(text, leftOut) {
    const parts = partsOf(text).map(([title, part]) => title ? fold(title, part, leftOut) : box(part, leftOut));
    return parts.length ? parts : [box(text)];
  }

  /** The blocks of a conversation after some turns, with the numbers of the policy's turns and the rewards of those before the last. */
  function segmentBlocks(segments, turn = 0) {
    return segments.flatMap((part) => {
      const isPolicy = part.from === "policy", text = String(part.text ?? ""), leftOut = part.text_left_out;
      if (isPolicy) turn += 1;
      const label = isPolicy ? `policy, turn ${turn}` : "environment";
      const reward = part.reward ? [element("div", { class: "muted", text: `reward of this turn: ${short(part.reward)}` })] : [];
      return [block(part.from, label, ...foldedText(text, leftOut)), ...reward];
    });
  }

  function responseBlocks(row) {
    if (row.segments?.length) return segmentBlocks(row.segments);
    return [block("policy", "policy", ...foldedText(String(row.response ?? ""), row.response_left_out))];
  }

  const imagesOf = (row) => Array.isArray(row.images) ? row.images.filter((image) => image && typeof image === "object") : [];

  /** Reads a thumbnail of the inspector as an address that the policy of the page allows; "" if there is none. */
  async function read(path) {
    const answer = await fetch(path).catch(() => null);
    if (!answer?.ok) return "";
    const reader = new FileReader(), content = await answer.blob();
    return new Promise((done) => {
      reader.addEventListener("loadend", () => done(reader.result ?? ""));
      reader.readAsDataURL(content);
    });
  }

  const thumbnails = new Map();  // promises of those that were read, by their paths

  function thumbnailAt(path) {
    if (thumbnails.size >= MOST_READ) thumbnails.clear();
    if (!thumbnails.has(path)) thumbnails.set(path, read(path));
    return thumbnails.get(path);
  }

  /** An image of a prompt: its size as text, or its thumbnail where there is one. */
  function picture({ file, width, height }, run) {
    const isSize = [width, height].every((pixels) => Number.isInteger(pixels) && pixels > 0);
    const text = isSize ? `image, ${width} x ${height} pixels` : "image", made = element("span", { class: "muted", text });
    const name = typeof file === "string" ? file.match(THUMBNAIL)?.[1] : undefined;
    const shown = (address) => JPEG.test(address) ? element("img", { src: address, alt: text, title: text }) : made;
    if (!name) return made;
    if (!live) return shown(String(own(runs[run]?.thumbnails, file) ?? ""));
    thumbnailAt(`images/${run}/${name}`).then((address) => made.replaceWith(shown(address)));
    return made;
  }

  /** The first images of a prompt, and the number of the others. */
  function pictures(row, run) {
    const images = imagesOf(row), left = images.length - MOST_IMAGES + (Number(row.images_left_out) || 0);
    const made = images.slice(0, MOST_IMAGES).map((image) => picture(image, run));
    if (left > 0) made.push(element("span", { class: "muted", text: `and ${counted(left, "more image")}` }));
    return made.length ? [element("div", { class: "pictures" }, ...made)] : [];
  }

  const stopOf = (row) => row.stop || (row.truncated ? "length" : "");

  /** The numbers of a response, each with its name. */
  function figures(row) {
    const stop = stopOf(row);
    const shown = [
      ...Object.entries(row.rewards || {}).filter(([name]) => name !== row.reward_name).map(([name, value]) => `${name} ${short(value)}`),
      ...["advantage", "kl"].filter((name) => !isMissing(row[name])).map((name) => `${name === "kl" ? "KL" : name} ${short(row[name])}`),
      ...[["response_tokens", "token"], ["turns", "turn"], ["tool_calls", "tool call"]]
        .filter(([name]) => !isMissing(row[name])).map(([name, noun]) => counted(row[name], noun)),
      ...(stop === "length" ? ["cut at the limit"] : stop ? [`end: ${stop}`] : []),
    ];
    return element("div", { class: "numbers" }, element("b", { text: `${row.reward_name ?? "reward"} ${short(row.reward)}` }),
      ...shown.map((text) => element("span", { text })));
  }

  /** The card of a response of a run: numbers, prompt with its images, blocks of the response, and the correct answer. */
  function card(row, run, blocks = responseBlocks(row)) {
    const made = element("article", { class: "sample" });
    const texts = [row.prompt, row.response, ...(row.segments || []).map((part) => part.text)].map((text) => String(text ?? ""));
    const height = button("full height", () => setHeight(made, !made.classList.contains("whole")), { class: "height", "aria-pressed": "false" });
    height.hidden = !texts.some((text) => text.length > LONG || text.split("\n").length > 12);
    made.append(element("div", { class: "heading" }, figures(row), height));
    if (row.prompt !== undefined) {
      const text = element("div", { class: "ends" }, box(String(row.prompt ?? ""), row.prompt_left_out));
      made.append(block("environment", "prompt", ...pictures(row, run), text));
    }
    made.append(...blocks);
    const answer = row.ground_truth;
    if (!isMissing(answer) && answer !== "") {
      made.append(element("div", { class: "label", text: "correct answer" }), box(String(answer), row.ground_truth_left_out));
    }
    return made;
  }

  function setHeight(made, isWhole) {
    made.classList.toggle("whole", isWhole);
    made.querySelector(".height").setAttribute("aria-pressed", String(isWhole));
  }

  /** Shows all texts of the cards in their whole height with their folded parts, or undoes it. */
  function expand(root, isWhole) {
    for (const made of root.querySelectorAll(".sample")) setHeight(made, isWhole);
    for (const part of root.querySelectorAll("details")) part.open = isWhole || (part.open && !part.classList.contains("fold"));
  }

  /** A button that expands all cards in an element, and undoes it. */
  function expandButton(root) {
    const made = button("expand all", () => {
      made.ariaPressed = String(made.ariaPressed !== "true");
      expand(root, made.ariaPressed === "true");
    }, { "aria-pressed": "false" });
    return made;
  }

  /** Opens the folded parts that contain a text, and marks where it is. Returns the number of places. */
  function find(root, wanted) {
    const places = [], text = wanted.trim().toLowerCase();
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (text && walker.nextNode()) {
      const node = walker.currentNode, own = node.data.toLowerCase();
      if (own.length !== node.data.length || !node.parentElement.closest("pre")) continue;
      for (let at = own.indexOf(text); at >= 0; at = own.indexOf(text, at + text.length)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, at + text.length);
        places.push(range);
      }
    }
    for (const range of places) {
      const around = (node) => node.parentElement.closest("details");
      for (let part = around(range.startContainer); part && root.contains(part); part = around(part)) part.open = true;
    }
    if (window.CSS.highlights) CSS.highlights.set("found", new Highlight(...places));
    return places.length;
  }

  Object.assign(window.report, { NO_RESPONSES, marked, box, block, card, imagesOf, expand, expandButton, find, segmentBlocks, stopOf, responseBlocks });
})();
