"""Divergence of a student's token distributions from a teacher's, without storing all logits at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_rlhf.functional.logprobs import add_product, dtype_of_head, head_logits, in_one_dtype
from lightning_rlhf.functional.products import linear, part_of
from lightning_rlhf.models.causal import Targets
from lightning_rlhf.types import LEAST_REST, TopTokens

DEFAULT_MEMORY_BYTES = 150 << 20  # of the logits and gradients that distillation computes at a time


class TeacherHead(NamedTuple):
    """Whole distributions of a teacher. Logits are ``scale * cap(weight @ states + bias)``.

    Args:
        states: (N, H) last hidden states of the teacher that predict the tokens.
        weight: (V, H) weight of its head; it may have other padding tokens at its end than the student's.
        bias: (V,) or None.
        scale: factor of the logits, divided by the temperature.
        softcap: soft cap of the logits, see :func:`~lightning_rlhf.functional.logprobs.head_logits`.
        rounds_to: dtype to which the head's results are rounded; None keeps them in float32.
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    rounds_to: torch.dtype | None = None


class DistillationScores(NamedTuple):
    """Result of :func:`distillation_scores`.

    Args:
        loss: () weighted sum of the divergences, with gradient.
        divergence: (N,) divergence of each token's distribution, nats, without gradient.
        logprobs: (N,) log-probability of the token under the student, without gradient.
        entropy: (N,) entropy of the student's distribution, nats, without gradient.
    """

    loss: Tensor
    divergence: Tensor
    logprobs: Tensor
    entropy: Tensor


def distillation_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    teacher: TeacherHead | TopTokens,
    token_weights: Tensor,
    *,
    beta: float,
    scale: float = 1.0,
    softcap: float | None = None,
    float32_logits: bool = True,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
) -> DistillationScores:
    """Generalized Jensen-Shannon divergence of each token's distribution, computed in chunks of bounded memory.

    With the teacher's probabilities q, the student's p, and m = beta q + (1 - beta) p:

    D = beta KL(q || m) + (1 - beta) KL(p || m);   beta = 0: KL(q || p);   beta = 1: KL(p || q)
    d D / d logits_v = p_v (g_v - sum_u p_u g_u)  with  g = (1 - beta) log(p / m);   beta = 0: p_v - q_v;
    beta = 1: g = log(p / q)

    Gradients are computed together with the loss, so that no logits are computed twice; the backward pass multiplies
    them by the gradient of the loss. Where student and teacher have different numbers of tokens, which are padding in
    models that share a tokenizer, D compares the distributions over the tokens that both have.
    See "On-Policy Distillation of Language Models", Agarwal et al. 2023, equation 1 and section 3.

    Args:
        hidden: (N, H) hidden states of the student that predict the tokens.
        weight: (V, H) weight of the student's head.
        bias: (V,) bias of the head, or None.
        targets: (N,) int64 ids of the tokens of the text.
        teacher: teacher's distributions, of the same N tokens.
        token_weights: (N,) weight of each token's divergence in the loss.
        beta: interpolation, in [0, 1].
        scale: multiplies the student's logits: 1 / temperature.
        softcap: soft cap of the student's logits.
        float32_logits: whether the student's head in bfloat16 has float32 results, which are not rounded.
        memory_bytes: memory of the logits and of their gradients at a time; at least one token is computed.

    Returns:
        Scores of the N tokens.
    """
    rounds_to = None if float32_logits else dtype_of_head(hidden)
    hidden, weight, bias = in_one_dtype(hidden, weight, bias)
    if isinstance(teacher, TeacherHead):
        teacher = TeacherHead(*in_one_dtype(*teacher[:3]), *teacher[3:])
    with_gradient = torch.is_grad_enabled()
    options = (token_weights, teacher, beta, scale, softcap, rounds_to, memory_bytes, with_gradient)
    return DistillationScores(*_HeadDivergence.apply(hidden, weight, bias, targets, options))


