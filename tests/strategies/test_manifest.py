"""Versions of a checkpoint: only complete versions are used, regardless of interruptions during a write."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_rlhf.strategies.checkpoints import manifest

ROOT = Path(__file__).parents[2]

# Common to both writers below: a version whose number stands in all of its files.
_COMMON = """
import itertools, os, random, signal, sys, time, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from lightning_rlhf.strategies.checkpoints import manifest

path = Path(sys.argv[1])

def save(number):
    version = manifest.begin(path)
    for role in ("actor", "critic"):
        (version / role).mkdir()
        save_file({"number": torch.full((3_000,), float(number))}, version / role / "shard-00001-x.safetensors")
        (version / role / "optimizer.json").write_text(str(number))
    manifest.publish(version)

def load():
    version = manifest.verified(path)
    found = {int((version / role / "optimizer.json").read_text()) for role in ("actor", "critic")}
    for role in ("actor", "critic"):
        found |= set(load_file(version / role / "shard-00001-x.safetensors")["number"].tolist())
    assert len(found) == 1, found
    return found.pop()
"""

# Forks a child that saves checkpoints repeatedly, kills it at a random time, and checks the files that remain.
_TIMES = """
draw, kept = random.Random(0), 0
save(0)
started = time.perf_counter()
save(0)
took = time.perf_counter() - started
for _ in range(TIMES):
    child = os.fork()
    if child == 0:
        for number in itertools.count(kept + 1):
            save(number)
    time.sleep(draw.uniform(0, 3 * took))  # some are killed in their first save, some in a later one
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = load()
    assert found >= kept, (found, kept)
    kept = found
assert kept > 0, kept  # how many depends on how busy the machine is
"""

# Forks a child that dies at every file operation of a save in turn; the survivor must be the old or the new version.
_STEPS = """
OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")

def save_and_die(number, step):
    count = 0
    def trace(event, arguments):
        nonlocal count
        if event in OPERATIONS:
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(trace)
    save(number)
    os._exit(0)

