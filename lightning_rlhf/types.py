"""Dataclasses that packages exchange: prompts, completions, rollouts, experience, batches.

Axes: B responses, P prompt tokens, T response tokens. Padding is always on the right, so with causal attention no real
token attends to it, and no attention mask is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.ranges import check_ranges

FinishReason = Literal["stop", "length"]
LEAST_REST = 1e-7  # least probability of all tokens but the top ones; float32 has no digits below
_Batch = TypeVar("_Batch", bound="TensorBatch")


@dataclass(frozen=True)
class TensorBatch:
    """Base class of dataclasses of tensors with equal numbers of rows, which are moved and indexed together."""

    def __len__(self) -> int:
        return len(next(iter(self._rows())))

    @property
    def total_lengths(self) -> Tensor:
        """(B,) number of tokens of each row in a model's input; both texts of a pair are padded to the longer one."""
        raise NotImplementedError

    @property
    def real_lengths(self) -> Tensor:
        """(B,) number of tokens of each row if rows are packed without padding."""
        return self.total_lengths

    def prompt_numbers(self) -> Tensor | None:
        """Return the (3, B) number of each row's prompt and the tokens of prompt and response; None without them.

        Rows with the same number have the same prompt, which a packed row of tokens contains once.
        """
        return None

    def _rows(self) -> Iterator[Tensor]:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, TensorBatch):
                yield from value._rows()
            elif isinstance(value, Tensor):
                yield value

    def map(self: _Batch, function: Callable[[Tensor], Tensor]) -> _Batch:
        """Apply a function to every tensor of the batch."""

        def convert(value: Any) -> Any:
            if isinstance(value, TensorBatch):
                return value.map(function)
            if isinstance(value, Tensor):
                return function(value)
            if isinstance(value, Mapping):
                return {key: convert(item) for key, item in value.items()}
            return value

        return dataclasses.replace(self, **{f.name: convert(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def to(self: _Batch, device: torch.device | str, **kwargs: Any) -> _Batch:
        """Move the batch to a device."""
        return self.map(lambda tensor: tensor.to(device, **kwargs))

    def __getitem__(self: _Batch, rows: Tensor | Sequence[int]) -> _Batch:
        """Return the rows with the given indices, or those for which a mask is True."""
        index = torch.as_tensor(rows)
        index = index.nonzero().squeeze(1) if index.dtype == torch.bool else index.long()
        return self.map(lambda tensor: tensor[index.to(tensor.device)])


def expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...] | torch.Size) -> None:
    """Validate the shape of a tensor.

    Raises:
        ValueError: the shape differs; the message contains the name and both shapes.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")


@dataclass(frozen=True)
class SamplingLimits:
    """Limits of the tokens that can be sampled, after the division by the temperature: min-p, then top-k, then top-p.

    Args:
        top_p: probability of the most likely tokens to keep together (nucleus sampling), in (0, 1]. 1 keeps all.
        top_k: number of most likely tokens to keep. 0 keeps all.
        min_p: smallest probability to keep, as a fraction of the largest one, in [0, 1]. 0 keeps all.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, top_p="in (0, 1]", min_p="in [0, 1]")
        if self.top_k < 0:
            raise UsageError(f"top_k must be 0 (keep all tokens) or positive, got {self.top_k}")

    def __bool__(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


NO_LIMITS = SamplingLimits()


class TokenIds:
    """Token ids that all rows of a batch share: they stay whole when rows are selected."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the (N,) int32 ids on a device, copied there once."""
        if self.ids.device == device:
            return self.ids
        if device not in self._copies:
            self._copies[device] = self.ids.to(device)
        return self._copies[device]


@dataclass(frozen=True)
class AllowedTokens(TensorBatch):
    """The tokens that :class:`SamplingLimits` left to sample from, at each token of a response or of a batch.

    Args:
        counts: (...) int32, number of allowed tokens; 0 where all tokens are.
        starts: (...) int64, index in ``ids`` of the first of them.
        ids: token ids.
        added: (...) bool, True where the sampled token was not among those that the trainer found, and was added.
    """

    counts: Tensor
    starts: Tensor
    ids: TokenIds
    added: Tensor

    @classmethod
    def of(cls, counts: Tensor, ids: Tensor, added: Tensor | None = None) -> AllowedTokens:
        """Return the tokens whose ids follow each other.

        Args:
            counts: (...) number of allowed tokens.
            ids: (N,) ids, N the sum of the counts.
            added: argument of the class; None: nowhere.
        """
        flat = counts.flatten().long()
        added = torch.zeros_like(counts, dtype=torch.bool) if added is None else added
        return cls(counts.int(), (flat.cumsum(0) - flat).view(counts.shape), TokenIds(ids.int()), added)

    @classmethod
    def join(cls, parts: Sequence[AllowedTokens]) -> AllowedTokens:
        """Return the tokens of several texts or batches, one after the other along the first dimension."""
        counts, added = torch.cat([part.counts for part in parts]), torch.cat([part.added for part in parts])
        return cls.of(counts, torch.cat([part.listed()[1] for part in parts]), added)

    @property
    def device(self) -> torch.device:
        """Device of the counts."""
        return self.counts.device

    @classmethod
    def every(cls, *shape: int) -> AllowedTokens:
        """Return that all tokens are allowed everywhere."""
        return cls.of(torch.zeros(shape, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))

    def listed(self) -> tuple[Tensor, Tensor]:
        """Return the allowed tokens place by place: (M,) int64 numbers of their places in the flat counts, and ids."""
        counts = self.counts.flatten().long()
        places = torch.arange(len(counts), device=self.device).repeat_interleave(counts)
        first = self.starts.flatten() - (counts.cumsum(0) - counts)
        index = torch.arange(len(places), device=self.device) + first[places]
        return places, self.ids.on(self.device)[index].long()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AllowedTokens):
            return NotImplemented
        return torch.equal(self.counts, other.counts) and torch.equal(self.listed()[1], other.listed()[1])


