"""Fakes for many processes, and small models of each supported kind."""

import contextlib

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.strategies.fsdp import RLHFFSDPStrategy

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
ARCHITECTURES = {
    "qwen2": {},
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40,
    },
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 20, "first_k_dense_replace": 0, "moe_intermediate_size": 48,
        "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


def source(kind, dtype="float32", **fields):
    """Return the source of a small model of that kind."""
    return FromConfig({"model_type": kind, **_SIZES, **ARCHITECTURES[kind], **fields}, seed=0, dtype=dtype)


@contextlib.contextmanager
def processes(count):
    """Simulate rank 0 of the given number of processes; collectives return immediately without communication."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Sent(TorchDispatchMode):
    """Adds up the bytes of collectives by kind, as the unsharded tensor of all ranks."""

    def __init__(self):
        super().__init__()
        self.bytes = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0, "all_to_all": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name == "c10d::_allgather_base_":
            self.bytes["all_gather"] += args[0].nbytes
        elif name == "c10d::_reduce_scatter_base_":
            self.bytes["reduce_scatter"] += args[1].nbytes
        elif name == "_c10d_functional::all_reduce":
            self.bytes["all_reduce"] += args[0].nbytes
        elif name == "c10d::alltoall_base_":
            self.bytes["all_to_all"] += args[1].nbytes
        return func(*args, **(kwargs or {}))


def texts(rows=2, length=32):
    """Return inputs of a language model that scores every token except the first."""
    ids = torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(0))
    index = torch.arange(length - 1).expand(rows, -1)
    return ids, index, ids[:, 1:], torch.ones(rows, length - 1, dtype=torch.bool)


def sharded(role, count, split=1, mixed=False, reshards=None, **options):
    """Return the role as ``rlhf_fsdp`` shards it over the given number of ranks."""
    strategy = RLHFFSDPStrategy(tensor_parallel_size=split, **options)
    names = ("data_parallel", "tensor_parallel")
    strategy._device_mesh = init_device_mesh("cpu", (count // split, split), mesh_dim_names=names)
    strategy._receive = lambda modules: None  # this rank has its tensors, and the others do not exist
    if mixed:
        strategy.precision_plugin = MixedPrecision("bf16-mixed", "cpu")
    strategy._shard("actor", role, reshards, {})
    return role


def saved_by(model, compute):
    """Return the bytes that autograd saves in a computation, without the model's own tensors."""
    instance = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    tensors = []
    sizes = {}

    def pack(tensor):
        tensors.append(tensor)  # or its address would be another tensor's
        if tensor.untyped_storage().data_ptr() not in instance:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(sizes.values())
