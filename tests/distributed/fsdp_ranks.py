"""Functions that run on the ranks for test_fsdp.py."""

import ctypes
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import ClassVar
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from safetensors.torch import save_file
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor

from lightning_rlhf.models.loading import FromConfig, Pretrained
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.rollout.shared import SharedEngine
from lightning_rlhf.rollout.vllm.sync import WeightSender
from lightning_rlhf.strategies.fsdp import RLHFFSDPStrategy
from tests.distributed.tasks import Record, parts, whole
from tests.stand_ins import TINY_LLAMA, TinyModel, quiet_trainer

# Neither the vocabulary of 11 nor the scalar head's one row is divided by the number of ranks.
ARCHITECTURES = {
    kind: TINY_LLAMA | {"model_type": kind, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    for kind in ("llama", "qwen2", "qwen3")
}
LARGE = FromConfig(TINY_LLAMA | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16}, seed=0)
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Watched(RLHFFSDPStrategy):
    """Records for every backward pass whether gradients are synchronized after it, and whether any and all exist."""

    def accumulate(self, name, sync):
        self.sync = sync
        return super().accumulate(name, sync)

    def backward_role(self, name, loss):
        super().backward_role(name, loss)
        there = [p.grad is not None for p in getattr(self.module, name).parameters()]
        self.backwards = [*getattr(self, "backwards", []), [name, self.sync, any(there), all(there)]]


class RecordShards(Callback):
    """Records the shards on this rank after every step, and the dtype in which blocks compute."""

    def __init__(self):
        self.local_sizes, self.types = [], set()

    def on_train_start(self, trainer, pl_module):
        def note(block, inputs, output):
            self.types.add(str(output.dtype))

        for block in getattr(pl_module, pl_module.trained_roles[0]).lm.base_model.layers:
            block.register_forward_hook(note)

    def on_train_batch_end(self, trainer, pl_module, *_):
        roles = (*pl_module.trained_roles, *pl_module.frozen_roles)
        self.local_sizes.append({name: sizes(getattr(pl_module, name)) for name in roles})


def sizes(role):
    """Return the shape of each parameter and the number of its elements on this rank, by name."""
    return {
        name: [list(p.shape), (p.to_local() if isinstance(p, DTensor) else p).numel()]
        for name, p in role.named_parameters()
    }


def train(runs):
    """Train the runs in order; each is described by the arguments of :func:`_train`."""
    return [_train(**run) for run in runs]


def _train(weights, kind="ppo", options=None, architecture="llama", tied=True, precision="32-true", again=False):
    """Train three steps with ``options`` of the strategy, or a single process for None. Rank 0 writes the weights.

    With ``again``, a validation and another fit of the same module follow.
    """
    L.seed_everything(7, verbose=False)
    torch.use_deterministic_algorithms(True)
    module, data, callbacks = parts(kind)
    values = ARCHITECTURES[architecture] | {"tie_word_embeddings": tied}
    module.sources = {name: replace(source, architecture=values) for name, source in module.sources.items()}
    shared = (options or {}).get("tensor_parallel_size", 1)
    for callback in callbacks:
        if shared > 1:
            callback.engine = SharedEngine(callback.engine, ranks=shared)
    record, shards, strategies = Record(), RecordShards(), []
    for _ in range(2 if again else 1):
        strategies.append("rlhf_single" if options is None else Watched(**options))
        trainer = quiet_trainer(
            strategy=strategies[-1],
            devices=RANKS,
            precision=precision,
            callbacks=[*callbacks, record, shards],
            max_steps=3,
            max_epochs=-1,
            use_distributed_sampler=False,
        )
        trainer.fit(module, datamodule=data)
        if again:
            trainer.validate(module, datamodule=data, verbose=False)
    trained = whole(module, module.trained_roles)
    if trainer.is_global_zero:
        save_file(trained, weights)
    first = getattr(module, module.trained_roles[0])
    return {
        "norms": [{name: value for name, value in step.items() if "grad_norm" in name} for step in record.steps],
        "validations": record.validations,
        "local sizes": shards.local_sizes,
        "types": sorted(shards.types),
        "backwards": getattr(strategies[0], "backwards", []),
        "data": [module.data_ranks.rank, module.data_ranks.size],
        "tied": first.lm.get_input_embeddings().weight is first.lm.get_output_embeddings().weight,
        "stored in": sorted({str(p.dtype) for p in first.parameters()}),
        "names": list(trained),
        "sum": sum(float(tensor.double().sum()) for tensor in trained.values()),
    }


# -- building ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noted(TinyModel):
    """Records the device on which it is built."""

    devices: ClassVar[list[str]] = []

    def causal(self):
        self.devices.append(torch.get_default_device().type)
        return super().causal()


