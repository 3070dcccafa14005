"""Frozen linear layers in 4 or 8 bits, with the kernels of bitsandbytes."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rlhf.expected_errors import MissingPackageError, UsageError
from lightning_rlhf.functional.products import linear
from lightning_rlhf.models.classes import layers_read_by_kernels, text_model_of
from lightning_rlhf.models.tensors import Quantization, StoredLinear

_BLOCK = 64  # weights with one scale in NF4
_LEAST_SHARE = 0.5  # of a backbone's parameters that can be quantized


def bitsandbytes() -> ModuleType:
    """Import bitsandbytes without the kernels that it would download from the hub if the package kernels is installed.

    Raises:
        ModuleNotFoundError: bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingPackageError(
            "quantization needs bitsandbytes, which is not installed: pip install 'lightning-rlhf[quantization]'"
        )
    if "bitsandbytes" not in sys.modules:
        logger = logging.getLogger("bitsandbytes.backends.cpu.ops")  # warns that the kernels are missing
        level, kernels = logger.level, sys.modules.pop("kernels", None)
        logger.setLevel(logging.ERROR)
        sys.modules["kernels"] = None  # type: ignore[assignment]  # an import of it fails
        try:
            import_module("bitsandbytes")
        finally:
            logger.setLevel(level)
            del sys.modules["kernels"]
            if kernels is not None:
                sys.modules["kernels"] = kernels
    return import_module("bitsandbytes")


class QuantizedLinear(StoredLinear):
    """A frozen linear layer whose weight is stored in 4 or 8 bits, and dequantized in each forward and backward pass.

    ``nf4``: 4 bits, one scale for 64 weights, which is itself stored in 8 bits: see "QLoRA: Efficient Finetuning of
    Quantized LLMs", Dettmers et al. 2023, section 3. ``int8``: 8 bits, one scale for each output. The product is
    computed in the dtype of the inputs, or of autocast. Values are the same on a GPU and on any CPU up to the rounding
    of the product.

    Args:
        layer: layer to quantize.
        quantization: kind of numbers.
    """

    weight: nn.Parameter  # stored numbers

    def __init__(self, layer: nn.Linear, quantization: Quantization) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.quantization = quantization
        self.dtype = layer.weight.dtype
        self.bias = layer.bias
        functional = bitsandbytes().functional
        weight = layer.weight.detach()
        if quantization == "nf4":
            # As rows of one block, because the kernels for CPUs misread rows that are not a multiple of it.
            stored, state = functional.quantize_4bit(
                weight.reshape(-1, _BLOCK), blocksize=_BLOCK, compress_statistics=True, quant_type="nf4"
            )
            stored = torch.cat([stored.flatten(), state.absmax])  # in one parameter, which roles can share
            scales = {"offset": state.offset, "code": state.code}
            scales |= {"outer_scales": state.state2.absmax, "outer_code": state.state2.code}
        else:
            stored, scale, _ = functional.int8_vectorwise_quant(weight.half())
            scales = {"scales": scale}
        self.weight = nn.Parameter(stored, requires_grad=False)
        for name, tensor in scales.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer of (..., in_features) states."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        product: Tensor = _Product.apply(input, self)
        return product

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the (out_features, in_features) weight.

        Args:
            dtype: its dtype; None is that of the layer before it was quantized.
        """
        dtype = dtype or self.dtype
        functional, buffers = bitsandbytes().functional, dict(self.named_buffers())
        stored, weights = self.weight.detach(), self.out_features * self.in_features
        if self.quantization == "int8":
            whole: Tensor = functional.int8_vectorwise_dequant(stored, buffers["scales"])
            return whole.to(dtype)
        outer = functional.QuantState(
            absmax=buffers["outer_scales"], code=buffers["outer_code"], blocksize=256, dtype=torch.float32
        )
        state = functional.QuantState(
            absmax=stored[weights // 2 :],
            shape=torch.Size((weights // _BLOCK, _BLOCK)),
            code=buffers["code"],
            blocksize=_BLOCK,
            quant_type="nf4",
            dtype=dtype,
            offset=buffers["offset"],
            state2=outer,
        )
        blocks: Tensor = functional.dequantize_4bit(stored[: weights // 2].unsqueeze(1), state)
        return blocks.view(self.out_features, self.in_features)

    def extra_repr(self) -> str:
        """Return the layer's sizes and its kind of numbers."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.quantization}"


class _Product(torch.autograd.Function):
    """The product with a quantized weight; the whole weight exists only within a pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: QuantizedLinear) -> Tensor:
        """Compute the layer."""
        ctx.layer, ctx.dtype = layer, states.dtype
        bias = layer.bias if layer.bias is None else layer.bias.to(states.dtype)
        return linear(states, layer.dequantized(states.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Compute the gradient of the states."""
        return linear(gradient.contiguous(), ctx.layer.dequantized(ctx.dtype).T), None


@torch.no_grad()
def quantize(lm: Any, quantization: Quantization) -> None:
    """Replace the linear layers of a model's backbone by quantized ones, one at a time; embedding and head stay.

    Sets ``quantization_error`` of the backbone, the length of the difference of all weights divided by theirs.

    Args:
        lm: model of transformers; changed in place.
        quantization: kind of numbers.

    Raises:
        ValueError: most of the backbone's parameters are not in linear layers.
    """
    backbone = text_model_of(lm)
    difference = length = 0.0
    for name in names_to_quantize(lm):
        layer: Any = backbone.get_submodule(name)
        made = QuantizedLinear(layer, quantization)
        path, _, attribute = name.rpartition(".")
        setattr(backbone.get_submodule(path), attribute, made)
        difference += float((made.dequantized() - layer.weight).float().square().sum())
        length += float(layer.weight.float().square().sum())
    backbone.quantization_error = (difference / length) ** 0.5 if length else 0.0
    _release_whole_weights(lm)


@torch.no_grad()
def _release_whole_weights(lm: Any) -> None:
    """Return the memory of the weights that were quantized to the system.

    The tensors that stay are views of the file, which is mapped as long as one of them exists, and the allocator of the
    C library keeps freed memory.
    """
    for tensor in (*lm.parameters(), *lm.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # musl has none
        libc.malloc_trim(0)


def names_to_quantize(lm: Any) -> list[str]:
    """Return the names of the linear layers that :func:`quantize` replaces, within the backbone.

    Args:
        lm: model of transformers, which may have no weights (device ``meta``).

    Raises:
        ValueError: most of the backbone's parameters are not in linear layers.
    """
    backbone = text_model_of(lm)
    left_out = layers_read_by_kernels(backbone)
    sizes = {
        name: layer.weight.numel()
        for name, layer in backbone.named_modules()
        if type(layer) is nn.Linear and layer.weight.numel() % _BLOCK == 0 and name not in left_out
    }
    embeddings = lm.get_input_embeddings().weight.numel()
    parameters = sum(parameter.numel() for parameter in backbone.parameters()) - embeddings
    if sum(sizes.values()) < _LEAST_SHARE * parameters:
        raise UsageError(
            f"quantization: most weights of {type(lm).__name__} are not in linear layers of torch, such as stacked "
            f"experts, and would stay as they are: remove quantization"
        )
    return list(sizes)
