"""A damaged or hostile checkpoint ends the command with one sentence, before anything of the run is touched."""

import pickle

import pytest

from tests.faults.runs import output, ppo, rows
from tests.strategies.test_checkpoint_io import Malicious


def flipped(path):
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1000])


def hostile(path):
    path.with_name("last.ckpt.sha256").unlink()
    path.write_bytes(pickle.dumps(Malicious(path.with_name("proof")), protocol=2))


@pytest.mark.parametrize("resume", ["last", "run/checkpoints/last.ckpt"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [(flipped, "is damaged"), (truncated, "is damaged"), (hostile, "is no checkpoint of tensors and plain values")],
)
def test_the_command_names_the_file_and_the_reason_and_touches_nothing(forge, tmp_path, damage, said, resume):
    config = ppo(1, max_steps=2)
    assert forge.attempt(tmp_path, config) == 0
    before, table = output(tmp_path), rows(tmp_path)
    damage(tmp_path / "run/checkpoints/last.ckpt")
    assert forge.attempt(tmp_path, config, resume=resume) in (1, 2)
    last = output(tmp_path).removeprefix(before).strip().splitlines()[-1]
    assert last.startswith("lightning-rlhf: ")
    assert "run/checkpoints/last.ckpt" in last
    assert said in last
    assert "Traceback" not in output(tmp_path)
    assert rows(tmp_path) == table
    assert not (tmp_path / "run/checkpoints/proof").exists()