class OtherTypes(TinyModel):
    """Has weights of a dtype other than that of its configuration, which is the only one used on the meta device."""

    def causal(self):
        model = super().causal()
        return model if torch.get_default_device().type == "meta" else model.bfloat16()


class InFit(Callback):
    """Calls a function with the strategy once."""

    def __init__(self, function: Callable):
        self.function = function

    def on_train_start(self, trainer, pl_module):
        self.result = self.function(trainer.strategy)
        trainer.should_stop = True


def build(folder):
    """Build several models under the strategy and return their state."""
    # Freed memory returns to the system at once, so that resident memory is memory in use.
    assert ctypes.CDLL("libc.so.6").mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    module, data, _ = parts("sft")
    module.sources = {"actor": Noted()}

    def states(strategy):
        small = {"same": _same(strategy, folder), "cast": _cast(strategy), "error": _error_of_other_tensors(strategy)}
        return {**small, **_memory(strategy)}

    call = InFit(states)
    trainer = quiet_trainer(strategy="rlhf_fsdp", devices=RANKS, callbacks=[call], use_distributed_sampler=False)
    trainer.fit(module, datamodule=data)
    return {"devices": Noted.devices, **call.result}


def _same(strategy, folder):
    """Return which models have bitwise the same weights, names and buffers as those built in one process."""
    tied = TinyModel(TINY_LLAMA | {"tie_word_embeddings": True})
    sources = {
        "fresh": TinyModel(),
        "tied": tied,
        "bf16": TinyModel(dtype="bfloat16"),
        "kept": OtherTypes(),
        "stored": Pretrained(folder),
    }
    result = {}
    for name, source in sources.items():
        for model in ("causal", "scalar"):
            make = getattr(source, model)
            alone, role = make(), strategy.build_role("actor", make)
            strategy.module.probe = role
            got = {key: tensor.clone() for key, tensor in strategy.iter_full_params("probe")}
            expected = dict(alone.lm.named_parameters())
            buffers = dict(role.named_buffers())
            result[f"{name} {model}"] = (
                got.keys() == expected.keys()
                and all(torch.equal(got[key], expected[key]) for key in got)
                and all(torch.equal(buffers[key], buffer) for key, buffer in alone.named_buffers())
                and len(buffers) > 0
            )
            del strategy.module.probe
    return result


def _cast(strategy):
    """Return which matrices are cast before they are gathered, and whether the result equals a cast after gathering."""
    cast, whole = {}, DTensor.redistribute

    def redistribute(self, *arguments, **options):
        gathered.append(self.dtype)
        return whole(self, *arguments, **options)

    for name, source in {"full": TinyModel(dtype="float32"), "lora": TinyModel(lora=LoRA(rank=2, alpha=4))}.items():
        strategy.module.probe = strategy.build_role("actor", source.causal)
        plain = {key: tensor.clone() for key, tensor in strategy.iter_full_params("probe")}
        gathered = []
        with mock.patch.object(DTensor, "redistribute", redistribute):
            got = {key: tensor.clone() for key, tensor in strategy.iter_full_params("probe", torch.bfloat16)}
        cast[name] = {
            "gathered": sorted({str(dtype) for dtype in gathered}),
            "matrices": sum(dtype == torch.bfloat16 for dtype in gathered),
            "all": sum(tensor.ndim > 1 for tensor in plain.values()),
            "same": all(torch.equal(got[key].bfloat16(), plain[key].bfloat16()) for key in plain),
        }
        del strategy.module.probe
    return cast


def _error_of_other_tensors(strategy):
    """Return the error for tensors on rank 0 that differ from those of the other ranks."""

    def make():
        tied = torch.get_default_device().type != "meta"
        return TinyModel(TINY_LLAMA | {"tie_word_embeddings": tied}).causal()

    try:
        strategy.build_role("actor", make)
    except ValueError as error:
        return str(error)
    return None


def _memory(strategy):
    """Return the peak host memory in bytes for building a large model, and for gathering its weights."""
    with torch.device("meta"):
        model = LARGE.causal()
    built = _most_taken(lambda: setattr(strategy.module, "probe", strategy.build_role("actor", LARGE.causal)))
    gathered = _most_taken(lambda: [None for _ in strategy.iter_full_params("probe")])
    model, layer = (sum(p.nbytes for p in part.parameters()) for part in (model, model.lm.model.layers[0]))
    return {"built": built, "gathered": gathered, "model": model, "layer": layer}


