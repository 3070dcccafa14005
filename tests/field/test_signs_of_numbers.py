"""A sign that is not ASCII, and a plus sign, are signs of a number."""

import pytest

from lightning_rlhf.extras.judges.endpoint import Endpoint
from lightning_rlhf.extras.judges.judge import JudgeReward
from lightning_rlhf.rewards.rules import gsm8k_lenient, gsm8k_strict

MINUS = ["-", "\u2212", "\uff0d", "\u2011"]


@pytest.mark.parametrize("minus", MINUS)
def test_rules_of_gsm8k_read_the_sign(minus):
    for rule, text in ((gsm8k_lenient, f"It is {minus}3."), (gsm8k_strict, f"#### {minus}3")):
        assert rule([text], ["3"]) == [0.0]
        assert rule([text], ["-3"]) == [1.0]
        assert rule([text], [f"#### {minus}3"]) == [1.0]


def test_rules_of_gsm8k_read_a_plus_sign():
    assert gsm8k_strict(["#### +5", "#### +$1,000"], ["5", "+1000"]) == [1.0, 1.0]
    assert gsm8k_lenient(["2+3=+5", "2+3", "2\u22123"], ["5", "3", "3"]) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "score"),
    [('{"score": +7}', 0.85), ('{"score": "+7"}', 0.85), ('{"score": \u22123}', 0.35), ('{"score": "\u22123"}', 0.35)],
)
def test_judge_s_score_has_a_sign(answer, score):
    judge = JudgeReward(Endpoint("http://127.0.0.1:1"), "judge", lowest=-10, highest=10)
    assert judge.score(answer) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        ("\\boxed{\u22123}", "-3", 1.0), ("\\boxed{\u22123}", "3", 0.0), ("#### \u22123", "\u22123", 1.0),
        ("#### +5", "5", 1.0), ("\\boxed{+5}", "5", 1.0), ("It is $x \u2212 1$", "$x - 1$", 1.0), ("5", "+5", 1.0),
    ],
)  # fmt: skip
def test_mathematical_answers_have_signs(math_reward, text, gold, reward):
    assert math_reward([text], [gold]) == [reward]


@pytest.fixture(scope="module")
def math_reward():
    pytest.importorskip("math_verify")
    from lightning_rlhf.extras.rewards.math import MathReward

    reward = MathReward(workers=1)
    yield reward
    reward.close()
