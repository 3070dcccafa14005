import dataclasses
import inspect
import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from lightning_rlhf.extras.algorithms.verl_corrections import VerlCorrection
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.rejections import Rejection
from tests.helpers import (
    assert_close,
    float64,
    golden,
    masks,
    normal,
    over_ranks,
    pad_columns,
    properties,
    seeds,
    with_garbage,
)

LEVELS = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}
PRESETS = sorted(golden("corrections")["outputs"]["presets"])
FURTHER = sorted(set(golden("corrections")["outputs"]["further"]) - {"token_k1_inverted"})
LN2 = math.log(2)
MASK = torch.tensor([[True, True], [True, False]])
rejections = st.one_of(
    st.builds(
        Rejection,
        st.just("k1"),
        st.sampled_from(list(LEVELS.values())),
        st.sampled_from([1.2, 2.0]),
        st.sampled_from([None, 0.7]),
    ),
    st.builds(
        Rejection, st.sampled_from(["k2", "k3"]), st.sampled_from(list(LEVELS.values())), st.sampled_from([0.05, 0.5])
    ),
)
corrections = st.builds(
    RolloutCorrection,
    level=st.sampled_from([None, "token", "sequence", "geometric"]),
    upper=st.sampled_from([1.3, 2.0, math.inf]),
    lower=st.sampled_from([None, 0.8]),
    mode=st.sampled_from(["truncate", "mask"]),
    rejections=st.lists(rejections, max_size=2, unique_by=lambda rejection: rejection.name).map(tuple),
) | st.builds(
    RolloutCorrection,
    level=st.sampled_from(["token", "sequence", "geometric"]),
    mode=st.sampled_from(["truncate", "mask"]),
    batch_normalize=st.just(True),
    rejections=rejections.map(lambda rejection: (rejection,)),
)


def logprobs_of(mask, seed):
    """Return log-probabilities of actor and engine, about half a nat apart."""
    rollout = -normal(*mask.shape, seed=seed).abs()
    return rollout + normal(*mask.shape, seed=seed + 1) / 2, rollout


def same(results, expected):
    for ours, theirs in zip(results[:2], expected[:2], strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert set(results[2]) == set(expected[2])
    for name, value in expected[2].items():
        assert_close(results[2][name], value, rtol=1e-9, atol=1e-9, equal_nan=True)


# -- literal cases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # ratios train / rollout 4, 1/2 | 3: products 2 | 3, geometric means sqrt 2 | 3
        ({}, [[1, 1], [1, 0]]),
        ({"level": "token"}, [[2, 0.5], [2, 0]]),
        ({"level": "token", "upper": math.inf}, [[4, 0.5], [3, 0]]),
        ({"level": "token", "upper": 3.5, "lower": 0.75}, [[3.5, 0.75], [3, 0]]),
        ({"level": "token", "upper": 3.5, "lower": 0.75, "mode": "mask"}, [[0, 0], [3, 0]]),
        ({"level": "token", "upper": 3.5, "mode": "mask"}, [[0, 0.5], [3, 0]]),
        ({"level": "sequence", "upper": 2.5}, [[2, 2], [2.5, 0]]),
        ({"level": "sequence", "upper": 2.5, "mode": "mask"}, [[2, 2], [0, 0]]),
        ({"level": "geometric", "upper": 2.5}, [[math.sqrt(2), math.sqrt(2)], [2.5, 0]]),
        # divided by (2 + 1/2 + 2) / 3 = 3/2 over tokens, by (2 + 2.5) / 2 = 9/4 over responses
        ({"level": "token", "batch_normalize": True}, [[4 / 3, 1 / 3], [4 / 3, 0]]),
        ({"level": "sequence", "upper": 2.5, "batch_normalize": True}, [[8 / 9, 8 / 9], [10 / 9, 0]]),
    ],
)
def test_weights_of_a_case_worked_by_hand(options, expected):
    old, rollout = float64([[0.8, 0.3], [0.6, torch.nan]]).log(), float64([[0.2, 0.6], [0.2, 1]]).log()
    weights, saved, _ = RolloutCorrection(**options)(old, rollout, MASK)
    assert_close(weights, expected, rtol=1e-12)
    assert (saved == MASK).all()


