"""The report page in a real browser: its numbers, its controls, hostile texts, narrow windows and dark mode."""

import json

import pytest

from lightning_rlhf.extras.report import command as report
from lightning_rlhf.extras.report.page import groups_of, report_page, reward_quantiles, samples_of
from lightning_rlhf.extras.report.run_directory import RunDirectory

pytestmark = pytest.mark.timeout(180)
ROWS = [
    {"step": 0, "val/fraction_correct_greedy": 0.25},
    *({"step": i, "reward/mean": i / 10, "reward/std": 0.4, "kl/ref": 0.1 * i, "time/step_s": 2.0, "time/update_s": 1.5,
       "rollout/response_tokens": 80.0, "rollout/response_tokens_mean": 10.0, "loss/policy": -0.01 * i}
      for i in range(1, 11)),
    {"step": 10, "val/fraction_correct_greedy": 0.75},
]  # fmt: skip
RESPONSES = [
    {
        "prompt": f"question {i // 4}",
        "response": f"answer {i}",
        "reward": float(i % 4),
        "rewards": {"right": float(i % 4)},
        "group": i // 4,
        "truncated": i == 3,
        "ground_truth": "42",
    }
    for i in range(8)
]
SCRIPT = "<script>window.hacked=1</script>"
HOSTILE = [
    SCRIPT, f"</script>{SCRIPT}", f'">{SCRIPT}', f"<!--{SCRIPT}", f"]]>{SCRIPT}", f"<template>{SCRIPT}</template>",
    "<img src=x onerror=window.hacked=1>", "'><img src=x onerror=window.hacked=1>", "<svg onload=window.hacked=1>",
    "<iframe src=javascript:parent.hacked=1>", "<a href=javascript:window.hacked=1>x</a>", "javascript:window.hacked=1",
    "<style>*{display:none}</style>", "<base href=http://127.0.0.1:9/>",
    "<meta http-equiv=refresh content=0;url=http://127.0.0.1:9/>", "<link rel=stylesheet href=http://127.0.0.1:9/x.css>",
    "<form action=http://127.0.0.1:9/><input name=a></form>", "<object data=http://127.0.0.1:9/x></object>",
    "\u2028window.hacked=1\u2029", "${window.hacked=1}", "{{window.hacked=1}}", "\u202egnp.exe", "\x00\x07\ud800",
    "\\u003cscript>window.hacked=1",
]  # fmt: skip


def chart(metric):
    return f"document.querySelector('[data-metric=\"{metric}\"]').plot.data"


@pytest.fixture
def page(browser, tmp_path):
    """Open the report of some directories."""

    def page(*folders, **options):
        path = tmp_path / "page.html"
        path.write_text(report_page([RunDirectory(folder) for folder in folders]), encoding="utf-8")
        browser.open(path.as_uri(), **options)
        return browser

    return page


def test_charts_have_the_numbers_of_the_run(page, run_directory):
    browser = page(run_directory("a", ROWS, {1: RESPONSES, 10: RESPONSES}))
    assert browser.evaluate(chart("reward/mean")) == [list(range(1, 11)), [i / 10 for i in range(1, 11)]]
    assert browser.evaluate(chart("val/fraction_correct_greedy")) == [[0, 10], [0.25, 0.75]]
    assert browser.evaluate(chart("reward quantiles"))[:2] == [[1, 10], [0, 0]]
    assert [column[0] for column in browser.evaluate(chart("reward quantiles"))[1:]] == [0, 0, 0.75, 1.5, 2.25, 3, 3]
    for shown in ("0.25 → 0.75", "0.1 → 1", "No check failed.", "question 1", "answer 7", "reward 3", "update"):
        browser.wait(f"document.body.innerText.includes({json.dumps(shown)})")
    assert not browser.problems


def test_finding_shows_its_responses(page, run_directory):
    rows = [
        {"step": i + 1, "reward/liked": float(i > 9), "reward/right": float(i < 10), "rollout/truncated_fraction": 0.5}
        for i in range(20)
    ]
    responses = [{**row, "rewards": {"liked": row["reward"], "right": 1 - row["reward"]}} for row in RESPONSES]
    folder = run_directory("a", rows, {20: responses})
    (folder / "health_settings.json").write_text(json.dumps({"weights": {"liked": 1.0, "right": 0.0}}))
    browser = page(folder)
    shown = "[...document.querySelectorAll('.finding')].map((one) => one.querySelectorAll('.sample').length)"
    assert sorted(browser.evaluate(shown)) == [0, 4]
    browser.evaluate("document.querySelector('.finding details').open = true")
    for text in ("4 responses of step 20", "answer 3", "right -2"):
        browser.wait(f"document.querySelector('.finding details').innerText.includes({json.dumps(text)})")
    assert not browser.problems


