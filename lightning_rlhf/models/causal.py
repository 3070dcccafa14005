"""The language model of the roles actor and reference, which computes log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rlhf.batching.packing import Packing
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.allowed_tokens import EVERY_TOKEN, Found, Known, Restriction
from lightning_rlhf.functional.logprobs import TokenScores, chunked_token_scores, token_scores
from lightning_rlhf.images import FeatureCache, TextImages
from lightning_rlhf.models.classes import backbone_of
from lightning_rlhf.models.heads import EXCLUDED, Head, head_of, without_tokens
from lightning_rlhf.models.lora import adapters_disabled, merged_weights
from lightning_rlhf.models.master_weights import in_bfloat16_if_chosen
from lightning_rlhf.models.packed_attention import has_packed_attention, keep_masks
from lightning_rlhf.models.sequence_parallel import SequenceRanks, layout_of, part_of_row
from lightning_rlhf.types import AllowedTokens, RoutedExperts, SamplingLimits


class CausalLM(nn.Module):
    """A transformers causal language model that returns the log-probabilities of target tokens.

    The head is applied in chunks, only to hidden states that predict a target, so the (B, T, V) logits are never
    in memory at once. Texts are padded on the right, so with causal attention no attention mask is needed.

    Args:
        lm: model, for example ``Qwen2ForCausalLM``.
        float32_logits: argument of :func:`~lightning_rlhf.functional.logprobs.chunked_token_scores`.

    Raises:
        ValueError: the model has no output head.
    """

    def __init__(self, lm: PreTrainedModel, float32_logits: bool = True) -> None:
        super().__init__()
        if lm.get_output_embeddings() is None or backbone_of(lm) is None:
            raise UsageError(
                f"{type(lm).__name__} is not a causal language model: it has no output head over a backbone"
            )
        keep_masks(lm)
        self.lm, self.float32_logits = lm, float32_logits
        self.adapter_metadata: dict[str, str] = {}  # texts to store with adapters
        self.never_sampled: tuple[int, ...] = ()  # tokens that have no probability, such as those of images
        self.image_features: FeatureCache | None = None  # of a frozen image encoder
        self.computes_in_bfloat16 = False  # with float32 weights, by use_master_weights
        self.sequence_ranks: SequenceRanks | None = None  # processes that divide the tokens of each packed row

    @in_bfloat16_if_chosen
    def forward(
        self,
        input_ids: Tensor,
        index: Tensor,
        targets: Tensor,
        mask: Tensor,
        temperature: float = 1.0,
        squares: bool = False,
        adapters: bool = True,
        packing: Packing | None = None,
        own_logits: bool = False,
        of_targets: Callable[[Targets], Any] | None = None,
        images: TextImages | None = None,
        limits: AllowedTokens | LimitedTokens | None = None,
        experts: RoutedExperts | None = None,
    ) -> Any:
        """Compute the log-probability of each target token and the entropy of its distribution.

        Args:
            input_ids: (B, L) int64, right-padded.
            index: (B, T) int64, position in [0, L) whose hidden state predicts the target.
            targets: (B, T) int64 token ids.
            mask: (B, T) bool, True for targets to compute.
            temperature: divisor of the logits, positive.
            squares: whether to compute ``sum_pi_squared`` too.
            adapters: whether LoRA adapters are active. An argument of the call, because the wrappers that distribute
                the model act on calls.
            packing: layout of the texts in one row without padding; None computes padded rows.
            own_logits: whether to compute all logits by the model's own ``forward``, for a comparison; without packing,
                temperature and squares.
            of_targets: what to compute of the targets in place of their scores, such as a divergence from a teacher.
            images: images of the texts; None for texts without images.
            limits: the (B, T) tokens over which the scores are computed, or how to find them; None: all tokens. Not for
                ``of_targets``.
            experts: experts of the B texts that the routers are to choose; None leaves the choice to them.

        Returns:
            :class:`TokenScores` of shape (B, T), 0 where the mask is False, or the result of ``of_targets``.
        """
        if own_logits:
            logits = self.lm(input_ids=input_ids, use_cache=False).logits
            if self.never_sampled:
                logits[..., list(self.never_sampled)] += EXCLUDED
            rows = torch.arange(len(index), device=index.device).unsqueeze(1)
            return token_scores(logits[rows, index], targets)
        ranks = self.sequence_ranks
        packing = layout_of(input_ids, packing, ranks)
        with nullcontext() if adapters else adapters_disabled(self.lm):
            hidden = hidden_states(
                self.lm, input_ids, packing, images, cache=self.image_features, ranks=ranks, experts=experts
            )
        scored = mask.flatten().nonzero().squeeze(1)  # computed once, because nonzero() synchronizes with the GPU
        in_row = flat_index(input_ids, index, packing).flatten()[scored]
        if ranks is not None:
            local = ranks.is_local(in_row, len(hidden)).nonzero().squeeze(1)
            scored, in_row = scored[local], in_row[local] - ranks.rank * len(hidden)
        head = without_tokens(head_of(self.lm), self.never_sampled)
        states = hidden[in_row]
        if head.transform is not None:
            states = head.transform(states)
        scale = head.scale / temperature
        wanted = targets.flatten()[scored]
        tokens = Targets(states, wanted, head, self.float32_logits, scale, positions=scored, mask=mask, ranks=ranks)
        if of_targets is not None:
            return of_targets(tokens)
        restriction = restriction_of(limits, mask, scored)
        scores = tokens.scores(slice(None), squares, restriction)
        return TokenScores(
            tokens.spread(scores.logprobs),
            tokens.spread(scores.entropy),
            None if scores.sum_pi_squared is None else tokens.spread(scores.sum_pi_squared),
            tokens.spread_allowed(*restriction.tokens()) if isinstance(restriction, Found) else None,
        )

    def save_pretrained(self, directory: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write safetensors and config that ``transformers`` and vLLM load.

        Args:
            directory: output directory.
            weights: full parameters by name with adapters merged, for a sharded model; None uses the model's parameters
                and merges its adapters.
        """
        self.lm.save_pretrained(directory, state_dict=weights or merged_weights(self.lm))


