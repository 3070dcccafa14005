"""Figures of suites and their intervals: hand-worked cases, and files that the real packages wrote."""

import json
import math
from pathlib import Path

import pytest

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.extras.suites import harness, inspection
from lightning_rlhf.extras.suites.suite import Figure, TaskFigures, report, with_interval
from tests.helpers import assert_close

RECORDED = Path(__file__).parent


def interval(name, value, stderr, rows):
    result = with_interval(Figure(name, value, stderr, harness._FRACTIONS.search(name) is not None), rows)
    return result["interval"], result["low"], result["high"]


def test_fractions_have_the_interval_of_wilson():
    # 9 of 12: (0.75 + 3.8415 / 24 -+ 1.96 sqrt(0.75 * 0.25 / 12 + 3.8415 / 576)) / (1 + 3.8415 / 12)
    kind, low, high = interval("acc", 0.75, math.sqrt(0.75 * 0.25 / 11), 12)
    assert kind == "wilson"
    assert_close([low, high], [0.46769, 0.91106], rtol=2e-5)
    # A mean of 1 has the standard error 0, but four rows do not prove it: n / (n + z^2).
    kind, low, high = interval("exact_match (strict-match)", 1.0, 0.0, 4)
    assert (kind, high) == ("wilson", pytest.approx(1.0))
    assert_close(low, 4 / (4 + 1.959964**2), rtol=1e-6)
    # Values between 0 and 1 vary less, as a standard error of 0.01 for 12 rows has: n = 0.25 / 0.0001.
    _, low, high = interval("acc", 0.5, 0.01, 12)
    assert_close([low, high], [0.48041, 0.51959], rtol=2e-4)


def test_other_figures_have_the_normal_interval_or_none():
    kind, low, high = interval("word_perplexity", 20.0, 1.0, 12)
    assert kind == "normal"
    assert_close([low, high], [18.04004, 21.95996], rtol=1e-5)
    assert interval("bleu", 20.0, None, 12) == ("none", None, None)
    assert interval("acc", 0.5, math.nan, 1) == ("none", None, None)
    assert interval("accumulated", 0.5, 0.1, 12)[0] == "normal"


def test_report_has_the_form_of_evaluate():
    figures = [TaskFigures("math", 12, 24, [Figure("acc", 0.75, 0.13)])]
    values = report("models/x", figures, suite="lm-eval")["sources"]["math"]
    assert (values["prompts"], values["responses"]) == (12, 24)
    assert (values["rewards"]["acc"]["mean"], values["rewards"]["acc"]["stderr"]) == (0.75, 0.13)


def test_figures_of_a_file_of_the_harness():
    results = {
        "results": {
            "math": {"alias": "math", "sample_len": 4, "acc,none": 0.5, "acc_stderr,none": 0.25,
                     "exact_match,strict": 1.0, "exact_match_stderr,strict": "N/A"},
            "all": {" ": " ", "alias": "all"},
        },
        "groups": {"all": {"acc,none": 0.5, "acc_stderr,none": 0.25, "alias": "all"}},
        "n-samples": {"math": {"original": 9, "effective": 4}, "all": {"original": 9, "effective": 4}},
    }  # fmt: skip
    math_figures, group = harness.figures(results)
    first, second = math_figures.figures
    assert (math_figures.task, math_figures.rows, math_figures.responses) == ("math", 4, 4)
    assert (first, second) == (Figure("acc", 0.5, 0.25, True), Figure("exact_match (strict)", 1.0, None, True))
    assert group == ("all", 4, 4, [Figure("acc", 0.5, 0.25, True)], 0)
    with pytest.raises(UsageError, match=r"another form than that of 0\.4\.13: no 'n-samples'"):
        harness.figures({"results": {"math": {"acc,none": 0.5}}})


def recorded(name):
    return json.loads((RECORDED / name).read_text())


def test_figures_of_recorded_files():
    choice, exact = harness.figures(recorded("lm_eval_0.4.13.json"))
    values = [(figure.name, round(figure.value, 4)) for figure in choice.figures]
    assert values == [("acc", 0.3333), ("acc_norm", 0.3333)]
    assert_close(exact.figures[0].stderr, math.sqrt(8 / 12 * 4 / 12 / 11))
    assert exact == ("tiny_exact", 12, 12, [Figure("exact_match", 8 / 12, exact.figures[0].stderr, True)], 0)
    assert inspection.figures(recorded("inspect_0.3.285.json")) == ("tiny", 12, 12, [Figure("mean", 0.0, 0.0, True)], 0)


def test_figures_of_a_log_of_inspect():
    log = recorded("inspect_0.3.285.json")
    score = log["results"]["scores"][0]
    score |= {"scored_samples": 10, "metrics": {"accuracy": {"value": 0.7}, "stderr": {"value": 0.15}}}
    other = {"name": "length", "scored_samples": 10, "metrics": {"mean": {"value": 7.5}, "std": {"value": 2.0}}}
    log["results"]["scores"].append(other)
    for sample in log["samples"]:
        sample["scores"]["length"] = {"value": 7.5}
    figures = inspection.figures(log)
    assert (figures.rows, figures.responses, figures.left_out) == (10, 10, 2)
    assert figures.figures == [
        Figure("exact accuracy", 0.7, 0.15, True), Figure("length mean", 7.5, None), Figure("length std", 2.0, None)
    ]  # fmt: skip
    rewards = report("m", [figures])["sources"]["tiny"]["rewards"]
    assert (rewards["exact accuracy"]["not_applicable"], rewards["exact accuracy"]["interval"]) == (2, "wilson")
    log["eval"]["config"]["epochs"] = 5
    assert (inspection.figures(log).rows, inspection.figures(log).responses) == (2, 10)
    for scores, error, message in (
        ([], RunError, "no row of tiny has a score"),
        ([{"scored_samples": 3}], UsageError, "another form"),
    ):
        log["results"]["scores"] = scores
        with pytest.raises(error, match=message):
            inspection.figures(log)
