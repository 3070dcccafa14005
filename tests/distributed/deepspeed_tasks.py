"""What ranks do for test_deepspeed.py: each function runs in every process and returns what was seen there."""

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
    """Return a llama many of whose parameters have sizes that 2 does not divide."""
    return TinyModel({**TinyModel().architecture, "tie_word_embeddings": tied, "hidden_size": 31}, dtype=dtype)


class Watched(RLHFDeepSpeedStrategy):
    """Notes whether clipping already moves a weight."""

    still = True

    def clip_role(self, name: str, max_norm: float | None) -> Tensor:
        before = weights(self, name)
        norm = super().clip_role(name, max_norm)
        after = weights(self, name)
        self.still &= all(torch.equal(before[key], after[key]) for key in before)
        return norm


def weights(roles: Any, name: str) -> dict[str, Tensor]:
    """Return all of a role, whole."""
    return {key: tensor.clone() for key, tensor in roles.iter_full_params(name)}


class Plain:
    """The same updates by torch alone, on whole batches; in bfloat16 computed by a copy of float32 weights.

    The first weights of that copy are rounded, as DeepSpeed makes its float32 weights of those in bfloat16.
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
        """Return norm before clipping."""
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
        """Return by how much any weight differs at most; names and order must be the same."""
        named = dict(self.model.lm.named_parameters())
        assert list(named) == list(others), (list(named), list(others))
        return max(float((tensor.detach().float() - others[name]).abs().max()) for name, tensor in named.items())


def loss(plain: Any, batch: SequenceBatch) -> Tensor:
    """Return mean over the tokens of a whole batch."""
    ids, mask = batch.input_ids, batch.loss_mask[:, 1:]
    index = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
    return -plain(ids, index, ids[:, 1:], mask).logprobs.sum() / mask.sum()


def sft(source: Any, **options: Any) -> SFTModule:
    """Return a module of these updates."""
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=DECAY)
    sgd = partial(torch.optim.SGD, lr=RATE)
    inputs = {"optimizer": sgd, "lr_scheduler": schedule, "micro_batch_tokens": 24, "max_grad_norm": MAX_NORM}
    return SFTModule(source, **(inputs | options))


class Compare(Callback):
    """Runs the plain updates beside those of the ranks and notes what differs."""

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
    """Return elements that are whole before, at most during, and after a walk through all parameters; the largest layer."""
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
    """Return elements of the actor and of what this rank keeps of it: weights to compute with, weights to optimize."""
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
    """Return every so-manieth row of each batch."""
    return DataLoader([batch[torch.arange(rank, len(batch), ranks)] for batch in batches], batch_size=None)


def trainer_of(strategy: Any, **options: Any) -> Any:
    """Return a Trainer over the processes that run."""
    devices = int(os.environ["WORLD_SIZE"])
    return quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, **options)


def position() -> tuple[int, int]:
    """Return rank and number of ranks."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


# -- what run_ranks calls ---------------------------------------------------------------------------------------------


def everything(requested: dict[str, Any], folder: str) -> dict[str, Any]:
    """Answer of all functions below to what they are asked; starting the processes is what takes long."""
    return {
        "updates": updates(list(requested["updates"].values())),
        "breaks": breaks(requested["breaks"]),
        "validations": validations(requested["validations"]),
        "loaded": [from_directory(folder, precision) for precision in requested["loaded"]],
        "references": references(requested["references"]),
        "shared_memory": [line.strip() for line in open("/proc/self/maps") if "deepspeed_allreduce" in line],
    }


