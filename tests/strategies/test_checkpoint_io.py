"""Checkpoint files are complete or absent, regardless of interruptions during a write, and run no code when read."""

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_rlhf.strategies.checkpoints.io import AtomicCheckpointIO

ROOT = Path(__file__).parents[2]

# Forks a child that saves checkpoints repeatedly, kills it at a random time, and checks the files that remain.
_TIMES = """
import itertools, os, random, signal, sys, time, torch
from lightning_rlhf.strategies.checkpoints.io import AtomicCheckpointIO

io, path, draw, kept, kills = AtomicCheckpointIO(), sys.argv[1], random.Random(0), 0, 0
io.save_checkpoint({"number": 0, "weights": torch.zeros(30_000)}, path)
while kills < 100 or kept <= 20:  # on a busy machine it takes more kills until as many saves have come to an end
    child = os.fork()
    if child == 0:
        for number in itertools.count(kept + 1):
            io.save_checkpoint({"number": number, "weights": torch.full((30_000,), float(number))}, path)
    time.sleep(draw.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    kills += 1
    found = io.load_checkpoint(path)
    assert found["number"] >= kept and bool((found["weights"] == found["number"]).all())
    kept = found["number"]
"""

# Forks a child that dies at every file operation of a save in turn; the survivor must be the old or the new checkpoint.
_STEPS = """
import os, signal, sys, torch
from lightning_rlhf.strategies.checkpoints import io
from lightning_rlhf.strategies.checkpoints.io import AtomicCheckpointIO

def state(number):
    return {"number": number, "weights": torch.full((300,), float(number))}

def save_and_die(io, path, number, step):
    count = 0
    def trace(event, arguments):
        nonlocal count
        if event in ("open", "os.rename"):
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(trace)
    io.save_checkpoint(state(number), path)
    os._exit(0)

io, path, number, deaths = AtomicCheckpointIO(), sys.argv[1], 0, 0
io.save_checkpoint(state(number), path)
for first in range(1, 13):
    for second in range(1, 13):  # a save that dies, then one of the resumed run that dies too
        kept = io.load_checkpoint(path)["number"]
        for step in (first, second):
            number += 1
            child = os.fork()
            if child == 0:
                save_and_die(io, path, number, step)
            deaths += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
            found = io.load_checkpoint(path)
            assert found["number"] in (kept, number), (first, second, found["number"])
            assert bool((found["weights"] == found["number"]).all())
            kept = found["number"]
print(deaths)
"""


@pytest.fixture
def io():
    return AtomicCheckpointIO()


@pytest.fixture
def path(io, tmp_path):
    io.save_checkpoint({"number": 1, "weights": torch.arange(500.0)}, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def python(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, env=environment)


def test_saved_checkpoint_is_loaded(io, path):
    assert io.load_checkpoint(path)["weights"].equal(torch.arange(500.0))
    assert sorted(file.name for file in path.parent.iterdir()) == ["last.ckpt", "last.ckpt.sha256"]


@pytest.mark.slow
def test_writer_that_dies_twice_at_any_file_operation_leaves_a_loadable_checkpoint(tmp_path):
    with python(_STEPS, tmp_path / "last.ckpt") as process:
        deaths, _ = process.communicate()
    assert process.returncode == 0
    assert int(deaths) > 100


@pytest.mark.slow
def test_writer_killed_at_a_hundred_random_times_never_leaves_a_corrupt_or_rejected_checkpoint(tmp_path):
    with python(_TIMES, tmp_path / "last.ckpt") as process:
        pass
    assert process.returncode == 0


def test_every_flipped_bit_is_detected(io, path):
    whole, draw = path.read_bytes(), random.Random(0)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"last\.ckpt is damaged: its SHA-256 differs"):
            io.load_checkpoint(path)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.999])
def test_truncated_checkpoint_is_detected_with_and_without_its_checksum(io, path, fraction):
    path.write_bytes(path.read_bytes()[: int(fraction * path.stat().st_size)])
    with pytest.raises(ValueError, match="is damaged"):
        io.load_checkpoint(path)
    path.with_name("last.ckpt.sha256").unlink()
    with pytest.raises(ValueError, match="is not a checkpoint of tensors and plain values"):
        io.load_checkpoint(path)


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return (open, (str(self.proof), "w"))


@pytest.mark.parametrize("by", ["pickle", "torch"])
def test_checkpoint_with_code_is_rejected_without_running_it(io, tmp_path, by):
    path, proof = tmp_path / "last.ckpt", tmp_path / "proof"
    state = {"state_dict": {}, "callbacks": Malicious(proof)}
    if by == "pickle":
        path.write_bytes(pickle.dumps(state, protocol=2))
    else:
        torch.save(state, path)
    with pytest.raises(ValueError, match="tensors and plain values; other objects are not loaded"):
        io.load_checkpoint(path)
    with pytest.raises(ValueError, match="other objects are not loaded"):
        io.load_checkpoint(path, weights_only=False)
    assert not proof.exists()


def test_missing_checkpoint_is_reported(io, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*none\.ckpt"):
        io.load_checkpoint(tmp_path / "none.ckpt")


def test_checkpoint_without_checksum_is_accepted_while_it_is_being_replaced(io, path, monkeypatch):
    path.with_name("last.ckpt.sha256").unlink()  # as from another program

    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "replace", _only_sums(fail))
    with pytest.raises(OSError, match="the disk is gone"):
        io.save_checkpoint({"number": 2}, path)
    monkeypatch.undo()
    assert io.load_checkpoint(path)["number"] == 1


def _only_sums(otherwise):
    replace = os.replace
    return lambda source, target: (replace if str(target).endswith(".sha256") else otherwise)(source, target)


def test_full_disk_leaves_the_previous_checkpoint(io, path, monkeypatch):
    def full(_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        io.save_checkpoint({"number": 2}, path)
    assert io.load_checkpoint(path)["number"] == 1


def test_removing_a_checkpoint_removes_its_checksum(io, path):
    io.remove_checkpoint(path)
    assert list(path.parent.iterdir()) == []
