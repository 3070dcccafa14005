import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.objectives.kl_controllers import AdaptiveKL, KLTerm
from tests.helpers import assert_close, golden, properties


def test_a_term_is_off_and_k1_by_default():
    assert KLTerm() == KLTerm(coef=0.0, estimator="k1")


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_every_estimator_may_be_named(estimator):
    assert KLTerm(0.1, estimator).estimator == estimator


def test_a_negative_weight_and_an_unknown_estimator_are_refused():
    with pytest.raises(ValueError, match=r"^KL coef must be at least 0, got -0.1$"):
        KLTerm(coef=-0.1)
    with pytest.raises(ValueError, match=r"^KL estimator must be one of k1, k2, k3, abs, got 'kl'$"):
        KLTerm(estimator="kl")


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.05),  # on target
        (6.6, 0.0505),  # 10% above: 0.05 (1 + 0.1 * 100 / 1000)
        (5.4, 0.0495),
        (60.0, 0.051),  # far above: at most 20%
        (0.0, 0.049),
        (-3.0, 0.049),  # k1 may be negative
    ],
)
def test_coefficients_of_cases_worked_by_hand(kl, expected):
    assert_close(AdaptiveKL(target=6.0, horizon=1000)(0.05, kl, 100), expected)


def test_the_default_horizon_is_ten_thousand_responses():
    assert AdaptiveKL(target=1.0).horizon == 10000


@pytest.mark.parametrize("record", golden("verl")["outputs"]["adaptive_kl"], ids=lambda record: f"kl={record['kl']}")
def test_coefficients_are_verls(record):
    controller = AdaptiveKL(record["target"], record["horizon"])
    assert_close(controller(record["coef"], record["kl"], record["responses"]), record["next"])


@properties
@given(st.floats(0.01, 10), st.floats(0.01, 10), st.floats(-100, 100), st.integers(1, 512))
def test_the_coefficient_moves_towards_the_target_and_by_at_most_a_fifth_of_its_share(target, coef, kl, responses):
    change = AdaptiveKL(target, horizon=1000)(coef, kl, responses) / coef - 1
    assert abs(change) <= 0.2 * responses / 1000 + 1e-12
    assert change * (kl - target) >= 0


def test_steering_reaches_the_target():
    # a policy whose KL is 3 / coef: the fixed point is 1/2
    controller, coef = AdaptiveKL(target=6.0, horizon=100), 0.01
    for _ in range(200):
        coef = controller(coef, 3 / coef, 64)
    assert_close(coef, 0.5)


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 10), (-1.0, 10), (1.0, 0), (1.0, -5)])
def test_target_and_horizon_must_be_positive(target, horizon):
    with pytest.raises(ValueError, match=rf"^target and horizon must be positive, got {target=}, {horizon=}$"):
        AdaptiveKL(target, horizon)


def test_a_horizon_of_one_response_is_allowed():
    assert_close(AdaptiveKL(target=0.1, horizon=1)(0.05, 1.0, 1), 0.06)


def test_a_batch_larger_than_the_horizon_cannot_turn_the_coefficient_negative():
    assert AdaptiveKL(target=1.0, horizon=10)(0.1, kl=0.0, num_responses=1000) == pytest.approx(0.08)
