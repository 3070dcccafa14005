"""Test whether a model separates the texts of a packed row."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.batching.packing import Packing, pack_texts
from lightning_rlhf.models.packed_attention import ARCHITECTURES

_TOKENS = 12


@torch.no_grad()
def packing_fault(lm: Any, evaluate: Callable[[Tensor, Packing | None], Tensor], exact: bool) -> str | None:
    """Return why texts of a packed row would influence each other, else None. All ranks.

    Architectures that tests have compared with padded texts are accepted. With others, a text is evaluated alone, and
    packed after each of two other texts. Its outputs must not depend on the other text, nor on packing itself, which
    would mean that positions do not restart. Attention passes, because transformers derives its mask from the
    positions; a state that is carried along the row, as in Mamba, does not.

    Args:
        lm: model of a role.
        evaluate: function of (B, L) token ids and their layout that returns the role's (B, L) outputs.
        exact: whether the model computes in float32.
    """
    if lm.config.model_type in ARCHITECTURES:
        return None
    name = f"{type(lm).__name__} with attention {lm.config._attn_implementation!r}"
    if "position_ids" not in inspect.signature(lm.base_model.forward).parameters:
        return f"{name} does not take positions, which separate packed texts"
    generator = torch.Generator().manual_seed(0)
    vocabulary = lm.config.get_text_config().vocab_size
    device = next(lm.parameters()).device
    one, other, ids = torch.randint(vocabulary, (3, 1, _TOKENS), generator=generator).to(device)
    packing = pack_texts([_TOKENS - 5, _TOKENS], _TOKENS, device)
    alone = evaluate(ids, None)[-1]
    after_one = evaluate(torch.cat([one, ids]), packing)[-1]
    after_other = evaluate(torch.cat([other, ids]), packing)[-1]
    by_neighbour = float((after_one - after_other).abs().max())
    by_packing = float((after_one - alone).abs().max())
    # Another batch shape changes the rounding; another neighbour changes no bit, except in mixtures of experts.
    rounding = 1e-4 if exact else 1e-2
    if by_neighbour <= rounding and by_packing <= 10 * rounding:
        return None
    return (
        f"{name} does not separate packed texts: the outputs of a text change by up to {by_neighbour:.1g} with its "
        f"neighbour, and by {by_packing:.1g} by packing"
    )