@pytest.mark.parametrize(
    ("statistic", "level", "upper", "lower", "expected"),
    [
        # ratios 3, 1/2 | 2;  logs 1.0986, -0.6931 | 0.6931;  k2 0.6035, 0.2402 | 0.2402;  k3 0.9014, 0.1931 | 0.3069
        ("k1", "token", 4.0, 0.6, [[1, 0], [1, 0]]),  # of train / rollout: the inverse ratios 1/3, 2 | 1/2 would differ
        ("k1", "token", 2.5, 0.4, [[0, 1], [1, 0]]),
        ("k1", "token", 2.5, None, [[0, 1], [1, 0]]),  # 1 / 2.5 = 0.4
        ("k1", "sequence_sum", 1.6, 0.1, [[1, 1], [0, 0]]),  # 3/2 | 2
        ("k1", "sequence_sum", 2.5, 1.7, [[0, 0], [1, 0]]),
        ("k1", "sequence_mean", 1.3, 0.1, [[1, 1], [0, 0]]),  # sqrt 3/2 = 1.22 | 2
        ("k1", "sequence_mean", 2.5, 1.3, [[0, 0], [1, 0]]),
        ("k1", "sequence_max", 2.5, 0.1, [[0, 0], [1, 0]]),
        ("k1", "sequence_max", 4.0, 0.6, [[0, 0], [1, 0]]),
        ("k2", "token", 0.5, None, [[0, 1], [1, 0]]),
        ("k2", "sequence_sum", 0.8, None, [[0, 0], [1, 0]]),  # 0.8437 | 0.2402
        ("k2", "sequence_mean", 0.43, None, [[1, 1], [1, 0]]),  # 0.4218 | 0.2402
        ("k2", "sequence_mean", 0.42, None, [[0, 0], [1, 0]]),
        ("k2", "sequence_max", 0.6, None, [[0, 0], [1, 0]]),
        ("k3", "token", 0.25, None, [[0, 1], [0, 0]]),
        ("k3", "sequence_sum", 1.1, None, [[1, 1], [1, 0]]),  # 1.0945 | 0.3069
        ("k3", "sequence_sum", 1.09, None, [[0, 0], [1, 0]]),
        ("k3", "sequence_mean", 0.54, None, [[0, 0], [1, 0]]),  # 0.5473 | 0.3069
        ("k3", "sequence_max", 0.9, None, [[0, 0], [1, 0]]),
    ],
)
def test_rejections_of_a_case_worked_by_hand(statistic, level, upper, lower, expected):
    old, rollout = float64([[0.9, 0.3], [0.8, torch.inf]]).log(), float64([[0.3, 0.6], [0.4, torch.nan]]).log()
    correction = RolloutCorrection(rejections=(Rejection(statistic, level, upper, lower),))
    weights, saved, _ = correction(old, rollout, MASK)
    assert saved.tolist() == [[bool(cell) for cell in row] for row in expected]
    assert_close(weights, MASK.double())


def test_statistic_of_sequence_max_is_that_of_the_policy_token_with_the_largest_deviation():
    log_ratio, mask = float64([[0.5, 0, 1.0], [-0.5, 1.2, 0]]), torch.tensor([[True, False, True], [True, True, False]])
    for statistic, upper, lower, expected in (
        ("k1", 4.0, 1.0, [1.0, -0.5]),  # bounds 0 and 1.386: the nearest to one, or the one below
        ("k1", 2.0, 0.1, [1.0, 1.2]),
        ("k2", 0.1, None, [0.5, 0.72]),
    ):
        assert_close(Rejection(statistic, "sequence_max", upper, lower).values(log_ratio, mask), expected, rtol=1e-12)


@pytest.mark.parametrize("level", LEVELS.values())
def test_rejection_keeps_only_tokens_of_the_mask(level):
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert Rejection("k1", level, 2.0).keep(torch.zeros(2, 3), mask).tolist() == mask.tolist()


