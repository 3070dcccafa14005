"""The inspector's list of responses, the values of tokens, the comparison of two responses, and its requests."""

import json
import random
import threading
from difflib import SequenceMatcher

import pytest

from tests.extras.report.test_inspector import LINES, RESPONSES, SPANS, choose, click, response, sort, tokens
from tests.extras.report.test_report_page import ROWS

pytestmark = pytest.mark.timeout(180)
CONVERSATION = {
    **response("three", ["x", "y", "z"], 0.5, 2),
    "segments": [{"from": "policy", "text": "xy"}, {"from": "environment", "text": "z"}],
    "response_tokens": 3, "advantage": 0.25, "turns": 1, "tool_calls": 4, "stop": "fault", "truncated": False,
}  # fmt: skip
NOTES = "[...document.querySelectorAll('#detail .note')].map((own) => own.textContent)"


def key(browser, name):
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)


def test_columns_follow_the_rows(inspect_page, run_directory):
    browser = inspect_page(run_directory("a", ROWS, {1: [*RESPONSES, CONVERSATION]}))
    line = browser.evaluate(LINES)[-1]
    assert line == {
        "reward": "0.5", "right": "0.5", "advantage": "0.25", "tokens": "3", "turns": "1", "tool calls": "4",
        "end": "fault", "prompt": "three", "response": "xyz",
    }  # fmt: skip
    parts = "[...document.querySelectorAll('button.line')].at(-1).querySelectorAll('.part').length"
    assert browser.evaluate(parts) == 2  # texts of policy and environment are apart
    browser = inspect_page(run_directory("b", ROWS, {1: RESPONSES[2:3]}))
    assert list(browser.evaluate(LINES)[0]) == ["reward", "right", "tokens", "prompt", "response"]


@pytest.mark.slow
def test_viewer_waits_for_the_first_responses(inspect_page, run_directory):
    folder = run_directory("a", ROWS)
    browser = inspect_page(folder)
    assert browser.evaluate("document.querySelector('#responses .controls').hidden")
    assert "No responses were written" in browser.evaluate("document.getElementById('list').innerText")
    browser.wait(
        "performance.getEntriesByName(new URL('data', location).href).length > 0"
    )  # so that only the file is new
    (folder / "rollouts/step-000001.jsonl").write_text(json.dumps(RESPONSES[0]) + "\n")
    browser.wait("document.querySelectorAll('button.line').length === 1")
    assert not browser.evaluate("document.querySelector('#responses .controls').hidden")
    assert not browser.problems


def test_headings_sort_with_missing_values_last(inspect_page, run_directory):
    rows = [{"prompt": "p", "response": str(reward), "reward": reward, "group": 0} for reward in (1.0, None, -2.0, 3.0)]
    browser = inspect_page(run_directory("a", ROWS, {1: rows}))
    browser.evaluate(sort("reward"))
    assert [line["reward"] for line in browser.evaluate(LINES)] == ["3", "1", "-2", "–"]
    browser.evaluate(sort("reward"))
    assert [line["reward"] for line in browser.evaluate(LINES)] == ["-2", "1", "3", "–"]
    assert browser.evaluate("document.querySelector('.sort[aria-pressed=true]').textContent") == "reward ↑"
    browser.evaluate(click(3))
    assert browser.evaluate("document.querySelector('#detail .numbers b').textContent") == "reward –"


def test_faults_and_ends_are_filtered(inspect_page, run_directory):
    browser = inspect_page(run_directory("a", ROWS, {1: [*RESPONSES, CONVERSATION]}))
    options = browser.evaluate("[...document.getElementById('only').options].map((own) => own.value)")
    assert options == ["all", "truncated", "differing", "fault", "end: fault", "end: length"]
    for wanted, prompt in (("fault", "three"), ("end: fault", "three"), ("end: length", "one")):
        browser.evaluate(choose("only", wanted))
        assert [line["prompt"] for line in browser.evaluate(LINES)] == [prompt]


def test_keyboard_moves_between_lines_and_selects_them(inspect_page, run_directory):
    browser = inspect_page(run_directory("a", ROWS, {1: RESPONSES}))
    browser.evaluate("document.querySelector('button.line').focus()")
    key(browser, "ArrowDown")
    browser.evaluate("document.activeElement.click()")
    state = (
        "[...document.querySelectorAll('button.line')].map((own) => "
        "[own.ariaPressed, own === document.activeElement, own.tabIndex])"
    )
    expected = [["false", False, -1], ["true", True, 0], ["false", False, -1], ["false", False, -1]]
    assert browser.evaluate(state) == expected
    assert browser.evaluate("document.querySelector('#detail .numbers b').textContent") == "reward 0"
    key(browser, "End")
    assert browser.evaluate(state)[3] == ["false", True, 0]
    browser.evaluate(sort("reward"))
    browser.evaluate("document.querySelector('[data-column=reward]').focus()")
    browser.evaluate("document.activeElement.click()")
    assert browser.evaluate("document.activeElement.dataset.column") == "reward"


