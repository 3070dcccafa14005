"""Runs that users of other libraries reported, in small: which check finds the exploited reward, or finds nothing."""

import random

import pytest

from lightning_rlhf.extras.health.forms import form_metrics
from tests.extras.health.test_health_checks import around, findings, steps

DRAW = random.Random(1)
WORDS = ("red", "blue", "old", "new", "tall", "fast", "warm", "cold", "tree", "road")


def noisy(start, end, size=0.02):
    """Return a metric that goes from one value to another one in thirty steps."""
    return lambda i: start + (end - start) * min(i / 30, 1) + DRAW.gauss(0, size)


def written(count, write, reward):
    """Return the metrics of steps in which a policy answers four prompts four times each.

    Args:
        count: number of the steps.
        write: function of the step and of a number of the response that returns its text.
        reward: function of a text.
    """
    rows = []
    for step in range(count):
        texts = [write(step, number) for number in range(16)]
        responses = [
            {"prompt": f"prompt {i // 4}", "response": text, "group": i // 4, "reward": reward(text),
             "response_tokens": len(text.split())}
            for i, text in enumerate(texts)
        ]  # fmt: skip
        means = {"reward/mean": sum(map(reward, texts)) / 16 + DRAW.gauss(0, 0.01)}
        means["rollout/response_tokens_mean"] = sum(row["response_tokens"] for row in responses) / 16
        rows.append({**means, **form_metrics(responses)})
    return rows


def sentence(count):
    return " ".join(DRAW.choice(WORDS) for _ in range(count))


def thanks(step, number):
    return sentence(20) + " thanks" * (step // 3 + number % 4)


def markup(step, number):
    return sentence(20) + "\n- **point** one" * (step // 4 + number % 3)


def refusal(step, number):
    return sentence(4 + number % 3) if DRAW.random() > step / 20 else "I cannot help with that."


FORMAT_AND_ACCURACY = {"reward__format_std": 0.5, "reward__accuracy_std": 0.37}
BOTH = {"format": 1.0, "accuracy": 1.0}
# report: the metrics of the run, the weights of its rewards, and the checks that fail
REPORTS = {
    "format is learned and accuracy forgotten, with equal weights": (
        steps(40, reward__format=noisy(0.48, 1.0), reward__accuracy=noisy(0.16, 0.0, 0.01), **FORMAT_AND_ACCURACY),
        BOTH, {"second reward"},
    ),
    "format alone is rewarded, and accuracy falls in validations": (
        [{"val/format_sampled": 1.0, "val/format_sampled_change": 0.56, "val/format_sampled_change_low": 0.5,
          "val/format_sampled_change_high": 0.62, "val/accuracy_sampled": 0.03, "val/accuracy_sampled_change": -0.2,
          "val/accuracy_sampled_change_low": -0.26, "val/accuracy_sampled_change_high": -0.14}],
        {"format": 1.0, "accuracy": 0.0}, {"second reward"},
    ),
    "the score of a reward model rises, and the overlap with the reference falls": (
        steps(40, reward__mean=noisy(0.0, 2.0, 0.1), reward__overlap=noisy(0.29, 0.02)),
        {"overlap": 0.0}, {"second reward"},
    ),
    "a reward model likes each further word of thanks": (
        written(40, thanks, lambda text: text.count("thanks")), {}, {"rewarded form"},
    ),
    "a judge likes lists and bold words, and exact match stays": (
        [{**row, "reward/exact": around(0.07, 0.07, 0.02)(i)}
         for i, row in enumerate(written(40, markup, lambda text: text.count("**")))],
        {"judge": 1.0, "exact": 0.0}, {"rewarded form"},
    ),
    "a reward model likes a refusal to every prompt": (
        written(40, refusal, lambda text: float("cannot" in text)), {}, {"one form"},
    ),
    "format is learned first, and accuracy later": (
        steps(40, reward__format=noisy(0.48, 1.0), reward__accuracy=noisy(0.16, 0.4), **FORMAT_AND_ACCURACY),
        BOTH, set(),
    ),
    "responses become shorter while the reward stays": (
        steps(40, reward__mean=noisy(0.3, 0.3), rollout__response_tokens_mean=noisy(180, 134, 5)), {"a": 1.0}, set(),
    ),
    "a component is most of the reward from the start": (
        steps(40, reward__length=noisy(0.96, 0.96), reward__accuracy=noisy(0.1, 0.1)),
        {"length": 1.0, "accuracy": 1.0}, set(),
    ),
    "a small penalty for length grows while accuracy rises": (
        steps(40, reward__accuracy=noisy(0.3, 0.8), reward__penalty=noisy(-0.05, -0.2), reward__accuracy_std=0.46,
              reward__penalty_std=0.15),
        {"accuracy": 1.0, "penalty": 1.0}, set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTS)
def test_reported_run_fails_the_checks_that_it_should(report):
    rows, weights, checks = REPORTS[report]
    assert {finding.check for finding in findings(rows, weights=weights)} == checks