save(0)
number, deaths, kept, survived = 0, 0, 0, False
step = 0
while not survived:  # until a save has fewer operations than that
    step += 1
    for second in (step, max(1, step // 2)):  # and a save of the resumed run that dies too
        number += 1
        child = os.fork()
        if child == 0:
            save_and_die(number, second)
        died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        deaths += died
        survived = survived or (second == step and not died)
        found = load()
        assert found in (kept, number), (step, second, found)
        kept = found
save(-1)
assert load() == -1
assert len(list(path.iterdir())) == 2, list(path.iterdir())
print(deaths)
"""


def python(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _COMMON + code, *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=False)


def written(path, number=1, folders=("actor",), keep=1):
    version = manifest.begin(path)
    for folder in folders:
        (version / folder).mkdir()
        save_file({"number": torch.full((50,), float(number))}, version / folder / "shard-00001-x.safetensors")
    (version / "state.pt").write_bytes(bytes([number]) * 100)
    manifest.publish(version, keep)
    return version


@pytest.fixture
def path(tmp_path):
    written(tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


@pytest.mark.slow
def test_writer_that_dies_at_any_file_operation_leaves_the_old_or_the_new_version(tmp_path):
    process = python(_STEPS, tmp_path / "last.ckpt")
    assert process.returncode == 0
    assert int(process.stdout) > 50


@pytest.mark.slow
@pytest.mark.parametrize("times", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_writer_killed_at_random_times_never_leaves_a_corrupt_or_rejected_checkpoint(tmp_path, times):
    assert python(_TIMES.replace("TIMES", str(times)), tmp_path / "last.ckpt").returncode == 0


def test_last_finished_version_is_used_and_others_are_removed(path):
    assert manifest.verified(path).name == "v000001"
    written(path, number=2)
    assert manifest.verified(path).name == "v000002"
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "v000002"]


def test_versions_that_cannot_be_removed_end_no_save(path, monkeypatch, caplog):
    rmtree = shutil.rmtree

    def fail_for_first(folder, **options):
        if Path(folder).name == "v000001":
            raise OSError(39, "Directory not empty")
        rmtree(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", fail_for_first)
    for number in (2, 3):
        written(path, number=number)
        assert manifest.verified(path).name == f"v00000{number}"
    assert "v000001" in {entry.name for entry in path.iterdir()}
    assert "could not be removed yet: [Errno 39] Directory not empty" in caplog.text
    monkeypatch.undo()
    written(path, number=4)
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "v000004"]


def test_unfinished_version_is_ignored_and_removed_by_the_next_save(path):
    half = manifest.begin(path)
    (half / "state.pt").write_bytes(b"half")
    assert manifest.verified(path).name == "v000001"
    again = written(path, number=3)
    assert not half.exists() or half == again
    assert manifest.verified(path) == again


def test_leftovers_are_files_without_a_manifest_entry(path, tmp_path):
    manifest.begin(path)
    (path / "manifest.json.new").touch()
    (path / "mine").mkdir()
    manifest.remove_leftovers(path)
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "mine", "v000001"]
    manifest.remove_leftovers(tmp_path / "none.ckpt")


def test_interrupted_first_save_is_replaced_by_the_next(tmp_path):
    half = manifest.begin(tmp_path / "first.ckpt")
    (half / "state.pt").write_bytes(b"half")
    assert manifest.never_finished(tmp_path / "first.ckpt")
    assert manifest.begin(tmp_path / "first.ckpt") == half
    assert list(half.iterdir()) == []
    manifest.publish(half)
    assert not manifest.never_finished(tmp_path / "first.ckpt")
    assert sorted(entry.name for entry in half.parent.iterdir()) == ["manifest.json", "v000001"]


def test_first_save_interrupted_before_its_folder_existed_leaves_no_empty_folder(tmp_path, monkeypatch):
    path = tmp_path / "first.ckpt"
    with monkeypatch.context() as patched:
        patched.setattr(manifest.os, "rename", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            manifest.begin(path)
    assert manifest.never_finished(path)
    assert not path.exists()
    manifest.publish(manifest.begin(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["first.ckpt"]


def test_versions_are_kept_without_a_manifest_until_a_newer_one_is_complete(path):
    (path / "manifest.json").unlink()
    assert not manifest.never_finished(path)
    with pytest.raises(ValueError, match=r"has no manifest\.json: its manifest is lost; resume from another"):
        manifest.verified(path)
    manifest.remove_leftovers(path)
    version = manifest.begin(path)
    assert sorted(entry.name for entry in path.iterdir()) == ["v000001", "v000002"]
    manifest.publish(version)
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "v000002"]


def test_several_versions_are_kept_and_can_be_read_by_path(path):
    for number in (2, 3, 4):
        written(path, number=number, keep=3)
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "v000002", "v000003", "v000004"]
    assert manifest.verified(path).name == "v000004"
    assert manifest.verified(path / "v000002") == path / "v000002"
    manifest.begin(path)
    with pytest.raises(ValueError, match=r"v000005 of a checkpoint is unfinished; .* v000004, v000003, v000002"):
        manifest.verified(path / "v000005")
    (path / "v000002/state.pt").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"is damaged: v000002/state\.pt does not have the size"):
        manifest.verified(path / "v000002")
    written(path, number=6)
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "v000005"]


def dangling(path):
    (path / "v000001/state.pt").unlink()
    (path / "v000001/state.pt").symlink_to(path / "nowhere")


def brackets(path):
    (path / "manifest.json").write_text("[" * 200_000)


def rewritten(**changes):
    def damage(path):
        content = {"format": 1, "version": "v000001", "files": {}, **changes}
        manifest.write(path, {key: value for key, value in content.items() if value is not None})

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (dangling, "state.pt is a symbolic link, but was written as a file"),
        (brackets, "manifest.json was changed after it was written"),
        (rewritten(format=None), "has format None, but this release reads format 1"),
        (rewritten(version=7), "has invalid names of versions or files"),
        (rewritten(files=None), "has invalid names of versions or files"),
        (rewritten(files={"/etc/passwd": {"bytes": 1, "sha256": ""}}), "has invalid names of versions or files"),
        (rewritten(files={"a": {"bytes": "1", "sha256": ""}}), "has invalid names of versions or files"),
        (rewritten(earlier=["v000001"]), "has invalid names of versions or files"),
        (rewritten(version="../other"), "has invalid names of versions or files"),
    ],
)
def test_damaged_or_rewritten_manifest_raises_a_one_line_error(path, damage, message):
    damage(path)
    with pytest.raises(ValueError, match=re.escape(message)):
        manifest.verified(path)


def test_dangling_link_counts_as_a_missing_checkpoint(tmp_path):
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        manifest.verified(tmp_path / "last.ckpt")


def test_nothing_is_removed_if_the_manifest_cannot_be_read(path):
    half = manifest.begin(path)
    (path / "manifest.json").write_text("{}")
    manifest.remove_leftovers(path)
    assert half.exists()
    written(path, number=2)  # and the next save puts things right
    assert manifest.verified(path).name == "v000003"


def test_every_flipped_bit_is_detected(path):
    draw = random.Random(0)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert len(files) == 3
    missed = 0
    for _ in range(150):
        for file in files:
            whole = file.read_bytes()
            damaged = bytearray(whole)
            damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            try:
                manifest.verified(path)
            except ValueError as error:
                assert "is damaged" in str(error)  # noqa: PT017
                assert file.name in str(error)  # noqa: PT017
            else:
                assert file.name == "manifest.json"
                missed += 1
            file.write_bytes(whole)
    assert missed < 30, "only a blank between two words of the manifest may change without being seen"


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("name", ["manifest.json", "v000001/state.pt", "v000001/actor/shard-00001-x.safetensors"])
def test_truncated_file_is_reported(path, name, fraction):
    whole = (path / name).read_bytes()
    (path / name).write_bytes(whole[: int(fraction * len(whole))])
    with pytest.raises(ValueError, match=f"the checkpoint {path} is damaged: {name} (does not have|was changed)"):
        manifest.verified(path)


def test_missing_and_additional_files_are_reported(path):
    (path / "v000001/actor/more.safetensors").touch()
    with pytest.raises(ValueError, match=r"is damaged: v000001/actor/more\.safetensors was added"):
        manifest.verified(path)
    (path / "v000001/actor/more.safetensors").unlink()
    (path / "v000001/state.pt").unlink()
    with pytest.raises(ValueError, match=r"is damaged: v000001/state\.pt is missing"):
        manifest.verified(path)


def test_path_that_is_not_a_checkpoint_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*none\.ckpt"):
        manifest.verified(tmp_path / "none.ckpt")
    manifest.begin(tmp_path / "half.ckpt")
    with pytest.raises(ValueError, match=r"half\.ckpt has no manifest\.json: its first save was interrupted"):
        manifest.verified(tmp_path / "half.ckpt")
    (tmp_path / "file.ckpt").touch()
    with pytest.raises(ValueError, match=r"file\.ckpt is a file, but a checkpoint is a folder: it was written by"):
        manifest.verified(tmp_path / "file.ckpt")
    with pytest.raises(ValueError, match=r"file\.ckpt is a file, but a checkpoint is a folder: move or remove"):
        manifest.begin(tmp_path / "file.ckpt")


def test_unsupported_format_is_reported_with_its_number(path):
    manifest.write(path, {"format": 2, "version": "v000001", "files": {}})
    with pytest.raises(ValueError, match="has format 2, but this release reads format 1"):
        manifest.verified(path)


def test_full_disk_leaves_the_previous_version(path, monkeypatch):
    def full(_):
        raise OSError("No space left on device")

    version = manifest.begin(path)
    (version / "state.pt").touch()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        manifest.publish(version)
    monkeypatch.undo()
    assert manifest.verified(path).name == "v000001"
