"""The table of the runs below a folder: sorting, filters, groups of seeds, and the comparison of selected runs."""

import json
import threading

import pytest

from lightning_rlhf.extras.report.inspector.project import find_runs
from lightning_rlhf.extras.report.inspector.server import InspectServer
from tests.extras.report.page_data import project
from tests.extras.report.test_inspector import choose
from tests.extras.report.test_report_page import HOSTILE, ROWS

pytestmark = pytest.mark.timeout(180)
SCRIPTS = ("common.js", "project.js")
CELLS = "[...document.querySelectorAll('tbody tr')].map((line) => [...line.cells].map((cell) => cell.textContent))"
HEADINGS = "[...document.querySelectorAll('thead button')].map((own) => own.dataset.column)"
RUNS = [
    {"name": "a/0", "config": {"lr": "0.1", "same": "x"}, "last": {"reward/mean": 1.0, "other": 4.0}, "group": 0,
     "first": {"reward/mean": 0.5}, "seed": 0},
    {"name": "a/1", "config": {"lr": "0.1", "same": "x"}, "last": {"reward/mean": 2.0}, "group": 0, "seed": 1,
     "steps": 4, "failed_checks": 2},
    {"name": "b", "config": {"lr": "0.02", "same": "x"}, "last": {"reward/mean": 9.0}, "first": {"reward/mean": 0.0},
     "group": 1, "state": "failed", "seed": None},
    {"name": "c", "config": {"same": "x"}, "last": {}, "group": 2, "state": "damaged", "error": "c cannot be read"},
]  # fmt: skip


def sort(column):
    return f"document.querySelector('[data-column=\"{column}\"]').click()"


@pytest.fixture
def table(show):
    return lambda *runs, **options: show(project(*(runs or RUNS), **options), SCRIPTS)


def test_runs_with_equal_settings_are_one_row_with_mean_and_deviation(table):
    browser = table()
    assert browser.evaluate(HEADINGS) == [
        "name", "state", "failed checks", "steps", "lr", "reward/mean", "seed", "last metrics"
    ]  # fmt: skip
    assert browser.evaluate(CELLS) == [
        ["▸\u00a0a/0 and 1 other run", "2 ended", "2", "4 to 10 of 10", "0.1", "1.5 ± 0.71 (2)", "0, 1", "60 min ago"],
        ["b", "failed", "0", "10", "0.02", "0 → 9", "–", "60 min ago"],
        ["cc cannot be read", "damaged", "0", "10", "–", "–", "3", "60 min ago"],
    ]
    browser.evaluate("(own => { own.focus(); own.click(); })(document.querySelector('[aria-expanded]'))")
    assert browser.evaluate("document.activeElement.ariaExpanded") == "true"  # of the new table
    names = [line[0] for line in browser.evaluate(CELLS)]
    assert names == ["▾\u00a0a/0 and 1 other run", "a/0", "a/1", "b", "cc cannot be read"]
    assert browser.evaluate(CELLS)[1][3:6] == ["10", "0.1", "0.5 → 1"]
    browser.evaluate("document.getElementById('single').click()")
    assert len(browser.evaluate(CELLS)) == 4
    assert not browser.problems


def test_run_that_ended_before_any_metrics_has_its_error(table):
    empty = {"name": "d", "last": {}, "state": "failed", "error": "no engine", "modified": 0.0, "steps": 0}
    assert table(*RUNS, empty).evaluate(CELLS)[-1][:4] == ["dno engine", "failed", "0", "0 of 10"]


def test_columns_sort_with_missing_values_last(table):
    browser = table()
    for column, names in (("reward/mean", "bac"), ("lr", "bac"), ("name", "abc"), ("failed checks", "abc")):
        browser.evaluate(sort(column))
        shown = "".join(line[0].strip("▸\u00a0")[0] for line in browser.evaluate(CELLS))
        assert shown == names, column
    browser.evaluate(f"{sort('reward/mean')}, {sort('reward/mean')}")
    assert [line[0].strip("▸\u00a0")[0] for line in browser.evaluate(CELLS)] == ["a", "b", "c"]
    assert browser.evaluate("document.querySelector('[aria-sort=ascending]').textContent") == "reward/mean ↑"


def test_rows_are_filtered(table):
    browser = table()
    for words, names in (("lr=0.1", "a"), ("B FAILED", "b"), ("nothing", ""), ("", "abc")):
        browser.evaluate(choose("words", words, "input"))
        assert "".join(line[0].strip("▸\u00a0")[0] for line in browser.evaluate(CELLS)) == names
    browser.evaluate(choose("state", "failed"))
    assert [line[0] for line in browser.evaluate(CELLS)] == ["b"]
    assert browser.evaluate("location.hash") == "#state=failed"
    browser.evaluate(choose("state", ""))
    browser.evaluate(choose("checks", "failed"))
    assert [line[0] for line in browser.evaluate(CELLS)] == ["a/1"]  # the only one that is left of its group


