"""RunCheckpoint: files of finished, interrupted and killed runs."""

import logging
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rlhf import DPOModule, PreferenceDataModule
from lightning_rlhf.callbacks import GracefulShutdown, ReportPage, RunCheckpoint, complete
from lightning_rlhf.callbacks.survival.checkpoint import checkpoint_to_resume
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.report.run_directory import end_state
from lightning_rlhf.strategies.checkpoints import manifest, reshardable
from tests.stand_ins import TinyModel, quiet_trainer


def trainer_with(directory, *callbacks, **options):
    options |= {"default_root_dir": str(directory), "enable_checkpointing": True}
    return quiet_trainer(callbacks=list(callbacks), **options)


def test_last_and_best_have_separate_states():
    best = [RunCheckpoint(best=f"val/{name}_greedy").state_key for name in "ab"]
    keys = {RunCheckpoint().state_key, *best}
    assert len(keys) == 3


def test_only_partial_files_of_a_killed_run_are_removed(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("last.ckpt", "last.ckpt.sha256", "last.ckpt.new", "last.ckpt.sha256.new", "best.ckpt.new", "my.new"):
        (folder / name).touch()
    last = RunCheckpoint()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        last.setup(trainer_with(tmp_path, last), None, "fit")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["best.ckpt.new", "last.ckpt", "last.ckpt.sha256", "my.new"]


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_partial_versions_of_a_killed_run_are_removed_before_fit(tmp_path, stage):
    folder = tmp_path / "checkpoints"
    for name in ("last.ckpt", "best.ckpt"):
        manifest.publish(manifest.begin(folder / name))
        manifest.begin(folder / name)
    last = RunCheckpoint()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        last.setup(trainer_with(tmp_path, last), None, stage)
    left = {name: len(list((folder / name).glob("v*"))) for name in ("last.ckpt", "best.ckpt")}
    assert left == {"last.ckpt": 1 if stage == "fit" else 2, "best.ckpt": 2}


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_last_checkpoint_is_found_before_setup(tmp_path, kind):
    last, path = RunCheckpoint(), tmp_path / "checkpoints/last.ckpt"
    trainer = trainer_with(tmp_path, last)
    path.parent.mkdir()
    if kind == "file":
        path.touch()
    else:
        version = manifest.begin(path)
        assert last._find_last_checkpoints(trainer) == set()  # none was ever finished
        manifest.publish(version)
    assert last._find_last_checkpoints(trainer) == {str(path)}


@pytest.mark.parametrize("others", [(), ("best.ckpt",)])
def test_empty_folder_of_the_last_checkpoint_raises_instead_of_starting_a_new_run(tmp_path, others):
    last, path = RunCheckpoint(), tmp_path / "checkpoints/last.ckpt"
    trainer = trainer_with(tmp_path, last)
    path.mkdir(parents=True)
    assert last._find_last_checkpoints(trainer) == {str(path)}
    for name in others:
        manifest.publish(manifest.begin(path.with_name(name)))
        with pytest.raises(ValueError, match=r"has best\.ckpt but no last\.ckpt: resume with"):
            checkpoint_to_resume(trainer)
    if not others:
        assert checkpoint_to_resume(trainer) == str(path)
    with pytest.raises(ValueError, match=r"last\.ckpt is an empty folder: its files were removed; resume from another"):
        manifest.verified(path)


def test_missing_last_checkpoint_is_logged_without_an_error(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="lightning_rlhf"):
        logging.getLogger("lightning_rlhf").addHandler(caplog.handler)  # it hands nothing on to the root
        result = RunCheckpoint()._find_last_checkpoints(SimpleNamespace(default_root_dir=str(tmp_path)))
        logging.getLogger("lightning_rlhf").removeHandler(caplog.handler)
    assert result == set()
    assert "has no last.ckpt yet: training starts from the beginning" in caplog.text


@pytest.mark.parametrize("names", [("val/a_greedy", "val/b_greedy"), (None, None)])
def test_two_callbacks_with_the_same_file_raise(tmp_path, names):
    both = [RunCheckpoint(every_n_steps=i + 1, best=name) for i, name in enumerate(names)]
    trainer = SimpleNamespace(checkpoint_callbacks=both, default_root_dir=str(tmp_path))
    with pytest.raises(ValueError, match="two RunCheckpoint callbacks would write"):
        both[0].setup(trainer, None, "fit")


def test_zero_steps_between_saves_raise():
    with pytest.raises(ValueError, match="every_n_steps must be at least 1, got 0"):
        RunCheckpoint(every_n_steps=0)


def test_run_without_a_configured_checkpoint_can_be_resumed(tmp_path):
    trainer = trainer_with(tmp_path)
    saved = [callback for callback in complete(trainer.callbacks) if isinstance(callback, ModelCheckpoint)]
    assert [(type(callback), callback.filename) for callback in saved] == [(RunCheckpoint, "last")]


def test_configured_checkpoint_is_kept_and_disabled_checkpointing_adds_none(tmp_path):
    mine = ModelCheckpoint(monitor="val/x")
    assert [c for c in complete([mine]) if isinstance(c, ModelCheckpoint)] == [mine]
    assert not [c for c in complete(quiet_trainer().callbacks) if isinstance(c, ModelCheckpoint)]


def test_ckpt_path_last_without_a_saving_callback_is_rejected(tmp_path):
    trainer = quiet_trainer(callbacks=[ModelCheckpoint(dirpath=tmp_path)], enable_checkpointing=True)
    with pytest.raises(ValueError, match="--ckpt_path last needs a callback that saves the last checkpoint: add"):
        checkpoint_to_resume(trainer)
    saves = quiet_trainer(callbacks=[ModelCheckpoint(dirpath=tmp_path, save_last=True)], enable_checkpointing=True)
    assert checkpoint_to_resume(saves) == "last"


class EndsAfter(Callback):
    """Ends a run as a signal within a step does."""

    def __init__(self, step):
        self.step, self.ends_now = step, False

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ends_now = trainer.should_stop = trainer.global_step == self.step


class FailsAfter(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise RuntimeError("between two steps")


@pytest.fixture
def copied(monkeypatch):
    """Steps at which a background save copied the actor to host memory."""
    steps = []

    def counted(state, tensors, copy=reshardable.in_host_memory):
        steps.append(len(steps) + 1)
        return copy(state, tensors)

    monkeypatch.setattr(reshardable, "in_host_memory", counted)
    return steps


def train(trainer):
    rows = InMemory([{"prompt": word, "chosen": word[::-1], "rejected": "a"} for word in ("ab", "ba", "bc", "cb")])
    module = DPOModule(TinyModel(), optimizer=partial(torch.optim.AdamW, lr=1e-2))
    trainer.fit(module, datamodule=PreferenceDataModule(rows, CharacterTokenizer("abc"), batch_size=1))


def test_checkpoint_of_a_run_ended_by_a_signal_is_written_without_a_copy(tmp_path, copied):
    last = RunCheckpoint(every_n_steps=1)
    train(trainer_with(tmp_path, EndsAfter(3), last, strategy="rlhf_single"))
    assert copied == [1, 2]
    assert last.saved_step == 3


def test_checkpoint_between_two_steps_is_written_without_a_copy(tmp_path, copied):
    last = RunCheckpoint(every_n_steps=100)
    trainer = trainer_with(tmp_path, FailsAfter(2), GracefulShutdown(), last, strategy="rlhf_single")
    with pytest.raises(RuntimeError, match="between two steps"):
        train(trainer)
    assert (copied, last.saved_step) == ([], 2)


def test_expired_grace_period_without_a_checkpoint_promises_none(tmp_path, monkeypatch, capfd):
    codes = []
    monkeypatch.setattr("os._exit", codes.append)
    shutdown = GracefulShutdown(grace_seconds=3)
    trainer = trainer_with(tmp_path, shutdown, last := RunCheckpoint(), ReportPage())
    last.setup(trainer, None, "fit")
    shutdown.setup(trainer, None, "fit")
    shutdown._give_up(15)
    shutdown.teardown(trainer, None, "fit")
    assert codes == [15 + 128]
    assert capfd.readouterr().err == (
        "lightning-rlhf: ended 3 s after SIGTERM, during an unfinished step; "
        "no checkpoint was saved yet: the same command starts from the beginning\n"
    )
    assert end_state(tmp_path) == {
        "state": "interrupted",
        "error": "Interrupted: 3 s after SIGTERM, during an unfinished step",
    }


@pytest.mark.parametrize(
    ("best", "mode", "wanted"),
    [
        ("val/loss", None, "min"),
        ("val/exact_greedy", None, "max"),
        ("kl/ref", "min", "min"),
        ("val/own", "min", "min"),
        ("val/own", "max", "max"),
        ("val/toxicity_greedy", "min", "min"),
        ("env/errors_fixed", "max", "max"),
    ],
)
def test_best_follows_the_direction_of_its_metric(best, mode, wanted):
    assert RunCheckpoint(best=best, mode=mode).mode == wanted


@pytest.mark.parametrize(
    ("best", "mode", "message"),
    [
        ("val/loss", "max", "best: val/loss with mode: max would keep the worst checkpoint: remove mode"),
        ("reward/mean", "min", "would keep the worst checkpoint"),
        ("val/entropy", None, "best: val/entropy needs a mode, because its direction is not known"),
    ],
)
def test_mode_against_its_metric_or_without_a_known_one_raises(best, mode, message):
    with pytest.raises(UsageError, match=message):
        RunCheckpoint(best=best, mode=mode)