@dataclass(frozen=True)
class LimitedTokens:
    """Limits whose tokens are to be found from the model's own logits.

    Args:
        where: (B, 1) or (B, T) bool, the tokens that were sampled with them.
    """

    limits: SamplingLimits
    where: Tensor


@dataclass(frozen=True)
class Targets:
    """Targets of a mask with the hidden states that predict them; with sequence parallelism, those of one process.

    Args:
        states: (N, H) hidden states.
        targets: (N,) int64 token ids.
        float32_logits: argument of :func:`~lightning_rlhf.functional.logprobs.chunked_token_scores`.
        scale: factor of the logits.
        positions: (N,) int64 positions in the flat mask.
        mask: (B, T) bool.
        ranks: processes whose targets are those of the mask together; None for all targets.
    """

    states: Tensor
    targets: Tensor
    head: Head
    float32_logits: bool
    scale: float
    positions: Tensor
    mask: Tensor
    ranks: SequenceRanks | None = None

    def total(self, values: Tensor) -> Tensor:
        """Return values of all targets, from those of this process, which are 0 elsewhere."""
        return values if self.ranks is None else self.ranks.sum(values)

    def numbers(self, part: Tensor, mask: Tensor) -> Tensor:
        """Return the numbers of some of these targets among the targets of a mask."""
        flat = mask.flatten().long()
        return (flat.cumsum(0) - flat)[self.positions[part]]

    def scores(
        self, part: slice | Tensor, squares: bool = False, restriction: Restriction = EVERY_TOKEN
    ) -> TokenScores:
        """Return the scores of some of the N targets."""
        return chunked_token_scores(
            self.states[part],
            self.head.weight,
            self.head.bias,
            self.targets[part],
            scale=self.scale,
            softcap=self.head.softcap,
            squares=squares,
            float32_logits=self.float32_logits,
            restriction=restriction,
        )

    def spread_allowed(self, counts: Tensor, ids: Tensor, added: Tensor) -> AllowedTokens:
        """Return the (B, T) allowed tokens of all targets from those of this process; see :meth:`Found.tokens`."""
        every, flags = self.spread(counts.float()).int(), self.spread(added.float()).bool()
        allowed = AllowedTokens.of(every, ids, flags)
        if self.ranks is None:
            return allowed
        first = allowed.starts.flatten()[self.positions] - (counts.cumsum(0) - counts)
        index = first.repeat_interleave(counts) + torch.arange(len(ids), device=ids.device)
        of_all = torch.zeros(int(every.sum()), device=ids.device).index_copy(0, index, ids.float())
        return AllowedTokens.of(every, self.ranks.sum(of_all), flags)

    def spread(self, values: Tensor) -> Tensor:
        """Return (B, T) values of all targets and 0 elsewhere, from the N values of this process."""
        if self.ranks is not None:
            return self.ranks.sum(self.scatter(values))
        return torch.zeros(self.mask.shape, device=self.mask.device).masked_scatter(self.mask, values)  # no view

    def scatter(self, values: Tensor, part: slice | Tensor = slice(None)) -> Tensor:
        """Return (B, T, ...) values of some of the N targets, and 0 elsewhere."""
        rows = values.new_zeros(self.mask.numel(), *values.shape[1:])
        return rows.index_copy(0, self.positions[part], values).view(*self.mask.shape, *values.shape[1:])


