"""Private attributes and behaviour of Lightning that compat.py relies on: still present and unchanged."""

import copy
import inspect
from datetime import timedelta

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loops.fit_loop import _FitLoop

from lightning_rlhf import SFTModule
from lightning_rlhf.compat import set_group_timeout, settle_progress, training_ends
from lightning_rlhf.types import SequenceBatch
from tests.stand_ins import TinyModel, fit, quiet_trainer

# From a Trainer, by attribute. Should one be gone: find its successor, change compat.py, and then this list.
_OF_TRAINER = (
    "strategy.optimizers",
    "strategy.optimizer_step",
    "fit_loop._data_fetcher",
    "fit_loop.is_resuming",
    "fit_loop.max_batches",
    "fit_loop.max_epochs",
    "fit_loop.epoch_loop._batches_that_stepped",
    "fit_loop.epoch_loop._num_ready_batches_reached",
    "fit_loop.epoch_loop._should_check_val_fx",
    "fit_loop.epoch_loop.manual_optimization.optim_step_progress.increment_ready",
    "fit_loop.epoch_loop.manual_optimization.optim_step_progress.increment_completed",
    "fit_loop.epoch_loop.val_loop.run",
    "_logger_connector._first_loop_iter",
)
_OF_CHECKPOINT = (
    "_every_n_train_steps",
    "_find_last_checkpoints",
    "_last_global_step_saved",
    "_monitor_candidates",
    "_save_last_checkpoint",
    "_save_topk_checkpoint",
    "_should_skip_saving_checkpoint",
)
_OF_MODULE = ("_trainer",)
_COUNTS = ("ready", "started", "processed", "completed")


@pytest.mark.parametrize("path", _OF_TRAINER)
def test_trainer_still_has_the_attribute(path):
    there, result = quiet_trainer(), "trainer"
    for name in path.split("."):
        assert hasattr(there, name), f"lightning has no {result}.{name} any more: see lightning_rlhf/compat.py"
        there, result = getattr(there, name), f"{result}.{name}"


@pytest.mark.parametrize("name", _OF_MODULE)
def test_module_still_has_the_attribute(name):
    gone = f"lightning's LightningModule has no {name} any more: see trainer_of in lightning_rlhf/compat.py"
    assert hasattr(SFTModule(TinyModel()), name), gone


def test_torch_still_sets_the_timeout_of_a_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        set_group_timeout(group, timedelta(seconds=77))
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", _OF_CHECKPOINT)
def test_model_checkpoint_still_has_the_attribute(name):
    gone = f"lightning's ModelCheckpoint has no {name} any more: see compat.py and callbacks/survival/checkpoint.py"
    assert hasattr(ModelCheckpoint(), name), gone


def test_command_line_still_reads_hyperparameters_of_a_checkpoint_in_a_replaceable_method():
    assert "_parse_ckpt_path" in inspect.getsource(LightningCLI.__init__)


def test_fit_loop_of_a_trainer_still_has_the_extended_class_and_checks_skip():
    assert type(quiet_trainer().fit_loop) is _FitLoop
    assert "if self.skip:\n            return" in inspect.getsource(_FitLoop.run)


def test_checkpoint_still_stores_progress_under_the_expected_names():
    state = quiet_trainer().fit_loop.state_dict()
    for name in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"):
        assert set(state[name]["current"]) == set(_COUNTS), name
        assert set(state[name]["total"]) == set(_COUNTS), name
    assert "is_last_batch" in state["epoch_loop.batch_progress"]
    assert "state_dict" in state


def progress(batch, completed, epoch, last=False, epochs=None):
    """Return Lightning's counters at batch ``batch`` of epoch ``epoch``, with 5 batches per epoch."""
    total = (epoch - 1) * 5

    def counts(done, ahead):
        return dict(zip(_COUNTS, (done, done, done, ahead), strict=True))

    epochs = epochs or dict(zip(_COUNTS, (epoch, epoch, epoch - 1, epoch - 1), strict=True))
    return {
        "epoch": 77,
        "loops": {
            "fit_loop": {
                "state_dict": {"combined_loader": [{"batches": batch}]},
                "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
                "epoch_loop.batch_progress": {
                    "total": counts(total + batch, total + completed),
                    "current": counts(batch, completed),
                    "is_last_batch": last,
                },
                "epoch_loop.val_loop.batch_progress": {
                    "total": counts(2, 2), "current": counts(2, 2), "is_last_batch": True,
                },
            }
        },
    }  # fmt: skip