def test_bounds_apply_to_the_right_quantity():
    zero, mask = float64([[0.0]]), torch.tensor([[True]])
    ratio, k3 = float64(1.0).exp().item(), (float64(1.0).expm1() - 1).item()
    for sign, lower, upper in ((1, 0.5, ratio), (-1, float64(-1.0).exp().item(), 2.0)):
        weights, _, metrics = RolloutCorrection("token", upper, lower, "mask")(float64([[sign]]), zero, mask)
        assert_close(weights, [[math.exp(sign)]])
        assert metrics["rollout_corr/outside_fraction"] == 0
        for name in ("above_fraction", "below_fraction", "sequence_above_fraction", "sequence_below_fraction"):
            assert metrics[f"rollout_corr/{name}"] == 0
        assert Rejection("k1", "token", upper, lower).keep(float64([[sign]]), mask).all()
    for level in LEVELS.values():
        metrics = RolloutCorrection(rejections=(Rejection("k1", level, 4.0, 0.5),))(float64([[-LN2]]), zero, mask)[2]
        assert metrics[f"rollout_corr/{level}_k1_below_fraction"] == 0
    for statistic, upper in (("k2", 0.5), ("k3", k3)):
        for level in LEVELS.values():
            correction = RolloutCorrection(rejections=(Rejection(statistic, level, upper),))
            _, saved, metrics = correction(float64([[1.0]]), zero, mask)
            assert saved.all()
            assert metrics[f"rollout_corr/{level}_{statistic}_above_fraction"] == 0


def test_metrics_of_a_case_worked_by_hand():
    # ratios 4, 1/5 | 3 in bounds [0, 2]: weights 2, 1/5 | 2; k1 rejects out of [1/3.5, 3.5]
    old, rollout = float64([[0.8, 0.1], [0.6, 1]]).log(), float64([[0.2, 0.5], [0.2, 1]]).log()
    correction = RolloutCorrection("token", rejections=(Rejection("k1", "token", 3.5),))
    metrics = correction(old, rollout, MASK)[2]
    expected = {
        "above_fraction": 2 / 3,
        "below_fraction": 1 / 3,  # below 1/2
        "outside_fraction": 2 / 3,
        "sequence_above_fraction": 1,  # means of raw ratios 2.1 | 3
        "sequence_below_fraction": 0,
        "weight_mean": 1.4,
        "weight_std": math.sqrt(0.72),  # deviations 0.6, -1.2, 0.6
        "weight_max": 2,
        "weight_min": 0.2,
        "weight_ess": 1.96 / 2.68,
        "sequence_weight_mean": 1.55,  # 1.1 | 2
        "sequence_weight_std": 0.45,
        "token_k1_mean": math.log(2.4) / 3,
        "token_k1_max": math.log(4),
        "token_k1_min": -math.log(5),
        "token_k1_above_fraction": 1 / 3,
        "token_k1_below_fraction": 1 / 3,
        "token_k1_rejected_fraction": 2 / 3,
        "token_k1_rejected_sequence_fraction": 0.5,
        "rejected_fraction": 2 / 3,
        "rejected_sequence_fraction": 0.5,
    }
    for name, value in expected.items():
        assert_close(metrics[f"rollout_corr/{name}"], value, rtol=1e-12, atol=1e-12)


# -- float64 loops -------------------------------------------------------------------------------------------


def by_loops(correction, old, rollout, mask):
    """Return weight, kept tokens and metrics by the docstrings' formulas over plain numbers."""
    weights = torch.zeros_like(old)
    saved = mask.clone()
    for row in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[row, t]]
        logs = {t: max(-20.0, min(20.0, old[row, t].item() - rollout[row, t].item())) for t in tokens}
        for t in tokens:
            ratio = {
                None: 1.0,
                "token": math.exp(logs[t]),
                "sequence": math.exp(max(-20.0, min(20.0, sum(logs.values())))),
                "geometric": math.prod(math.exp(x / len(logs)) for x in logs.values()),
            }[correction.level]
            low = 0.0 if correction.lower is None else correction.lower
            if correction.level is not None and not low <= ratio <= correction.upper:
                ratio = 0.0 if correction.mode == "mask" else (low if ratio < low else correction.upper)
            weights[row, t] = ratio
        for rejection in correction.rejections:
            ratios = {t: math.exp(x) for t, x in logs.items()}
            values = {
                t: {"k1": math.log(r), "k2": math.log(r) ** 2 / 2, "k3": (r - 1) - math.log(r)}[rejection.statistic]
                for t, r in ratios.items()
            }

            def passes(value, rejection=rejection):
                if rejection.statistic != "k1":
                    return value <= rejection.upper
                low = 1 / rejection.upper if rejection.lower is None else rejection.lower
                return low <= math.exp(value) <= rejection.upper

            for t in tokens:
                saved[row, t] &= {
                    "token": passes(values[t]),
                    "sequence_sum": passes(sum(values.values())),
                    "sequence_mean": passes(sum(values.values()) / len(values)),
                    "sequence_max": all(map(passes, values.values())),
                }[rejection.level]
    if correction.batch_normalize:
        rows = [[w for w, k in zip(ws, ks, strict=True) if k] for ws, ks in zip(weights, saved, strict=True)]
        per_token = correction.level == "token"
        counted = [w for row in rows for w in row] if per_token else [sum(row) / len(row) for row in rows if row]
        if sum(counted) > 0:
            weights /= sum(counted) / len(counted)
    return weights, saved