def test_intervals_are_bands_around_their_metric(page, run_directory):
    bounds = {"val/fraction_correct_greedy_low": 0.2, "val/fraction_correct_greedy_high": 0.4}
    rows = [{**row, **bounds} if "val/fraction_correct_greedy" in row else row for row in ROWS]
    browser = page(run_directory("a", rows), run_directory("b", ROWS))
    assert browser.evaluate(chart("val/fraction_correct_greedy")) == [
        [0, 10], [0.25, 0.75], [0.2, 0.2], [0.4, 0.4], [0.25, 0.75], [None, None], [None, None]
    ]  # fmt: skip
    assert browser.evaluate("document.querySelector('[data-metric=\"val/fraction_correct_greedy\"]').plot.bands")[0][
        "series"
    ] == [3, 2]
    assert browser.evaluate("document.querySelectorAll('[data-metric$=_low]').length") == 0
    assert browser.evaluate("!document.body.innerText.includes('val (2)')")
    assert not browser.problems


def test_legend_has_the_last_values_until_the_pointer_is_over_the_chart(page, run_directory):
    browser = page(run_directory("a", ROWS))
    plot = "document.querySelector('[data-metric=\"reward/mean\"]')"
    legend = f"[...{plot}.querySelectorAll('.u-legend .u-value')].map((own) => own.textContent).join(' ')"
    browser.wait(f"{legend} === '10 1'")
    browser.evaluate(f"{plot}.plot.setCursor({{ left: 0, top: 10 }}), 0")
    browser.wait(f"{legend} === '1 0.1'")
    browser.evaluate(f"{plot}.plot.setCursor({{ left: -10, top: -10 }}), 0")
    browser.wait(f"{legend} === '10 1'")
    assert not browser.problems


def test_controls_change_the_charts(page, run_directory):
    browser = page(run_directory("a", ROWS))
    assert browser.evaluate("document.querySelector('[data-metric=\"loss/policy\"]')") is None  # in a closed group
    browser.evaluate("document.querySelector('[data-group=loss]').open = true")
    browser.wait("document.querySelector('[data-metric=\"loss/policy\"]') !== null")
    browser.evaluate("axis.value = 'samples', axis.dispatchEvent(new Event('change'))")
    assert browser.evaluate(chart("reward/mean"))[0] == [8 * i for i in range(1, 11)]
    assert browser.evaluate(chart("val/fraction_correct_greedy"))[0] == [0, 80]
    browser.evaluate("axis.value = 'seconds', axis.dispatchEvent(new Event('change'))")
    assert browser.evaluate(chart("reward/mean"))[0] == [2 * i for i in range(1, 11)]
    browser.evaluate("smoothing.value = 0.5, smoothing.dispatchEvent(new Event('input'))")
    smoothed = (0.5 * 0.1 + 0.2) / 1.5  # by hand: the mean with weights 1/2 and 1
    browser.wait(f"Math.abs({chart('reward/mean')}.at(-1)[1] - {smoothed}) < 1e-12")  # below the raw values
    browser.evaluate("search.value = 'KL', search.dispatchEvent(new Event('input'))")
    browser.wait("document.querySelectorAll('[data-metric=\"reward/mean\"]').length === 0")
    shown = "[...document.querySelectorAll('#curves [data-metric]')].map((box) => box.dataset.metric)"
    assert browser.evaluate(shown) == ["kl/ref"]
    assert not browser.problems


def test_several_runs_share_charts_with_differing_settings_first(page, run_directory):
    one = run_directory("x/ppo", ROWS, config={"model": {"lr": 1e-3, "coef": 0.5}})
    other = run_directory(
        "y/ppo", [{**row, "kl/ref": 5.0} for row in ROWS[:8]], config={"model": {"lr": 0.1, "coef": 0.5}}
    )
    browser = page(one, other)
    steps, first, second = browser.evaluate(chart("reward/mean"))
    assert len(steps) == len(first) == len(second) == 10
    assert [sum(value is not None for value in values) for values in (first, second)] == [10, 7]
    differing = "[...document.querySelectorAll('details[open] tr.differs td')].map((cell) => cell.textContent)"
    assert browser.evaluate(differing) == ["model.lr", "0.001", "0.1"]
    text = browser.evaluate("document.body.innerText")
    assert "KL to the reference, step 1" in text
    assert str(one) in text
    assert str(other) in text
    assert not browser.problems


