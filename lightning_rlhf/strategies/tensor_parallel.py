"""Tensor parallelism: transformers' plan for an architecture, applied with torch's parallel styles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.classes import text_model_of
from lightning_rlhf.models.lora import MAGNITUDE, adapted_parts

# Torch's style for each style name in a plan. The last name is a norm over the width of each head, whose replicated
# weight has its gradient summed over ranks. Its input is split by heads (dimension 2); any dimension but the normalized
# one gives the same result.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
_NOT_SPLIT = ("embedding_rowwise",)  # inputs and outputs are not split, so the weight need not be either
_SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def tensor_parallel_plan(name: str, model: PreTrainedModel, size: int) -> dict[nn.Module, ParallelStyle]:
    """Return the parallel style of each module to split; embedding and head are not split.

    Args:
        name: name of the role, for messages.
        model: model, which may be on the meta device.
        size: number of tensor-parallel ranks, at least 1; the plan for 1 is empty.

    Raises:
        ValueError: the architecture's plan is missing or not supported, or ``size`` does not divide heads or width.
    """
    if size == 1:
        return {}
    config = model.config.get_text_config()
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {path: style for path, style in plan.items() if style not in _NOT_SPLIT}
    unknown = sorted(set(plan.values()) - set(_STYLES))
    if unknown or not plan:
        reason = "transformers has no plan for it"
        if unknown:
            reason = f"its plan uses {', '.join(unknown)}"
        raise UsageError(
            f"tensor_parallel_size: {size} is not supported for the {name}'s {type(model).__name__}: {reason}; "
            f"supported are plans with only {', '.join(_STYLES)} (Llama, Mistral, Qwen2, Qwen3). Use "
            f"tensor_parallel_size: 1"
        )
    for field in _SPLIT:
        value = getattr(config, field, size)
        if value % size:
            raise UsageError(f"tensor_parallel_size: {size} does not divide the {name}'s {field}, which is {value}")
    if any(key.endswith(MAGNITUDE) for key, _ in model.named_parameters()):
        raise UsageError(f"tensor_parallel_size: {size} does not split the {name}'s dora: use tensor_parallel_size: 1")
    styles = {
        part: _STYLES[style]()
        for path, module in text_model_of(model).named_modules()
        for pattern, style in plan.items()
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path)
        for part in adapted_parts(module, outputs=style == "colwise")
    }
    if not styles:
        raise UsageError(
            f"tensor_parallel_size: {size} is not supported for the {name}'s {type(model).__name__}: it has no "
            f"layer of the plan of transformers. Use tensor_parallel_size: 1"
        )
    other = next(
        (m for m, style in styles.items() if not isinstance(style, SequenceParallel) and type(m) is not nn.Linear), None
    )
    if other is not None:
        raise UsageError(
            f"tensor_parallel_size: {size} supports only torch.nn.Linear layers, but the {name} has "
            f"{type(other).__name__}: use tensor_parallel_size: 1"
        )
    return styles


def split(modules: Iterable[nn.Module], plan: dict[nn.Module, ParallelStyle], mesh: DeviceMesh) -> None:
    """Replace the weights of each module in the plan by this rank's shard.

    Args:
        modules: modules with the same full weights on all ranks of the mesh.
        plan: result of :func:`tensor_parallel_plan`.
        mesh: mesh of the tensor-parallel ranks.
    """
    for module in modules:
        if module in plan:
            parallelize_module(module, mesh, plan[module], src_data_rank=None)