@properties
@given(corrections, masks(), seeds)
def test_weights_and_kept_tokens_follow_their_formulas(correction, mask, seed):
    old, rollout = logprobs_of(mask, seed)
    weights, saved, _ = correction(with_garbage(old, mask), with_garbage(rollout, mask), mask)
    expected_weights, expected_kept = by_loops(correction, old, rollout, mask)
    assert_close(weights, expected_weights, rtol=1e-9, atol=1e-12)
    assert (saved == expected_kept).all()


@properties
@given(corrections, masks(), seeds)
def test_shares_are_those_of_the_tokens_and_responses_concerned(correction, mask, seed):
    old, rollout = logprobs_of(mask, seed)
    _, saved, metrics = correction(old, rollout, mask)
    dropped, rows = mask & ~saved, mask.any(dim=1)
    expected = {"rejected_fraction": dropped[mask], "rejected_sequence_fraction": dropped.any(dim=1)[rows]}
    for rejection in correction.rejections:
        of_one = mask & ~RolloutCorrection(rejections=(rejection,))(old, rollout, mask)[1]
        expected[f"{rejection.name}_rejected_fraction"] = of_one[mask]
        expected[f"{rejection.name}_rejected_sequence_fraction"] = of_one.any(dim=1)[rows]
        shares = (metrics[f"rollout_corr/{rejection.name}_{side}_fraction"] for side in ("above", "below"))
        counted = of_one[mask] if rejection.level == "token" else of_one.any(dim=1)[rows]
        assert_close(sum(shares), counted.double().mean(), equal_nan=True)
    if correction.level is not None:
        low = correction.lower or 0.0
        plain = dataclasses.replace(correction, upper=math.inf, lower=None, batch_normalize=False, rejections=())
        ratio = plain(old, rollout, mask)[0]
        expected["outside_fraction"] = ((ratio < low) | (ratio > correction.upper))[mask]
    for name, values in expected.items():
        assert_close(metrics[f"rollout_corr/{name}"], values.double().mean(), equal_nan=True)


# -- verl's numbers ------------------------------------------------------------------------------------------


def from_verl(config):
    """Return this library's correction for one of verl's configurations."""
    given_bound = str(config.get("rollout_is_threshold", 2.0)).split("_")
    lower, upper = (None if len(given_bound) == 1 else float(given_bound[0])), float(given_bound[-1])
    names = [name for name in (config.get("rollout_rs") or "").split(",") if name]
    result = []
    for name, bound in zip(names, str(config.get("rollout_rs_threshold")).split(","), strict=bool(names)):
        level, statistic = name.rsplit("_", 1)
        parts = [float(part) for part in bound.split("_")]
        result.append(Rejection(statistic, LEVELS[level], parts[-1], parts[0] if len(parts) == 2 else None))
    level = config.get("rollout_is")
    return RolloutCorrection(
        level,
        upper if level else 2.0,
        lower if level else None,
        "truncate" if lower is None else "mask",
        config.get("rollout_is_batch_normalize", False),
        tuple(result),
        config.get("bypass_mode", False),
    )


@pytest.mark.parametrize("name", PRESETS)
def test_presets_equal_those_of_verl(name):
    config = golden("corrections")["outputs"]["presets"][name]["config"]
    assert asdict(getattr(VerlCorrection, name)()) == asdict(from_verl(config))


def test_presets_are_exactly_those_of_verl():
    methods = inspect.getmembers(VerlCorrection, inspect.ismethod)
    assert {name for name, _ in methods if not name.startswith("_")} == set(PRESETS)


def call_recorded(correction):
    inputs = golden("corrections")["inputs"]
    old, rollout, mask = (float64(inputs[name]) for name in ("old_logprobs", "rollout_logprobs", "mask"))
    return correction(old, rollout, mask.bool())


