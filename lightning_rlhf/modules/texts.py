"""Log-probs of given texts under a language-model role."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlhf.functional.logprobs import TokenScores
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.types import SequenceBatch


def text_scores(module: RoleModule, role: str, texts: SequenceBatch) -> tuple[TokenScores, Tensor]:
    """Compute log-probs and entropies of the marked tokens under a language-model role. All ranks.

    A reference without its own model is the actor without its adapters.

    Args:
        module: module of the role.
        role: name of the role.
        texts: B texts.

    Returns:
        scores: (B, L - 1) each, 0 where the mask is False; the first token of a text is never predicted.
        mask: (B, L - 1) bool, the marked tokens.
    """
    ids = texts.input_ids[:, : int(texts.lengths.max())]
    mask = texts.loss_mask[:, 1 : ids.shape[1]]
    index = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
    adapters = role != "ref" or "ref" in module.sources
    model = module.role_strategy.role(role if adapters else "actor")
    packing = module.layout.pack(texts, ids.shape[1])
    images = module.layout.images_of(texts)
    return model(ids, index, ids[:, 1:], mask, adapters=adapters, packing=packing, images=images), mask
