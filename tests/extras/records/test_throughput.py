"""Time, memory and utilization of a step: on the CPU, over two ranks, and for a device with a known peak."""

import time
from functools import partial

import pytest
import torch

from lightning_rlhf import PPOModule, SFTModule
from lightning_rlhf.callbacks import Throughput
from lightning_rlhf.extras.records import throughput
from lightning_rlhf.extras.records.throughput import known_peak, memory, operations_per_pass
from lightning_rlhf.types import SequenceBatch
from tests.helpers import over_ranks
from tests.stand_ins import OneOfTwoRanks, TinyModel, fit, responses, rollout_of

ROWS = responses(8, seed=5)
TOKENS = sum(len(row.prompt) + len(row.tokens) for row in ROWS)
SGD = partial(torch.optim.SGD, lr=0.01)


def ppo(**options):
    ours = {"optimizer": SGD, "critic_optimizer": SGD, "minibatch_size": 4}
    return PPOModule(TinyModel(), **(ours | options))


def measured(module, rows=ROWS, **options):
    callbacks = [Throughput(options.pop("peak_tflops", None))]
    return {
        k: float(v) for k, v in fit(module, [rollout_of(rows)], callbacks=callbacks, **options).callback_metrics.items()
    }


def test_tokens_and_seconds_of_a_step_are_measured():
    started = time.perf_counter()
    result = measured(ppo())
    parts = result["time/evaluate_s"] + result["time/update_s"]
    assert parts <= result["time/step_s"] * 1.0001 <= time.perf_counter() - started
    assert result["perf/tokens"] == TOKENS
    assert result["perf/tokens_per_s"] == pytest.approx(TOKENS / result["time/step_s"], rel=1e-5)
    assert result["perf/tokens_per_s_per_device"] == result["perf/tokens_per_s"]
    for name in ("evaluate", "update"):
        expected = 1000 * result[f"time/{name}_s"] / TOKENS
        assert result[f"time/{name}_ms_per_token"] == pytest.approx(expected, rel=1e-5)
    assert 0.01 < result["perf/cpu_memory_gib"] < 1000
    absent = {"perf/mfu_update", "perf/memory_allocated_gib", "perf/memory_reserved_gib", "time/generate_ms_per_token"}
    assert not absent & result.keys()


def test_custom_training_step_has_the_metrics_of_the_whole_step():
    class Own(PPOModule):
        def training_step(self, batch, batch_idx):
            rollout = self.pop_rollout().rollout
            self.finish_step({"reward/mean": float(rollout.reward.mean())}, bar=())

    result = measured(Own(TinyModel(), optimizer=SGD, critic_optimizer=SGD), peak_tflops=1e-6)
    assert result["perf/tokens"] == TOKENS
    assert not {"time/update_ms_per_token", "perf/mfu_update"} & result.keys()


def test_batch_without_rollout_is_measured():
    module = SFTModule(TinyModel())
    ids = torch.tensor([[1, 3, 4, 2], [1, 5, 2, 0]])
    batch = SequenceBatch(
        ids, torch.tensor([4, 3]), torch.tensor([[False, True, True, True], [False, True, True, False]])
    )
    result = fit(module, [batch], callbacks=[Throughput(1.0)]).callback_metrics
    assert result["perf/tokens"] == 7
    assert {"perf/tokens_per_s", "time/step_s", "perf/cpu_memory_gib"} <= result.keys()
    assert not {"perf/mfu_update", "time/update_ms_per_token"} & result.keys()