def timeouts(options):
    """Return the timeouts in seconds of all groups of the mesh of a strategy, by their descriptions."""

    def read(strategy):
        groups = [group for group in c10d._world.pg_map if group.group_desc.startswith("mesh_")]
        cpu = torch.device("cpu")
        return {group.group_desc: group._get_backend(cpu).options._timeout.total_seconds() for group in groups}

    module, data, _ = parts("sft", heads=4)
    call, strategy = InFit(read), RLHFFSDPStrategy(timeout=timedelta(seconds=420), **options)
    trainer = quiet_trainer(strategy=strategy, devices=RANKS, callbacks=[call], use_distributed_sampler=False)
    trainer.fit(module, datamodule=data)
    return call.result


def gather_on(options, receivers):
    """Return the models whose tensors differ if only some ranks receive them.

    If several receivers have their tensors from the same ranks, all ranks receive them; else the other ranks have
    tensors without values.

    Args:
        options: options of the strategy.
        receivers: ranks that receive tensors.
    """
    sizes = (options.get(name, 1) for name in ("shard_size", "tensor_parallel_size", "sequence_parallel_size"))
    together = math.prod(sizes) if "shard_size" in options else RANKS
    all_receive = len({rank // together for rank in receivers}) < len(receivers)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}  # and a vocabulary of 11
    sources = {
        "plain": TinyModel(TINY_LLAMA | heads),
        "tied": TinyModel(TINY_LLAMA | heads | {"tie_word_embeddings": True}),
    }
    sources["lora"] = TinyModel(TINY_LLAMA | heads, lora=LoRA(rank=2, alpha=4))
    if "tensor_parallel_size" not in options:  # which does not split experts
        few = {"model_type": "mixtral", "num_local_experts": 2}  # fewer than ranks: another dimension is sharded
        sources["experts"] = TinyModel(TINY_LLAMA | heads | few)
    module, data, _ = parts("sft")
    module.sources = {"actor": sources["plain"]}

    def compare(strategy):
        faults = []
        for (name, source), dtype in itertools.product(sources.items(), (None, torch.bfloat16)):
            strategy.module.probe = strategy.build_role("actor", source.causal)
            for read in (partial(strategy.iter_full_params, dtype=dtype), strategy.iter_base_params):
                expected = {key: tensor.clone() for key, tensor in read("probe")}
                got = {key: tensor.clone() for key, tensor in read("probe", receivers=receivers)}
                same = list(got) == list(expected)
                for key, tensor in expected.items():
                    if all_receive or strategy.global_rank in receivers:
                        same &= torch.equal(tensor, got[key])
                    else:
                        same &= got[key].is_meta and (tensor.shape, tensor.dtype) == (got[key].shape, got[key].dtype)
                if not same:
                    faults.append([name, str(dtype)])
            del strategy.module.probe
        return faults

    call = InFit(compare)
    trainer = quiet_trainer(
        strategy=RLHFFSDPStrategy(**options), devices=RANKS, callbacks=[call], use_distributed_sampler=False
    )
    trainer.fit(module, datamodule=data)
    return call.result


def push_a_gigabyte():
    """Return seconds and peak memory of two pushes of a model of 1 GB, and the seconds of a plain copy of it."""
    assert ctypes.CDLL("libc.so.6").mallopt(-3, 65536)  # as in build()
    fields = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 5, "num_attention_heads": 16}
    source = FromConfig(TINY_LLAMA | fields | {"num_key_value_heads": 16, "head_dim": 128}, seed=0)
    module, data, _ = parts("sft")

    def push(strategy):
        strategy.module.probe = strategy.build_role("actor", source.causal)
        nbytes = sum(p.numel() * 4 for p in strategy.module.probe.parameters())
        sender, result = WeightSender(), {"bytes": nbytes, "shards": nbytes // RANKS}

        def once():
            parameters = strategy.iter_full_params("probe", torch.float32, receivers=[0])
            if strategy.global_rank == 0:
                sender.write(parameters)
            deque(parameters, maxlen=0)

        for name in ("first", "second"):
            dist.barrier()
            began = time.perf_counter()
            result[f"{name} memory"] = _most_taken(once)
            dist.barrier()
            result[f"{name} seconds"] = time.perf_counter() - began
        source_of_copy, copy = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
        began = time.perf_counter()
        copy.copy_(source_of_copy)
        result["copy seconds"] = time.perf_counter() - began
        sender.close()
        return result

    call = InFit(push)
    trainer = quiet_trainer(strategy="rlhf_fsdp", devices=RANKS, callbacks=[call], use_distributed_sampler=False)
    trainer.fit(module, datamodule=data)
    return call.result


def _most_taken(function):
    def of_process(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current resident memory
    before = of_process("VmRSS")
    function()
    return of_process("VmHWM") - before