@dataclass(frozen=True)
class RoutedExperts(TensorBatch):
    """The experts that routers of an engine chose at each token of B prompts with responses.

    Args:
        numbers: (B, S * L * K * 2) uint8, 1 + expert as int16 for S tokens, L layers and K choices; 0 where it is
            unknown. Bytes, because NCCL and gloo do not transfer int16.
        layers: L.
        choices: K.
    """

    numbers: Tensor
    layers: int
    choices: int

    @classmethod
    def of(cls, rows: Sequence[Tensor | None]) -> RoutedExperts | None:
        """Return the experts of several completions, see :class:`Completion`; None if none of them has any."""
        known = [row for row in rows if row is not None]
        if not known:
            return None
        layers, choices = known[0].shape[1:]
        tokens = max(map(len, known))
        numbers = torch.zeros(len(rows), tokens, layers, choices, dtype=torch.int16)
        for of_row, row in zip(numbers, rows, strict=True):
            if row is not None:
                of_row[: len(row)] = row + 1
        return cls(numbers.flatten(1).view(torch.uint8), layers, choices)

    def at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the (N, L, K) int16 experts at (N,) positions in rows, -1 where they are unknown."""
        numbers = self.numbers.view(torch.int16).unflatten(1, (-1, self.layers, self.choices))
        is_known = (positions < numbers.shape[1]).view(-1, 1, 1)
        return torch.where(is_known, numbers[rows, positions.clamp(max=numbers.shape[1] - 1)], 0) - 1


@dataclass(frozen=True)
class SamplingParams:
    """Sets how responses are sampled.

    Args:
        max_tokens: longest response, tokens, at least 1.
        temperature: divisor of the logits. 0 always selects the most likely token (greedy).
        limits: which tokens can be sampled.
        stop_token_ids: tokens that end a response. They are part of it.
        echo: whether completions begin with the prompt's tokens after the first, and their log-probs at temperature 1.
            These carry the ``policy_version`` of the completion, and count every token, even those never sampled.
        never_sampled: tokens that are not sampled, such as those that stand for images.
    """

    max_tokens: int
    temperature: float = 1.0
    limits: SamplingLimits = NO_LIMITS
    stop_token_ids: tuple[int, ...] = ()
    echo: bool = False
    never_sampled: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_ranges(self, max_tokens="at least 1")
        if not self.temperature >= 0:
            raise UsageError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")


@dataclass(frozen=True)
class ConversationRecord:
    """Record of a conversation with an environment: its messages, rewards and counts.

    Args:
        prompt_ids: tokens of the prompt with the messages that the environment appended to it at the start.
        messages: messages after the prompt, of policy and environment.
        turn_ends: number of tokens from the end of the prompt to the end of each turn of the policy.
        turn_rewards: reward of each turn; the first contains that of the start.
        stop: reason of the end: ``done`` (the environment or agent ended it), ``max_turns``, ``truncated`` (a limit cut
            a turn), ``tokens`` (none were left for another turn), ``images`` (a reply had more than allowed),
            ``malformed`` (the bridge could not continue the turn) or ``fault``.
        tool_calls: number of tool calls.
        malformed: number of turns with a tool call that could not be parsed.
        fault: kind of the environment's failure; None without one.
        metrics: numbers that the environment logged, summed over its replies.
        environment_s: seconds in which the environment was called.
        text_starts: number of tokens after the prompt before each further branch of an agent, which begins there with
            its prompt.
        images: images that the environment wrote, in their order.
        images_in_prompt: number of those that it appended to the prompt at the start.
    """

    prompt_ids: list[int]
    messages: list[dict[str, Any]]
    turn_ends: list[int]
    turn_rewards: list[float]
    stop: str
    tool_calls: int = 0
    malformed: int = 0
    fault: str | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    environment_s: float = 0.0
    text_starts: list[int] = dataclasses.field(default_factory=list)
    images: tuple[EncodedImage, ...] = ()
    images_in_prompt: int = 0


_ROUNDING = 1e-3  # a log-softmax in bfloat16 can round to just above 0


@dataclass(frozen=True)
class Completion:
    """An engine's result for one request.

    Args:
        token_ids: sampled tokens, including the stop token, at least one.
        logprobs: log-probability of each token under the sampling distribution, same length.
        finish_reason: ``stop`` after a stop token, ``length`` when the limit cut the response.
        policy_version: version of the policy that sampled the first token.
        later_versions: pair (index, version) of each push while the response was sampled: the tokens from this index on
            have this version.
        sampled: whether the policy sampled each token, which an environment wrote otherwise; None if it sampled all.
        conversation: record of a conversation with an environment; None without one.
        allowed: (T,) tokens that limits left to sample from; None if there were no limits, or the engine does not
            return them.
        experts: (N, L, K) int16, the K experts that each of L layers chose at the N first tokens of prompt and
            response, -1 where they are unknown; None if the engine does not return them. The last token has none.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    policy_version: int
    later_versions: tuple[tuple[int, int], ...] = ()
    sampled: tuple[bool, ...] | None = None
    conversation: ConversationRecord | None = None
    allowed: AllowedTokens | None = None
    experts: Tensor | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.logprobs):
            raise UsageError(
                f"a completion needs one log-probability per token and at least one token, "
                f"got {len(self.token_ids)} tokens and {len(self.logprobs)} log-probabilities"
            )
        if self.sampled is not None and (len(self.sampled) != len(self.token_ids) or not self.sampled[-1]):
            raise UsageError("a conversation needs one mark per token, and its last token must be sampled")
        if self.allowed is not None and len(self.allowed) != len(self.token_ids):
            raise UsageError(f"got allowed tokens for {len(self.allowed)} of {len(self.token_ids)} tokens")
        for i, value in enumerate(self.logprobs):
            if value > _ROUNDING:  # NaN is reported later, with the name of the damaged weight
                raise UsageError(f"log-probabilities of sampled tokens must not be positive, got {value} at token {i}")

    @property
    def token_versions(self) -> list[int]:
        """Version of the policy that sampled each token."""
        versions = [self.policy_version] * len(self.token_ids)
        for start, version in self.later_versions:
            versions[start:] = [version] * (len(versions) - start)
        return versions

    def cut(self, max_tokens: int) -> Completion:
        """Return the completion, or its first tokens if it is longer.

        Args:
            max_tokens: largest number of tokens.
        """
        if len(self.token_ids) <= max_tokens:
            return self
        ids, logprobs = self.token_ids[:max_tokens], self.logprobs[:max_tokens]
        later = tuple((start, version) for start, version in self.later_versions if start < max_tokens)
        allowed = None if self.allowed is None else self.allowed[range(max_tokens)]
        experts = None if self.experts is None else self.experts[: max_tokens - len(self.token_ids)]
        return Completion(ids, logprobs, "length", self.policy_version, later, allowed=allowed, experts=experts)