def settled(checkpoint, epoch_batches=5):
    checkpoint = copy.deepcopy(checkpoint)
    settle_progress(checkpoint, epoch_batches)
    return checkpoint


def test_unfinished_batch_counts_as_completed_and_its_epoch_continues():
    after = settled(progress(batch=3, completed=2, epoch=2))
    fit = after["loops"]["fit_loop"]
    assert after["epoch"] == 1
    assert fit["epoch_loop.batch_progress"]["current"] == dict.fromkeys(_COUNTS, 3)
    assert fit["epoch_loop.batch_progress"]["total"] == dict.fromkeys(_COUNTS, 8)
    assert fit["epoch_progress"]["current"] == {"ready": 2, "started": 2, "processed": 1, "completed": 1}
    assert fit["state_dict"]["combined_loader"] == [{"batches": 3}]


@pytest.mark.parametrize(("last", "epoch_batches"), [(True, 9), (False, 5)])
def test_after_the_last_batch_of_an_epoch_the_next_epoch_starts_at_its_first_batch(last, epoch_batches):
    after = settled(progress(batch=5, completed=4, epoch=2, last=last), epoch_batches)
    fit = after["loops"]["fit_loop"]
    assert after["epoch"] == 2
    assert fit["epoch_loop.batch_progress"]["current"] == dict.fromkeys(_COUNTS, 0)
    assert fit["epoch_loop.batch_progress"]["total"] == dict.fromkeys(_COUNTS, 10)
    assert fit["epoch_progress"]["total"] == dict.fromkeys(_COUNTS, 2)
    assert "combined_loader" not in fit["state_dict"]


@pytest.mark.parametrize(("batch", "last"), [(3, False), (5, True)])
def test_counters_in_validation_and_at_the_end_of_the_run_equal_those_at_the_end_of_the_batch(batch, last):
    at_end = settled(progress(batch, batch - 1, epoch=2, last=last))
    over = dict.fromkeys(_COUNTS, 2)  # Lightning ends the epoch of a run that max_steps stops
    assert settled(progress(batch, batch, epoch=2, last=last)) == at_end
    assert settled(progress(batch, batch, epoch=2, last=last, epochs=over)) == at_end


@pytest.mark.parametrize("batch", [3, 5])
def test_settled_counters_do_not_change(batch):
    once = settled(progress(batch, batch - 1, epoch=2))
    assert settled(once) == once


def test_trainer_loads_settled_counters():
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    state = trainer.fit_loop.state_dict()
    trainer.fit_loop.load_state_dict(settled({"loops": {"fit_loop": state}, "epoch": 0})["loops"]["fit_loop"])
    assert trainer.fit_loop.epoch_progress.current.processed == 0


class TrainingEndRecorder(Callback):
    """Stops training after the second step if ``stops`` is set, and records after each step whether training ends."""

    def __init__(self, stops):
        self.stops, self.ends = stops, []

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = self.stops and trainer.global_step == 2
        self.ends.append(training_ends(trainer))


@pytest.mark.parametrize(
    ("stops", "batches", "options"),
    [(True, 4, {}), (False, 4, {"max_steps": 2}), (False, 2, {}), (False, 1, {"max_epochs": 2})],
    ids=["should_stop", "max_steps", "last batch", "last epoch"],
)
def test_end_of_training_is_known_in_the_last_step_for_every_stop_condition(stops, batches, options):
    batch = SequenceBatch(torch.tensor([[3, 4]]), torch.tensor([2]), torch.tensor([[False, True]]))
    recorder = TrainingEndRecorder(stops)
    assert fit(SFTModule(TinyModel()), [batch] * batches, callbacks=[recorder], **options).global_step == 2
    assert recorder.ends == [False, True]