@pytest.mark.parametrize("name", [*PRESETS, *FURTHER])
def test_weights_and_kept_tokens_equal_those_of_verl(name):
    outputs = golden("corrections")["outputs"]
    record = (outputs["presets"] | outputs["further"])[name]
    weights, saved, _ = call_recorded(from_verl(record["config"]))
    assert saved.tolist() == float64(record["kept"]).bool().tolist()
    if record["weights"] is not None:
        # verl divides by counts + 1e-8 where it normalises
        assert_close(weights, record["weights"], rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("name", [*PRESETS, *FURTHER])
def test_metrics_equal_those_of_verl(name):
    outputs = golden("corrections")["outputs"]
    record = (outputs["presets"] | outputs["further"])[name]
    correction, verls = from_verl(record["config"]), record["metrics"]
    ours = {key.removeprefix("rollout_corr/"): value for key, value in call_recorded(correction)[2].items()}
    pairs, singly = {}, math.sqrt(4 / 5)  # verl's deviation over the five responses divides by n - 1
    if correction.level is not None:
        pairs |= {f"weight_{end}": f"rollout_is_{end}" for end in ("mean", "std")}
        pairs |= {f"sequence_weight_{end}": f"rollout_is_seq_{end}" for end in ("mean", "max", "min")}
        pairs |= {f"{side}_fraction": f"rollout_is_ratio_fraction_{verls_side}"
                  for side, verls_side in (("above", "high"), ("below", "low"))}  # fmt: skip
        pairs |= {"sequence_above_fraction": "rollout_is_seq_fraction_high", "weight_ess": "rollout_is_eff_sample_size"}
        pairs["sequence_below_fraction"] = "rollout_is_seq_fraction_low"
        assert_close(ours["sequence_weight_std"], verls["rollout_is_seq_std"] * singly, rtol=1e-6)
        # At the sequence level verl's extremes are those of the raw ratio.
        prefix = "weight" if correction.level == "token" else "sequence_ratio"
        pairs |= {f"{prefix}_{end}": f"rollout_is_{end}" for end in ("max", "min")}
    if correction.mode == "mask":
        pairs["outside_fraction"] = "rollout_is_oob_ratio"
    if correction.batch_normalize:
        pairs["batch_norm_factor"] = "rollout_is_batch_norm_factor"
    for rejection in correction.rejections:
        option = f"{({v: k for k, v in LEVELS.items()})[rejection.level]}_{rejection.statistic}"
        key = f"rollout_rs_{option}"
        pairs |= {f"{rejection.name}_rejected_fraction": f"{key}_masked_fraction"}
        pairs |= {f"{rejection.name}_rejected_sequence_fraction": f"{key}_seq_masked_fraction"}
        if rejection.statistic == "k1":  # of rollout / train there, so all is turned round
            assert_close(ours[f"{rejection.name}_max"], -verls[f"{key}_min"], rtol=1e-6, atol=1e-8)
            assert_close(ours[f"{rejection.name}_min"], -verls[f"{key}_max"], rtol=1e-6, atol=1e-8)
            sides = {"above": "low", "below": "high"}
        else:
            pairs |= {f"{rejection.name}_{end}": f"{key}_{end}" for end in ("max", "min")}
            sides = {"above": "high"}
        pairs |= {f"{rejection.name}_{side}_fraction": f"{key}_fraction_{other}" for side, other in sides.items()}
        sign = -1 if rejection.statistic == "k1" else 1
        mean = f"{key}_mean" if rejection.level == "token" else f"{key}_seq_mean"
        assert_close(ours[f"{rejection.name}_mean"], sign * verls[mean], rtol=1e-6, atol=1e-8)
    if correction.rejections:
        pairs["rejected_fraction"] = "rollout_rs_masked_fraction"
        pairs["rejected_sequence_fraction"] = "rollout_rs_seq_masked_fraction"
    for name_here, name_there in pairs.items():
        assert_close(ours[name_here], verls[name_there], rtol=1e-6, atol=1e-7)


def test_k1_of_verl_with_asymmetric_bounds_equals_that_of_the_inverse_ratio():
    record = golden("corrections")["outputs"]["further"]["token_k1_inverted"]  # 0.5 to 4
    expected = float64(record["kept"]).bool().tolist()
    inverse = call_recorded(RolloutCorrection(rejections=(Rejection("k1", "token", 2.0, 0.25),)))
    assert inverse[1].tolist() == expected
    documented = call_recorded(RolloutCorrection(rejections=(Rejection("k1", "token", 4.0, 0.5),)))
    assert documented[1].tolist() != expected


# -- properties ----------------------------------------------------------------------------------------------


@properties
@given(corrections, masks(), seeds)
def test_padding_garbage_and_the_order_of_responses_change_nothing(correction, mask, seed):
    old, rollout = logprobs_of(mask, seed)
    weights, saved, metrics = correction(old, rollout, mask)
    same(correction(with_garbage(old, mask), with_garbage(rollout, mask), mask), (weights, saved, metrics))
    padded = correction(*(pad_columns(tensor, 2) for tensor in (old, rollout, mask)))
    same(padded, (pad_columns(weights, 2), pad_columns(saved, 2), metrics))
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    same(correction(old[order], rollout[order], mask[order]), (weights[order], saved[order], metrics))
    assert (weights[~mask] == 0).all()
    assert not (saved & ~mask).any()


@properties
@given(corrections, masks(min_rows=2), seeds, st.integers(0, 5))
def test_ranks_change_nothing_even_empty_ones(correction, mask, seed, first):
    old, rollout = logprobs_of(mask, seed)

    def rank(number, rows):
        def call(ranks):
            return correction(old[rows], rollout[rows], mask[rows], ranks)

        return call

    parts = over_ranks(rank(0, slice(first)), rank(1, slice(first, None)))
    whole = correction(old, rollout, mask)
    for part in parts:
        same((torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), part[2]), whole)


