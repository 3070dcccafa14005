"""A run of two ranks of which one fails in the third step: ``failing.py HOW RANK DIRECTORY [timeout in s]``.

Each rank starts an engine first, as a rollout does, and writes the ids of its processes to a file. If the environment
variable UNWATCHED is set, the ranks have no failure watch, only the error handling of torch and Lightning.
"""

import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_rlhf.rollout.vllm.supervisor import EngineProcess
from lightning_rlhf.strategies.failure import EndsTogether

HOW, FAILING_RANK, DIRECTORY = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
TIMEOUT = float(sys.argv[4]) if len(sys.argv) > 4 else 1800


class WatchedDDP(EndsTogether, DDPStrategy):
    """DDP for a plain module with the failure watch of this package."""


class Linear(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def on_train_start(self):
        # The whole run with so short a timeout would not outlast the start of its processes on a busy machine.
        self.group = torch.distributed.new_group(timeout=timedelta(seconds=TIMEOUT))

    def training_step(self, batch, index):
        if index == 2 and self.global_rank == FAILING_RANK:
            (DIRECTORY / "failed").write_text(str(time.time()))
            fail()
        torch.distributed.all_reduce(torch.zeros(1), group=self.group)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fail():
    if HOW == "raise":
        raise ValueError("the reward function broke")
    if HOW == "exit":
        sys.exit(3)
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "hang":
        time.sleep(1000)
    if HOW == "hold":  # the interpreter's lock, so that no other thread of this process can run
        re.match(r"(a+)+$", "a" * 100 + "b")


class Engine(Callback):
    def setup(self, trainer, pl_module, stage):
        self.engine = EngineProcess("tests.rollout.stub_worker", {}, {}, DIRECTORY / f"engine{trainer.global_rank}.log")
        self.engine.ready.result(60)
        pids = f"{os.getpid()} {self.engine.process.pid}"
        (DIRECTORY / f"rank{trainer.global_rank}").write_text(pids)

    def teardown(self, trainer, pl_module, stage):
        self.engine.close()

    def on_exception(self, trainer, pl_module, exception):
        self.engine.close()


def main():
    loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4, num_workers=1)  # a worker is forked
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu", devices=2, num_nodes=int(os.environ.get("NODES", "1")), max_steps=5,
        strategy=DDPStrategy() if "UNWATCHED" in os.environ else WatchedDDP(), callbacks=Engine(),
        enable_model_summary=False, default_root_dir=DIRECTORY, **quiet,
    )  # fmt: skip
    trainer.fit(Linear(), loader)


if __name__ == "__main__":
    main()