def test_hostile_texts_are_shown_as_text(page, run_directory, tmp_path):
    rows = [{"step": 1, "reward/mean": 1.0, **{f"reward/{text}": 1.0 for text in HOSTILE if "\x00" not in text}}]
    responses = [
        {"prompt": text, "response": text, "ground_truth": text, "reward": 1.0, "rewards": {text: 1.0}, "group": i,
         "segments": [{"from": text, "text": text}, {"from": "policy", "text": text}]}
        for i, text in enumerate(HOSTILE)
    ]  # fmt: skip
    config = {f"k{i}": text for i, text in enumerate(HOSTILE) if text.isprintable()}
    folder = run_directory(
        "a", rows, {1: responses}, config, {"command": HOSTILE[:3], "packages": {HOSTILE[0]: HOSTILE[1]}}
    )
    for chosen in ("search.value = 'script'", "search.value = ''"):
        browser = page(folder)
        browser.evaluate(f"{chosen}, search.dispatchEvent(new Event('input'))")
        browser.evaluate("document.querySelectorAll('details').forEach((own) => own.open = true)")
        browser.evaluate("new Promise((done) => setTimeout(done, 400))")
        assert browser.evaluate("typeof window.hacked") == "undefined"
        elements = "[...document.querySelectorAll('script, img, svg, iframe, base, link, form, object, template, a')]"
        kinds = browser.evaluate(f"{elements}.map((own) => own.tagName + (own.getAttribute('href') || ''))")
        assert {kind for kind in kinds if not kind.startswith("A#")} == {"SCRIPT"}
        scripts = browser.evaluate("document.scripts.length")
        assert kinds.count("SCRIPT") == scripts == (tmp_path / "page.html").read_text().count("<script")
        assert "<script>window.hacked=1</script>" in browser.evaluate("document.body.textContent")
        assert not browser.problems


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, True)])
def test_page_fits_narrow_windows_and_dark_mode(page, run_directory, width, dark):
    browser = page(run_directory("a", ROWS, {1: RESPONSES}), width=width, dark=dark)
    browser.evaluate("new Promise((done) => setTimeout(done, 400))")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    boxes = "[...document.querySelectorAll('.chart')].map((box) => box.clientWidth - box.plot.width)"
    assert all(rest >= 0 for rest in browser.evaluate(boxes))
    ground = [
        int(part) for part in browser.evaluate("getComputedStyle(document.body).backgroundColor")[4:-1].split(",")
    ]
    assert (max(ground) < 60) == dark
    assert not browser.problems


def test_run_without_responses_and_steps_has_a_page(page, run_directory):
    browser = page(run_directory("a", [{"step": 0, "val/loss": 1.0}]))
    assert browser.evaluate(chart("val/loss")) == [[0], [1]]
    assert not browser.problems


def test_quantiles_groups_and_samples_are_shown(run_directory):
    run = RunDirectory(run_directory("a", ROWS, {1: RESPONSES, 2: []}))
    assert [reward_quantiles(step, files)["quantiles"] for step, files in run.rollout_files().items()] == [
        [0, 0, 0.75, 1.5, 2.25, 3, 3], []
    ]  # fmt: skip
    assert groups_of(RESPONSES) == [
        {"prompt": f"question {i}", "mean": 1.5, "rewards": [0.0, 1.0, 2.0, 3.0]} for i in range(2)
    ]
    assert [row["reward"] for row in samples_of(RESPONSES * 9)] == [3.0] * 3 + [2.0] * 3 + [1.0] * 3 + [0.0] * 3


@pytest.mark.parametrize("reward", [None, float("nan"), "x", 10**400])
def test_responses_without_a_reward_are_shown_without_one(run_directory, reward):
    broken = [{**RESPONSES[0], "reward": reward, "rewards": {"a": reward}, "segments": ["x"]}]
    samples = samples_of([*broken, *RESPONSES])
    assert (samples[-1]["reward"], samples[-1]["rewards"]) == (None, {"a": None})
    assert json.dumps(samples, allow_nan=False)
    assert samples_of([{**broken[0], "rewards": 1, "segments": None}])[0]["rewards"] == {}
    assert groups_of(broken) == []
    assert groups_of([*broken, *RESPONSES]) == groups_of(RESPONSES)
    run = RunDirectory(run_directory("a", ROWS, {1: [*RESPONSES, *broken], 2: broken}))
    assert [reward_quantiles(step, files)["quantiles"] for step, files in run.rollout_files().items()] == [
        [0, 0, 0.75, 1.5, 2.25, 3, 3], []
    ]  # fmt: skip