@properties
@given(corrections, masks(), seeds)
def test_separate_rows_equal_the_batch_without_normalization(correction, mask, seed):
    old, rollout = logprobs_of(mask, seed)
    weights, saved, _ = dataclasses.replace(correction, batch_normalize=False)(old, rollout, mask)
    rows = zip(old.split(1), rollout.split(1), mask.split(1), strict=True)
    of_rows = [correction.of_rows(*row) for row in rows]
    assert_close(torch.cat([part[0] for part in of_rows]), weights)
    assert (torch.cat([part[1] for part in of_rows]) == saved).all()


@properties
@given(corrections, masks(), seeds)
def test_equal_policies_have_weight_1_and_reject_nothing(correction, mask, seed):
    old, _ = logprobs_of(mask, seed)
    weights, saved, _ = correction(old.float(), old.float(), mask)
    assert (saved == mask).all()
    assert (weights == mask.float()).all()
    assert weights.dtype == torch.float32


@properties
@given(corrections, masks(), seeds)
def test_weights_and_rejections_have_no_gradient(correction, mask, seed):
    old, rollout = (values.requires_grad_() for values in logprobs_of(mask, seed))
    weights, saved, _ = correction(old, rollout, mask)
    assert not weights.requires_grad
    assert not correction.of_rows(old, rollout, mask)[0].requires_grad
    assert saved.dtype == torch.bool


@properties
@given(seeds, st.sampled_from(["token", "sequence", "geometric"]), st.sampled_from([0.2, math.inf]))
def test_normalized_weights_of_kept_tokens_have_mean_1(seed, level, upper):
    rejected = (Rejection("k3", "token", upper),)
    mask = torch.ones(4, 6, dtype=torch.bool)
    old, rollout = logprobs_of(mask, seed)
    weights, saved, _ = RolloutCorrection(level, batch_normalize=True, rejections=rejected)(old, rollout, mask)
    assert_close(weights[saved].mean() if level == "token" else weights[saved.any(dim=1), 0].mean(), 1, rtol=1e-12)


@properties
@given(seeds)
def test_weights_without_bounds_make_the_expectation_that_of_the_trained_policy(seed):
    # what importance sampling is for: over a whole vocabulary, sum of q (p / q) f is sum of p f
    train, rollout = (normal(6, seed=seed + i).log_softmax(-1) for i in range(2))
    values, mask = normal(6, seed=seed + 2), torch.ones(6, 1, dtype=torch.bool)
    for level in ("token", "sequence", "geometric"):
        weights, _, _ = RolloutCorrection(level, upper=math.inf)(train.unsqueeze(1), rollout.unsqueeze(1), mask)
        expectation = (rollout.exp() * weights.squeeze(1) * values).sum()
        assert_close(expectation, (train.exp() * values).sum(), rtol=1e-9, atol=1e-12)