def test_two_ranks_add_their_tokens_and_use_the_slower_time():
    class Slow(Throughput):
        def on_train_batch_end(self, *args):
            time.sleep(0.3)
            super().on_train_batch_end(*args)

    def rank(kind, rows, ranks):
        module = ppo(minibatch_size=2)
        module.configure_model()
        trainer = fit(module, [rollout_of(rows)], strategy=OneOfTwoRanks(ranks), callbacks=[kind()])
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    fast, slow = over_ranks(partial(rank, Throughput, ROWS[:4]), partial(rank, Slow, ROWS[4:]))
    for name in ("time/step_s", "perf/tokens", "perf/tokens_per_s", "time/update_ms_per_token"):
        assert fast[name] == slow[name]
    assert fast["time/step_s"] >= 0.3
    assert fast["perf/tokens"] == TOKENS
    assert fast["perf/tokens_per_s_per_device"] == pytest.approx(TOKENS / fast["time/step_s"] / 2, rel=1e-5)
    assert fast["perf/rank_tokens_max"] + fast["perf/rank_tokens_min"] == TOKENS


# The tiny llama: 11 x 32 tokens in, two layers of 4 x 32^2 + 3 x 32 x 48 + 2 x 32, a norm of 32; 11 x 32 tokens or
# 32 for a value out.
BODY = 11 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48 + 64) + 32
ACTOR, CRITIC = BODY + 11 * 32, BODY + 32
SQUARES = sum((len(row.prompt) + len(row.tokens)) ** 2 for row in ROWS)


def once(parameters):
    """Return the number of operations of one training pass over all rows."""
    return 6 * parameters * TOKENS + 12 * 2 * 32 * SQUARES


def test_operations_of_an_update_match_the_formula():
    module = ppo(update_epochs=3)
    result = measured(module, peak_tflops=0.25)
    assert module.parameter_counts() == {"actor": ACTOR, "critic": CRITIC}
    expected = 3 * (once(ACTOR) + once(CRITIC))
    assert 3 * operations_per_pass(module, module.last_step) == expected
    assert result["perf/mfu_update"] == pytest.approx(expected / result["time/update_s"] / 0.25e12, rel=1e-4)


def test_roles_without_an_update_have_no_operations():
    stopped = ppo(update_epochs=3, target_kl=1e-12, optimizer=partial(torch.optim.SGD, lr=10.0))
    result = measured(stopped)
    assert result["policy/updates"] == 2  # the second sees that the first went too far
    assert operations_per_pass(stopped, stopped.last_step) == once(ACTOR) + once(CRITIC)
    warming = ppo(update_epochs=2, critic_warmup_steps=1)
    assert measured(warming)["policy/updates"] == 0
    assert operations_per_pass(warming, warming.last_step) == once(CRITIC)


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.0),
        ("NVIDIA H100 PCIe", "bf16-true", 756.0),
        ("NVIDIA GeForce RTX 4090", "bf16-mixed", 165.2),
        ("NVIDIA GeForce RTX 3090", "bf16-mixed", 71.0),
        ("NVIDIA A10G", "bf16-mixed", 70.0),
        ("NVIDIA H200", "bf16-mixed", 989.0),
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312.0),
        ("NVIDIA A100-SXM4-80GB", "32-true", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bf16-mixed", None),
        ("NVIDIA GeForce GTX 1080", "bf16-mixed", None),
    ],
)
def test_peak_is_known_only_for_some_devices_and_for_bfloat16(monkeypatch, device, precision, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    module = type("Module", (), {"device": torch.device("cuda"), "trainer": type("T", (), {"precision": precision})})
    assert known_peak(module) == peak


def test_gpu_memory_is_in_gib(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 5 * 2**30)
    result = memory(torch.device("cuda"))
    assert (result["perf/memory_allocated_gib"], result["perf/memory_reserved_gib"]) == (3.0, 5.0)
    used = type("Usage", (), {"ru_maxrss": 2**20})  # KiB
    monkeypatch.setattr(throughput.resource, "getrusage", lambda _: used)
    assert memory(torch.device("cpu")) == {"perf/cpu_memory_gib": 1.0}


def test_peak_must_be_positive():
    with pytest.raises(ValueError, match=r"^peak_tflops must be positive or null, got 0$"):
        Throughput(0)
