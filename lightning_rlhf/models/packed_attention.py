"""Causal attention over texts in one row without padding, as an attention function of transformers.

A model uses it as ``attn_implementation`` :data:`NAME`. No mask is registered under that name, so transformers builds
none; a forward pass of a packed row has the lengths of its parts as the keyword argument ``packed_lengths``, which
transformers passes to every attention layer. :func:`keep_masks` is for passes of others, which bring a mask.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from lightning_rlhf.batching.packing import PackedLengths
from lightning_rlhf.models.attention import Attention, set_attention
from lightning_rlhf.models.classes import text_model_of
from lightning_rlhf.models.packed_calls import ALIGNMENT, layout_of_calls, rounded_up
from lightning_rlhf.models.sequence_parallel import SequenceRanks, repeated_keys
from lightning_rlhf.types import expect_shape

NAME = "packed"
_MASKED = "packed_masked"  # the same attention, while transformers makes masks for it
# Architectures for which tests compare log-probs and gradients with those of padded texts.
ARCHITECTURES = {
    "llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "granite", "gemma2", "gemma3_text", "mixtral", "qwen3_moe",
    "deepseek_v3", "smollm3",
}  # fmt: skip
# Vision-language architectures, whose text model alone has this attention; tests compare texts with images too.
VISION_ARCHITECTURES = {
    "idefics3", "smolvlm", "llava", "llava_next", "internvl", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
}  # fmt: skip
_VARLEN_ARGUMENTS = {"scale", "window_size"}  # of torch 2.11 or newer
_VARLEN_CAPABILITY = (8, 0)  # Ampere
_VARLEN_WIDTH = 256  # largest number of channels of a head
_BLOCK = 512  # queries that one mask is for
_UNSUPPORTED = ("s_aux", "position_bias", "cache")  # attention sinks, biases, a cache of earlier tokens


def set_role_attention(config: PretrainedConfig, implementation: Attention | None = None) -> PretrainedConfig:
    """Set and validate the attention of a role's model; by default that of this module, where it is tested.

    Args:
        config: configuration of a model; changed in place.
        implementation: implementation that overrides the configuration; None uses the configuration or the default.

    Raises:
        ValueError: the configuration requests an implementation that is not supported.
    """
    is_default = implementation is None and config._attn_implementation is None
    set_attention(config, implementation)
    if is_default and config.model_type in ARCHITECTURES:
        config._attn_implementation = NAME
    elif is_default and config.model_type in VISION_ARCHITECTURES:
        config.get_text_config()._attn_implementation = NAME
    return config


def has_packed_attention(lm: Any) -> bool:
    """Return whether the text model of a model has this attention.

    Args:
        lm: model of transformers.
    """
    return bool(lm.config.get_text_config()._attn_implementation == NAME)


def keep_masks(lm: PreTrainedModel) -> None:
    """Give passes with a mask, a cache or positions, such as those of ``lm.generate``, the masks of transformers.

    Without it their masks would be left out, and padding on the left would be read as text.

    Args:
        lm: model of a role, with a backbone; changed in place unless its attention is that of transformers.
    """
    if has_packed_attention(lm):
        text_model = text_model_of(lm)
        text_model.register_forward_pre_hook(_use_masks, with_kwargs=True)
        text_model.register_forward_hook(_use_lengths, always_call=True)


def _use_masks(text_model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    given = [*arguments[1:], *map(keywords.get, ("attention_mask", "past_key_values"))]
    positions = keywords.get("position_ids")
    if positions is not None and positions.ndim == 2:  # those of images have three axes, and separate no texts
        given.append(positions)
    if "packed_lengths" not in keywords and any(each is not None for each in given):
        text_model.config._attn_implementation = _MASKED


def _use_lengths(text_model: Any, *_: Any) -> None:
    text_model.config._attn_implementation = NAME


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    packed_lengths: PackedLengths | None = None,
    sequence_ranks: SequenceRanks | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each text of a packed row; responses to one prompt may share it.

    Texts of similar lengths share one call of ``scaled_dot_product_attention``, with padding. On a GPU in half
    precision, all share one call of torch's kernel for variable lengths.

    Args:
        module: attention layer.
        query: (1, H, N, D), or (B, H, L, D) for padded texts.
        key: (1, K, N, D) keys; K, the number of their heads, divides H.
        value: (1, K, N, E).
        attention_mask: (B, 1, L, M) mask that is added to the logits, see :func:`keep_masks`; None for padding on the
            right, where causal attention needs no mask.
        dropout: 0.
        scaling: factor of the logits; None is 1 / sqrt(D).
        sliding_window: number of tokens that a token attends to, itself included; None is all before it.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None does not cap.
        is_causal: whether attention is causal; None takes the layer's.
        packed_lengths: lengths of the parts of the row; None for padded texts.
        sequence_ranks: processes of which each has a part of the tokens of the packed row; None for a whole row.
        **kwargs: further arguments of the architecture.

    Returns:
        (1, N, H, E), or (B, L, H, E), and None for the attention weights.

    Raises:
        NotImplementedError: the architecture needs a mask, dropout, sinks, a bias or a cache.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if not causal or dropout or (attention_mask is not None and packed_lengths is not None) or unsupported:
        raise NotImplementedError(
            f"{type(module).__name__} needs {', '.join(unsupported) or 'a mask or dropout'}, which attention over "
            f"concatenated texts does not support"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = (scale, sliding_window, softcap)
    if attention_mask is not None:
        return _attend_block(query, key, value, attention_mask, scale=scale, softcap=softcap).transpose(1, 2), None
    if packed_lengths is None:
        if softcap is None and (sliding_window is None or query.shape[2] <= sliding_window):
            output: Tensor = sdpa_attention_forward(module, query, key, value, None, scaling=scale, is_causal=True)[0]
            return output, None
        return _attend(query, key, value, *options).transpose(1, 2), None
    query, key, value = _for_autocast(query, key, value)
    if sequence_ranks is None:
        return _attend_in_row(query, key, value, packed_lengths, options), None
    count, tokens = sequence_ranks.size, packed_lengths.tokens
    query = sequence_ranks.to_heads(query, tokens)
    key = sequence_ranks.to_heads(repeated_keys(key, count), tokens)
    value = sequence_ranks.to_heads(repeated_keys(value, count), tokens)
    return sequence_ranks.to_tokens(_attend_in_row(query, key, value, packed_lengths, options)), None


def _for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors as autocast does: norms of queries and keys return float32 beside bfloat16 values."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _attend_in_row(
    query: Tensor, key: Tensor, value: Tensor, packed_lengths: PackedLengths, options: tuple[Any, ...]
) -> Tensor:
    """Return the (1, N, H, E) outputs of a packed row; arguments are those of :func:`packed_attention`."""
    expect_shape("the query of a packed row", query, (1, query.shape[1], packed_lengths.tokens, query.shape[3]))
    scale, window, softcap = options
    if softcap is None and _has_varlen_kernel(query, value):
        return _varlen(query, key, value, packed_lengths, scale=scale, window=window)
    layout = layout_of_calls(packed_lengths, window, query.dtype, query.device)
    # split() instead of slices: the backward pass of each slice would fill a gradient of the whole row with zeros.
    q_parts = _taken(query, layout.queries).split([call.texts * call.queries for call in layout.calls])
    tokens = [call.texts * call.keys for call in layout.calls]
    k_parts, v_parts = (_taken(each, layout.keys).split(tokens) for each in (key, value))
    outputs = []
    for call, *parts in zip(layout.calls, q_parts, k_parts, v_parts, strict=True):
        rows = [part.unflatten(0, (call.texts, -1)).transpose(1, 2) for part in parts]
        if call.mask is None:
            attended = _attend(*rows, *options)
        else:
            attended = _attend_block(rows[0], rows[1], rows[2], call.mask, scale=scale, softcap=softcap)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    output = torch.cat(outputs)
    return (output if layout.places is None else output.index_select(0, layout.places)).unsqueeze(0)


def _taken(tensor: Tensor, index: Tensor | None) -> Tensor:
    """Return (T, H, D) the tokens of (1, H, N, D) at indices; None is all."""
    tokens = tensor.squeeze(0).transpose(0, 1)
    return tokens if index is None else tokens.index_select(0, index)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """Compute causal attention of (B, H, L, D) queries to (B, K, M, D) keys, of which the last L are their own.

    Where a mask is needed, blocks of queries share it, so that its memory grows with the length and not its square.
    """
    length = q.shape[2]
    before = k.shape[2] - length
    window = None if window is not None and k.shape[2] <= window else window
    if softcap is None and window is None and before == 0:
        return _attend_block(q, k, v, scale=scale)
    starts = range(before, before + length, _BLOCK)
    # A block's part of the mask begins at a column that depends on the number of keys before the block. All of these
    # numbers leave the same remainder, so that all parts begin at aligned addresses.
    remainder = before % ALIGNMENT
    reach = starts[-1] if window is None else min(starts[-1], rounded_up(window - 1, ALIGNMENT, remainder))
    columns = rounded_up(reach, _BLOCK, remainder)  # rounded, so that texts of many lengths share few masks
    mask = _visible(columns, window, q.dtype, q.device)
    outputs = []
    for start in starts:
        queries = q[:, :, start - before : start - before + _BLOCK]
        count = queries.shape[2]
        first = max(0, start - reach)
        keys, values = (each[:, :, first : start + count] for each in (k, v))
        part = mask[:count, columns - (start - first) : columns + count]
        outputs.append(_attend_block(queries, keys, values, part, scale=scale, softcap=softcap))
    return torch.cat(outputs, dim=2)


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Compute attention of (B, H, L, D) queries to (B, K, M, D) keys; a mask is added, None is causal attention."""
    if softcap is None or mask is None:
        shares_keys = q.shape[1] != k.shape[1]
        if shares_keys and q.device.type == "cuda" and (mask is not None or q.dtype == torch.float32):
            # The only kernel that would share them keeps the weights of all pairs of tokens for the backward pass.
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
            shares_keys = False
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shares_keys
        )
    # scaled_dot_product_attention has no soft cap; heads that share a key are neighbours.
    heads = q.shape[1] // k.shape[1]
    logits = q.unflatten(1, (-1, heads)) @ k.unsqueeze(2).transpose(3, 4) * scale
    logits = softcap * torch.tanh(logits / softcap) + mask.unsqueeze(-3)
    weights = logits.softmax(dim=-1, dtype=torch.float32).to(v.dtype)
    return (weights @ v.unsqueeze(2)).flatten(1, 2)


