"""A rank for which all others wait is named with what it does; one that is expected to be slow is not."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from lightning_rlhf.extras.late_ranks.callback import _progress, _Report, late_ranks
from tests.distributed.launch import ROOT

CALLBACK = """
import os, signal, time
from lightning.pytorch import Callback

class Late(Callback):
    def __init__(self, rank: int, how: str):
        self.rank, self.how = rank, how

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == self.rank and batch_idx == 1:
            if self.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                time.sleep(600)
"""


def report(number, moved_at, written_at=100.0, is_slow=False, group="0"):
    values = {"collectives": {group: number}, "name": f"rank of {number}", "location": "x.py:1, f()"}
    return _Report(**values, is_slow=is_slow, written_at=written_at, moved_at=moved_at)


@pytest.mark.parametrize(
    ("reports", "late"),
    [
        ([report(7, 0.0), report(6, 0.0)], {1: "rank of 6 is in x.py:1, f()"}),
        ([report(7, 0.0), report(6, 99.0)], {}),  # it has just begun a collective
        ([report(7, 99.0), report(6, 0.0)], {}),  # one that the others have yet to begin
        ([report(7, 0.0), report(7, 0.0)], {}),  # all wait, for an engine or a reward
        ([report(7, 0.0), report(6, 0.0, is_slow=True)], {}),
        ([report(7, 0.0), report(9, 0.0, group="1")], {}),  # groups of other ranks have other numbers
        (
            [report(7, 0.0), report(6, 0.0, written_at=0.0, is_slow=True)],
            {1: "rank of 6 does not answer: it is stopped, or its machine hangs"},
        ),
    ],
)
def test_ranks_with_fewer_collectives_are_late(reports, late):
    assert late_ranks(reports, now=100.0, seconds=10.0) == late


def test_code_that_may_take_long_is_recognised(monkeypatch):
    import torch.distributed.distributed_c10d as c10d

    monkeypatch.setattr(type(c10d._world), "pg_map", {})
    seen = []
    code = compile("look(sys._getframe())", f"{ROOT}/lightning_rlhf/rewards/executor.py", "exec")
    exec(code, {"look": lambda frame: seen.append(_progress(frame)), "sys": sys})
    seen.append(_progress(sys._getframe()))
    assert [entry["is_slow"] for entry in seen] == [True, False]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("rank", "how", "line"),
    [
        (1, "sleep", "late.py:14, on_train_batch_start()"),
        (2, "stop", "does not answer: it is stopped, or its machine hangs"),
        (0, "stop", "rank 0 does not answer: it is stopped, or its machine hangs"),
    ],
)
def test_one_line_names_the_late_rank(tmp_path, rank, how, line):
    (tmp_path / "late.py").write_text(CALLBACK)
    callbacks = [
        {"class_path": "lightning_rlhf.callbacks.LateRanks", "init_args": {"after_seconds": 5.0}},
        {"class_path": "late.Late", "init_args": {"rank": rank, "how": how}},
    ]
    own = {"trainer": {"devices": 3, "max_steps": 3, "callbacks": callbacks, "default_root_dir": "run"}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    config = str(ROOT / "configs/quickstart/sft.yaml")
    with (tmp_path / "output.log").open("wb") as log:
        command = subprocess.Popen(
            [sys.executable, "-m", "lightning_rlhf", "fit", "--config", config, "--config", "own.yaml"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        until = time.monotonic() + 300
        while line not in (tmp_path / "output.log").read_text() and time.monotonic() < until:
            assert command.poll() is None, (tmp_path / "output.log").read_text()
            time.sleep(0.2)
        time.sleep(6)
    finally:
        for process in [*psutil.Process(command.pid).children(recursive=True), psutil.Process(command.pid)]:
            process.send_signal(signal.SIGKILL)
        command.wait()
    output = (tmp_path / "output.log").read_text()
    (named,) = [text for text in output.splitlines() if "does not answer" in text or "have waited" in text]
    assert line in named
    assert how == "stop" or named.startswith("The other ranks have waited 5 s for one: rank 1 (host ")