@properties
@given(seeds)
def test_weight_at_ratio_1_of_the_loss_is_the_off_policy_gradient(seed):
    # bypass: the clipped loss has the ratio, the plain policy gradient takes the weight; unclipped both are the same
    logits, rollout = normal(3, 5, seed=seed).requires_grad_(), normal(3, 1, seed=seed + 1)
    advantages, mask = normal(3, 1, seed=seed + 2), torch.ones(3, 1, dtype=torch.bool)
    logprobs = logits.log_softmax(-1)[:, 2:3]
    weights, _ = RolloutCorrection("token", upper=math.inf, bypass=True).of_rows(logprobs, rollout, mask)
    (weighed,) = torch.autograd.grad((-advantages * logprobs * weights).sum(), logits, retain_graph=True)
    (by_ratio,) = torch.autograd.grad((-advantages * (logprobs - rollout).exp()).sum(), logits)
    assert_close(weighed, by_ratio, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("level", [None, "token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("difference", [-math.inf, -1e4, 1e4, math.inf])
def test_huge_differences_give_finite_weights(level, mode, difference):
    result = tuple(Rejection(statistic, where, 2.0) for statistic in ("k1", "k2", "k3") for where in LEVELS.values())
    for upper in (2.0, math.inf):
        for normalize in (False, level is not None):
            correction = RolloutCorrection(level, upper, None, mode, normalize, result)
            old = torch.tensor([[difference, -1.0], [-difference, difference]])
            weights, saved, metrics = correction(old, torch.full((2, 2), -1.0), torch.ones(2, 2, dtype=torch.bool))
            assert weights.isfinite().all()
            assert saved.tolist() == [[False, False], [False, False]]
            assert math.isfinite(metrics["rollout_corr/rejected_fraction"])


@pytest.mark.parametrize(("difference", "expected"), [(15.0, 20.0), (-15.0, -20.0), (7.0, 14.0)])
def test_log_ratio_of_a_response_is_clamped(difference, expected):
    old, mask = torch.full((1, 2), difference, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    weights, _, _ = RolloutCorrection("sequence", math.inf)(old, torch.zeros_like(old), mask)
    assert_close(weights.log(), [[expected, expected]], rtol=1e-12)


@pytest.mark.parametrize(("mean", "factor"), [(1.5e-8, 1.5e-8), (0.75e-8, 1.0)])
def test_normalization_divides_by_means_above_1e_8(mean, factor):
    old, mask = float64([[mean, mean]]).log(), torch.ones(1, 2, dtype=torch.bool)
    weights, _, metrics = RolloutCorrection("token", batch_normalize=True)(old, torch.zeros_like(old), mask)
    assert_close(metrics["rollout_corr/batch_norm_factor"], factor, rtol=1e-9)
    assert_close(weights, [[mean / factor] * 2], rtol=1e-9)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_batch_without_tokens_gives_weights_0(normalize, shape):
    correction = RolloutCorrection("token", 2.0, 0.5, "mask", normalize, (Rejection("k3", "sequence_max", 0.1),))
    mask = torch.zeros(shape, dtype=torch.bool)
    weights, saved, metrics = correction(torch.zeros(shape), torch.zeros(shape), mask)
    assert (weights == 0).all()
    assert not saved.any()
    assert math.isnan(metrics["rollout_corr/rejected_fraction"])


def test_normalization_of_zero_or_rejected_weights_divides_by_nothing():
    old, rollout, mask = torch.zeros(2, 2), torch.full((2, 2), -3.0), torch.ones(2, 2, dtype=torch.bool)
    weights, saved, metrics = RolloutCorrection("token", 2.0, 0.5, "mask", True)(old, rollout, mask)
    assert (weights == 0).all()
    assert saved.all()
    assert metrics["rollout_corr/batch_norm_factor"] == 1
    assert metrics["rollout_corr/weight_ess"] == 0
    weights, saved, metrics = RolloutCorrection("token", 2.0, None, "truncate", True, (Rejection("k3", "token", 0.1),))(
        old, rollout, mask
    )
    assert (weights == 2).all()
    assert not saved.any()
    assert metrics["rollout_corr/batch_norm_factor"] == 1


def test_metrics_are_measured_before_weights_and_rejections():
    mask = torch.ones(3, 5, dtype=torch.bool)
    old, rollout = logprobs_of(mask, 7)
    measured = VerlCorrection.disabled()(old, rollout, mask)[2]
    metrics = VerlCorrection.decoupled_geo_rs_seq_tis()(old, rollout, mask)[2]
    changed = {name for name, value in measured.items() if metrics[name] != value}
    assert changed == {"rollout_corr/rejected_fraction", "rollout_corr/rejected_sequence_fraction"}


# -- from YAML -----------------------------------------------------------------------------------------------

PATH = "lightning_rlhf.objectives.corrections.RolloutCorrection"
PRESET = "lightning_rlhf.extras.algorithms.verl_corrections.VerlCorrection"


class Learner:
    def __init__(self, correction: RolloutCorrection | None = None):
        self.correction = correction


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (None, None),
        ({"class_path": PATH}, RolloutCorrection()),
        (
            {
                "class_path": PATH,
                "init_args": {
                    "level": "token",
                    "upper": 3,
                    "rejections": [{"statistic": "k1", "level": "sequence_max", "upper": math.inf, "lower": 1e-4}],
                },
            },
            RolloutCorrection("token", 3.0, rejections=(Rejection("k1", "sequence_max", math.inf, 1e-4),)),
        ),
        ({"level": "geometric", "mode": "mask"}, RolloutCorrection("geometric", mode="mask")),
        ({"class_path": f"{PRESET}.decoupled_geo_rs_seq_tis"}, VerlCorrection.decoupled_geo_rs_seq_tis()),
        ({"class_path": f"{PRESET}.bypass_pg_is", "init_args": {"upper": 4}}, VerlCorrection.bypass_pg_is(4.0)),
    ],
)
def test_correction_and_preset_can_be_configured_in_yaml(written, expected):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Learner, "learner")
    config = parser.parse_object({"learner": {"correction": written}})
    assert parser.instantiate(config).learner.correction == expected


# -- invalid options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "response"}, r"^level must be token, sequence, geometric or null, got 'response'$"),
        ({"mode": "clip"}, r"^mode must be truncate or mask, got 'clip'$"),
        ({"upper": 0.0}, r"^upper must be positive, got 0.0$"),
        ({"lower": 3.0}, r"^lower must lie in \[0, upper\], got 3.0 with upper 2.0$"),
        ({"lower": -0.1}, r"^lower must lie in \[0, upper\], got -0.1 with upper 2.0$"),
        ({"batch_normalize": True}, r"^batch_normalize needs a level, and does not work with bypass"),
        ({"batch_normalize": True, "level": "token", "bypass": True}, r"^batch_normalize needs a level"),
        (
            {"rejections": (Rejection("k3", "token", 1.0), Rejection("k3", "token", 2.0))},
            r"^rejections must differ in statistic or level, got token_k3, token_k3$",
        ),
    ],
)
def test_invalid_corrections_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrection(**options)


