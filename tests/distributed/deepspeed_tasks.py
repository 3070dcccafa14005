"""Functions that run on every rank for test_deepspeed.py and return their observations."""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_rlhf import PPOModule, SFTModule
from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.models.tensors import layers
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.strategies.deepspeed.strategy import RLHFDeepSpeedStrategy
from lightning_rlhf.types import SequenceBatch
from tests.stand_ins import VOCABULARY, HandOver, TinyModel, quiet_trainer, responses, rollout_of

SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
MAX_NORM, RATE, DECAY = 0.5, 0.7, 0.5


def texts(rows: int, seed: int) -> SequenceBatch:
    """Return texts of 3 to 11 tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (rows,), generator=draw)
    ids = torch.randint(0, VOCABULARY, (rows, int(lengths.max())), generator=draw)
    mask = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
    mask[:, 0] = False
    return SequenceBatch(ids, lengths, mask)


def model(tied: bool = False, dtype: Any = "float32") -> TinyModel:
    """Return a llama in which many parameters have sizes that 2 does not divide."""
    return TinyModel({**TinyModel().architecture, "tie_word_embeddings": tied, "hidden_size": 31}, dtype=dtype)


class Watched(RLHFDeepSpeedStrategy):
    """Records whether clipping changes a weight."""

    still = True

    def clip_role(self, name: str, max_norm: float | None) -> Tensor:
        before = weights(self, name)
        norm = super().clip_role(name, max_norm)
        after = weights(self, name)
        self.still &= all(torch.equal(before[key], after[key]) for key in before)
        return norm


def weights(roles: Any, name: str) -> dict[str, Tensor]:
    """Return all unsharded weights of a role."""
    return {key: tensor.clone() for key, tensor in roles.iter_full_params(name)}


class Plain:
    """Computes the same updates in torch on whole batches; for bfloat16, with a float32 copy of the weights.

    The copy starts from rounded weights, because DeepSpeed creates its float32 weights from those in bfloat16.
    """

    def __init__(self, source: Any, bfloat16: bool = False) -> None:
        self.masters = source.causal().float()
        self.model = copy.deepcopy(self.masters)
        self.dtype = torch.bfloat16 if bfloat16 else torch.float32
        self.optimizer = torch.optim.SGD(self.masters.parameters(), lr=RATE)
        self._round()
        for master, parameter in self._pairs():
            master.data.copy_(parameter.data)

    def _pairs(self) -> Any:
        return zip(self.masters.parameters(), self.model.parameters(), strict=True)

    def _round(self) -> None:
        for master, parameter in self._pairs():
            parameter.data = master.data.to(self.dtype)

    def update(self, batch: SequenceBatch) -> float:
        """Train on a batch and return the gradient norm before clipping."""
        loss(self.model, batch).backward()
        for master, parameter in self._pairs():
            master.grad, parameter.grad = parameter.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self.masters.parameters(), MAX_NORM)
        self.optimizer.step()
        self._round()
        for group in self.optimizer.param_groups:
            group["lr"] *= DECAY
        return float(norm)

    def furthest(self, others: dict[str, Tensor]) -> float:
        """Return the largest difference of any weight; names and order must be equal."""
        named = dict(self.model.lm.named_parameters())
        assert list(named) == list(others), (list(named), list(others))
        return max(float((tensor.detach().float() - others[name]).abs().max()) for name, tensor in named.items())


def loss(plain: Any, batch: SequenceBatch) -> Tensor:
    """Return the mean loss over the tokens of a whole batch."""
    ids, mask = batch.input_ids, batch.loss_mask[:, 1:]
    index = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
    return -plain(ids, index, ids[:, 1:], mask).logprobs.sum() / mask.sum()


def sft(source: Any, **options: Any) -> SFTModule:
    """Return a module for these updates."""
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=DECAY)
    sgd = partial(torch.optim.SGD, lr=RATE)
    inputs = {"optimizer": sgd, "lr_scheduler": schedule, "micro_batch_tokens": 24, "max_grad_norm": MAX_NORM}
    return SFTModule(source, **(inputs | options))


class Compare(Callback):
    """Computes the updates in torch next to those of the ranks, and records the differences."""

    def __init__(self, plain: Plain, batches: list[SequenceBatch]) -> None:
        self.plain, self.batches = plain, batches
        self.result: dict[str, Any] = {"norms": [], "plain_norms": [], "furthest": [], "rates": []}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.result["furthest"].append(self.plain.furthest(weights(pl_module.role_strategy, "actor")))
        self.result["walk"] = walk(pl_module)
        self.result["held"] = held(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.result["rates"].append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.result["norms"].append(float(trainer.callback_metrics["grad_norm/actor"]))
        self.result["plain_norms"].append(self.plain.update(self.batches[batch_idx]))
        self.result["furthest"].append(self.plain.furthest(weights(pl_module.role_strategy, "actor")))


def walk(module: Any) -> dict[str, int]:
    """Return the number of unsharded elements before, during (maximum) and after iterating over all parameters."""
    parameters = list(module.actor.parameters())

    def whole() -> int:
        return sum(parameter.numel() for parameter in parameters)

    before, most, names = whole(), 0, []
    for name, _ in module.role_strategy.iter_full_params("actor"):
        most = max(most, whole())
        names.append(name)
    largest = max(sum(_elements(p) for _, p in layer) for layer in layers(module.actor.lm))
    return {"before": before, "most": most, "after": whole(), "largest": largest, "names": len(names)}


def held(module: Any) -> dict[str, int]:
    """Return the number of elements of the actor, and those that this rank stores as weights and for the optimizer."""
    parameters = list(module.actor.parameters())
    optimized = module.trainer.optimizers[0].param_groups[0]["params"]
    return {
        "all": sum(_elements(parameter) for parameter in parameters),
        "weights": sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in parameters),
        "optimized": sum(parameter.numel() for parameter in optimized),
        "padding": 2 * len(parameters) * module.trainer.world_size,
    }


def _elements(parameter: Any) -> int:
    return parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()


def shares(batches: list[SequenceBatch], rank: int, ranks: int) -> DataLoader:
    """Return every n-th row of each batch, where n is the number of ranks."""
    return DataLoader([batch[torch.arange(rank, len(batch), ranks)] for batch in batches], batch_size=None)


def trainer_of(strategy: Any, **options: Any) -> Any:
    """Return a Trainer for all running processes."""
    devices = int(os.environ["WORLD_SIZE"])
    return quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, **options)


def rank_and_size() -> tuple[int, int]:
    """Return the rank and the number of ranks."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


