"""The language model of the roles actor and reference, which computes log-probabilities of tokens."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rlhf.batching.packing import Packing
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.divergence import (
    DistilledScores,
    Distillation,
    TeacherOutputs,
    distillation_scores,
    top_tokens,
)
from lightning_rlhf.functional.logprobs import TokenScores, chunked_token_scores, token_scores
from lightning_rlhf.models.classes import backbone_of
from lightning_rlhf.models.heads import Head, head_of
from lightning_rlhf.models.lora import adapters_disabled, merged_weights
from lightning_rlhf.models.packed_attention import NAME
from lightning_rlhf.types import TopTokens


class CausalLM(nn.Module):
    """A transformers causal language model that returns the log-probabilities of target tokens.

    The head is applied in chunks, only to hidden states that predict a target, so the (B, T, V) logits are never
    in memory at once. Texts are padded on the right, so with causal attention no attention mask is needed.

    Args:
        lm: model, for example ``Qwen2ForCausalLM``.

    Raises:
        ValueError: the model has no output head.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        if lm.get_output_embeddings() is None or backbone_of(lm) is None:
            raise UsageError(
                f"{type(lm).__name__} is not a causal language model: it has no output head over a backbone"
            )
        self.lm = lm

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
        distillation: Distillation | None = None,
        teacher: TeacherOutputs | None = None,
    ) -> TokenScores | DistilledScores | Tensor | TopTokens:
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
            distillation: teacher's distributions with which those of some tokens are compared.
            teacher: outputs of this model as a teacher, which are returned instead of scores; None for scores.

        Returns:
            Tensors of shape (B, T), 0 where the mask is False; with ``distillation``, its loss too. As a teacher, the
            (N, H) hidden states that predict the N targets of the mask, or their (B, T, K) top tokens.
        """
        if own_logits:
            logits = self.lm(input_ids=input_ids, use_cache=False).logits
            rows = torch.arange(len(index), device=index.device).unsqueeze(1)
            return token_scores(logits[rows, index], targets)
        with nullcontext() if adapters else adapters_disabled(self.lm):
            hidden = hidden_states(self.lm, input_ids, packing)
        flat = flat_index(input_ids, index, packing)
        scored = mask.flatten().nonzero().squeeze(1)  # computed once, because nonzero() synchronizes with the GPU
        head = head_of(self.lm)
        states = hidden[flat.flatten()[scored]]
        states = states if head.transform is None else head.transform(states)
        if teacher is not None:
            return _as_teacher(states, head, scored, mask, temperature, teacher)
        ids, scale = targets.flatten()[scored], head.scale / temperature
        if distillation is not None:
            return _distilled(states, head, ids, scale, scored, mask, distillation)
        scores = chunked_token_scores(
            states, head.weight, head.bias, ids, scale=scale, softcap=head.softcap, squares=squares
        )
        zeros = torch.zeros(mask.shape, device=mask.device)
        scattered = (None if values is None else zeros.masked_scatter(mask, values) for values in scores)
        return TokenScores(*scattered)  # type: ignore[arg-type]

    def save_pretrained(self, directory: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write safetensors and config that ``transformers`` and vLLM load.

        Args:
            directory: output directory.
            weights: full parameters by name with adapters merged, for a sharded model; None uses the model's parameters
                and merges its adapters.
        """
        self.lm.save_pretrained(directory, state_dict=weights or merged_weights(self.lm))


def _as_teacher(
    states: Tensor, head: Head, scored: Tensor, mask: Tensor, temperature: float, outputs: TeacherOutputs
) -> Tensor | TopTokens:
    """Return a teacher's hidden states, or its (B, T, K) top tokens.

    Args:
        states: (N, H) hidden states that predict the targets.
        head: head of the model.
        scored: (N,) positions of the targets in the flat mask.
        mask: (B, T) bool.
        temperature: divisor of the logits.
        outputs: requested outputs.
    """
    if outputs.top_k is None:
        return states
    tokens = top_tokens(
        states,
        head.weight[: outputs.vocabulary],
        None if head.bias is None else head.bias[: outputs.vocabulary],
        outputs.top_k,
        scale=head.scale / temperature,
        softcap=head.softcap,
    )

    def scattered(values: Tensor) -> Tensor:
        rows = values.new_zeros(mask.numel(), *values.shape[1:])
        return rows.index_copy(0, scored, values).view(*mask.shape, *values.shape[1:])

    return tokens.map(scattered)


def _distilled(
    states: Tensor, head: Head, ids: Tensor, scale: float, scored: Tensor, mask: Tensor, distillation: Distillation
) -> DistilledScores:
    """Return the (B, T) scores of a student, with the loss of the tokens that have a teacher.

    Args:
        states: (N, H) hidden states that predict the targets.
        head: head of the model.
        ids: (N,) targets.
        scale: factor of the logits.
        scored: (N,) positions of the targets in the flat mask.
        mask: (B, T) bool.
        distillation: teacher's distributions.
    """
    taught = distillation.mask.flatten()[scored]
    ours, others = taught.nonzero().squeeze(1), (~taught).nonzero().squeeze(1)
    distilled = distillation_scores(
        states[ours],
        head.weight,
        head.bias,
        ids[ours],
        distillation.teacher,
        distillation.token_weights.flatten()[scored[ours]],
        beta=distillation.beta,
        scale=scale,
        softcap=head.softcap,
        memory_bytes=distillation.memory_bytes,
    )
    zeros = torch.zeros(mask.numel(), device=mask.device)
    logprobs, entropy, divergence = (
        zeros.index_copy(0, scored[ours], values.to(zeros.dtype))
        for values in (distilled.logprobs, distilled.entropy, distilled.divergence)
    )
    if len(others):
        scores = chunked_token_scores(
            states[others], head.weight, head.bias, ids[others], scale=scale, softcap=head.softcap
        )
        logprobs = logprobs.index_copy(0, scored[others], scores.logprobs)
        entropy = entropy.index_copy(0, scored[others], scores.entropy)
    shape = mask.shape
    return DistilledScores(logprobs.view(shape), entropy.view(shape), divergence.view(shape), distilled.loss)


def hidden_states(lm: Any, input_ids: Tensor, packing: Packing | None) -> Tensor:
    """Return the (N, H) last hidden states of padded or packed texts.

    Args:
        lm: model with a backbone.
        input_ids: (B, L) int64, right-padded.
        packing: layout of the texts in one row; None computes padded rows, with N = B x L.
    """
    if packing is None or packing.width is not None:
        rows = input_ids
        if packing is not None and packing.width is not None:
            rows = input_ids.flatten()[packing.tokens].view(-1, packing.width)
        states: Tensor = backbone_of(lm)(input_ids=rows, use_cache=False).last_hidden_state
        return states.flatten(0, 1)
    lengths = {}
    if lm.config._attn_implementation == NAME:
        lengths = {"packed_lengths": packing.lengths}
    ids = input_ids.flatten()[packing.tokens].unsqueeze(0)
    output = backbone_of(lm)(input_ids=ids, position_ids=packing.positions, use_cache=False, **lengths)
    packed_states: Tensor = output.last_hidden_state
    return packed_states.squeeze(0)


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
