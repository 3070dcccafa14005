"""Averages that begin later, and schedules that are shorter than the run."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.cli import ReduceLROnPlateau
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR

from lightning_rlhf import ConversationDataModule, FromConfig, SFTModule
from lightning_rlhf.callbacks import RunCheckpoint, complete
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.expected_errors import UsageError
from tests.cli.conftest import LLAMA
from tests.stand_ins import quiet_trainer

ROWS = [{"prompt": "12"[: 1 + i % 2], "completion": "3456"[: 1 + i % 4]} for i in range(16)]
pytestmark = [
    pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


def run(tmp_path, callbacks=(), schedule=None, ckpt_path=None, **settings):
    torch.manual_seed(0)
    module = SFTModule(FromConfig(LLAMA, seed=0), optimizer=partial(torch.optim.AdamW, lr=1e-2), lr_scheduler=schedule)
    data = ConversationDataModule(
        InMemory(ROWS), CharacterTokenizer("0123456789+=: "), val=InMemory(ROWS), batch_size=4, shuffle=False
    )
    losses = []
    trainer = quiet_trainer(
        callbacks=complete(callbacks),
        default_root_dir=tmp_path,
        enable_checkpointing=True,
        val_check_interval=1,
        **settings,
    )
    module.on_validation_epoch_end = lambda: losses.append(float(trainer.callback_metrics["val/loss"]))
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, losses, trainer


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.actor.parameters()])


def test_average_that_has_not_begun_is_the_actor(tmp_path, caplog):
    plain, plain_losses, _ = run(tmp_path / "plain", max_steps=4)
    late, losses, _ = run(tmp_path / "late", [EMAWeightAveraging(decay=0.5, update_starting_at_step=10)], max_steps=4)
    assert losses == plain_losses
    assert torch.equal(weights(late), weights(plain))
    assert "EMAWeightAveraging had not begun when the run ended" in caplog.text


def test_average_that_begins_in_the_run_is_used_from_then_on(tmp_path, caplog):
    plain, plain_losses, _ = run(tmp_path / "plain", max_steps=4)
    late, losses, _ = run(tmp_path / "late", [EMAWeightAveraging(decay=0.5, update_starting_at_step=2)], max_steps=4)
    assert losses[:3] == plain_losses[:3]  # the first update copies the weights
    assert losses[3] != plain_losses[3]
    assert not torch.equal(weights(late), weights(plain))
    assert "had not begun" not in caplog.text


def test_schedule_shorter_than_the_run_is_an_error_before_the_first_step(tmp_path):
    schedule = partial(OneCycleLR, max_lr=1e-2, total_steps=3)
    with pytest.raises(UsageError, match="OneCycleLR ends after its total_steps of 3, but the run has 4 steps"):
        run(tmp_path, schedule=schedule, max_epochs=1)
    with pytest.raises(UsageError, match="total_steps of 2, but the run has 8"):
        run(tmp_path, schedule=partial(OneCycleLR, max_lr=1e-2, epochs=1, steps_per_epoch=2), max_epochs=2)


class WarmUpAndHold(torch.optim.lr_scheduler.LambdaLR):
    """Has the name of OneCycleLR's length, and lasts."""

    def __init__(self, optimizer, total_steps):
        self.total_steps = total_steps
        super().__init__(optimizer, lambda step: min(step / total_steps, 1.0))


def chained(optimizer, steps):
    warm, cycle = LinearLR(optimizer, total_iters=2), OneCycleLR(optimizer, 1e-2, total_steps=steps)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cycle], milestones=[2])


def test_schedules_within_schedules_are_checked(tmp_path):
    run(tmp_path, schedule=partial(chained, steps=3), max_epochs=1)
    with pytest.raises(UsageError, match="OneCycleLR ends after its total_steps of 2, but the run has"):
        run(tmp_path, schedule=partial(chained, steps=2), max_epochs=2)
    run(tmp_path, schedule=partial(WarmUpAndHold, total_steps=2), max_epochs=2)


def test_schedule_that_cannot_be_made_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="schedule cannot be made: You must define either total_steps"):
        run(tmp_path, schedule=partial(OneCycleLR, max_lr=1e-2, epochs=2), max_steps=2)


def test_schedule_without_a_length_has_that_of_the_run(tmp_path):
    for settings, steps in (({"max_epochs": 2}, 8), ({"max_steps": 3}, 3)):
        module, _, _ = run(tmp_path / str(steps), schedule=partial(OneCycleLR, max_lr=1e-2), **settings)
        assert module.lr_schedulers().total_steps == steps + 1


def test_resumed_run_has_the_length_of_its_configuration(tmp_path):
    schedule = partial(OneCycleLR, max_lr=1e-2)
    run(tmp_path, [RunCheckpoint()], schedule=schedule, max_epochs=1)
    last = tmp_path / "checkpoints/last.ckpt"
    module, _, trainer = run(tmp_path, [RunCheckpoint()], schedule=schedule, max_epochs=2, ckpt_path=last)
    assert (module.lr_schedulers().total_steps, trainer.global_step) == (9, 8)


@pytest.mark.parametrize(
    "schedule",
    [
        partial(LinearLR, total_iters=2),
        partial(CosineAnnealingLR, T_max=2),
        partial(OneCycleLR, max_lr=1, epochs=1, steps_per_epoch=4),
    ],
)
def test_schedules_that_last_are_accepted(tmp_path, schedule):
    _, losses, _ = run(tmp_path, schedule=schedule, max_epochs=1)
    assert len(losses) == 4


def test_schedule_that_waits_for_a_metric_is_an_error(tmp_path):
    for kind in (ReduceLROnPlateau, torch.optim.lr_scheduler.ReduceLROnPlateau):
        options = {"monitor": "train/loss"} if kind is ReduceLROnPlateau else {}
        with pytest.raises(UsageError, match="schedule is ReduceLROnPlateau"):
            run(tmp_path, schedule=partial(kind, **options), max_steps=2)