class _HeadDivergence(torch.autograd.Function):
    """Scores of a student's tokens by chunks; see :func:`distillation_scores`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the scores, and the gradients of the loss."""
        weights, teacher, beta, scale, softcap, rounds_to, memory_bytes, with_gradient = options
        wants_hidden, wants_weight, wants_bias = (with_gradient and wants for wants in ctx.needs_input_grad[:3])
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        chunk, block = _sizes(hidden, weight, memory_bytes, has_softcap=softcap is not None)
        buffers = _Buffers.of(hidden, weight, chunk, block)
        of_weight, of_bias = None, buffers.student.new_zeros(len(weight)) if wants_bias else None
        scores = []
        for begin in range(0, len(hidden), block):
            states = hidden[begin : begin + block]
            for first in range(begin, begin + len(states), chunk):
                part = slice(first, min(first + chunk, begin + len(states)))
                gradient = buffers.gradients[first - begin : part.stop - begin]
                memory = buffers.student[: len(gradient)]
                logits = head_logits(hidden[part], weight, bias, scale, softcap, out=memory, rounds_to=rounds_to)
                slope = None if softcap is None else 1 - (logits / (scale * softcap)).square()
                compare = _with_head if isinstance(teacher, TeacherHead) else _with_top_tokens
                chunk_of = _Chunk(logits, targets[part], beta, gradient, buffers)
                scores.append(compare(chunk_of, _part(teacher, part)))
                gradient.mul_((scale * weights[part]).unsqueeze(-1).to(gradient.dtype))
                if slope is not None:
                    gradient.mul_(slope)
                if of_hidden is not None:
                    of_hidden[part] = linear(gradient.to(hidden.dtype), weight.T)
            gradients = buffers.gradients[: len(states)]
            if of_bias is not None:
                of_bias += gradients.sum(dim=0)
            if wants_weight:  # read and written once for a block
                of_weight = add_product(of_weight, gradients.to(hidden.dtype).T, states)
        if scores:
            divergence, logprobs, entropy = (torch.cat(values) for values in zip(*scores, strict=True))
        else:
            divergence = logprobs = entropy = buffers.student.new_zeros(0)
        loss = (divergence * weights.to(divergence.dtype)).sum()
        if wants_weight:
            of_weight = torch.zeros_like(weight) if of_weight is None else of_weight.to(weight.dtype)
        ctx.save_for_backward(of_hidden, of_weight, None if of_bias is None else of_bias.to(weight.dtype))
        ctx.mark_non_differentiable(divergence, logprobs, entropy)
        return loss, divergence, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor, *_: Any) -> Any:
        """Multiply the gradients of hidden states, weight and bias by that of the loss."""
        # In place: the gradient of the weight is as large as the head.
        gradients = (None if value is None else value.mul_(of_loss) for value in ctx.saved_tensors)
        return *gradients, None, None


class _Buffers(NamedTuple):
    """Memory of one chunk of student's and teacher's logits, and of the gradients of a block of them."""

    student: Tensor
    teacher: Tensor
    spare: Tensor
    gradients: Tensor

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, chunk: int, block: int) -> _Buffers:
        """Return uninitialised memory."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        chunk, block = min(chunk, len(hidden)), min(block, len(hidden))
        sizes = (chunk, chunk, chunk, block)
        return cls(*(torch.empty(size, len(weight), dtype=dtype, device=hidden.device) for size in sizes))


def _sizes(hidden: Tensor, weight: Tensor, memory_bytes: int, has_softcap: bool) -> tuple[int, int]:
    """Return the tokens of a chunk and of a block of chunks.

    A chunk reads both heads, a block reads and writes the gradient of one. The fewest bytes are moved where a block has
    twice as many tokens as a chunk. The memory is that of three chunks, a block and its copy for the product with the
    states, and of two further chunks for the slope of a soft cap.
    """
    of_token = len(weight) * torch.promote_types(hidden.dtype, torch.float32).itemsize
    chunk = max(1, memory_bytes // (9 if has_softcap else 7) // of_token)
    return chunk, 2 * chunk


def _part(teacher: Any, part: slice) -> Any:
    """Return a teacher's distributions of some tokens."""
    if isinstance(teacher, TeacherHead):
        return teacher._replace(states=teacher.states[part])
    return teacher.map(lambda values: values[part])


