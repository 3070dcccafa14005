"""Matrix products in float32 on a CPU, by oneDNN where it is faster than torch's default library, MKL.

On AMD's processors, MKL computes with AVX2 although they have AVX-512. oneDNN, which torch contains too, uses AVX-512:
on a core of Zen 5, it takes 0.4 times the seconds. Intel's processors with AVX-512 were not measured. Without AVX-512
the two differ little, and everything is left to torch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

_SLICE_BYTES = 4 << 20  # of a product that is copied to given memory
_SMALLEST = 64  # inner or outer dimension from which oneDNN is faster; the matrices of adapters are smaller


class Linear(nn.Linear):
    """``torch.nn.Linear`` that multiplies by :func:`linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer of (..., in_features) states."""
        return linear(input, self.weight, self.bias)


def use_faster_products(model: nn.Module) -> None:
    """Make a model's linear layers multiply by :func:`linear`; subclasses of ``torch.nn.Linear`` stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def linear(
    states: Float[Tensor, "... H"], weight: Float[Tensor, "V H"], bias: Float[Tensor, " V"] | None = None
) -> Float[Tensor, "... V"]:
    """Compute ``torch.nn.functional.linear`` by the faster library."""
    if not uses_onednn(states, weight):
        return nn.functional.linear(states, weight, bias)
    if torch.is_grad_enabled():
        product: Tensor = _Linear.apply(states, weight, bias)
        return product
    return _onednn(states, weight, bias)


def linear_into(
    out: Float[Tensor, "N V"],
    states: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None = None,
) -> Tensor:
    """Compute :func:`linear` into given memory, without gradient.

    oneDNN only returns new memory, so that its products are copied in slices of 4 MiB.

    Args:
        out: memory of the result, of any floating dtype.

    Returns:
        ``out``.
    """
    if uses_onednn(states, weight):
        width = max(_SMALLEST, _SLICE_BYTES // (len(states) * states.element_size()))
        for begin in range(0, len(weight), width):
            part = slice(begin, begin + width)
            out[:, part].copy_(_onednn(states, weight[part], part_of(bias, part)))
    elif states.device.type != "cpu" and out.itemsize > states.itemsize:
        torch.mm(states, weight.T, out_dtype=out.dtype, out=out)  # sums in float32, which are not rounded to bfloat16
        if bias is not None:
            out.add_(bias)
    elif out.dtype != states.dtype:
        out.copy_(linear(states, weight, bias))
    elif bias is None:
        torch.mm(states, weight.T, out=out)
    else:
        torch.addmm(bias, states, weight.T, out=out)
    return out


def part_of(values: Tensor | None, part: slice) -> Tensor | None:
    """Return a part of values; None without values."""
    return None if values is None else values[part]


def uses_onednn(states: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN multiplies these: plain float32 matrices on a CPU with AVX-512, outside autocast.

    ``torch.backends.mkldnn.enabled = False`` leaves all products to torch.
    """
    return (
        states.device.type == "cpu"
        and states.dtype == weight.dtype == torch.float32
        and min(weight.shape) >= _SMALLEST
        and states.dim() > 1
        and states.numel() > 0
        and type(weight) in (Tensor, nn.Parameter)  # a shard of tensor parallelism is a DTensor
        and _has_onednn()
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


@cache
def _has_onednn() -> bool:
    is_fast = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return is_fast and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _onednn(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return states @ weight.T + bias; both may be transposed views, but not have strides of 0."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, attr="none", scalars=[], algorithm="")
    return product


class _Linear(torch.autograd.Function):
    """A linear layer whose three products are oneDNN's."""

    @staticmethod
    def forward(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer."""
        return _onednn(states, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        """Keep states and weight; a separate method, because ``torch.func.grad`` requires one."""
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Compute the gradients of states, weight and bias."""
        states, weight = ctx.saved_tensors
        gradient = gradient.contiguous()  # that of a sum has strides of 0
        rows = gradient.flatten(0, -2)
        of_states = linear(gradient, weight.T) if ctx.needs_input_grad[0] else None
        of_weight = linear(rows.T, states.flatten(0, -2).T) if ctx.needs_input_grad[1] else None
        return of_states, of_weight, rows.sum(dim=0) if ctx.needs_input_grad[2] else None
