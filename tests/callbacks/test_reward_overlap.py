"""Rewards computed outside of the trainer's thread overlap with forward passes that do not need them."""

import asyncio
import threading

import pytest
import torch

from lightning_rlhf import PPOModule
from lightning_rlhf.callbacks import DynamicSampling, GracefulShutdown, RolloutLog, RunCheckpoint, Throughput
from lightning_rlhf.rewards.function import RewardFunction
from tests.callbacks.conftest import exact


async def same(completions, answer):
    """Return 1.0 for completions that equal the answer, otherwise 0.0."""
    await asyncio.sleep(0.01)
    return exact(completions, answer)


def length(solution_str):
    return float(len(solution_str))


class Reading(PPOModule):
    """Module that reads the rewards before it evaluates the rollout."""

    seen = None

    def receive(self, inputs):
        self.seen = inputs.rollout.rewards
        super().receive(inputs)


def made_with(run, kind=PPOModule, rewards=(same, length), **parts):
    loop = {"rewards": [RewardFunction(each, dry_call=False) for each in rewards], **parts.pop("loop", {})}
    return run(loop={"group_size": 2, "val_metric": rewards[0].__name__, **loop}, kind=kind, **parts)


def results(made):
    weights = [parameter.detach().clone() for parameter in made.module.parameters()]
    clocks = ("time/", "perf/", "rollout/tokens_per_s")
    return weights, {name: value for name, value in made.metrics.items() if not name.startswith(clocks)}


def test_batch_is_scored_while_the_module_evaluates_it(run):
    evaluated, waited = threading.Event(), []

    async def late(completions):
        for _ in range(1000):
            if evaluated.is_set():
                break
            await asyncio.sleep(0.01)
        waited.append(len(completions))
        return [float(evaluated.is_set())] * len(completions)

    class Marked(PPOModule):
        def values(self, rollout):
            result = super().values(rollout)  # the last forward pass that needs no reward
            evaluated.set()
            return result

    made = made_with(run, Marked, (late,), loop={"val_metric": "late", "validate_at_ends": False})
    made.fit()
    assert waited == [4, 4]
    assert made.metrics["reward/late"] == 1
    assert made.metrics["time/reward_s"] >= 0


def test_weights_and_metrics_equal_those_without_overlap(run):
    overlapping = made_with(run).fit()
    waiting = made_with(run, Reading).fit()
    assert waiting.module.seen.keys() == {"same", "length"}
    (weights, metrics), (expected_weights, expected_metrics) = results(overlapping), results(waiting)
    assert all(torch.equal(one, other) for one, other in zip(weights, expected_weights, strict=True))
    assert metrics == pytest.approx(expected_metrics, rel=0, abs=0, nan_ok=True)
    assert metrics["reward_same/not_applicable"] == 0
    assert overlapping.module.last_rollout.rewards.keys() == {"same", "length"}
    assert overlapping.metrics.keys() == waiting.metrics.keys()


def test_rewards_are_known_before_the_evaluation_with_dynamic_sampling(run):
    sampling = DynamicSampling(2, reward="length")
    made = made_with(run, loop={"dynamic_sampling": sampling, "validate_at_ends": False}).fit()
    assert made.module.last_rollout.rewards.keys() == {"same", "length"}


def test_functions_of_the_trainer_thread_are_not_deferred(run):
    made = run(loop={"validate_at_ends": False})
    inputs = []
    made.module.receive = lambda *arguments: (
        inputs.append(arguments),
        type(made.module).receive(made.module, *arguments),
    )
    made.fit()
    assert all(instance.rewards is None for (instance,) in inputs)


def test_failure_ends_the_run_with_its_cause(run):
    async def broken(completions):
        await asyncio.sleep(0.05)
        raise ZeroDivisionError("no completions")

    made = made_with(run, rewards=(broken,), loop={"val_metric": "broken", "validate_at_ends": False})
    with pytest.raises(RuntimeError, match="reward function 'broken' raised ZeroDivisionError: no completions"):
        made.fit()


def test_last_finished_step_can_be_saved_until_the_first_update(run):
    between_steps = []

    class Watched(PPOModule):
        def update(self, *arguments):
            (last,) = [each for each in self.trainer.callbacks if isinstance(each, RunCheckpoint)]
            before = last.between_steps
            result = super().update(*arguments)
            between_steps.append((before, last.between_steps))
            return result

    made = made_with(run, Watched, callbacks=[RunCheckpoint()], trainer={"enable_checkpointing": True})
    made.fit()
    first, second = between_steps[:4], between_steps[4:]
    assert first == 4 * [(False, False)]  # no step is finished before
    assert second == [(True, False), *3 * [(False, False)]]


@pytest.mark.slow
def test_waiting_for_rewards_is_not_counted_as_evaluation(run):
    async def slow(completions):
        await asyncio.sleep(1)
        return [1.0] * len(completions)

    loop = {"val_metric": "slow", "validate_at_ends": False}
    made = made_with(run, rewards=(slow,), loop=loop, callbacks=[Throughput()]).fit()
    assert made.metrics["time/reward_s"] > 0.3
    parts = sum(made.metrics[f"time/{part}_s"] for part in ("reward", "evaluate", "update"))
    assert parts <= made.metrics["time/step_s"]


@pytest.mark.parametrize("kind", [PPOModule, Reading], ids=["overlapping", "waiting"])
def test_last_finished_step_is_saved_if_a_function_fails(run, kind, tmp_path):
    scored = []

    async def broken(completions):
        await asyncio.sleep(0.01)
        scored.append(len(completions))
        if len(scored) == 2:
            raise ZeroDivisionError("no completions")
        return [1.0] * len(completions)

    callbacks = [RunCheckpoint(every_n_steps=100), GracefulShutdown()]
    loop = {"val_metric": "broken", "validate_at_ends": False}
    made = made_with(run, kind, (broken,), loop=loop, callbacks=callbacks, trainer={"enable_checkpointing": True})
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        made.fit()
    assert made.trainer.global_step == 1
    (saved,) = tmp_path.rglob("last.ckpt")
    assert torch.load(saved, weights_only=True)["global_step"] == 1


def test_rollout_log_has_the_rewards(run, tmp_path):
    made = made_with(run, callbacks=[RolloutLog()]).fit()
    files = [*tmp_path.rglob("*.jsonl")]
    assert files
    assert all('"length"' in file.read_text() for file in files)
    assert made.trainer.global_step == 2
