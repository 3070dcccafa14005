"""A damaged or hostile checkpoint ends the command with a one-line error, before any file of the run is changed."""

import hashlib
import json
import pickle
import shutil

import pytest
import torch

from tests.faults.runs import output, ppo, rows
from tests.strategies.test_checkpoint_io import Malicious

LAST = "run/checkpoints/last.ckpt"
SHARD = "critic/shard-00001-model-00001-of-00001.safetensors"


def version_of(folder):
    return next(folder.glob("v*"))


def flipped(folder):
    path = next((version_of(folder) / "critic").glob("*.safetensors"))
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


def truncated(folder):
    path = version_of(folder) / "state.pt"
    path.write_bytes(path.read_bytes()[:-1000])


def lost(folder):
    (version_of(folder) / "actor" / "optimizer.json").unlink()


def added(folder):
    (version_of(folder) / "actor" / "mine.safetensors").write_bytes(b"")


def unfinished(folder):
    (folder / "manifest.json").unlink()


def garbled(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"bytes": ', '"bytes": 1', 1))


def with_right_sums(name, content):
    """Write a file and a matching manifest, as an attacker with write access could."""

    def damage(folder):
        file, path = version_of(folder) / name, folder / "manifest.json"
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save(content, file)
        manifest = json.loads(path.read_text())["checkpoint"]
        manifest["files"][name] = {
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        its_sum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({"sha256": its_sum, "checkpoint": manifest}))

    return damage


def hostile(folder):
    """Write a hostile state.pt and a matching manifest, as an attacker with write access could."""
    state, path = version_of(folder) / "state.pt", folder / "manifest.json"
    state.write_bytes(pickle.dumps(Malicious(folder.parent / "proof"), protocol=2))
    content = json.loads(path.read_text())["checkpoint"]
    content["files"]["state.pt"] = {
        "bytes": state.stat().st_size,
        "sha256": hashlib.sha256(state.read_bytes()).hexdigest(),
    }
    its_sum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": its_sum, "checkpoint": content}))


DAMAGES = [
    (flipped, "is damaged: v000002/critic/shard-00001-model-00001-of-00001.safetensors does not have the size"),
    (lost, "is damaged: v000002/actor/optimizer.json is missing"),
    (hostile, "is not a checkpoint of tensors and plain values"),
    (unfinished, "has no manifest.json: its manifest is lost"),
    (truncated, "is damaged: v000002/state.pt does not have the size and SHA-256"),
    (added, "is damaged: v000002/actor/mine.safetensors was added"),
    (garbled, "is damaged: manifest.json was changed"),
    (with_right_sums("state.pt", {}), "is damaged: state.pt lacks the key 'callbacks'"),
    (with_right_sums(SHARD, b"rubbish" * 9), "is not a safetensors file"),
    (with_right_sums(SHARD, (2**60).to_bytes(8, "little") + b"{}"), "is not a safetensors file"),
    (with_right_sums("critic/optimizer.json", b"[" * 100_000), "optimizer.json is not valid JSON"),
    (with_right_sums("critic/optimizer.json", b"{}"), "optimizer.json is damaged: it needs 'optimizer', a class, and"),
]


@pytest.fixture(scope="module")
def finished_run(undisturbed, tmp_path_factory):
    """Directory of a run with a checkpoint, its configuration, and the files of the checkpoint."""
    directory, config = tmp_path_factory.mktemp("finished"), ppo(1, max_steps=2)
    shutil.copytree(undisturbed(config), directory, dirs_exist_ok=True)
    return directory, config, {path: path.read_bytes() for path in (directory / LAST).rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_command_reports_file_and_reason_and_changes_nothing(forge, finished_run, damage, message):
    directory, config, whole = finished_run
    table, before = rows(directory), output(directory)
    damage(directory / LAST)
    try:
        assert forge.attempt(directory, config, resume=LAST) in (1, 2)
        last = output(directory).removeprefix(before).strip().splitlines()[-1]
        assert last.startswith("lightning-rlhf: "), last
        assert LAST in last
        assert message in last
        assert "Traceback" not in output(directory)
        assert rows(directory) == table
        assert not (directory / "run/checkpoints/proof").exists()
    finally:
        for path in (directory / LAST).rglob("*"):
            if path.is_file() and path not in whole:
                path.unlink()
        for path, content in whole.items():
            path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flipped, pytest.param(garbled, marks=pytest.mark.slow)])
def test_last_checkpoint_is_also_verified_when_selected_as_last(forge, tmp_path, damage):
    config = ppo(1, max_steps=1)
    assert forge.attempt(tmp_path, config) == 0
    damage(tmp_path / LAST)
    assert forge.attempt(tmp_path, config, resume="last") in (1, 2)
    assert "is damaged" in output(tmp_path).strip().splitlines()[-1]
