"""Schedules over the length of a run have the factors of transformers, without a configured number of steps."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback
from transformers import get_cosine_schedule_with_warmup, get_scheduler

from lightning_rlhf import GRPOModule
from lightning_rlhf.modules.schedules import RunSchedule
from tests.stand_ins import TinyModel, fit, responses, rollout_of


def optimizer(rate=0.5):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)


def rates(schedule, steps):
    """Return the learning rate of each step."""
    seen = []
    for _ in range(steps):
        seen.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return seen


def test_warm_up_and_cosine_have_known_values():
    schedule = RunSchedule(optimizer(), "cosine", warmup_ratio=0.25)
    schedule.stretch(8)
    half = 0.5 * (1 + 0.5) * 0.5  # a third of the way down: cos(pi / 3) = 1/2
    assert rates(schedule, 5) == pytest.approx([0.0, 0.25, 0.5, 0.25 * (1 + 3**0.5 / 2), half])


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("cosine", {}),
        ("linear", {}),
        ("polynomial", {}),
        ("constant_with_warmup", {}),
        ("inverse_sqrt", {}),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ],
)
def test_every_kind_equals_that_of_transformers(kind, arguments):
    schedule = RunSchedule(optimizer(), kind, 0.2, arguments)
    schedule.stretch(20)
    theirs = get_scheduler(kind, optimizer(), 4, 20, scheduler_specific_kwargs=dict(arguments))
    assert rates(schedule, 20) == rates(theirs, 20)


def test_resumed_schedule_continues():
    whole = RunSchedule(optimizer(), "linear", 0.5)
    whole.stretch(10)
    wanted = rates(whole, 10)
    first = RunSchedule(optimizer(), "linear", 0.5)
    first.stretch(10)
    rates(first, 4)
    second = RunSchedule(optimizer(), "linear", 0.5)
    second.stretch(10)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert rates(second, 6) == wanted[4:]


def test_kind_is_read_from_the_checkpoint_and_length_from_the_run():
    first = RunSchedule(optimizer(), "cosine", 0.5)
    first.stretch(10)
    second = RunSchedule(optimizer(), "linear", 0.0)
    second.stretch(20)
    second.load_state_dict(first.state_dict())
    theirs = get_cosine_schedule_with_warmup(optimizer(), 10, 20)
    assert [factor(7) for factor in second.lr_lambdas] == [factor(7) for factor in theirs.lr_lambdas]


@pytest.mark.parametrize(("ratio", "steps", "message"), [
    (1.0, 10, r"warmup_ratio must lie in \[0, 1\), got 1.0"),
    (0.1, float("inf"), "needs the length of the run, which is inf steps: give trainer.max_steps"),
])  # fmt: skip
def test_invalid_schedule_is_rejected(ratio, steps, message):
    with pytest.raises(ValueError, match=message):
        RunSchedule(optimizer(), "cosine", ratio).stretch(steps)


def test_unsupported_arguments_are_rejected():
    with pytest.raises(ValueError, match=r"'linear' does not take the arguments {'num_cycles': 2}"):
        RunSchedule(optimizer(), "linear", 0.0, {"num_cycles": 2}).stretch(10)


def test_schedule_without_a_length_raises():
    with pytest.raises(ValueError, match=r"call stretch\(steps\) before training"):
        rates(RunSchedule(optimizer()), 2)


class Rates(Callback):
    """Records the learning rate that each step logs."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(trainer.callback_metrics["lr/actor"]))


def test_run_passes_its_length_to_the_schedule():
    module = GRPOModule(
        TinyModel(),
        minibatch_size=4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        lr_scheduler=lambda optimizer: RunSchedule(optimizer, "linear", 0.0),
    )
    rates_seen = Rates()
    fit(module, [grouped()] * 4, callbacks=[rates_seen])
    assert rates_seen.seen == pytest.approx([1.0, 0.75, 0.5, 0.25])


def grouped():
    """Return two prompts with two responses each."""
    return replace(rollout_of(responses(4, 1)), group=torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"optimizer": lambda parameters: 0}, "the actor's optimizer must be a torch.optim.Optimizer, got 0"),
        (
            {"lr_scheduler": lambda optimizer: "x"},
            "the actor's schedule must be an LRScheduler of torch, got 'x'",
        ),
    ],
)
def test_factory_with_a_wrong_result_is_rejected(inputs, message):
    with pytest.raises(ValueError, match=message):
        fit(GRPOModule(TinyModel(), minibatch_size=4, **inputs), [grouped()])