@lru_cache(maxsize=16)
def _visible(before: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a (block, before + block) mask of the keys that a block of queries attends to.

    Args:
        before: number of keys before the block.
        window: number of keys that a query attends to, its own included; None is all before it.
        dtype: dtype of the queries; a mask of another dtype would be copied in each layer.
        device: device of the mask.
    """
    width = rounded_up(before + _BLOCK, ALIGNMENT)
    with torch.inference_mode(False):  # a validation may make it, and training use it
        keys = torch.arange(-before, width - before, dtype=torch.int32, device=device)
        distance = torch.arange(_BLOCK, dtype=torch.int32, device=device).unsqueeze(1) - keys
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        return torch.zeros(_BLOCK, width, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _has_varlen_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's kernel for variable lengths computes the attention of a packed row.

    It needs float16 or bfloat16, an NVIDIA GPU of the Ampere generation or newer, heads of at most 256 channels, and
    a torch whose function takes the scale and the window; 2.10 does not.
    """
    is_half = query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16)
    if not is_half or max(query.shape[-1], value.shape[-1]) > _VARLEN_WIDTH:
        return False
    return _varlen_arguments() >= _VARLEN_ARGUMENTS and _capability(query.device) >= _VARLEN_CAPABILITY


@lru_cache(maxsize=1)
def _varlen_arguments() -> frozenset[str]:
    """Return the names of the arguments of torch's attention for variable lengths; empty where torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; that of AMD's GPUs counts as none."""
    if torch.version.hip:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def _varlen(q: Tensor, k: Tensor, v: Tensor, lengths: PackedLengths, *, scale: float, window: int | None) -> Tensor:
    """Compute attention by torch's kernel for variable lengths; see :func:`_has_varlen_kernel`.

    Its causal mask is aligned to the last key, so that a response attends to its whole prompt.
    """
    from torch.nn.attention.varlen import varlen_attn

    bounds = _bounds(lengths, q.device)
    width = v.shape[-1]
    if width != q.shape[-1]:  # values of latent attention are narrower than its keys
        v = functional.pad(v, (0, q.shape[-1] - width))
    queries, keys, values = (tensor.squeeze(0).transpose(0, 1) for tensor in (q, k, v))
    if bounds.keys is not None:
        keys = keys.index_select(0, bounds.keys)
        values = values.index_select(0, bounds.keys)
    heads_per_key = q.shape[1] // k.shape[1]
    options: dict[str, Any] = {}
    if "enable_gqa" in _varlen_arguments():
        options["enable_gqa"] = heads_per_key > 1
    elif heads_per_key > 1:  # torch 2.11
        keys = keys.repeat_interleave(heads_per_key, dim=1)
        values = values.repeat_interleave(heads_per_key, dim=1)
    output: Any = varlen_attn(
        queries,
        keys,
        values,
        cu_seq_q=bounds.query_bounds,
        cu_seq_k=bounds.key_bounds,
        max_q=bounds.longest_query,
        max_k=bounds.longest_key,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    attended: Tensor = output[..., :width]
    return attended.unsqueeze(0)


class _Bounds(NamedTuple):
    """Bounds of the parts of a packed row, int32, and the tokens that keys are taken from where prompts are shared."""

    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_key: int
    keys: Tensor | None


@lru_cache(maxsize=8)
def _bounds(lengths: PackedLengths, device: torch.device) -> _Bounds:
    """Return the bounds of the parts on a device; copied once for all layers."""
    queries = list(lengths.prompts)
    keys = list(lengths.prompts)
    indices = [torch.arange(sum(lengths.prompts))]
    prompt_start = 0
    start = sum(lengths.prompts)
    for prompt, responses in zip(lengths.prompts, lengths.responses, strict=True):
        for size in responses:
            queries.append(size)
            keys.append(prompt + size)
            indices += [torch.arange(prompt_start, prompt_start + prompt), torch.arange(start, start + size)]
            start += size
        prompt_start += prompt
    with torch.inference_mode(False):
        bounds = [
            torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
            for sizes in (queries, keys)
        ]
        shared = torch.cat(indices).to(device) if any(lengths.responses) else None
    return _Bounds(bounds[0], bounds[1], max(queries), max(keys), shared)


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(_MASKED, packed_attention)
AttentionMaskInterface.register(_MASKED, eager_mask)
