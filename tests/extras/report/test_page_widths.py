"""Pages fit into the width of their window and follow common conventions."""

import re

import pytest

from lightning_rlhf.extras.report import page as page_module
from tests.extras.report.page_data import page, project, response, run, table, with_responses
from tests.extras.report.test_inspector import click, tokens
from tests.extras.report.test_report_page import ROWS

pytestmark = pytest.mark.timeout(180)
STEPS = list(range(1, 15))
SEGMENTS = [
    {"from": "policy", "text": "<think>" + "why " * 200 + "</think><tool_call>" + "x" * 400 + "</tool_call>"},
    {"from": "environment", "text": "<tool_response>" + "y" * 500 + "</tool_response>"},
    {"from": "environment", "text": "z" * 500},
]
NUMBERS = {"advantage": -0.123456, "response_tokens": 3000, "turns": 3, "tool_calls": 2, "stop": "max_turns", "kl": 0.1}
CHECKS = [{"name": "KL to the reference", "state": "no data", "note": "x" * 200}]
ANSWERS = [{"step": 0, "rows": [response(index=0, prompt="p" * 300, response="q" * 300)]}]
LONG = response(response="word " * 3000, rewards={"r" * 60: 1.0}, **NUMBERS)
GROUPS = [{"prompt": "g" * 160, "mean": 1.0, "rewards": [0.0, 1.0]}]
PAGES = {
    "failed": page(run("f" * 80, state="failed", error="E" * 300 + " do this " * 40, checks=CHECKS)),
    "long": with_responses({**LONG, "prompt": "p" * 400}, answers=ANSWERS),
    "environment": with_responses(response(segments=SEGMENTS, **NUMBERS), groups=GROUPS),
    "two": page(
        run("a" * 60, training=table(step=STEPS, reward__mean=[0.1 * i for i in STEPS]), answers=ANSWERS),
        run("b", training=table(step=STEPS[:5], reward__mean=[1.0] * 5), config={"s" * 90: "v" * 200}, answers=ANSWERS),
        definitions={"reward/mean": {"unit": "u" * 60, "meaning": "m " * 80}},
    ),
}  # fmt: skip
FORTY = project(*[
    {"name": f"sweep/{'n' * 30}{i}", "config": {"model.lr": str(i // 4), "path": "v" * 60}, "group": i // 4,
     "last": {"reward/mean": i / 7}, "state": ["ended", "failed"][i % 2]}
    for i in range(40)
])  # fmt: skip


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("width", [390, 900, 1400])
@pytest.mark.parametrize("name", [*PAGES, "forty"])
def test_pages_fit_into_the_width_of_their_window(show, name, width):
    data, scripts = (FORTY, ("common.js", "project.js")) if name == "forty" else (PAGES[name], page_module._SCRIPTS)
    for dark in (False, True):
        browser = show(data, scripts, width=width, dark=dark)
        browser.evaluate("document.querySelectorAll('details').forEach((own) => own.open = true)")
        browser.evaluate("document.querySelector('[aria-expanded]')?.click()")
        browser.evaluate("new Promise((done) => setTimeout(done, 150))")  # charts follow the width after 120 ms
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert not browser.problems


@pytest.mark.parametrize("width", [390, 900, 1400])
def test_inspector_fits_into_the_width_of_its_window(inspect_page, run_directory, width):
    instance = tokens(["<think>", *["word "] * 600, "x" * 500], [1.0] * 602)
    rows = [{**LONG, "tokens": instance, "group": 0}, response(segments=SEGMENTS, group=1, **NUMBERS)]
    browser = inspect_page(run_directory("a", ROWS, {1: rows}), width=width)
    browser.evaluate(click(0, 1))
    browser.evaluate("document.querySelector('.tokens span').click()")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("(own => own.scrollWidth > own.clientWidth)(document.getElementById('list'))")


FORBIDDEN = (
    "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", "<script", "cssText",
)  # fmt: skip


def test_scripts_insert_texts_only_as_text():
    for path in page_module._ASSETS.glob("*.js"):
        if path.name == "uPlot.iife.min.js":
            continue
        code = path.read_text()
        assert not [name for name in FORBIDDEN if name in code], path.name
        assert not re.search(r"https?://[a-z]", code), path.name
        assert len(code.splitlines()) <= 400, path.name
