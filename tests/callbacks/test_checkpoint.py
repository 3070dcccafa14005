"""RunCheckpoint: which files, and what a killed run left."""

import logging
import warnings
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rlhf.callbacks import RunCheckpoint, complete
from lightning_rlhf.strategies import manifest
from tests.stand_ins import quiet_trainer


def trainer_with(directory, *callbacks):
    return quiet_trainer(callbacks=list(callbacks), default_root_dir=str(directory), enable_checkpointing=True)


def test_last_and_best_keep_their_states_apart():
    keys = {RunCheckpoint().state_key, RunCheckpoint(best="val/a").state_key, RunCheckpoint(best="val/b").state_key}
    assert len(keys) == 3


def test_half_written_files_of_a_killed_run_are_taken_away_and_nothing_else_is(tmp_path):
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
def test_versions_that_a_killed_run_did_not_finish_are_taken_away_before_a_fit(tmp_path, stage):
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
def test_the_last_checkpoint_is_found_before_setup(tmp_path, kind):
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


def test_no_last_checkpoint_is_said_and_is_no_error(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="lightning_rlhf"):
        logging.getLogger("lightning_rlhf").addHandler(caplog.handler)  # it hands nothing on to the root
        found = RunCheckpoint()._find_last_checkpoints(SimpleNamespace(default_root_dir=str(tmp_path)))
        logging.getLogger("lightning_rlhf").removeHandler(caplog.handler)
    assert found == set()
    assert "has no last.ckpt yet: training starts at the beginning" in caplog.text


@pytest.mark.parametrize("names", [("val/a", "val/b"), (None, None)])
def test_two_that_would_write_one_file_are_refused(tmp_path, names):
    both = [RunCheckpoint(every_n_steps=i + 1, best=name) for i, name in enumerate(names)]
    trainer = SimpleNamespace(checkpoint_callbacks=both, default_root_dir=str(tmp_path))
    with pytest.raises(ValueError, match="two RunCheckpoint callbacks would write"):
        both[0].setup(trainer, None, "fit")


def test_no_steps_between_saves_are_refused():
    with pytest.raises(ValueError, match="every_n_steps must be at least 1, got 0"):
        RunCheckpoint(every_n_steps=0)


def test_a_run_without_a_configured_checkpoint_can_be_resumed_too(tmp_path):
    trainer = trainer_with(tmp_path)
    kept = [callback for callback in complete(trainer.callbacks) if isinstance(callback, ModelCheckpoint)]
    assert [(type(callback), callback.filename) for callback in kept] == [(RunCheckpoint, "last")]


def test_a_configured_checkpoint_stays_and_without_checkpoints_there_is_none(tmp_path):
    mine = ModelCheckpoint(monitor="val/x")
    assert [c for c in complete([mine]) if isinstance(c, ModelCheckpoint)] == [mine]
    assert not [c for c in complete(quiet_trainer().callbacks) if isinstance(c, ModelCheckpoint)]