def restriction_of(limits: AllowedTokens | LimitedTokens | None, mask: Tensor, scored: Tensor) -> Restriction:
    """Return the restriction of some targets.

    Args:
        limits: argument of :meth:`CausalLM.forward`.
        mask: (B, T) bool.
        scored: (N,) int64 positions of the targets in the flat mask.
    """
    if isinstance(limits, LimitedTokens):
        return Found(limits.limits, limits.where.expand(mask.shape).flatten()[scored])
    return EVERY_TOKEN if limits is None else Known(limits.map(lambda values: values.flatten()[scored]))


def hidden_states(
    lm: Any,
    input_ids: Tensor,
    packing: Packing | None,
    images: TextImages | None = None,
    cache: FeatureCache | None = None,
    ranks: SequenceRanks | None = None,
    experts: RoutedExperts | None = None,
) -> Tensor:
    """Return the (N, H) last hidden states of padded or packed texts, or of this process's part of the packed row.

    Args:
        lm: model with a backbone.
        input_ids: (B, L) int64, right-padded.
        packing: layout of the texts in one row; None computes padded rows, with N = B x L.
        images: images of the texts; None for texts without images.
        cache: features of images in earlier passes; None encodes all images.
        ranks: processes that divide the tokens of a packed row without images; None for a whole row.
        experts: argument of :meth:`CausalLM.forward`. Layers get those of their input as ``routed_experts``.
    """
    arguments: dict[str, Any]
    if ranks is not None:
        assert packing is not None
        rows, positions = part_of_row(input_ids, packing, ranks)
        arguments = {"position_ids": positions, "packed_lengths": packing.lengths, "sequence_ranks": ranks}
    elif packing is not None and packing.width is not None:
        rows, arguments = input_ids.flatten()[packing.tokens].view(-1, packing.width), {}
    elif packing is not None:
        rows = input_ids.flatten()[packing.tokens].unsqueeze(0)
        arguments = {"position_ids": packing.positions}
        if has_packed_attention(lm):
            arguments["packed_lengths"] = packing.lengths
    else:
        rows, arguments = input_ids, {}
    if images is not None:
        arguments |= images.arguments(lm, input_ids, packing, cache)
    if experts is not None:
        places = torch.arange(rows.numel(), device=rows.device) if packing is None else packing.tokens
        places = places if ranks is None else ranks.part(places.unsqueeze(0)).squeeze(0)
        width = input_ids.shape[1]
        arguments["routed_experts"] = experts.at(places // width, places % width)
    states: Tensor = backbone_of(lm)(input_ids=rows, use_cache=False, **arguments).last_hidden_state
    return states.flatten(0, 1)


def flat_index(input_ids: Tensor, index: Tensor, packing: Packing | None) -> Tensor:
    """Return the (B, T) indices of positions in texts within the result of :func:`hidden_states`.

    Args:
        input_ids: (B, L) int64, right-padded.
        index: (B, T) int64 positions in the texts.
        packing: layout of the texts in one row; None for padded rows.
    """
    if packing is not None:
        return packing.row_index(index)
    rows, width = input_ids.shape
    return torch.arange(rows, device=input_ids.device).unsqueeze(1) * width + index
