"""Comparison of log-probabilities of engine and actor: a few large differences pass, a lost weight is detected."""

import math
import re

import pytest
import torch

from lightning_rlhf.callbacks.loop.engine_comparison import gap_statistics
from lightning_rlhf.rollout.engine import engine_dtype
from lightning_rlhf.rollout.transformers import TransformersEngine
from tests.callbacks.conftest import Run


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([], [0, 0, 0]),
        ([0.5], [0.5, 0.5, 0.5]),
        ([0.1] * 98 + [3.0], [(9.8 + 3) / 99, 3, 3]),  # fewer than a hundred tokens: the percentile is the maximum
        ([0.1] * 99 + [3.0], [(9.9 + 3) / 100, 0.1, 3]),
        ([0.1] * 197 + [2.0, 3.0, 4.0], [(19.7 + 9) / 200, 2, 4]),
        ([0.1, math.nan], [math.inf, math.inf, math.inf]),
    ],
    ids=["none", "one", "99 tokens", "100 tokens", "200 tokens", "nan"],
)
def test_statistics_of_a_rollout(gaps, expected):
    assert gap_statistics(torch.tensor(gaps)).tolist() == pytest.approx(expected)


class Noisy(TransformersEngine):
    """Adds a difference to the log-probability of every n-th token."""

    def __init__(self, nats, every):
        super().__init__()
        self.nats, self.every, self.tokens = nats, every, 0

    def request(self, prompts, sampling, seeds):
        futures = super().request(prompts, sampling, seeds)
        for completion in (future.result() for future in futures):
            for i in range(len(completion.logprobs)):
                self.tokens += 1
                completion.logprobs[i] -= self.nats * (self.tokens % self.every == 0)
        return futures


def fit(tmp_path, nats, every, bound, precision="32-true"):
    loop = {"engine": Noisy(nats, every), "check_rows": 64, "group_size": 64, "max_logprob_diff": bound}
    loop |= {"validate_at_ends": False, "max_response_tokens": 8}
    return Run(
        tmp_path, loop=loop, model={"minibatch_size": 128}, trainer={"max_steps": 1, "precision": precision}
    ).fit()


def test_one_of_many_tokens_may_differ_by_any_amount(tmp_path):
    # 64 rows of up to 8 tokens: one of 200 tokens differs by 9 nats, 0.045 on average
    assert fit(tmp_path, 9.0, 200, 1.0).metrics["rollout/logprob_diff_max"] == pytest.approx(9, abs=1e-3)


@pytest.mark.parametrize(
    ("nats", "every", "message"),
    [
        (0.09, 1, "by 0.09 nats on average (allowed: 0.05) and 0.09 at the 99th percentile (allowed: 1, max_logprob"),
        (1.2, 30, "at the 99th percentile (allowed: 1, max_logprob_diff), 1.2 at most: "),
        (math.nan, 200, "by inf nats on average"),
    ],
    ids=["all a little", "some much", "not a number"],
)
def test_differences_in_many_tokens_raise(tmp_path, nats, every, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        fit(tmp_path, nats, every, 1.0)


def test_mean_difference_in_bfloat16_on_a_cpu_is_limited_to_a_tenth_of_the_percentile(tmp_path):
    assert fit(tmp_path, 0.07, 1, None, "bf16-mixed").metrics["rollout/logprob_diff_mean"] > 0.05
    with pytest.raises(RuntimeError, match=re.escape("nats on average (allowed: 0.1) and 0.1")):
        fit(tmp_path, 0.15, 1, None, "bf16-mixed")
    with pytest.raises(RuntimeError, match=re.escape("at the 99th percentile (allowed: 1, max_logprob_diff)")):
        fit(tmp_path, 1.2, 30, None, "bf16-mixed")


@pytest.mark.parametrize(
    ("precision", "source", "engine"),
    [
        ("32-true", "float32", "float32"),
        ("32-true", "bfloat16", "bfloat16"),
        ("bf16-mixed", "float32", "bfloat16"),
        ("bf16-mixed", "bfloat16", "bfloat16"),
    ],
)
def test_engine_computes_in_the_dtype_of_the_actor(tmp_path, precision, source, engine):
    assert engine_dtype(precision, source) == engine


def test_engine_starts_in_bfloat16_with_mixed_precision(tmp_path):
    for precision, dtype in (("32-true", "float32"), ("bf16-mixed", "bfloat16")):
        made = Run(
            tmp_path,
            loop={"engine": TransformersEngine(), "check_rows": 2, "validate_at_ends": False},
            trainer={"precision": precision, "max_steps": 2},
        ).fit()
        assert made.loop.engine_description == f"transformers' generate on cpu in {dtype}"


def test_lost_weight_is_detected_with_mixed_precision(tmp_path):
    class Forgetful(TransformersEngine):
        def update_weights(self, parameters, version):
            super().update_weights(parameters, version)
            with torch.no_grad():
                self._running.model.layers[1].self_attn.o_proj.weight.zero_()

    loop = {"engine": Forgetful(), "check_rows": 4, "validate_at_ends": False}
    with pytest.raises(
        RuntimeError, match=r"the first parameter that differs is model.layers.1.self_attn.o_proj.weigh"
    ):
        Run(tmp_path, loop=loop, trainer={"precision": "bf16-mixed"}).fit()