def test_values_of_a_token_are_shown_by_click_and_keyboard(inspect_page, run_directory):
    browser = inspect_page(run_directory("a", ROWS, {1: RESPONSES}))
    browser.evaluate(click(0))
    message = "document.getElementById('told').textContent"
    assert browser.evaluate(message) == ""
    browser.evaluate("document.querySelectorAll('.tokens span')[1].click()")
    assert browser.evaluate(message).startswith('"b", token 1, logprob -1, ')
    assert browser.evaluate(message).endswith("advantage -1, weight 1, KL 0.5, version 3, not in the loss")
    browser.evaluate("document.querySelector('.tokens').focus()")
    key(browser, "ArrowRight")
    assert browser.evaluate(message).startswith('"c", token 2, ')
    key(browser, "ArrowRight")
    key(browser, "ArrowLeft")
    assert browser.evaluate(message).startswith('"b", token 1, ')
    assert browser.evaluate(f"{SPANS} (span) => span.classList.contains('current')))") == [[False, True, False]]


def test_responses_may_have_values_for_their_first_tokens_or_none(inspect_page, run_directory):
    texts = [" a", "<s>", "b\n", "c"]  # the special token is not in the response, its first space neither
    partly = {**response("p", [], 1.0, 0), "response": "ab\ncd <think>e</think>", "response_tokens": 9}
    partly["tokens"] = tokens(texts, [1.0] * 4)
    parts = (("policy", "ab"), ("environment", "cd"), ("policy", "e"))
    turns = {
        **response("q", ["a", "b", "c"], 1.0, 1, sampled=[True, True, False]),
        "segments": [{"from": writer, "text": text} for writer, text in parts],
        "response_tokens": 5,
    }
    without = {key: value for key, value in partly.items() if key != "tokens"}
    browser = inspect_page(run_directory("a", ROWS, {1: [partly, turns, {**without, "group": 2}]}))
    browser.evaluate(click(0))
    assert browser.evaluate(NOTES) == [
        "The first 4 of 9 tokens have values; the rest follows without: raise max_token_values of RolloutLog."
    ]
    boxes = "[...document.querySelectorAll('#detail pre')].map((own) => own.textContent)"
    assert browser.evaluate(boxes)[1:] == [" a<s>b\nc", "d <think>e</think>"]
    browser.evaluate(click(0, 1))
    assert browser.evaluate(boxes)[1:] == ["ab", "c", "d", "e"]
    labels = "[...document.querySelectorAll('#detail .block .label')].map((own) => own.textContent)"
    assert browser.evaluate(labels) == ["prompt", "policy, turn 1", "environment", "environment", "policy, turn 2"]
    browser.evaluate(click(1, 2))
    assert browser.evaluate(NOTES) == [
        "No values of tokens were written for this response: raise max_token_values of RolloutLog."
    ]
    browser.evaluate(choose("colour", "text"))
    assert browser.evaluate(NOTES) == []
    assert not browser.problems


def test_text_search_opens_folded_parts(inspect_page, run_directory):
    row = {"prompt": "p", "response": "<think>deep NEEDLE</think>answer", "reward": 1.0, "group": 0}
    browser = inspect_page(run_directory("a", ROWS, {1: [row]}))
    browser.evaluate(click(0))
    assert not browser.evaluate("document.querySelector('#detail .fold').open")
    browser.evaluate(choose("text", "needle", "input"))
    assert browser.evaluate("document.querySelector('#detail .fold').open")


def test_address_selects_a_response(inspect_page, run_directory, browser):
    folder = run_directory("a", ROWS, {1: RESPONSES, 2: RESPONSES})
    page = inspect_page(folder)
    page.evaluate(choose("step", "1"))
    page.wait("location.hash === '#step=1'")
    page.wait("document.querySelectorAll('button.line').length === 4")
    page.evaluate(click(1, 2))
    assert page.evaluate("location.hash") == "#step=1&row=1,2".replace(",", "%2C")
    address = page.evaluate("location.href")
    browser.open(address)
    browser.wait("document.querySelectorAll('#detail .sample').length === 2")
    assert browser.evaluate("document.getElementById('step').value") == "1"
    browser.open(address.replace("row=1%2C2", "row=99,x"))
    browser.wait("document.querySelectorAll('button.line').length === 4")
    assert not browser.problems


