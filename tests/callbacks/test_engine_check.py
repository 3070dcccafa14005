"""Comparison of log-probabilities of engine and actor: a few large differences pass, a lost weight is detected."""

import math
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightning_rlhf.callbacks.loop import engine_comparison
from lightning_rlhf.callbacks.loop.engine_comparison import check_gaps, gap_statistics
from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.rollout.engine import engine_dtype
from lightning_rlhf.rollout.transformers import TransformersEngine
from tests.callbacks.conftest import Run
from tests.stand_ins import TinyModel


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


def test_unusual_difference_in_bfloat16_is_logged_and_a_gross_one_ends_the_run(tmp_path, caplog):
    assert fit(tmp_path, 0.07, 1, None, "bf16-mixed").metrics["rollout/logprob_diff_mean"] > 0.05
    assert "have the same weights" not in caplog.text
    fit(tmp_path, 0.15, 1, None, "bf16-mixed")
    assert "differ by 0.15 nats on average (allowed: 0.5)" in caplog.text
    assert "usual is at most 0.1 on average" in caplog.text
    with pytest.raises(RuntimeError, match=re.escape("nats on average (allowed: 0.5) and 0.6")):
        fit(tmp_path, 0.6, 1, None, "bf16-mixed")
    with pytest.raises(RuntimeError, match=re.escape("at the 99th percentile (allowed: 5, max_logprob_diff)")):
        fit(tmp_path, 6.0, 30, None, "bf16-mixed")


@pytest.mark.parametrize(
    ("device", "dtype", "gaps", "ends"),
    [
        ("cuda", "bf16-mixed", 0.07, False),  # what a right model may show
        ("cuda", "bf16-mixed", 0.3, False),
        ("cuda", "bf16-mixed", 0.6, True),
        ("cuda", "32-true", 0.01, False),  # TensorFloat-32
        ("cuda", "32-true", 0.06, True),
        ("cpu", "32-true", 1e-4, True),
    ],
)
@pytest.mark.usefixtures("any_device")
def test_bounds_of_a_device(device, dtype, gaps, ends):
    module, engine = module_on(device, dtype), Proves()
    gaps = torch.full((200,), gaps)
    with pytest.raises(RunError, match="engine and actor have the same weights") if ends else nullcontext():
        check_gaps(engine, module, gaps, None, 1)
    assert engine.proofs == 1  # of the first push


class Proves(TransformersEngine):
    """Counts the comparisons of its weights with the actor's."""

    proofs, differs = 0, None

    def first_difference(self, parameters):
        self.proofs += 1
        return self.differs


def module_on(device, precision):
    """Return what the comparison reads of a module on a device that this machine may not have."""
    return SimpleNamespace(
        data_ranks=SimpleNamespace(max=lambda values: values),
        trainer=SimpleNamespace(precision=precision),
        sources={"actor": TinyModel()},
        device=torch.device(device),
        role_strategy=SimpleNamespace(iter_full_params=lambda name: iter([])),
    )


class OnAnyDevice(torch.Tensor):
    """A tensor that is not moved to a device, which this machine may not have."""

    def to(self, device):
        return self


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(engine_comparison, "gap_statistics", lambda gaps: gap_statistics(gaps).as_subclass(OnAnyDevice))


def test_weights_are_proven_at_the_first_push_and_when_the_difference_grows():
    engine, module = Proves(), module_on("cpu", "bf16-mixed")
    proofs = []
    for mean in (0.03, 0.03, 0.2, 0.25, 0.19, 0.32):
        check_gaps(engine, module, torch.full((200,), mean), None, 1)
        proofs.append(engine.proofs)
    assert proofs == [1, 1, 2, 2, 2, 3]
    engine = Proves()
    engine.differs = "model.norm.weight"
    with pytest.raises(RunError, match=r"does not hold the actor's weights: .* differs is model.norm.weight"):
        check_gaps(engine, module, torch.zeros(200), None, 1)  # whatever the log-probs say


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