class _Chunk(NamedTuple):
    """Student's logits of a chunk of tokens, and memory.

    Args:
        logits: (N, V), changed in place.
        targets: (N,) int64.
        beta: interpolation of the divergence.
        gradient: (N, V) memory of the gradient of each divergence in the logits.
        buffers: further memory.
    """

    logits: Tensor
    targets: Tensor
    beta: float
    gradient: Tensor
    buffers: _Buffers

    @property
    def spare(self) -> Tensor:
        """(N, V) memory."""
        return self.buffers.spare[: len(self.logits)]

    def scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """Subtract the largest logit from each; return exp(logits), and each token's log-probs and entropies."""
        # A vocabulary padded with -inf has probability 0 there, and 0 times -inf is NaN.
        self.logits.clamp_(min=torch.finfo(self.logits.dtype).min / 4)
        self.logits.sub_(self.logits.amax(dim=-1, keepdim=True))
        torch.exp(self.logits, out=self.gradient)
        total = self.gradient.sum(dim=-1)
        mean = torch.mul(self.gradient, self.logits, out=self.spare).sum(dim=-1) / total
        logprobs = self.logits.gather(-1, self.targets.unsqueeze(-1)).squeeze(-1) - total.log()
        return self.gradient, logprobs, total.log() - mean


def _with_head(chunk: _Chunk, teacher: TeacherHead) -> tuple[Tensor, Tensor, Tensor]:
    """Return divergences, log-probs and entropies of a chunk, and set the gradient of its logits."""
    weights, logprobs, entropy = chunk.scores()
    tokens = len(chunk.logits)
    common = min(chunk.logits.shape[1], len(teacher.weight))
    student = chunk.logits[:, :common].sub_(weights[:, :common].sum(dim=-1, keepdim=True).log())
    bias = part_of(teacher.bias, slice(common))
    memory = chunk.buffers.teacher[:tokens, :common]
    states, weight = teacher.states, teacher.weight[:common]
    other = head_logits(states, weight, bias, teacher.scale, teacher.softcap, out=memory, rounds_to=teacher.rounds_to)
    other.clamp_(min=torch.finfo(other.dtype).min / 4)
    other.sub_(other.amax(dim=-1, keepdim=True))
    spare = chunk.spare[:, :common]
    other.sub_(torch.exp(other, out=spare).sum(dim=-1, keepdim=True).log())
    divergence = divergence_with_gradient(student, other, chunk.beta, chunk.gradient[:, :common], spare)
    chunk.gradient[:, common:] = 0
    return divergence, logprobs, entropy


