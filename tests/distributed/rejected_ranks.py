"""Steps of ranks whose tokens are all rejected, for test_rejected_ranks.py."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_rlhf import PPOModule, RLHFModule
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.policy_losses import ReinforceLoss
from lightning_rlhf.objectives.rejections import Rejection
from lightning_rlhf.types import Rollout
from tests.distributed.tasks import strategy_of, whole
from tests.stand_ins import HandOver, TinyModel, quiet_trainer, responses, rollout_of

ADAMW = partial(torch.optim.AdamW, lr=5e-3, weight_decay=0.1)
CORRECTION = RolloutCorrection(rejections=(Rejection("k1", "token", upper=100.0, lower=0.01),), bypass=True)
ROWS = responses(12, seed=8)
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Recorded(Callback):
    """Records after each step whether the actor and the critic have changed, and the metrics."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = whole(pl_module, pl_module.trained_roles)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        before, self.weights = self.weights, whole(pl_module, pl_module.trained_roles)
        changed = {name for name, tensor in self.weights.items() if not torch.equal(tensor, before[name])}
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.steps.append(
            {
                "changed": sorted({name.partition(".")[0] for name in changed}),
                "updates": metrics["policy/updates"],
                "has_norm": metrics.get("grad_norm/actor", torch.nan) > 0,
                "rejected": metrics.get("rollout_corr/rejected_fraction", torch.nan),
                "sums": {name: float(tensor.double().sum()) for name, tensor in self.weights.items()},
            }
        )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        state = trainer.strategy.role_state("actor").tensors
        self.state = {name: float(tensor.double().square().sum()) for name, tensor in state.items()}


def batch(kind: str) -> Rollout:
    """Return this rank's rows, by the kind of batch.

    ``accepted`` has accepted tokens, ``all`` rejected ones, ``one`` rejected ones on rank 0, and ``none`` rows that are
    excluded from training. ``few`` and ``one`` have one row per rank, so that a mini-batch is a micro-batch.
    """
    rollout = rollout_of(ROWS)[torch.arange(RANK, len(ROWS), RANKS)]
    if kind == "one" or kind.startswith("few"):
        rollout = rollout[torch.tensor([0])]
    if kind.endswith(("all", "none")) or (kind == "one" and RANK == 0):
        rollout.rollout_logprobs[:] = -15.0
    return replace(rollout, included=torch.zeros_like(rollout.included)) if kind.endswith("none") else rollout


def steps(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train each run, a dictionary of ``strategy``, ``batches``, and optionally ``precision`` and ``critic``."""
    result = []
    for run in runs:
        recorded = Recorded()
        trainer = quiet_trainer(
            strategy=strategy_of(run["strategy"]),
            devices=RANKS,
            precision=run.get("precision", "32-true"),
            callbacks=[HandOver(), recorded],
            use_distributed_sampler=False,
        )
        # The first of two mini-batches has several micro-batches on each rank, which DeepSpeed accumulates.
        options = {"correction": CORRECTION, "optimizer": ADAMW, "minibatch_size": 9, "micro_batch_tokens": 24}
        options |= {"policy_loss": ReinforceLoss()}
        if run.get("critic"):
            module = PPOModule(TinyModel(), critic=TinyModel(seed=1), critic_optimizer=ADAMW, **options)
        else:
            module = RLHFModule(TinyModel(), **options)
        trainer.fit(module, DataLoader([batch(kind) for kind in run["batches"]], batch_size=None))
        result.append({"steps": recorded.steps, "state": recorded.state})
    return result