def test_responses_beyond_the_memory_limit_are_omitted(run_directory, caplog, monkeypatch):
    folder = run_directory("a", ROWS, {1: [{"prompt": "x" * 1000}] * 20})
    monkeypatch.setattr("lightning_rlhf.extras.report.run_directory._MAX_ROLLOUT_BYTES", 5000)
    assert len(RunDirectory(folder).rollouts(1)) == 4
    assert "the step has more than 0 MiB of responses; those after the first 4 are left out" in caplog.text
    (folder / "rollouts/step-000002.jsonl").write_text("x" * 100_000)
    assert RunDirectory(folder).rollouts(2) == []


@pytest.mark.parametrize(
    ("end", "state"), [(None, "running"), ({"error": None}, "ended"), ({"error": "RunError: <b>lost"}, "failed")]
)
def test_page_shows_whether_the_run_has_ended(page, run_directory, end, state):
    folder = run_directory("a", ROWS)
    if end is not None:
        (folder / "end.json").write_text(json.dumps(end))
    browser = page(folder)
    text = browser.evaluate("document.body.innerText")
    assert f"{state}{' or killed' if state == 'running' else ''}\nstate" in text
    assert ("ago\nlast metrics" in text) == (state == "running")
    assert ("RunError: <b>lost" in text) == (state == "failed")
    assert ("No check failed" in text) == (state != "failed")


def test_partially_written_lines_are_ignored(run_directory):
    folder = run_directory("a", ROWS, {1: RESPONSES})
    with (folder / "rollouts/step-000001.jsonl").open("a") as file:
        file.write('{"prompt": "ha')
    with (folder / "metrics.csv").open("a") as file:
        file.write("11,0.")
    run = RunDirectory(folder)
    assert len(run.rollouts(1)) == len(RESPONSES)
    assert run.rows()[-1] == (10, {"val/fraction_correct_greedy": 0.75})


DAMAGED = {
    "metrics.csv": ["step,a\nx,1\n", "a\n1\n", "step,a\n1,2,3\n", "step,a\n1,high\n", "step\n\xff\n"],
    "config.yaml": ["a: [", "- 1\n", "\xff"],
    "env.json": ["{", "[1]", "1"],
    "health_settings.json": ["{", "[1]", '{"rewards": 1}'],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, contents in DAMAGED.items() for content in contents]
)
def test_damaged_file_is_reported(run_directory, capsys, name, content):
    folder = run_directory("a", ROWS)
    (folder / name).write_bytes(content.encode("latin-1"))
    assert report.run([str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"lightning-rlhf: {folder / name} cannot be read, the file is damaged: ")
    assert error.count("\n") == 1


def test_nested_aliases_of_a_configuration_do_not_exhaust_memory(run_directory):
    folder = run_directory("a", ROWS)
    bomb = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    bomb += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    (folder / "config.yaml").write_text("\n".join(bomb))
    assert len(RunDirectory(folder).config()) <= 100_000


def test_command_writes_the_report(run_directory, tmp_path, capsys):
    folder = run_directory("a", ROWS)
    assert report.run([str(folder)]) == 0
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert report.run([str(folder), str(folder), "--to", str(tmp_path / "new/x.html")]) == 0
    assert report.run([str(tmp_path), str(folder)]) == 2
    message = capsys.readouterr().err
    assert "has no metrics.csv, which a run writes when training begins: expected the" in message
    assert message.endswith(f"; runs below it: {folder}\n")
    assert report.run([str(tmp_path / "new")]) == 2
    assert report.run([str(tmp_path / "none")]) == 2
    assert "none does not exist: expected the directory of a run, its default_root_dir" in capsys.readouterr().err
    assert report.run([str(folder / "metrics.csv")]) == 2
    assert "metrics.csv is not a directory: expected the directory of a run" in capsys.readouterr().err
    assert report.run([str(folder), "--to", "x.txt"]) == 2
    assert "--to must end with .html" in capsys.readouterr().err


def test_titles_of_prompts_omit_their_common_prefix(page, run_directory):
    texts = [f"Examples: 1\nuser\n{question}\nassistant\n" for question in ("two plus three", "four plus one")]
    rows = [{**RESPONSES[0], "prompt": text, "index": i, "group": i} for i, text in enumerate(texts)]
    again = [{**row, "reward": row["reward"] - 1} for row in rows]
    folder = run_directory("a", ROWS, {1: [*rows, *again]})
    for step in (0, 10):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"rollouts/validation-{step:06d}.jsonl").write_text(lines)
    browser = page(folder)
    titles = "[...document.querySelectorAll('#prompts option')].map((own) => own.textContent.split(' (')[0])"
    assert browser.evaluate(titles) == ["0: two plus three", "1: four plus one"]
    cells = "[...document.querySelectorAll('#rewards td.text')].map((own) => own.textContent.trim())"
    assert sorted(browser.evaluate(cells)) == ["four plus one", "two plus three"]
