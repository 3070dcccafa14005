"""Comparison of engine and actor after pushes whose first responses are used in a later step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rollout.engine import Generation
from lightning_rlhf.rollout.sampler import ResponseSampler
from lightning_rlhf.rollout.scorer import collect
from lightning_rlhf.rollout.source import Request
from lightning_rlhf.types import Completion, SamplingParams

from .checks import actor_logprobs, check_gaps

_TEXT_TOKENS = 64  # longest text: vLLM computes the logits of all of its tokens at once
_COMPARED_TOKENS = 16  # longest end of a text whose log-probs are compared, tokens of a response


@dataclass(frozen=True)
class _Comparison:
    """Texts that the engine evaluates after a push, with the actor's log-probs of their ends under the same weights.

    Args:
        version: version of the policy that was pushed.
        texts: token ids of each text.
        logprobs: the actor's log-probs of the last tokens of each text.
        generation: the engine's log-probs of the texts.
    """

    version: int
    texts: list[list[int]]
    logprobs: list[Tensor]
    generation: Generation

    def gaps(self) -> Tensor:
        """Wait for the engine; return (N,) absolute differences of log-probs, nats.

        An engine that loads weights while it generates may evaluate a text with those of a later push; it is left out.

        Raises:
            RuntimeError: the engine returned no log-probs of the texts, or used older weights.
        """
        gaps = [torch.zeros(0)]
        for text, logprobs, completion in zip(self.texts, self.logprobs, self.generation.completions(), strict=True):
            if len(completion.logprobs) != len(text):
                raise RunError(
                    f"the engine returned {len(completion.logprobs)} log-probabilities for a prompt of {len(text)} "
                    f"tokens with SamplingParams.echo, which needs {len(text)}: implement it in the engine, or set "
                    f"check_rows to 0, which disables the check of pushed weights"
                )
            if completion.policy_version < self.version:
                raise RunError(
                    f"the engine used weights of version {completion.policy_version} after version {self.version} was "
                    f"pushed: its weights are not the actor's"
                )
            if completion.policy_version == self.version:
                end = slice(len(text) - 1 - len(logprobs), len(text) - 1)  # after it, the engine sampled a token
                gaps.append((torch.tensor(completion.logprobs[end]) - logprobs).abs())
        return torch.cat(gaps)


@dataclass
class PushChecks:
    """Comparisons of engine and actor that are not finished, one for each push.

    With ``max_staleness``, the engine may load pushed weights only after the responses that it is generating, for which
    the trainer does not wait. So the actor evaluates short texts at the push, the engine evaluates them as prompts when
    it has loaded the weights, and the results are compared before responses of these weights are used.

    Args:
        sampler: sampler of the responses.
        module: module with the actor.
        rows: number of prompts whose first response is used; 0 compares none.
        max_logprob_diff: argument of :func:`~.checks.check_gaps`.
    """

    sampler: ResponseSampler
    module: RLHFModule
    rows: int
    max_logprob_diff: float | None
    _pending: deque[_Comparison] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self._pending)

    def begin(self, request: Request, version: int) -> None:
        """Evaluate texts with the actor, and request their log-probs from the engine. All ranks.

        Args:
            request: finished responses to at least one prompt.
            version: version of the policy that was pushed.
        """
        if not self.rows:
            return
        sampler = self.sampler
        prompts = request.prompts[: self.rows]
        responses = request.completions()[: len(prompts) * request.sampling.samples : request.sampling.samples]
        longest = min(_TEXT_TOKENS, sampler.max_length - 1)  # the engine samples a token after the text
        parts = [
            shortened(prompt, response.token_ids, longest)
            for prompt, response in zip(prompts.token_ids, responses, strict=True)
        ]
        known = replace(prompts, token_ids=[prompt for prompt, _ in parts])
        ends = [end for _, end in parts]
        texts = [[*prompt, *end] for prompt, end in parts]
        completions = [Completion(end, [0.0] * len(end), "length", version) for end in ends]
        logprobs = actor_logprobs(self.module, collect(known, completions, [], sampler.tokenizer)).float().cpu()
        generation = sampler.engine.submit(texts, SamplingParams(1, echo=True), [0] * len(texts))
        unpadded = [row[: len(end)] for row, end in zip(logprobs, ends, strict=True)]
        self._pending.append(_Comparison(version, texts, unpadded, generation))

    def finish(self, version: int) -> None:
        """Wait for the comparisons of pushes up to a version. All ranks; the engine has the actor's weights.

        Args:
            version: largest version of the policy.

        Raises:
            RuntimeError: log-probs differ by more than a bound.
        """
        while self._pending and self._pending[0].version <= version:
            comparison = self._pending.popleft()
            check_gaps(self.sampler.engine, self.module, comparison.gaps(), self.max_logprob_diff, comparison.version)


def shortened(prompt: Sequence[int], response: Sequence[int], longest: int) -> tuple[list[int], list[int]]:
    """Return the parts of a prompt and its response that are compared, together at most ``longest`` tokens.

    They are the prompt's first token, without which some models compute badly, then the last tokens of the prompt, then
    the first ones of the response.

    Args:
        prompt: token ids, at least one.
        response: token ids.
        longest: largest number of tokens, at least 1.
    """
    end = list(response[: min(_COMPARED_TOKENS, longest - 1)])
    before = longest - 1 - len(end)  # most tokens of the prompt after its first
    return [prompt[0], *prompt[1:][max(0, len(prompt) - 1 - before) :]], end