@dataclass(frozen=True)
class PromptImages:
    """Images of a prompt, for an engine.

    Args:
        images: the images in their order; empty for a prompt without images.
        numbers: K numbers of the images, padded by -1.
        unexpanded_ids: tokens of the prompt with one placeholder for each image; the tokens of the prompt itself have
            the placeholders of all features.
    """

    images: tuple[EncodedImage, ...]
    numbers: tuple[int, ...]
    unexpanded_ids: tuple[int, ...]


@dataclass(frozen=True)
class TokenPrompt(Sequence[int]):
    """What an engine continues. An engine that reads texts only can use it as a sequence of token ids.

    Args:
        token_ids: tokens, in which each image has the tokens of its features.
        images: images among the tokens; None where the data have none.
    """

    token_ids: Sequence[int]
    images: PromptImages | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, key: Any) -> Any:
        return self.token_ids[key]

    @property
    def encoded_images(self) -> tuple[EncodedImage, ...]:
        """The images in their order; empty without any."""
        return () if self.images is None else self.images.images


@dataclass(frozen=True)
class Prompt:
    """A prompt with what belongs to its row of the data.

    Args:
        token_ids: tokens of the prompt.
        text: the prompt as text, rendered by the chat template for messages; ``<image>`` stands for an image.
        columns: further columns of the row, for rewards and environments; read-only.
        messages: chat messages from which the prompt was rendered; empty for plain text.
        tools: JSON schemas of the tools that the chat template described.
        images: images of the prompt; None where the data have none.
        index: position in the data, which seeds the samples; another number if a sampler repeats the prompt within an
            epoch.
        position: position among the prompts of all ranks, by which their responses are numbered.
        source: number of the row's source among those of the data, -1 without one; None if the data has none.
    """

    token_ids: list[int]
    text: str
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[dict[str, Any]] = ()
    images: PromptImages | None = None
    index: int = 0
    position: int = 0
    source: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", MappingProxyType(dict(self.columns)))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Prompt, **vars(self) | {"columns": dict(self.columns)}), ()

    @property
    def tokens(self) -> TokenPrompt:
        """The part that an engine reads."""
        return TokenPrompt(self.token_ids, self.images)


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one step.

    Args:
        prompts: prompts of this rank.
        epoch: number of completed passes over the data.
    """

    prompts: Sequence[Prompt]
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def __getitem__(self, prompts: slice) -> PromptBatch:
        """Return a slice of the prompts."""
        return dataclasses.replace(self, prompts=self.prompts[prompts])

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, which all prompts have."""
        return list(self.prompts[0].columns) if self.prompts else []

    def take(self, numbers: Iterable[int]) -> PromptBatch:
        """Return the prompts with some numbers in this batch."""
        return dataclasses.replace(self, prompts=[self.prompts[number] for number in numbers])

    def to(self, device: torch.device | str) -> PromptBatch:
        """Return the batch unchanged, because it has no tensors; Lightning calls this on every batch."""
        return self


