"""On GPUs, ranks build roles only after the engines of all ranks are ready."""

import time
from unittest.mock import patch

import pytest
import torch

from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.callbacks.loop import run_engine
from lightning_rlhf.rewards.function import RewardFunction
from tests.distributed.launch import run_ranks
from tests.distributed.tasks import SeededEngine, parts
from tests.stand_ins import quiet_trainer


class Slow(SeededEngine):
    """Is ready after some seconds, which differ between ranks."""

    ranks = 1

    def start(self, setup):
        super().start(setup)
        self.ready = None

    def wait(self):
        if self.ready is None:
            time.sleep(2 * torch.distributed.get_rank())
            self.ready = time.time()
        return "slow"


def ready_and_built(folder):
    module, data, _ = parts("ppo")
    engine, build, built = Slow(), module.build_role, []
    module.build_role = lambda name: built.append(time.time()) or build(name)
    loop = RolloutLoop([RewardFunction(zeros)], engine, check_rows=0, max_response_tokens=4, validate_at_ends=False)
    trainer = quiet_trainer(
        strategy="rlhf_ddp", devices=2, max_steps=1, callbacks=[loop], use_distributed_sampler=False,
        limit_val_batches=0, default_root_dir=folder,
    )  # fmt: skip
    with patch.object(run_engine, "visible_gpu", lambda device: (str(torch.distributed.get_rank()),)):
        trainer.fit(module, datamodule=data)
    return [engine.ready, min(built)]


def zeros(completions):
    return [0.0] * len(completions)


@pytest.mark.slow
def test_all_ranks_wait_for_the_engines_of_all_ranks(tmp_path):
    (ready0, built0), (ready1, built1) = run_ranks(
        "tests.distributed.test_engine_start:ready_and_built", 2, str(tmp_path)
    )
    assert ready1 - ready0 > 1
    assert min(built0, built1) > ready1
