"""Log-probs of given texts under a language-model role, padded or packed."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.logprobs import TokenScores
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.types import SequenceBatch


def text_scores(module: RoleModule, role: str, texts: SequenceBatch, packed: bool) -> tuple[TokenScores, Tensor]:
    """Compute log-probs and entropies of the marked tokens under a language-model role. All ranks.

    A reference without its own model is the actor without its adapters.

    Args:
        module: module of the role.
        role: name of the role.
        texts: B texts.
        packed: whether the texts are concatenated without padding.

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
    """Raise if packing is on and a language model lets a packed text attend to another. All ranks.

    Raises:
        ValueError: the texts of a packed row influence each other.
    """
    if module.packing:
        for role in module.sources:
            check_apart(module, role)


@torch.no_grad()
def check_apart(module: RoleModule, role: str) -> None:
    """Test whether a model lets a packed text attend to the one before it. All ranks.

    A text is scored alone, and packed after each of two other texts. Its log-probs must not depend on the other text,
    nor on packing itself, which would mean that positions do not restart. Attention passes, because transformers
    derives its mask from the positions; a state that is carried along the row, as in Mamba, does not.

    Args:
        module: module of the role.
        role: name of the role.

    Raises:
        ValueError: the texts of a packed row influence each other.
    """
    lm: Any = getattr(module, role).lm
    name = f"{type(lm).__name__} with attention {lm.config._attn_implementation!r}"
    if "position_ids" not in inspect.signature(lm.base_model.forward).parameters:
        raise UsageError(f"{name} does not take positions, which separate packed texts: set packing: false")
    generator = torch.Generator().manual_seed(0)
    vocabulary = lm.config.get_text_config().vocab_size
    one, other, ids = (torch.randint(vocabulary, (1, 12), generator=generator) for _ in range(3))
    marked = torch.arange(12).expand(2, -1) > 0

    def logprobs(*rows: Tensor) -> Tensor:
        lengths = torch.tensor([7, 12][-len(rows) :])
        texts = SequenceBatch(torch.cat(rows), lengths, marked[: len(rows)] & (torch.arange(12) < lengths[:, None]))
        scores, _ = text_scores(module, role, texts.to(module.device), packed=len(rows) > 1)
        return scores.logprobs[-1]

    alone = logprobs(ids)
    after_one = logprobs(one, ids)
    after_other = logprobs(other, ids)
    exact = module.trainer.precision == "32-true" and module.sources[role].dtype == "float32"
    rounding = 1e-4 if exact else 1e-2
    by_neighbour = float((after_one - after_other).abs().max())
    by_packing = float((after_one - alone).abs().max())
    # Another batch shape changes the rounding; another neighbour changes no bit, except in mixtures of experts.
    if not (by_neighbour <= rounding and by_packing <= 10 * rounding):
        raise UsageError(
            f"{name} does not separate packed texts: a text's log-probabilities change by up to {by_neighbour:.1g} "
            f"nats with its neighbour, and by {by_packing:.1g} by packing: set packing: false"
        )