@dataclass(frozen=True)
class RolloutImages(TensorBatch):
    """Images of the responses.

    Args:
        numbers: (B, K) int64, numbers of each row's images in their order, padded by -1.
        in_prompt: (B,) int64, number of the images in each row's prompt; the others are in the response.
        written: images that an environment wrote, by their numbers; others are in the data.
    """

    numbers: Tensor
    in_prompt: Tensor
    written: Mapping[int, EncodedImage] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class ConversationTokens(TensorBatch):
    """What the tokens of conversations with an environment have in addition.

    Args:
        step_rewards: (B, T) float32, part of ``reward`` that the environment gave for a turn before the last, at the
            turn's last token, 0 elsewhere.
        text_starts: (B, T) bool, True at the first token of a further text in a response, which is computed without the
            tokens before it: the prompt of another branch of an agent. None without an agent.
    """

    step_rewards: Tensor
    text_starts: Tensor | None = None


@dataclass(frozen=True)
class PaddedPrompts(TensorBatch):
    """Prompts as tensors.

    Args:
        ids: (B, P) int64, right-padded.
        lengths: (B,) int64, at least 1.
    """

    ids: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Rollout(TensorBatch):
    """Prompts with sampled responses and their rewards.

    Your losses and metrics read it. B counts responses, P prompt tokens and T response tokens.

    Args:
        prompt_ids: (B, P) int64, right-padded.
        prompt_lengths: (B,) int64, at least 1.
        response_ids: (B, T) int64, right-padded.
        response_lengths: (B,) int64, tokens of the response including environment tokens, at least 1.
        response_mask: (B, T) bool, True where the policy sampled the token (the stop token included). False on padding
            and on tokens that an environment wrote inside the response.
        rollout_logprobs: (B, T) float32, log-probabilities of the engine at sampling time, 0 where the mask is False.
        rewards: (B,) float32 rewards of each reward function by name, NaN where it did not apply.
        reward: (B,) float32, weighted sum of the applicable rewards, reward units. NaN for a response without a reward.
        group: (B,) int64, equal for responses to the same prompt of this data rank.
        truncated: (B,) bool, True where the length limit cut the response.
        policy_version: (B, T) int64, version of the policy that sampled each token, counted in steps before its weights
            were pushed. 0 where the mask is False.
        included: (B,) bool, False for responses that only fill the batch. Metrics include them, losses do not.
        position: (B,) int64, position among the responses of all ranks. It determines the order of mini-batches.
        temperature: temperature of the sampling distribution. The trainer divides its logits by it too.
        limits: limits of the sampled tokens. The trainer computes probabilities over the tokens that they allowed.
        source: (B,) int64, number of the prompt's source among the sources of the data, -1 without one. None if the
            data name no sources.
        conversation: what conversations with an environment need in addition. None without an environment.
        teacher: prompts of a teacher. None if it reads the student's.
        images: images of the rows. None without images.
        is_given: (B,) bool, True for responses from the data, which no policy sampled. Their ``rollout_logprobs`` are 0
            and their ``rewards`` NaN. None if all were sampled.
        skipped: (B,) bool, True where a reward failed and ``on_error`` is ``skip``. Whatever learns from rewards leaves
            the response out, even if a reward model scores it. None before the rewards are known.
        allowed: (B, T) tokens that the limits allowed. None without limits, and until the module finds them because the
            engine does not return them.
        experts: experts that the engine's routers chose. None unless it returns them.
    """

    prompt_ids: Tensor
    prompt_lengths: Tensor
    response_ids: Tensor
    response_lengths: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    rewards: dict[str, Tensor]
    reward: Tensor
    group: Tensor
    truncated: Tensor
    policy_version: Tensor
    included: Tensor
    position: Tensor
    temperature: float = 1.0
    limits: SamplingLimits = NO_LIMITS
    source: Tensor | None = None
    conversation: ConversationTokens | None = None
    teacher: PaddedPrompts | None = None
    images: RolloutImages | None = None
    is_given: Tensor | None = None
    skipped: Tensor | None = None
    allowed: AllowedTokens | None = None
    experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        rows, tokens = len(self.prompt_ids), self.response_ids.shape
        expect_shape("Rollout.response_ids", self.response_ids, (rows, *tokens[-1:]))
        shapes = {"prompt_ids": self.prompt_ids.shape}
        shapes |= dict.fromkeys(("response_mask", "rollout_logprobs", "policy_version", "response_ids"), tokens)
        values = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        values |= {f"rewards[{name!r}]": each for name, each in self.rewards.items()}
        for name, value in values.items():
            expect_shape(f"Rollout.{name}", value, shapes.get(name, (rows,)))
        if self.conversation is not None:
            for name, value in vars(self.conversation).items():
                if value is not None:
                    expect_shape(f"Rollout.conversation.{name}", value, tokens)
        for name in ("teacher", "images", "allowed", "experts"):
            part = getattr(self, name)
            if part is not None and len(part) != rows:
                raise ValueError(f"Rollout.{name} has {len(part)} rows, expected {rows}")

    @property
    def total_lengths(self) -> Tensor:
        """(B,) tokens of prompt and response together."""
        return self.prompt_lengths + self.response_lengths

    @property
    def sampled_rows(self) -> Tensor:
        """(B,) bool, the responses that the policy sampled."""
        if self.is_given is None:
            return torch.ones_like(self.truncated)
        return ~self.is_given

    @property
    def sampled_lengths(self) -> Tensor:
        """(B,) tokens of the response that the policy sampled."""
        return self.response_mask.sum(dim=1)

    def of_teacher(self) -> Rollout:
        """Return the responses with the prompts of the teacher."""
        if self.teacher is None:
            return self
        prompts = self.teacher
        return dataclasses.replace(
            self, prompt_ids=prompts.ids, prompt_lengths=prompts.lengths, teacher=None, experts=None
        )

    @property
    def text_starts(self) -> Tensor | None:
        """(B, T) bool, True at the first token of a further text in a response; None without an agent."""
        return None if self.conversation is None else self.conversation.text_starts

    def prompt_numbers(self) -> Tensor:
        """Return the (3, B) number of each row's prompt and the tokens of prompt and response.

        The number is the first row of the group with the same tokens and images. A row of several texts does not share
        its prompt.
        """
        first = (self.group.unsqueeze(1) == self.group).long().argmax(dim=1)
        is_same = (self.prompt_lengths == self.prompt_lengths[first]) & (self.prompt_ids == self.prompt_ids[first]).all(
            dim=1
        )
        if self.images is not None:  # other images may have equal tokens
            numbers = self.images.numbers
            of_response = torch.arange(numbers.shape[1], device=first.device) >= self.images.in_prompt.unsqueeze(1)
            is_same &= ((numbers == numbers[first]) | of_response).all(dim=1)
        rows = torch.arange(len(first), device=first.device)
        if self.text_starts is not None:
            has_several = self.text_starts.any(dim=1)
            is_same, rows = is_same & ~has_several, rows + len(rows) * has_several
        return torch.stack([torch.where(is_same, first, rows), self.prompt_lengths, self.response_lengths])


