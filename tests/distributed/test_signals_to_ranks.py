"""After a signal, all ranks end after the same step with a common checkpoint."""

import copy
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from lightning.pytorch import Callback
from safetensors.torch import load_file

from lightning_rlhf.strategies.checkpoints import manifest
from tests.cli.conftest import PPO
from tests.distributed.launch import ROOT

STEPS = 8


def start(folder, strategy, *arguments):
    config = copy.deepcopy(PPO)
    config["trainer"] |= {"strategy": strategy, "devices": 2, "max_steps": STEPS}
    config["trainer"]["callbacks"] += [
        {"class_path": "lightning_rlhf.callbacks.RunCheckpoint", "init_args": {"every_n_steps": 2, "keep_last": 2}},
        {"class_path": "tests.distributed.test_signals_to_ranks.Slow"},
    ]
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    with (folder / "output.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "lightning_rlhf", "fit", "--config", "run.yaml", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


class Slow(Callback):
    """Makes steps long enough for a signal to arrive within one."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        time.sleep(0.3)


def wait_for(folder, text):
    end = time.monotonic() + 200
    while text not in (folder / "output.log").read_text():
        assert time.monotonic() < end, (folder / "output.log").read_text()[-4000:]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "rlhf_fsdp", "rlhf_deepspeed_stage_3"])
def test_ranks_end_together_after_a_signal_to_the_first_and_resume_as_without_interruption(tmp_path, strategy):
    folder = tmp_path / "stopped"
    process = start(folder, strategy)
    wait_for(folder, "step 3: ")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    printed = (folder / "output.log").read_text()
    assert "failed" not in printed
    assert "Traceback" not in printed
    last = folder / "runs/tiny/checkpoints/last.ckpt"
    step = manifest.step_of(last)
    assert 3 <= step < STEPS
    goes_on = f"to resume from step {step}, add --ckpt_path last to the same command (runs/tiny/checkpoints/last.ckpt)"
    assert f"lightning-rlhf: ended by SIGTERM after step {step}; {goes_on}" in printed
    assert len(manifest.kept_versions(last)) == 2
    assert start(folder, strategy, "--ckpt_path", "last").wait(200) == 0
    whole = tmp_path / "whole"
    assert start(whole, strategy).wait(200) == 0
    ours, theirs = (load_file(run / "runs/tiny/export/model.safetensors") for run in (folder, whole))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
