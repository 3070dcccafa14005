"""The tokens of a conversation: turns that the policy sampled, and texts that its environment wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.types import AllowedTokens, Completion, TokenPrompt

# Why a conversation ended: the environment ended it; the last allowed turn ended; a turn was cut by its limit; no
# tokens were left for another turn; the reply had more images than allowed; the bridge cannot continue the turn; the
# environment failed.
StopReason = Literal["done", "max_turns", "truncated", "tokens", "images", "malformed", "fault"]


@dataclass(frozen=True)
class Limits:
    """Limits of a conversation.

    Args:
        max_turns: turns of the policy, at least 1.
        max_response_tokens: tokens after the prompt, of all turns and of the environment's texts between them.
        max_turn_tokens: tokens of one turn; None is limited by ``max_response_tokens`` only.
        max_images: images in all of the environment's messages.
    """

    max_turns: int
    max_response_tokens: int
    max_turn_tokens: int | None = None
    max_images: int = 0


def last_turn_start(turn_ends: Sequence[int], sampled: Sequence[bool]) -> int:
    """Return the index of the first token of the last turn after the prompt.

    Args:
        turn_ends: number of tokens from the end of the prompt to the end of each turn; not empty.
        sampled: whether the policy sampled a token, for the tokens after the prompt.
    """
    before = [0, *turn_ends][-2]
    return before + sampled[before : turn_ends[-1]].count(False)


class Conversation:
    """One conversation as one row of tokens: sampled turns and written texts in turns, after a prompt.

    Sampled tokens are never decoded and encoded again: each request contains exactly the tokens before it.

    Args:
        prompt: prompt of the conversation, without the images that the environment wrote.
        written_images: images that the environment wrote at the end of the prompt.
    """

    def __init__(
        self,
        prompt: TokenPrompt,
        limits: Limits,
        written_images: Sequence[EncodedImage] = (),
    ) -> None:
        self.prompt = list(prompt)
        self._images = prompt.images
        self._written_images = list(written_images)
        self._unexpanded: list[int] = []  # tokens after the prompt with one placeholder for each image
        self.limits = limits
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.sampled: list[bool] = []
        self._allowed: list[AllowedTokens] = []  # of all parts, if the engine returns those of turns
        self._experts: Tensor | None = None  # of the prompt and all turns
        self.turn_ends: list[int] = []  # tokens from the end of the prompt to the end of each turn
        self.stop: StopReason | None = None
        self._versions: list[int] = []
        self._shown = len(self._written_images)  # number of written images before the last turn
        self.images_in_prompt = len(self._written_images)

    @property
    def request(self) -> TokenPrompt:
        """All tokens and images so far, which the next turn continues."""
        images = self._images
        if images is not None:
            images = replace(
                images,
                images=(*images.images, *self._written_images),
                unexpanded_ids=(*images.unexpanded_ids, *self._unexpanded),
            )
        return TokenPrompt(self.prompt + self.token_ids, images)

    @property
    def written_images(self) -> tuple[EncodedImage, ...]:
        """Images that the environment wrote before the last turn."""
        return tuple(self._written_images[: self._shown])

    @property
    def last_turn(self) -> tuple[list[int], list[int]]:
        """Tokens of the last turn, and all tokens before it."""
        start = last_turn_start(self.turn_ends, self.sampled)
        return self.token_ids[start:], self.prompt + self.token_ids[:start]

    @property
    def turn_budget(self) -> int:
        """Largest number of tokens of the next turn."""
        left = self.limits.max_response_tokens - len(self.token_ids)
        if self.limits.max_turn_tokens is None:
            return left
        return min(left, self.limits.max_turn_tokens)

    @property
    def has_all_turns(self) -> bool:
        """Whether no further turn is allowed."""
        return len(self.turn_ends) == self.limits.max_turns

    def add_turn(self, completion: Completion, may_be_cut: bool = False) -> None:
        """Append a sampled turn, and end the conversation if a limit cut the turn.

        Args:
            completion: the turn.
            may_be_cut: whether the conversation may continue after a turn that was cut.
        """
        self._expect_running()
        if len(completion.token_ids) > self.turn_budget:
            raise UsageError(f"a turn has {len(completion.token_ids)} tokens, at most {self.turn_budget} are allowed")
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.sampled += [True] * len(completion.token_ids)
        self._allowed += [] if completion.allowed is None else [completion.allowed]
        if self._experts is None or completion.experts is None:
            self._experts = completion.experts
        else:  # what came before was sampled with its own, maybe by older weights
            self._experts = torch.cat([self._experts, completion.experts[len(self._experts) :]])
        self._versions += completion.token_versions
        self._unexpanded += completion.token_ids
        self._shown = len(self._written_images)
        self.turn_ends.append(len(self.token_ids))
        if completion.finish_reason == "length" and not may_be_cut:
            self.stop = "truncated"

    def may_have(self, images: int) -> bool:
        """Return whether the environment may write a number of further images."""
        return len(self._written_images) + images <= self.limits.max_images

    def add_written(
        self, ids: Sequence[int] | None, images: Sequence[EncodedImage] = (), unexpanded: Sequence[int] | None = None
    ) -> None:
        """Append tokens of the environment; end the conversation instead if no further turn is possible.

        Args:
            ids: tokens between the last turn and the next one; None if no turn can follow the last one.
            images: images among them.
            unexpanded: the tokens with one placeholder for each image; None without images.
        """
        self._expect_running()
        if self.has_all_turns:
            self.stop = "max_turns"
        elif ids is None:
            self.stop = "malformed"
        elif not self.may_have(len(images)):
            self.stop = "images"
        elif len(self.token_ids) + len(ids) >= self.limits.max_response_tokens:
            self.stop = "tokens"
        else:
            self.token_ids += ids
            self._unexpanded += ids if unexpanded is None else unexpanded
            self._written_images += images
            self.logprobs += [0.0] * len(ids)
            self.sampled += [False] * len(ids)
            self._allowed.append(AllowedTokens.every(len(ids)))
            self._versions += [self._versions[-1]] * len(ids)

    def append(self, branch: Conversation) -> int:
        """Append the turns of another conversation with its prompt as written text, and return where it begins."""
        end, start = branch.turn_ends[-1], len(self.token_ids)
        before = len(branch.prompt)
        self.token_ids += [*branch.prompt, *branch.token_ids[:end]]
        self.logprobs += [0.0] * before + branch.logprobs[:end]
        self.sampled += [False] * before + branch.sampled[:end]
        self._allowed += [AllowedTokens.every(before), *filter(None, [branch.allowed])]
        if self._experts is not None and branch._experts is not None:
            gap = len(self.prompt) + start - len(self._experts)
            self._experts = torch.cat([functional.pad(self._experts, (0, 0, 0, 0, 0, gap), value=-1), branch._experts])
        self._versions += branch._versions[:1] * before + branch._versions[:end]
        self.turn_ends += [start + before + turn_end for turn_end in branch.turn_ends]
        return start

    def end(self, stop: StopReason) -> None:
        """End the conversation, if it has not ended."""
        self.stop = self.stop or stop

    @property
    def allowed(self) -> AllowedTokens | None:
        """Tokens that limits allowed until the end of the last turn; None if the engine does not return them."""
        if sum(map(len, self._allowed)) < len(self.token_ids):
            return None
        return AllowedTokens.join(self._allowed)[range(self.turn_ends[-1])]

    @property
    def completion(self) -> Completion:
        """The conversation as one completion; its last token is sampled."""
        if self.stop is None or not self.turn_ends:
            raise UsageError("a conversation without an end or without a turn has no completion")
        end = self.turn_ends[-1]
        versions = self._versions[:end]
        later = [(i, versions[i]) for i in range(1, end) if versions[i] != versions[i - 1]]
        return Completion(
            token_ids=self.token_ids[:end],
            logprobs=self.logprobs[:end],
            finish_reason="length" if self.stop in ("truncated", "tokens", "images") else "stop",
            policy_version=versions[0],
            later_versions=tuple(later),
            sampled=tuple(self.sampled[:end]),
            allowed=self.allowed,
            experts=self._experts,
        )

    def _expect_running(self) -> None:
        if self.stop is not None:
            raise UsageError(f"the conversation has ended ({self.stop})")
