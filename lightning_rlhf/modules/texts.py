"""A language model asked about given texts, padded or packed."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.functional.logprobs import TokenScores
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.types import SequenceBatch


def text_scores(module: RoleModule, role: str, texts: SequenceBatch, packed: bool) -> tuple[TokenScores, Tensor]:
    """What a language-model role says of the marked tokens. All ranks.

    Without a model of its own, the reference is the actor with its adapters switched off.

    Args:
        module: whose role it is.
        role: its name.
        texts: B of them.
        packed: whether they are laid behind each other without padding.

    Returns:
        scores: (B, L - 1) each, 0 where the mask is False; the first token of a text is never predicted.
        mask: (B, L - 1) bool, the marked tokens.
    """
    ids = texts.input_ids[:, : int(texts.lengths.max())]
    mask = texts.loss_mask[:, 1 : ids.shape[1]]
    index = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
    adapters = role != "ref" or "ref" in module.sources
    model = module.role_strategy.role(role if adapters else "actor")
    lengths = texts.lengths if packed else None
    return model(ids, index, ids[:, 1:], mask, adapters=adapters, lengths=lengths), mask


def check_packing(module: RoleModule) -> None:
    """Refuse to pack where the architecture or attention of a language model lets a text see another. All ranks.

    Raises:
        ValueError: texts are not kept apart.
    """
    if module.packing:
        for role in module.sources:
            check_apart(module, role)


@torch.no_grad()
def check_apart(module: RoleModule, role: str) -> None:
    """Try whether a model lets a packed text see the one before it. All ranks.

    A text is scored by itself, and packed behind either of two others: the neighbour must not change its
    log-probabilities, nor may packing as such, which would say that positions do not start again. Attention does,
    whose mask transformers derives from the positions; a state that is carried along the row, as in Mamba, does not.

    Args:
        module: whose role it is.
        role: its name.

    Raises:
        ValueError: texts are not kept apart.
    """
    lm: Any = getattr(module, role).lm
    name = f"{type(lm).__name__} with attention {lm.config._attn_implementation!r}"
    if "position_ids" not in inspect.signature(lm.base_model.forward).parameters:
        raise ValueError(f"{name} takes no positions, without which packed texts run into each other: packing: false")
    draw = torch.Generator().manual_seed(0)
    vocabulary = lm.config.get_text_config().vocab_size
    one, other, ids = (torch.randint(vocabulary, (1, 12), generator=draw) for _ in range(3))
    marked = torch.arange(12).expand(2, -1) > 0

    def scores(*rows: Tensor) -> Tensor:
        lengths = torch.tensor([7, 12][-len(rows) :])
        texts = SequenceBatch(torch.cat(rows), lengths, marked[: len(rows)] & (torch.arange(12) < lengths[:, None]))
        found: Tensor = text_scores(module, role, texts.to(module.device), len(rows) > 1)[0].logprobs[-1]
        return found

    alone, behind_one, behind_other = scores(ids), scores(one, ids), scores(other, ids)
    exact = module.trainer.precision == "32-true" and module.sources[role].dtype == "float32"
    rounding = 1e-4 if exact else 1e-2
    seen, moved = float((behind_one - behind_other).abs().max()), float((behind_one - alone).abs().max())
    # Another shape of the batch rounds otherwise; another neighbour should change no bit, but for mixtures of experts.
    if not (seen <= rounding and moved <= 10 * rounding):
        raise ValueError(
            f"{name} does not keep packed texts apart: a text's log-probabilities change by up to {seen:.1g} nats with "
            f"its neighbour, and by {moved:.1g} by being packed: set packing: false"
        )
