"""Tensor parallelism: the plan that transformers publishes for an architecture, in torch's parallel styles."""

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
from lightning_rlhf.models.lora import adapted_parts

# Names of styles in a plan, and their classes in torch. The last is a norm over the width of each head: every rank has
# some heads and the whole weight, whose gradient is the sum over ranks. To such a norm it makes no difference which
# dimension is split, as long as it is not the last.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
_LEFT_WHOLE = ("embedding_rowwise",)  # takes and gives whole tensors, so that whole weights do as well
_SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def tensor_parallel_plan(name: str, model: PreTrainedModel, size: int) -> dict[nn.Module, ParallelStyle]:
    """Return the modules to split over tensor-parallel ranks, and their styles; not embedding and head.

    Args:
        name: name of the role, for messages.
        model: may be on the meta device.
        size: tensor-parallel ranks, at least 1; nothing is split among one.

    Raises:
        ValueError: the architecture has no plan that is known here, or ranks do not divide its heads or width.
    """
    if size == 1:
        return {}
    config = model.config.get_text_config()
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {path: style for path, style in plan.items() if style not in _LEFT_WHOLE}
    unknown = sorted(set(plan.values()) - set(_STYLES))
    if unknown or not plan:
        reason = f"splits by {', '.join(unknown)}" if unknown else "publishes no plan"
        raise UsageError(
            f"tensor_parallel_size: {size} is not known for the {name}'s {type(model).__name__}, which {reason}; known "
            f"are architectures that split by {', '.join(_STYLES)} alone (Llama, Mistral, Qwen2, Qwen3): take "
            f"tensor_parallel_size: 1"
        )
    for field in _SPLIT:
        value = getattr(config, field, size)
        if value % size:
            raise UsageError(f"tensor_parallel_size: {size} does not divide the {name}'s {field}, which is {value}")
    styles = {
        part: _STYLES[style]()
        for path, module in model.base_model.named_modules()
        for pattern, style in plan.items()
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path)
        for part in adapted_parts(module, outputs=style == "colwise")
    }
    other = next(
        (m for m, style in styles.items() if not isinstance(style, SequenceParallel) and type(m) is not nn.Linear), None
    )
    if other is not None:
        raise UsageError(
            f"tensor_parallel_size: {size} splits plain linear layers, but the {name} has {type(other).__name__}: take "
            f"tensor_parallel_size: 1"
        )
    return styles


def split(modules: Iterable[nn.Module], plan: dict[nn.Module, ParallelStyle], mesh: DeviceMesh) -> None:
    """Keep of each planned module what belongs to this rank.

    Args:
        modules: modules with the same whole weights on all ranks of the mesh.
        plan: result of :func:`tensor_parallel_plan`.
        mesh: mesh of the tensor-parallel ranks.
    """
    for module in modules:
        if module in plan:
            parallelize_module(module, mesh, plan[module], src_data_rank=None)
