"""Builds of DeepSpeed extensions are announced, and stale locks of interrupted builds raise an error."""

import os
import time
from functools import partial

import pytest
import torch

from lightning_rlhf import ConversationDataModule, SFTModule
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.strategies.extension_builds import await_builds, build_folders, is_open, optimizer_extensions
from lightning_rlhf.strategies.single import RLHFSingleDeviceStrategy
from tests.stand_ins import TinyModel, quiet_trainer


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """A lock in the folder of an extension."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (folder,) = build_folders("some_extension")
    folder.mkdir()
    (folder / "lock").touch()
    return folder / "lock"


def test_old_lock_without_a_process_raises_with_the_command_to_remove_it(lock):
    os.utime(lock, (time.time() - 3600,) * 2)
    with pytest.raises(RuntimeError, match=f"60 minutes old and .* Remove it: rm {lock}$"):
        await_builds(["some_extension"], is_first=True)


def test_recent_lock_is_waited_for_and_logged(lock, caplog, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: lock.unlink())
    with caplog.at_level("INFO"):
        await_builds(["some_extension"], is_first=True)
    assert f"Waiting for the lock {lock}, which is not held by a process of this machine." in caplog.text
    assert "DeepSpeed compiles its extension some_extension" in caplog.text


def test_lock_held_by_a_process_is_left_to_torch(lock, monkeypatch):
    os.utime(lock, (time.time() - 3600,) * 2)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
    with lock.open():
        assert is_open(lock)
        await_builds(["some_extension"], is_first=False)
    assert not is_open(lock)


def test_lock_removed_during_the_check_ends_the_wait(lock, monkeypatch):
    def removed(file):
        file.unlink()
        return False

    monkeypatch.setattr("lightning_rlhf.strategies.extension_builds.is_open", removed)
    await_builds(["some_extension"], is_first=True)
    assert not lock.exists()


def test_existing_extension_is_not_announced(lock, caplog):
    lock.rename(lock.with_name("some_extension.so"))
    with caplog.at_level("INFO"):
        await_builds(["some_extension"], is_first=True)
    assert not caplog.text


class DeepSpeedCPUAdam(torch.optim.AdamW):
    """Has the name of DeepSpeed's class, which compiles ``cpu_adam`` when it is created."""


@pytest.mark.parametrize(
    "make", [DeepSpeedCPUAdam, partial(DeepSpeedCPUAdam, lr=1.0), partial(print, DeepSpeedCPUAdam)]
)
def test_extension_of_an_optimizer_is_found_by_its_class(make):
    assert optimizer_extensions(make) == ["cpu_adam"]
    assert optimizer_extensions(torch.optim.AdamW) == []


def test_interrupted_build_of_cpu_adam_ends_a_run_before_the_optimizer_is_created(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (lock,) = [folder / "lock" for folder in build_folders("cpu_adam")]
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - 3600,) * 2)
    data = ConversationDataModule(
        InMemory([{"prompt": "a", "completion": "b"}]), CharacterTokenizer("ab"), batch_size=1
    )
    module = SFTModule(TinyModel(), optimizer=partial(DeepSpeedCPUAdam, lr=1.0))
    with pytest.raises(RuntimeError, match=f"Remove it: rm {lock}$"):
        quiet_trainer(strategy=RLHFSingleDeviceStrategy()).fit(module, datamodule=data)