class Rewards(Protocol):
    """Rewards that are computed while a module evaluates their rollout."""

    def result(self, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
        """Wait for the rewards; return the rollout with them, and their metrics over all ranks. All ranks."""


@dataclass(frozen=True)
class StepRollout:
    """Rollout of one step, with the greedy responses and pending rewards that belong to it.

    Args:
        rollout: responses of this rank; their rewards are NaN while ``rewards`` are computed.
        greedy: one greedy response to each prompt, in the order of the groups, for estimators that need them.
        rewards: rewards that are still computed; None if the rollout has them.
    """

    rollout: Rollout
    greedy: Rollout | None = None
    rewards: Rewards | None = None

    def evaluated(self, logprobs: Tensor, allowed: AllowedTokens | None) -> StepRollout:
        """Return the step with what the actor computes because no engine has returned it.

        Args:
            logprobs: (B, T) log-probabilities of the actor, for given responses.
            allowed: tokens that the limits allow, if the engine has not returned them.
        """
        rollout = self.rollout
        if allowed is not None:
            rollout = dataclasses.replace(rollout, allowed=allowed)
        if rollout.is_given is not None:
            values = torch.where(rollout.is_given.unsqueeze(1), logprobs, rollout.rollout_logprobs)
            rollout = dataclasses.replace(rollout, rollout_logprobs=values)
        return dataclasses.replace(self, rollout=rollout)

    def with_rewards(self) -> tuple[Rollout, dict[str, float]]:
        """Wait for the rewards that are still computed; return the rollout with them, and their metrics. All ranks."""
        if self.rewards is None:
            return self.rollout, {}
        return self.rewards.result(self.rollout)


@dataclass(frozen=True)
class TopTokens(TensorBatch):
    """Most likely tokens of each of a teacher's distributions; all others are one event.

    Args:
        ids: (..., K) int64, different tokens.
        logprobs: (..., K) float32, their log-probabilities.
        rest: (...) float32, log-probability of all other tokens together.
    """

    ids: Tensor
    logprobs: Tensor
    rest: Tensor

    def __post_init__(self) -> None:
        expect_shape("TopTokens.logprobs", self.logprobs, self.ids.shape)
        expect_shape("TopTokens.rest", self.rest, self.ids.shape[:-1])

    @classmethod
    def of(cls, ids: Tensor, logprobs: Tensor) -> TopTokens:
        """Return the tokens with the rest of their distribution, computed from their log-probabilities.

        Args:
            ids: (..., K) int64.
            logprobs: (..., K) float32.
        """
        rest = 1 - logprobs.exp().sum(dim=-1)
        return cls(ids, logprobs, rest.clamp(min=LEAST_REST).log())


@dataclass(frozen=True)
class Experience(TensorBatch):
    """A rollout with the log-probabilities, values, advantages and returns that your losses need.

    Args:
        rollout: prompts, responses and rewards.
        reward: (B,) reward of each response: the rollout's reward plus the reward model's shaped score, without the KL
            penalty.
        old_logprobs: (B, T) log-probabilities of the actor before the first update.
        ref_logprobs: (B, T) log-probabilities of the frozen reference. Equal to ``old_logprobs`` without a reference.
        values: (B, T) values of the critic, reward units. 0 without a critic.
        token_rewards: (B, T) reward at each token, minus the KL penalty of the token.
        advantages: (B, T) advantages, 0 where the mask is False.
        returns: (B, T) returns, 0 where the mask is False.
        mask: (B, T) bool, True for tokens in the loss: the response mask without responses that are not included and
            without tokens that a rollout correction rejected.
        weights: (B, T) importance weights that multiply the policy loss. 1 without a correction.
        selected_tokens: (B, T) bool, tokens that the policy loss selected in a mini-batch. False without selection.
        entropies: (B, T) entropy of the actor's distribution of each token before the first update, nats. None where
            the actor did not evaluate the responses.
        teacher: (B, T, K) most likely tokens of a teacher, anything where the mask is False. None without them.
        scale: (B,) float64 factor of each row's losses in a mini-batch of a mixture, or of the losses of the
            environment's tokens. None for other losses.
    """

    rollout: Rollout
    reward: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    token_rewards: Tensor
    advantages: Tensor
    returns: Tensor
    mask: Tensor
    weights: Tensor
    selected_tokens: Tensor
    entropies: Tensor | None = None
    teacher: TopTokens | None = None
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        tokens = self.rollout.response_mask.shape
        for field in dataclasses.fields(self)[1:]:
            if isinstance(value := getattr(self, field.name), Tensor):
                shape = tokens[:1] if field.name in ("reward", "scale") else tokens
                expect_shape(f"Experience.{field.name}", value, shape)
        if self.teacher is not None:
            expect_shape("Experience.teacher.rest", self.teacher.rest, tokens)

    @property
    def total_lengths(self) -> Tensor:
        """(B,) tokens of prompt and response together."""
        return self.rollout.total_lengths

    @property
    def rewarded_rows(self) -> Tensor:
        """(B,) bool, the sampled responses that have a reward."""
        return self.rollout.sampled_rows & ~self.reward.isnan()

    @override
    def prompt_numbers(self) -> Tensor:
        return self.rollout.prompt_numbers()


@dataclass(frozen=True)
class SequenceBatch(TensorBatch):
    """Texts with a mask of the tokens in the loss.

    Args:
        input_ids: (B, L) int64, right-padded.
        lengths: (B,) int64, at least 1.
        loss_mask: (B, L) bool, True on tokens to predict; never on the first token or on padding.
        images: (B, K) int64, numbers of each text's images in their order, padded by -1; None without images.
        text_starts: (B, L) bool, True at the first token of each further text of a row, which is computed without the
            tokens before it; None if each row is one text.
        shared: (B,) int64, number of first tokens that the texts of a row have in common; None if each row is one text.
    """

    input_ids: Tensor
    lengths: Tensor
    loss_mask: Tensor
    images: Tensor | None = None
    text_starts: Tensor | None = None
    shared: Tensor | None = None

    def __post_init__(self) -> None:
        expect_shape("SequenceBatch.lengths", self.lengths, self.input_ids.shape[:1])
        expect_shape("SequenceBatch.loss_mask", self.loss_mask, self.input_ids.shape)
        if self.text_starts is not None:
            expect_shape("SequenceBatch.text_starts", self.text_starts, self.input_ids.shape)

    @property
    def total_lengths(self) -> Tensor:
        """(B,) tokens of each row."""
        return self.lengths


@dataclass(frozen=True)
class PreferenceBatch(TensorBatch):
    """Pairs of a preferred and a rejected text.

    Args:
        chosen: B preferred texts.
        rejected: B rejected texts, paired with the chosen texts by row.
        margin: (B,) margin by which the chosen text is better, score units; 0 if unknown.
    """

    chosen: SequenceBatch
    rejected: SequenceBatch
    margin: Tensor

    def __post_init__(self) -> None:
        expect_shape("PreferenceBatch.margin", self.margin, (len(self.chosen.input_ids),))
        expect_shape("PreferenceBatch.rejected.lengths", self.rejected.lengths, self.chosen.lengths.shape)

    @property
    def total_lengths(self) -> Tensor:
        """(B,) tokens of both texts of a pair when padded to the longer one."""
        return 2 * torch.maximum(self.chosen.lengths, self.rejected.lengths)

    @property
    def real_lengths(self) -> Tensor:
        """(B,) tokens of both texts of a pair without padding."""
        return self.chosen.lengths + self.rejected.lengths
