"""GSM8K's two rules on answers of models and data."""

import json
import os
from pathlib import Path

import pytest

from lightning_rlhf.rewards.executor import compute_reward
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rewards.rules import gsm8k_lenient, gsm8k_strict

GSM8K = Path(os.environ.get("LIGHTNING_RLHF_DATA", Path(__file__).parents[3] / "shared" / "data")) / "gsm8k"


@pytest.mark.parametrize(
    ("completion", "gold", "strict", "lenient"),
    [
        ("It is 6 + 6.\n#### 12", "12", 1, 1),
        ("It is 12.", "12", 0, 1),
        ("####12", "12", 1, 1),
        ("#### 12.", "12", 1, 1),
        ("#### 12.0", "12", 1, 1),
        ("#### 12 apples", "12", 1, 1),
        ("#### $12", "12", 1, 1),
        ("#### 1,234", "1234", 1, 1),
        ("#### 1234", "1,234", 1, 1),
        ("#### $1,234.50", "1234.5", 1, 1),
        ("#### 1,234,567", "1234567", 1, 1),
        ("#### -5", "-5", 1, 1),
        ("#### -$5", "-5", 1, 1),
        ("#### $-5", "-5", 1, 1),
        ("#### 5", "-5", 0, 0),
        ("#### .5", "0.5", 1, 1),
        ("#### 12.5", "12", 0, 0),
        ("#### 112", "12", 0, 0),
        ("#### 120", "12", 0, 0),
        ("#### 11 #### 12", "12", 1, 1),
        ("#### 12 #### 11", "12", 0, 0),
        ("#### 12, that is 3 x 4", "12", 1, 0),
        ("#### x = 12", "12", 0, 1),
        ("### 12", "12", 0, 1),
        ("between 3-5", "5", 0, 1),
        ("10 - 7 = 3", "3", 0, 1),
        ("1,2,3", "3", 0, 1),
        ("12,", "12", 0, 1),
        ("", "12", 0, 0),
        ("####", "12", 0, 0),
        ("no number . , $ -", "12", 0, 0),
        ("#### " + "9" * 400, "12", 0, 0),
        ("#### 9007199254740992", "9007199254740993", 0, 0),
    ],
)
def test_rules_for_known_answers(completion, gold, strict, lenient):
    answer = [f"Some reasoning with 3 and <<1+2=3>>.\n#### {gold}"]
    assert gsm8k_strict([completion], answer) == [strict]
    assert gsm8k_lenient([completion], answer) == [lenient]


def test_each_completion_is_compared_with_its_own_answer():
    assert gsm8k_strict(["#### 1", "#### 2"], ["#### 1", "#### 3"]) == [1, 0]
    with pytest.raises(ValueError, match="zip"):
        gsm8k_strict(["#### 1"], [])


@pytest.mark.parametrize("rule", [gsm8k_strict, gsm8k_lenient])
def test_data_without_results_raise_an_error(rule):
    with pytest.raises(RuntimeError, match=r"'gsm8k_\w+' raised UsageError: the data's answer 'twelve' has no '####"):
        compute_reward(RewardFunction(rule), completions=["#### 12"], answer=["twelve"])


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no GSM8K here: set LIGHTNING_RLHF_DATA to the folder that holds gsm8k/")
def test_real_answers_are_correct_for_their_own_row_only():
    answers = [json.loads(line)["answer"] for line in (GSM8K / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(answers) > 1000
    assert gsm8k_strict(answers, answers) == gsm8k_lenient(answers, answers) == [1.0] * len(answers)
    bare = [answer.replace("####", "so") for answer in answers]
    assert sum(gsm8k_strict(bare, answers)) == 0
    assert gsm8k_lenient(bare, answers) == [1.0] * len(answers)
    results = [answer.rpartition("#### ")[2] for answer in answers]
    other = [float(one == two) for one, two in zip(results, [*results[1:], results[0]], strict=True)]
    assert gsm8k_strict([*answers[1:], answers[0]], answers) == other
    assert sum(other) < 0.05 * len(answers)


@pytest.mark.parametrize("rule", [gsm8k_strict, gsm8k_lenient])
def test_ground_truth_may_be_numbers_or_gsm8k_s_texts_in_either_column(rule):
    result = rule(["#### 1,234"] * 3, ground_truth=["1234", "so\n#### 1,234", "12"])
    assert result == [1, 1, 0]
    assert rule(["#### 72"], answer=["72"]) == [1]
    assert rule(["#### 72"], ground_truth=["72"], answer=["#### 1"]) == [1]
    with pytest.raises(ValueError, match="need the correct answers, in a column 'ground_truth' or 'answer'"):
        rule(["#### 1"])