def test_bounds_at_the_edge_of_their_ranges_are_allowed():
    RolloutCorrection("token", upper=1e-3, lower=0.0)
    RolloutCorrection("token", upper=2.0, lower=2.0, mode="mask")
    Rejection("k1", "token", 1.0)
    Rejection("k1", "sequence_sum", 1e-3, 1e-3)
    Rejection("k3", "token", 1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("k4", "token", 1.0), r"^statistic must be one of k1, k2, k3, got 'k4'$"),
        (("k1", "seq_sum", 1.0), r"^level of a rejection must be one of token, .*, got 'seq_sum'$"),
        (("k3", "token", 0.0), r"^upper bound of a rejection must be positive, got 0.0$"),
        (("k3", "token", 1.0, 0.5), r"^k3 is never negative and has no lower bound, got 0.5$"),
        (("k1", "token", 1.0, 1.5), r"^k1 needs ratio bounds 0 < lower <= upper, got 1.5 and 1.0$"),
        (("k1", "token", 0.5), r"^k1 needs ratio bounds 0 < lower <= upper, got 2.0 and 0.5$"),
        (("k1", "token", math.inf), r"^k1 needs ratio bounds 0 < lower <= upper, got 0.0 and inf$"),
    ],
)
def test_invalid_rejections_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rejection(*arguments)
