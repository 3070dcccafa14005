"""Texts of responses on the report page: marks, folded parts, labels, and the same prompt over steps."""

import pytest

from tests.extras.report.page_data import page, response, run, with_responses
from tests.extras.report.test_inspector import choose

pytestmark = pytest.mark.timeout(180)
CARDS = "[...document.querySelectorAll('#responses .sample')]"
FOLDS = (
    "[...document.querySelectorAll('#responses .fold')].map((own) => [own.querySelector('summary').textContent, "
    "own.querySelector('pre').textContent, own.open])"
)


def test_text_without_its_middle_is_marked(show):
    mark = "\n… 15,906 characters left out, see lightning-rlhf inspect runs/a …\n"
    text = f"begin{mark}end"
    browser = show(with_responses(response(response=text, response_left_out=15906), response(response=text)))
    marks = f"{CARDS}.map((own) => [...own.querySelectorAll('.left-out')].map((one) => one.textContent))"
    assert browser.evaluate(marks) == [[mark.strip()], []]  # the second one's model wrote it
    assert browser.evaluate(f"{CARDS}[0].querySelectorAll('pre')[1].textContent") == f"begin{mark.strip()}end"


def test_thinking_and_tool_calls_are_folded_with_their_length(show):
    texts = [
        "<think>first</think>done <tool_call>{}</tool_call> rest",
        "thought</think>answer",  # the prompt has the opening mark
        "<think>" + "x" * 1234,  # cut
        "a < b, no marks",
    ]
    browser = show(with_responses(*[response(response=text) for text in texts]))
    assert browser.evaluate(FOLDS) == [
        ["thinking, 20 characters", "<think>first</think>", False],
        ["tool call, 25 characters", "<tool_call>{}</tool_call>", False],
        ["thinking, 15 characters", "thought</think>", False],
        ["thinking, 1,241 characters", "<think>" + "x" * 1234, False],
    ]
    instance = "[...card.querySelectorAll('.policy > pre, .policy .fold pre')].map((one) => one.textContent).join('')"
    assert browser.evaluate(f"{CARDS}.map((card) => {instance})") == texts


def test_turns_are_numbered_and_tool_results_folded(show):
    segments = [
        {"from": "policy", "text": "<tool_call>1+1</tool_call>", "reward": 0.25},
        {"from": "environment", "text": "<tool_response>\n2\n</tool_response>"},
        {"from": "policy", "text": "two"},
        {"from": "environment", "text": "right"},
    ]
    row = response(segments=segments, turns=2, tool_calls=1, stop="max_turns", advantage=-0.5, response_tokens=9)
    browser = show(with_responses(row))
    labels = f"{CARDS}.flatMap((own) => [...own.querySelectorAll('.label')].map((one) => one.textContent))"
    expected = ["prompt", "policy, turn 1", "environment", "policy, turn 2", "environment"]
    assert browser.evaluate(labels) == expected
    folds = [fold[0] for fold in browser.evaluate(FOLDS)]
    assert folds == ["tool call, 26 characters", "result of a tool, 34 characters"]
    numbers = browser.evaluate("[...document.querySelector('.numbers').children].map((own) => own.textContent)")
    assert numbers == ["reward 1", "advantage -0.5", "9 tokens", "2 turns", "1 tool call", "end: max_turns"]
    assert "reward of this turn: 0.25" in browser.evaluate("document.getElementById('responses').innerText")


def test_invisible_and_direction_changing_characters_are_marked(show):
    text = "a\u202eb\u0007c\u200bd\re\tf\r\ng\u200dh"
    browser = show(with_responses(response(prompt="\u0645\u0631\u062d\u0628\u0627", response=text)))
    box = "document.querySelectorAll('#responses pre')[1]"
    assert browser.evaluate(f"{box}.textContent") == "aU+202Eb\u2407cU+200Bd\u240de\tf\r\ng\u200dh"
    assert browser.evaluate(f"[...{box}.querySelectorAll('.mark')].map((own) => own.title)") == [
        "U+202E", "U+0007", "U+200B", "U+000D"
    ]  # fmt: skip
    directions = "[...document.querySelectorAll('#responses pre')].map((own) => getComputedStyle(own).direction)"
    assert browser.evaluate(directions) == ["rtl", "ltr"]


def test_search_opens_its_matches(show):
    rows = [response(response="<think>The NEEDLE is here</think>no"), response(response="<think>nothing</think>")]
    data = page(run(samples=[{"step": 1, "rows": rows}, {"step": 2, "rows": rows[1:]}]))
    browser = show(data)
    opened = "[...document.querySelectorAll('#responses > details')].map((own) => own.open)"
    assert browser.evaluate(opened) == [False, True]
    browser.evaluate(choose("text", "needle", "input"))
    assert browser.evaluate(opened) == [True, True]
    assert [fold[2] for fold in browser.evaluate(FOLDS)] == [True, False, False]
    assert browser.evaluate("[...CSS.highlights.get('found')].map(String)") == ["NEEDLE"]
    assert "1 place" in browser.evaluate("document.querySelector('#responses .controls').innerText")


def test_long_texts_open_to_their_full_height(show):
    browser = show(with_responses(response(response="line\n" * 200), response()))
    height = "document.querySelector('#responses .policy pre').clientHeight"
    buttons = "[...document.querySelectorAll('.height')].map((own) => [own.hidden, own.ariaPressed])"
    assert browser.evaluate(height) < 400
    assert browser.evaluate(buttons) == [[False, "false"], [True, "false"]]
    browser.evaluate("document.querySelector('.height').click()")
    assert browser.evaluate(height) > 3000
    browser.evaluate("document.querySelector('.height').click()")
    assert browser.evaluate(height) < 400
    everything = "[...document.querySelectorAll('#responses button')].find((own) => own.textContent === 'expand all')"
    browser.evaluate(f"{everything}.click()")
    assert browser.evaluate(height) > 3000
    assert browser.evaluate(f"{everything}.ariaPressed") == "true"


def answers(rewards, prompt="how much?", index=7):
    return [
        {"step": step, "rows": [response(index=index, prompt=prompt, response=f"at {step}", reward=reward)]}
        for step, reward in rewards.items()
    ]


def test_same_prompt_is_shown_over_steps_for_all_runs(show):
    one, other = answers({0: 0.0, 10: 1.0}), answers({0: 0.5})
    other[0]["rows"] += answers({0: None}, "other prompt")[0]["rows"]  # of the same position in other data
    browser = show(page(run("a", answers=one), run("b", answers=other)))
    choices = "[...document.getElementById('prompt').options].map((own) => own.textContent)"
    assert browser.evaluate(choices) == ["7: how much? (0 → 1, 0.5)", "7: other prompt (–)"]
    parts = "document.querySelectorAll('#prompts h3, #prompts h4, #prompts .numbers b')"
    shown = f"[...{parts}].map((own) => own.textContent)"
    assert browser.evaluate(shown) == ["step 0", "a", "reward 0", "b", "reward 0.5", "step 10", "a", "reward 1"]
    buttons = "[...document.querySelectorAll('#prompts button')]"
    browser.evaluate(f"{buttons}.find((own) => own.textContent === 'next').click()")
    assert browser.evaluate(shown) == ["step 0", "b", "reward –"]
    assert not browser.problems


def test_page_without_validation_responses_has_no_such_section(show):
    browser = show(page(run()))
    assert browser.evaluate("document.getElementById('prompts')") is None