def _with_top_tokens(chunk: _Chunk, teacher: TopTokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return divergences, log-probs and entropies of a chunk, and set the gradient of its logits."""
    weights, logprobs, entropy = chunk.scores()
    normalizer = weights.sum(dim=-1, keepdim=True).log()
    top = chunk.logits.gather(-1, teacher.ids)
    rest = weights.scatter_(-1, teacher.ids, 0).sum(dim=-1, keepdim=True)
    # With all tokens among the top ones, the rest has the least probability for both, and adds nothing.
    rest = rest.clamp(min=torch.finfo(rest.dtype).tiny)
    student = torch.cat([top - normalizer, (rest.log() - normalizer).clamp(min=math.log(LEAST_REST))], dim=-1)
    other = torch.cat([teacher.logprobs, teacher.rest.unsqueeze(-1)], dim=-1).to(student.dtype)
    other.clamp_(min=torch.finfo(other.dtype).min / 4)  # as in _Chunk.scores()
    of_events, spare = torch.empty_like(student), torch.empty_like(student)
    divergence = divergence_with_gradient(student, other, chunk.beta, of_events, spare)
    # The gradient of the rest is divided among its tokens by their probabilities.
    chunk.gradient.mul_(of_events[:, -1:] / rest)
    chunk.gradient.scatter_(-1, teacher.ids, of_events[:, :-1])
    return divergence, logprobs, entropy


def divergence_with_gradient(log_p: Tensor, log_q: Tensor, beta: float, gradient: Tensor, spare: Tensor) -> Tensor:
    """Generalized Jensen-Shannon divergence of distributions, with its gradient in the student's logits.

    Args:
        log_p: (N, E) log-probabilities of the student, overwritten.
        log_q: (N, E) log-probabilities of the teacher, overwritten.
        beta: interpolation, in [0, 1]; see :func:`distillation_scores`.
        gradient: (N, E) memory of the gradient of each divergence in logits whose softmax is exp(log_p).
        spare: (N, E) memory.

    Returns:
        (N,) divergences, nats.
    """
    if beta == 0:
        torch.sub(log_q, log_p, out=spare)
        torch.exp(log_q, out=gradient)
        divergence = spare.mul_(gradient).sum(dim=-1)
        torch.sub(log_p.exp_(), gradient, out=gradient)
        return divergence
    if beta == 1:
        torch.sub(log_p, log_q, out=spare)
        divergence = torch.mul(log_p.exp_(), spare, out=gradient).sum(dim=-1)
        gradient.sub_(log_p.mul_(divergence.unsqueeze(-1)))
        return divergence
    torch.add(log_p, math.log1p(-beta), out=spare)
    torch.add(log_q, math.log(beta), out=gradient)
    log_m = torch.logaddexp(spare, gradient, out=spare)
    torch.sub(log_q, log_m, out=gradient)
    of_teacher = log_q.exp_().mul_(gradient).sum(dim=-1)
    log_ratio = torch.sub(log_p, log_m, out=spare)
    of_student = torch.mul(log_p.exp_(), log_ratio, out=gradient).sum(dim=-1)
    gradient.sub_(log_p.mul_(of_student.unsqueeze(-1))).mul_(1 - beta)
    return beta * of_teacher + (1 - beta) * of_student


def top_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    count: int,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    float32_logits: bool = True,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
) -> TopTokens:
    """Most likely tokens of a teacher's distributions, computed in chunks.

    Args:
        hidden: (N, H) hidden states of the teacher.
        weight: (V, H) weight of its head.
        bias: (V,) bias of the head, or None.
        count: K, number of tokens, in [1, V].
        scale: multiplies the logits: 1 / temperature.
        softcap: soft cap of the logits.
        float32_logits: whether a head in bfloat16 has float32 results, which are not rounded to bfloat16.
        memory_bytes: memory of the logits at a time; at least one token is computed.
    """
    rounds_to = None if float32_logits else dtype_of_head(hidden)
    hidden, weight, bias = in_one_dtype(hidden, weight, bias)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    # The product, its copy in float32, and a temporary result of logsumexp.
    chunk = max(1, memory_bytes // 3 // (len(weight) * dtype.itemsize))
    buffer = torch.empty(min(chunk, len(hidden)), len(weight), dtype=dtype, device=hidden.device)
    parts = []
    for states in hidden.split(chunk) if len(hidden) else ():
        logits = head_logits(states, weight, bias, scale, softcap, out=buffer[: len(states)], rounds_to=rounds_to)
        logits.sub_(logits.logsumexp(dim=-1, keepdim=True))
        logprobs, ids = logits.topk(count, dim=-1)
        rest = logits.scatter_(-1, ids, -math.inf).logsumexp(dim=-1).clamp(min=math.log(LEAST_REST))
        parts.append((ids, logprobs, rest))
    if not parts:
        empty = buffer.new_zeros(0, count)
        return TopTokens(empty.long(), empty, empty.sum(dim=-1))
    return TopTokens(*(torch.cat(values) for values in zip(*parts, strict=True)))


@dataclass(frozen=True)
class TeacherOutputs:
    """Outputs of a language model as a teacher.

    Args:
        top_k: number of most likely tokens of each distribution; None for hidden states, from which whole distributions
            are computed together with the student's.
        vocabulary: number of tokens of the student; the teacher's padding tokens after them are left out.
        memory_bytes: memory of the logits at a time.
    """

    top_k: int | None
    vocabulary: int
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __call__(self, targets: Targets) -> Tensor | TopTokens:
        """Return (N, H) hidden states that predict the N targets, or the (B, T, K) top tokens of their distribution."""
        if self.top_k is None and targets.ranks is None:
            return targets.states
        if self.top_k is None:
            of_all = targets.states.new_zeros(int(targets.mask.sum()), targets.states.shape[1])
            everything = torch.arange(len(targets.positions), device=targets.mask.device)
            return targets.total(of_all.index_copy(0, targets.numbers(everything, targets.mask), targets.states))
        weight, bias = targets.head.weight[: self.vocabulary], targets.head.bias
        if bias is not None:
            bias = bias[: self.vocabulary]
        tokens = top_tokens(
            targets.states,
            weight,
            bias,
            self.top_k,
            scale=targets.scale,
            softcap=targets.head.softcap,
            float32_logits=targets.float32_logits,
            memory_bytes=self.memory_bytes,
        )
        return tokens.map(lambda values: targets.total(targets.scatter(values)).clone())  # FSDP warns of views


@dataclass(frozen=True)
class Distillation:
    """Teachers' distributions of the tokens of some rows, with which a student is compared.

    Args:
        teachers: distributions of each teacher and the (B, T) bool mask of its tokens, in whose order they are; a token
            has at most one teacher.
        token_weights: (B, T) weight of each token's divergence in the loss.
        beta: interpolation, see :func:`distillation_scores`.
        memory_bytes: memory of the logits and of their gradients at a time.
    """

    teachers: Sequence[tuple[TeacherHead | TopTokens, Tensor]]
    token_weights: Tensor
    beta: float
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __call__(self, targets: Targets) -> DistilledScores:
        """Return the (B, T) scores of a student, with the loss of the targets that have a teacher."""
        without = torch.ones_like(targets.positions, dtype=torch.bool)
        zeros = torch.zeros(targets.mask.shape, device=targets.mask.device)
        total = DistilledScores(zeros, zeros, zeros, loss=zeros.sum())
        for teacher, mask in self.teachers:
            has_teacher = mask.flatten()[targets.positions]
            part, without = has_teacher.nonzero().squeeze(1), without & ~has_teacher
            if targets.ranks is not None:
                teacher = _rows_of(teacher, targets.numbers(part, mask))
            scores = distillation_scores(
                targets.states[part],
                targets.head.weight,
                targets.head.bias,
                targets.targets[part],
                teacher=teacher,
                token_weights=self.token_weights.flatten()[targets.positions[part]],
                beta=self.beta,
                scale=targets.scale,
                softcap=targets.head.softcap,
                float32_logits=targets.float32_logits,
                memory_bytes=self.memory_bytes,
            )
            total = DistilledScores(
                total.logprobs + targets.scatter(scores.logprobs, part),
                total.entropy + targets.scatter(scores.entropy, part),
                total.divergence + targets.scatter(scores.divergence, part),
                total.loss + scores.loss,
            )
        # Also without such targets: ZeRO-3 needs the same operations on every rank.
        part = without.nonzero().squeeze(1)
        others = targets.scores(part)
        total = total._replace(
            logprobs=total.logprobs + targets.scatter(others.logprobs, part),
            entropy=total.entropy + targets.scatter(others.entropy, part),
        )
        return DistilledScores(*map(targets.total, total))


class DistilledScores(NamedTuple):
    """Scores of a student's tokens, some of which have a teacher.

    Args:
        logprobs: (B, T) log-probability of each token; without gradient for tokens with a teacher.
        entropy: (B, T) entropy of its distribution, nats; without gradient for tokens with a teacher.
        divergence: (B, T) divergence from the teacher, nats, without gradient; 0 without a teacher.
        loss: () weighted sum of the divergences, with gradient.
    """

    logprobs: Tensor
    entropy: Tensor
    divergence: Tensor
    loss: Tensor


def _rows_of(teacher: TeacherHead | TopTokens, rows: Tensor) -> TeacherHead | TopTokens:
    """Return a teacher's distributions of some of its tokens."""
    if isinstance(teacher, TopTokens):
        return teacher.map(lambda values: values[rows])
    return teacher._replace(states=teacher.states[rows])
