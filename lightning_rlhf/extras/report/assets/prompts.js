"use strict";
/** "The same prompt": its responses at each validation, for all runs side by side. */
(() => {
  const { runs, labelled, live, element, section, choices, button, short, key, ownParts, card, imagesOf, expandButton } = window.report;
  const MOST_VALIDATIONS = 12;  // files that the inspector reads for this section

  /** Prompts by position, text and images: {title, answers: [{run, step, row}]}. */
  function promptsOf(answers) {
    const prompts = new Map();
    for (const { run, step, row } of answers) {
      const name = JSON.stringify([row.index, row.prompt, imagesOf(row).map((image) => image.file)]);
      if (!prompts.has(name)) prompts.set(name, { row, answers: [] });
      prompts.get(name).answers.push({ run, step, row });
    }
    return [...prompts.values()].sort((a, b) => a.row.index - b.row.index);
  }

  /** Whether the reward of the first response of a run differs from that of the last. */
  function hasChanged({ answers }) {
    return runs.some((_, run) => {
      const rewards = answers.filter((answer) => answer.run === run).map((answer) => answer.row.reward);
      return rewards[0] !== rewards.at(-1);
    });
  }

  function titleOf({ row, answers }, prompt) {
    const text = prompt.replace(/\s+/g, " ").trim();
    const changes = runs.map((_, run) => {
      const rewards = answers.filter((answer) => answer.run === run).map((answer) => short(answer.row.reward));
      return rewards.length > 1 ? `${rewards[0]} → ${rewards.at(-1)}` : rewards.join("");
    });
    return `${row.index}: ${text.length > 60 ? `… ${text.slice(-60)}` : text} (${changes.filter(Boolean).join(", ")})`;
  }

  /** A row for each step with the responses of the runs in columns. */
  function answersOf({ row, answers }) {
    const { response: _, segments: __, ...asked } = row;
    const made = [element("div", { class: "samples" }, card(asked, answers[0].run, []))];
    made[0].querySelector(".numbers").remove();
    for (const step of [...new Set(answers.map((own) => own.step))].sort((a, b) => a - b)) {
      const cards = answers.filter((own) => own.step === step).sort((a, b) => a.run - b.run).map((own) => {
        const { prompt: _, ground_truth: __, ...rest } = own.row, shown = card(rest, own.run);
        if (labelled) shown.prepend(element("h4", {}, key(own.run), runs[own.run].name));
        return shown;
      });
      made.push(element("h3", { text: `step ${step}` }), element("div", { class: "samples" }, ...cards));
    }
    return made;
  }

  function addPrompts() {
    if (!live && !runs.some((run) => run.answers?.length)) return;
    const place = section("prompts", "The same prompt");
    const choice = choices("prompt", []), content = element("div"), note = element("p", { class: "muted", role: "status" });
    const move = (by) => { choice.selectedIndex = Math.min(Math.max(choice.selectedIndex + by, 0), choice.length - 1); draw(); };
    const all = expandButton(content);
    const controls = element("div", { class: "controls" }, element("label", {}, "prompt", choice),
      button("previous", () => move(-1)), button("next", () => move(1)), all);
    let prompts = [];
    const draw = () => { content.replaceChildren(...(prompts.length ? answersOf(prompts[choice.selectedIndex]) : [])); all.ariaPressed = "false"; };
    choice.addEventListener("change", draw);

    function show(answers) {
      const before = choice.value;
      prompts = promptsOf(answers);
      const texts = ownParts(prompts.map(({ row }) => String(row.prompt ?? "")));
      choice.replaceChildren(...prompts.map((prompt, i) => element("option", { value: i, text: titleOf(prompt, texts[i]) })));
      if (before && before < prompts.length) choice.value = before;
      else choice.selectedIndex = Math.max(prompts.findIndex(hasChanged), 0);
      draw();
    }

    place.append(element("p", { class: "muted", text: "Greedy responses to the first prompts of the validation data, "
      + (live ? "at each validation." : "in the first and last validation.") }));
    if (!live) {
      place.append(controls, content);
      show(runs.flatMap((run, i) => (run.answers ?? []).flatMap(({ step, rows }) => rows.map((row) => ({ run: i, step, row })))));
      return;
    }
    const details = element("details", {}, element("summary", { text: "show the prompts" }), note, controls, content);
    place.append(details);
    let loaded = "";
    /** Reads the files of the validations, when they are looked at and others exist than before. */
    async function load() {
      const wanted = runs.map((run) => spread(run.validations ?? []));
      if (!details.open || loaded === JSON.stringify(wanted)) return;
      loaded = JSON.stringify(wanted);
      controls.hidden = !wanted.flat().length;
      const left = runs.reduce((sum, run, i) => sum + (run.validations ?? []).length - wanted[i].length, 0);
      note.textContent = controls.hidden ? "No responses of a validation were written yet."
        : left ? `The first, the last, and others in equal distances; ${left} are not shown.` : "";
      const files = wanted.flatMap((steps, run) => steps.map((step) => ({ run, step })));
      const answers = await Promise.all(files.map(async ({ run, step }) => {
        const answer = await fetch(`validations/${run}/${step}`);
        return answer.ok ? (await answer.json()).map((row) => ({ run, step, row })) : [];
      }));
      show(answers.flat());
    }
    details.addEventListener("toggle", load);
    window.report.loadPrompts = load;
  }

  /** At most so many steps as are read: first, last, and others in equal distances. */
  function spread(steps) {
    const count = Math.min(steps.length, MOST_VALIDATIONS);
    return Array.from({ length: count }, (_, i) => steps[Math.round(i * (steps.length - 1) / Math.max(count - 1, 1))]);
  }

  window.report.addPrompts = addPrompts;
})();