def updates(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return three updates of each run, beside plain ones. ``precision``, ``dtype``, ``tied``; the rest is the strategy's."""
    result = []
    for run in runs:
        precision, dtype, tied = run.pop("precision", "32-true"), run.pop("dtype", "float32"), run.pop("tied", False)
        batches = [texts(7, seed) for seed in range(3)]
        source = model(tied, dtype)
        in_bfloat16 = "bf" in precision + dtype
        compare = Compare(Plain(source, in_bfloat16), batches)
        strategy = Watched(config=SHARDED, **run)
        trainer = trainer_of(strategy, callbacks=[compare], precision=precision)
        trainer.fit(sft(source), shares(batches, *position()))
        result.append({**compare.result, "still": strategy.still})
    return result


class OneRankBreaks(SFTModule):
    """Its loss is no number on the last rank."""

    refused = ""

    def training_step(self, batch: SequenceBatch, batch_idx: int) -> None:
        before = weights(self.role_strategy, "actor")
        try:
            super().training_step(batch, batch_idx)
        except FloatingPointError as error:
            self.refused = str(error)
        after = weights(self.role_strategy, "actor")
        self.moved = any(not torch.equal(before[name], after[name]) for name in before)

    def token_loss(self, rows: SequenceBatch, sums: MeanAccumulator, prefix: str = "train") -> Tensor:
        rank, ranks = position()
        return super().token_loss(rows, sums, prefix) * (torch.nan if rank == ranks - 1 else 1.0)


def breaks(runs: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """Return a mini-batch whose gradient is no number because of one rank, for each stage and precision."""
    result = []
    for stage, precision in runs:
        module = OneRankBreaks(model(), micro_batch_tokens=24)
        trainer = trainer_of(RLHFDeepSpeedStrategy(stage=stage, config=SHARDED), precision=precision)
        trainer.fit(module, shares([texts(7, 0)], *position()))
        result.append({"refused": module.refused, "moved": module.moved})
    return result


def validations(stages: list[int]) -> list[dict[str, float]]:
    """Return the loss of held-out texts without a fit, after a fit under the same Trainer, and by torch alone."""
    result = []
    held_out = texts(8, 9)
    for stage in stages:
        data, training = shares([held_out], *position()), shares([texts(7, 0)], *position())
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
    """Return a language model and a scalar model of it, loaded by rank 0 alone."""
    trainer = trainer_of(RLHFDeepSpeedStrategy(stage=3, config=SHARDED), max_steps=0, precision=precision)
    module, plain = sft(Pretrained(folder)), Plain(Pretrained(folder), bfloat16=precision != "32-true")
    trainer.fit(module, shares([texts(7, 0)], *position()))
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
    """Notes the KL to a reference that the actor begins as, and what this rank holds of it."""

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
    """Return one step of PPO whose reference is where the actor begins; ``precision``, the rest is the strategy's."""
    result = []
    rollout = rollout_of(responses(8, seed=1))
    rank, ranks = position()
    for run in runs:
        noted = Reference()
        options = {"precision": run.pop("precision"), "callbacks": [HandOver(), noted]}
        module = PPOModule(model(), critic=model(), ref=model(), kl_reward=KLTerm(0.1), micro_batch_tokens=24)
        data = DataLoader([rollout[torch.arange(rank, 8, ranks)]], batch_size=None)
        trainer_of(RLHFDeepSpeedStrategy(config=SHARDED, **run), **options).fit(module, data)
        result.append(noted.result)
    return result


def by_deepspeeds_adam(stages: list[int]) -> list[dict[str, Any]]:
    """Return two updates with an offloaded optimizer: by torch, and by DeepSpeed's own for CPUs."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    result = []
    for stage in stages:
        ends = []
        for optimizer in (partial(torch.optim.AdamW, lr=1e-2), partial(DeepSpeedCPUAdam, lr=1e-2, weight_decay=0.01)):
            strategy = RLHFDeepSpeedStrategy(stage=stage, offload_optimizer=True, config=SHARDED)
            saved = KeepWeights()
            trainer = trainer_of(strategy, callbacks=[saved])
            trainer.fit(sft(model(), optimizer=optimizer), shares([texts(7, 0), texts(7, 1)], *position()))
            ends.append(saved.weights)
        furthest = max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0])
        start = weights_of(model())
        moved = max(float((ends[0][name] - start[name]).abs().max()) for name in start)
        result.append({"furthest": furthest, "moved": moved})
    return result


class KeepWeights(Callback):
    """Keeps the actor as it is at the end."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = weights(pl_module.role_strategy, "actor")


def weights_of(source: Any) -> dict[str, Tensor]:
    """Return of a model in one process."""
    return {name: tensor.detach() for name, tensor in source.causal().lm.named_parameters()}