def test_columns_are_selected_by_words_and_settings_follow_the_metrics(table):
    browser = table()
    for words, columns in (("OTH", ["other"]), ("l", ["lr"]), ("", ["lr", "reward/mean"])):
        browser.evaluate(choose("names", words, "input"))
        assert browser.evaluate(HEADINGS)[4:-2] == columns
    settings = {f"model.init_args.s{i}": "1" for i in range(5)}
    browser = table({**RUNS[0], "config": settings}, {**RUNS[1], "group": 1})
    assert browser.evaluate(HEADINGS)[4:7] == ["reward/mean", "seed", "last metrics"]
    assert browser.evaluate(HEADINGS)[7:] == [*settings, "lr", "same"]
    heading = "document.querySelector('[data-column=\"model.init_args.s0\"]')"
    assert browser.evaluate(f"[{heading}.textContent, {heading}.title]") == ["model.s0", "model.init_args.s0"]


def test_page_of_a_file_links_only_to_files_next_to_it(table):
    links = ["a/0/report.html", "", "javascript:window.hacked=1", "//evil.example/x"]
    browser = table(*[{**item, "link": links[i], "group": i} for i, item in enumerate(RUNS)])
    result = browser.evaluate("[...document.querySelectorAll('a')].map((own) => own.href)")
    assert result[0].endswith("/a/0/report.html")
    assert all(address.startswith("file:///") for address in result)
    assert browser.evaluate("document.querySelectorAll('tbody input').length") == 0
    assert not browser.problems


def test_hostile_texts_are_shown_as_text(table):
    plain = ("name", "state", "error", "seed", "link")
    parts = {"config": lambda text: {text: text}, "last": lambda text: {text: 1.0}, "first": lambda text: {text: 0.0}}
    runs = [
        {**dict.fromkeys(plain, text), **{name: make(text) for name, make in parts.items()}, "group": 1}
        for text in HOSTILE
    ]
    definitions = {text: {"unit": text, "meaning": text} for text in HOSTILE}
    browser = table(*runs, definitions=definitions)
    browser.evaluate("document.getElementById('single').click()")
    browser.evaluate(choose("names", "<", "input"))
    assert browser.evaluate("typeof window.hacked") == "undefined"
    kinds = "document.querySelectorAll('script, img, svg, iframe, base, link, form, object, template')"
    assert browser.evaluate(f"[...{kinds}].map((own) => own.tagName)") == ["SCRIPT"] * 3
    assert not browser.problems


def test_folder_without_runs_is_reported(show):
    browser = show(project(), SCRIPTS)
    assert "No run below this folder has metrics yet." in browser.evaluate("document.body.innerText")


def test_selected_runs_are_compared_in_the_inspector(browser, run_directory):
    for i in range(10):
        folder = run_directory(f"sweep/{i}", ROWS, config={"lr": i // 2, "seed_everything": i}).parent
    (folder / "x").mkdir()
    (folder / "x/end.json").write_text('{"error": "no engine"}')  # it has no metrics, and cannot be selected
    server = InspectServer(find_runs(folder), folder=folder)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    before, browser.allowed = browser.allowed, (*browser.allowed, server.url)
    try:
        browser.open(server.url)
        link = "document.querySelector('#comparison a')?.getAttribute('href')"
        boxes = "[...document.querySelectorAll('tbody input')]"
        assert browser.evaluate(f"{boxes}.length") == 5
        assert browser.evaluate("document.querySelectorAll('tbody tr').length") == 6
        browser.evaluate(f"{boxes}[1].click()")
        browser.evaluate(f"{boxes}[2].click()")
        assert browser.evaluate(link) == "compare/2,3,4,5/"
        browser.evaluate(f"{boxes}.forEach((own, i) => {{ if (![1, 2].includes(i)) {boxes}[i].click(); }})")
        assert browser.evaluate(link) is None
        assert "at most 8" in browser.evaluate("document.getElementById('comparison').textContent")
        browser.evaluate(f"{boxes}[0].click()")
        browser.evaluate("document.querySelector('#comparison a').click()")
        browser.wait("document.querySelectorAll('.runs span[title]').length === 8")
        browser.open(server.url)
        browser.evaluate("document.querySelector('[aria-expanded]').click()")
        browser.evaluate("document.querySelector('tbody a').click()")
        browser.wait("location.pathname.endsWith('/run/0/') && document.documentElement?.dataset.ready === 'yes'")
        assert json.loads(browser.evaluate("JSON.stringify(window.report.runs.map((own) => own.name))")) == ["0"]
        browser.evaluate("[...document.querySelectorAll('nav a')].find((a) => a.textContent === 'All runs').click()")
        browser.wait(f"location.href === '{server.url}' && document.documentElement?.dataset.ready === 'yes'")
        assert not browser.problems
    finally:
        browser.leave()
        browser.allowed = before
        server.shutdown()
        server.server_close()