# -- what run_ranks calls ---------------------------------------------------------------------------------------------


def run_all(requested: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the results of all functions below for their requests, because starting the processes is slow."""
    return {
        "updates": updates(list(requested["updates"].values())),
        "breaks": breaks(requested["breaks"]),
        "validations": validations(requested["validations"]),
        "loaded": [from_directory(folder, precision) for precision in requested["loaded"]],
        "references": references(requested["references"]),
        "shared_memory": [line.strip() for line in open("/proc/self/maps") if "deepspeed_allreduce" in line],
    }


def updates(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return three updates of each run next to those in torch; options other than precision, dtype and tied are the
    strategy's."""
    result = []
    for run in runs:
        precision, dtype, tied = run.pop("precision", "32-true"), run.pop("dtype", "float32"), run.pop("tied", False)
        batches = [texts(7, seed) for seed in range(3)]
        source = model(tied, dtype)
        in_bfloat16 = "bf" in precision + dtype
        compare = Compare(Plain(source, in_bfloat16), batches)
        strategy = Watched(config=SHARDED, **run)
        trainer = trainer_of(strategy, callbacks=[compare], precision=precision)
        trainer.fit(sft(source), shares(batches, *rank_and_size()))
        result.append({**compare.result, "still": strategy.still})
    return result


class NaNOnLastRank(SFTModule):
    """Has a NaN loss on the last rank."""

    error_text = ""

    def training_step(self, batch: SequenceBatch, batch_idx: int) -> None:
        before = weights(self.role_strategy, "actor")
        try:
            super().training_step(batch, batch_idx)
        except FloatingPointError as error:
            self.error_text = str(error)
        after = weights(self.role_strategy, "actor")
        self.moved = any(not torch.equal(before[name], after[name]) for name in before)

    def token_loss(self, rows: SequenceBatch, sums: MeanAccumulator, prefix: str = "train") -> Tensor:
        rank, ranks = rank_and_size()
        return super().token_loss(rows, sums, prefix) * (torch.nan if rank == ranks - 1 else 1.0)


def breaks(runs: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """Return the result of a mini-batch whose gradient is NaN on one rank, for each stage and precision."""
    result = []
    for stage, precision in runs:
        module = NaNOnLastRank(model(), micro_batch_tokens=24)
        trainer = trainer_of(RLHFDeepSpeedStrategy(stage=stage, config=SHARDED), precision=precision)
        trainer.fit(module, shares([texts(7, 0)], *rank_and_size()))
        result.append({"error_text": module.error_text, "moved": module.moved})
    return result


def validations(stages: list[int]) -> list[dict[str, float]]:
    """Return the loss of held-out texts without a fit, after a fit with the same Trainer, and in torch."""
    result = []
    held_out = texts(8, 9)
    for stage in stages:
        data, training = shares([held_out], *rank_and_size()), shares([texts(7, 0)], *rank_and_size())
        alone = trainer_of(RLHFDeepSpeedStrategy(stage=stage, config=SHARDED))
        (first,) = alone.validate(sft(model()), data, verbose=False)
        both, module = trainer_of(RLHFDeepSpeedStrategy(stage=stage, config=SHARDED)), sft(model())
        both.fit(module, training)
        (after,) = both.validate(module, data, verbose=False)
        plain = Plain(model())
        expected = [float(loss(plain.model, held_out))]
        plain.update(texts(7, 0))
        expected.append(float(loss(plain.model, held_out)))
        result.append({"alone": first["val/loss"], "after": after["val/loss"], "expected": expected})
    return result


def from_directory(folder: str, precision: str) -> dict[str, Any]:
    """Return results for a language model and a scalar model of it that only rank 0 loads."""
    trainer = trainer_of(RLHFDeepSpeedStrategy(stage=3, config=SHARDED), max_steps=0, precision=precision)
    module, plain = sft(Pretrained(folder)), Plain(Pretrained(folder), bfloat16=precision != "32-true")
    trainer.fit(module, shares([texts(7, 0)], *rank_and_size()))
    buffers = [*zip(module.actor.buffers(), plain.model.buffers(), strict=True)]
    result: dict[str, Any] = {
        "spread": all(parameter.ds_tensor.numel() < parameter.ds_numel for parameter in module.actor.parameters()),
        "furthest": plain.furthest(weights(trainer.strategy, "actor")),
        "buffers": bool(buffers) and all(torch.equal(ours, theirs) for ours, theirs in buffers),
    }
    module.sources["critic"] = module.sources["actor"]
    module.critic = trainer.strategy.build_role("critic", module.sources["critic"].scalar)
    head = weights(trainer.strategy, "critic")["score.weight"]
    return {**result, "head": head.tolist()}


class Reference(Callback):
    """Records the KL to a reference that equals the initial actor, and the part that this rank stores."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = weights(pl_module.role_strategy, "ref")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        after = weights(pl_module.role_strategy, "ref")
        moved = any(not torch.equal(after[name], tensor) for name, tensor in self.before.items())
        parts = [getattr(parameter, "ds_tensor", parameter) for parameter in pl_module.ref.parameters()]
        dtypes = sorted({str(part.dtype) for part in parts})
        held, whole = sum(part.numel() for part in parts), sum(tensor.numel() for tensor in after.values())
        kl = float(trainer.callback_metrics["kl/ref"])
        self.result = {"kl": kl, "moved": moved, "held": held, "whole": whole, "dtypes": dtypes}


def references(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the result of one step of PPO with the initial actor as reference, for each precision and strategy."""
    result = []
    rollout = rollout_of(responses(8, seed=1))
    rank, ranks = rank_and_size()
    for run in runs:
        noted = Reference()
        options = {"precision": run.pop("precision"), "callbacks": [HandOver(), noted]}
        module = PPOModule(model(), critic=model(), ref=model(), kl_reward=KLTerm(0.1), micro_batch_tokens=24)
        data = DataLoader([rollout[torch.arange(rank, 8, ranks)]], batch_size=None)
        trainer_of(RLHFDeepSpeedStrategy(config=SHARDED, **run), **options).fit(module, data)
        result.append(noted.result)
    return result


def by_deepspeeds_adam(stages: list[int]) -> list[dict[str, Any]]:
    """Return the differences between two updates with torch's and with DeepSpeed's Adam for CPUs, both offloaded."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    result = []
    for stage in stages:
        ends = []
        for optimizer in (partial(torch.optim.AdamW, lr=1e-2), partial(DeepSpeedCPUAdam, lr=1e-2, weight_decay=0.01)):
            strategy = RLHFDeepSpeedStrategy(stage=stage, offload_optimizer=True, config=SHARDED)
            saved = KeepWeights()
            trainer = trainer_of(strategy, callbacks=[saved])
            trainer.fit(sft(model(), optimizer=optimizer), shares([texts(7, 0), texts(7, 1)], *rank_and_size()))
            ends.append(saved.weights)
        furthest = max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0])
        start = weights_of(model())
        moved = max(float((ends[0][name] - start[name]).abs().max()) for name in start)
        result.append({"furthest": furthest, "moved": moved})
    return result


class KeepWeights(Callback):
    """Stores the weights of the actor at the end."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = weights(pl_module.role_strategy, "actor")


def weights_of(source: Any) -> dict[str, Tensor]:
    """Return the weights of a model in one process."""
    return {name: tensor.detach() for name, tensor in source.causal().lm.named_parameters()}