def match_in_page(browser, one, other):
    return browser.evaluate(f"window.report.matches({json.dumps(one)}, {json.dumps(other)})")


def test_comparison_finds_a_longest_common_subsequence(inspect_page, run_directory):
    browser = inspect_page(run_directory("a", ROWS, {1: RESPONSES}))
    random.seed(0)
    for size in (0, 1, 5, 12, 40):
        one, other = ([random.choice("abc") for _ in range(size + random.randrange(3))] for _ in range(2))
        result, found_other = match_in_page(browser, one, other)
        common = [text for text, is_common in zip(one, result, strict=True) if is_common]
        assert common == [text for text, is_common in zip(other, found_other, strict=True) if is_common]
        best = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
        for i, a in enumerate(one):
            for j, b in enumerate(other):
                best[i + 1][j + 1] = best[i][j] + 1 if a == b else max(best[i][j + 1], best[i + 1][j])
        assert len(common) == best[-1][-1]


@pytest.mark.parametrize("vocabulary", [5, 300, 100_000])
def test_two_long_responses_are_compared_quickly_and_once(inspect_page, run_directory, vocabulary):
    random.seed(1)
    one, other = ([f"t{random.randrange(vocabulary)}" for _ in range(5000)] for _ in range(2))
    rows = [response("p", texts, 1.0, 0) for texts in (one, other)]
    browser = inspect_page(run_directory("a", ROWS, {1: rows}))
    took = (
        "(() => { const rows = [...document.querySelectorAll('button.line')].map((own) => own.row);"
        "const { comparison } = window.report, start = performance.now(); comparison(rows[0], rows[1]);"
        "const first = performance.now();"
        "for (let i = 0; i < 100; i++) { comparison(rows[1], rows[0]); comparison(rows[0], rows[1]); }"
        "return [first - start, performance.now() - first]; })()"
    )
    first, again = browser.evaluate(took)
    assert first < 1500  # ms, 60 to 90 on an idle core; the former algorithm took 3,500 or more
    assert again < 20
    result, _ = match_in_page(browser, one, other)
    ratio = SequenceMatcher(None, one[:500], other[:500], autojunk=False).ratio()
    assert sum(result) / 5000 >= ratio - 0.02


def test_same_prompt_is_loaded_when_it_is_opened(inspect_page, run_directory):
    folder = run_directory("a", ROWS, {1: RESPONSES})
    for step in range(15):
        row = {"index": 0, "prompt": "p", "response": f"at {step}", "reward": step / 2, "rewards": {}}
        (folder / f"rollouts/validation-{step:06d}.jsonl").write_text(json.dumps(row) + "\n")
    browser = inspect_page(folder)
    assert browser.evaluate("document.querySelectorAll('#prompts .sample').length") == 0
    browser.evaluate("document.querySelector('#prompts details').open = true")
    browser.wait("document.querySelectorAll('#prompts h3').length === 12")
    assert browser.evaluate("document.getElementById('prompt').textContent") == "0: p (0 → 7)"
    assert "3 are not shown" in browser.evaluate("document.getElementById('prompts').innerText")
    assert not browser.problems


@pytest.mark.slow
def test_unchanged_data_are_not_sent_again_and_ended_runs_are_polled_less_often(inspect_page, run_directory):
    folder = run_directory("a", ROWS, {1: RESPONSES})
    browser = inspect_page(folder)
    browser.evaluate(
        "window.seen = [], window.before = fetch, window.fetch = async (...given) => { const start = performance.now();"
        "const answer = await before(...given), tag = given[1].headers['If-None-Match'] ?? '';"
        "seen.push([given[0], answer.status, tag, start]); return answer; }, 0"
    )
    shown = "[...document.querySelectorAll('.figure')].find((own) => own.innerText.includes('last metrics')).innerText"
    before = browser.evaluate(shown)
    browser.wait("seen.some((own) => own[1] === 304)")  # the data has not changed
    assert browser.evaluate("seen.every((own, i) => own[0] === 'data' && Boolean(own[2]) === i > 0)")
    assert browser.evaluate("seen.slice(1).every((own, i) => own[3] - seen[i][3] < 8000)")
    browser.wait(f"{shown} !== {json.dumps(before)}")  # the shown time advances without new data
    (folder / "end.json").write_text('{"error": null}')
    browser.wait("document.querySelector('.figure b').textContent === 'ended'")
    number = browser.evaluate("seen.length")
    threading.Event().wait(5)
    assert browser.evaluate("seen.length") == number
    browser.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # the tab becomes visible again
    browser.wait(f"seen.length === {number + 1}")
