"""Default callbacks, their order, and the timer."""

import time

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rlhf.callbacks import (
    Console,
    GracefulShutdown,
    HealthChecks,
    HFExport,
    KLControl,
    MetricsCSV,
    Report,
    ReportPage,
    RolloutLog,
    RolloutLoop,
    RunCheckpoint,
    RunState,
    Throughput,
    complete,
)
from lightning_rlhf.extras.frozen_heap.callback import FrozenHeap
from lightning_rlhf.extras.late_ranks.callback import LateRanks
from lightning_rlhf.extras.resume_check.check import ResumeCheck
from lightning_rlhf.extras.run_lock.lock import RunLock
from lightning_rlhf.rewards.function import RewardFunction


def kinds(callbacks):
    return [type(callback) for callback in callbacks]


def test_default_callbacks_have_the_documented_order():
    assert kinds(complete([])) == [
        GracefulShutdown,
        RunLock,
        ResumeCheck,
        Throughput,
        Console,
        FrozenHeap,
        LateRanks,
        HFExport,
        MetricsCSV,
        RunState,
        HealthChecks,
        ReportPage,
    ]


def test_rollouts_are_logged_by_default():
    assert RolloutLog in kinds(complete([RolloutLoop([])]))


def test_given_callbacks_are_ordered_and_replace_the_default_of_their_class():
    console = Console(every_n_steps=7)
    inputs = [
        RunCheckpoint(every_n_steps=1),
        Report(),
        ModelCheckpoint(),
        RolloutLog(),
        RolloutLoop([]),
        KLControl(1.0),
    ]
    ordered = complete([*inputs, console])
    assert kinds(ordered) == [
        GracefulShutdown, RunLock, ResumeCheck, Throughput, Console, RolloutLoop, RolloutLog, KLControl, FrozenHeap,
        LateRanks, HFExport, MetricsCSV, RunState, Report, HealthChecks, ReportPage, RunCheckpoint, ModelCheckpoint,
    ]  # fmt: skip
    assert console in ordered


def test_last_checkpoint_is_saved_beside_the_best_one(caplog):
    best = RunCheckpoint(best="val/fraction_correct_greedy")
    (first, last) = complete([best])[-2:]
    assert (first, last.monitor, last.every_n_steps, last.every_n_minutes) == (best, None, 100, 10)
    assert complete([best, last])[-2:] == [best, last]
    lightning = ModelCheckpoint(monitor="val/loss")  # the user's own way to save
    assert complete([lightning])[-1] is lightning
    line = "ModelCheckpoint takes the place of RunCheckpoint: --ckpt_path last needs save_last: true of it"
    assert caplog.messages == [line]
    complete([ModelCheckpoint(monitor="val/loss", save_last=True)])
    assert caplog.messages == [line]


def test_subclass_of_a_default_replaces_it():
    class MyConsole(Console):
        pass

    assert kinds(complete([MyConsole()])).count(Console) == 0


def test_custom_callback_runs_after_the_rollout_and_before_the_files_are_written():
    class Own(Callback):
        pass

    order = kinds(complete([Own(), RolloutLoop([])]))
    assert order.index(RolloutLoop) < order.index(Own) < order.index(MetricsCSV)


def test_timer_counts_the_rollout_and_all_its_tokens(run):
    def slow(completions):
        time.sleep(0.2)
        return [0.0] * len(completions)

    made = run(loop={"rewards": [RewardFunction(slow)]})
    made.trainer.callbacks.insert(0, Throughput())
    made.fit()
    experience = made.module.last_step.experience
    assert made.metrics["time/reward_s"] >= 0.2
    assert made.metrics["time/step_s"] >= 0.2 + made.metrics["time/update_s"]
    tokens = float(experience.total_lengths.sum())
    assert made.metrics["perf/tokens_per_s"] == pytest.approx(tokens / made.metrics["time/step_s"], rel=1e-4)
    generated = made.metrics["rollout/tokens_per_s"] * made.metrics["time/generate_s"]
    assert generated == pytest.approx(float(experience.rollout.response_lengths.sum()), rel=1e-4)
