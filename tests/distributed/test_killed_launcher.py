"""The command of a run is killed while its ranks load: none of them is left."""

import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from lightning_rlhf.processes import child
from tests.cli.conftest import PPO
from tests.distributed.launch import ROOT

RANKS = 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("seconds", [0, 2, 8])  # after the last rank has started: importing, then joining or loading
def test_no_rank_is_left(tmp_path, sent, seconds):
    config = copy.deepcopy(PPO)
    config["trainer"] |= {"strategy": "rlhf_ddp", "devices": RANKS, "max_steps": 10_000}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    with (tmp_path / "output.log").open("wb") as log:
        command = subprocess.Popen(
            [sys.executable, "-m", "lightning_rlhf", "fit", "--config", "run.yaml"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    ranks = []
    while len(ranks) < RANKS - 1:
        assert command.poll() is None, (tmp_path / "output.log").read_text()
        time.sleep(0.05)
        ranks = psutil.Process(command.pid).children()
    time.sleep(seconds)
    every = [*ranks, *(process for rank in ranks for process in rank.children(recursive=True))]
    command.send_signal(sent)
    command.wait(60)
    _, left = psutil.wait_procs(every, timeout=20)
    for process in left:
        process.kill()
    assert not left, (tmp_path / "output.log").read_text()


RANK = "from lightning_rlhf.processes import child; child.end_with_launcher(False, True); print('runs')"


def test_rank_whose_launcher_has_ended_ends():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not Path("/proc", str(ended.pid)).exists()
    for pid, printed in ((ended.pid, ""), (os.getpid(), "runs\n")):
        environment = {**os.environ, "LOCAL_RANK": "1", child._LAUNCHER: str(pid)}
        rank = subprocess.run([sys.executable, "-c", RANK], env=environment, cwd=ROOT, capture_output=True, text=True)
        assert (rank.stdout, rank.returncode == 0) == (printed, bool(printed))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rank_that_dies_at_import_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nif os.environ.get('LOCAL_RANK') == '1': os._exit(3)\n")
    config = copy.deepcopy(PPO)
    config["trainer"] |= {"strategy": "rlhf_ddp", "devices": RANKS}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", "run.yaml"]
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "[rank: 1] Child process with PID " in done.stdout + done.stderr
    assert " terminated with code 3." in done.stdout + done.stderr
