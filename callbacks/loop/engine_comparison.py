"""Comparison of the log-probs of engine and actor, which finds damaged weights."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.rollout.assemble import scored_rollout
from lightning_rlhf.rollout.engine import RolloutEngine, engine_dtype
from lightning_rlhf.rollout.generation import PendingCompletions, submit
from lightning_rlhf.rollout.sampler import ResponseSampler
from lightning_rlhf.rollout.source import StepRequests
from lightning_rlhf.types import Completion, Prompt, PromptBatch, PromptImages, Rollout, SamplingParams, TokenPrompt

log = logging.getLogger("lightning_rlhf")
_MEAN_SHARE = 1 / 20  # bound of the mean difference of log-probs, as a fraction of the bound for 99 of 100 tokens
# Differences for 99 of 100 tokens and of the mean, nats: above the first pair the transfer of the weights is proven
# again, above the second the run ends in any case. On a CPU, SmolLM2-135M in bf16-mixed differs from the engine's
# bfloat16 by 0.03 to 0.06 on average, and by 0.23 or more if one of the matrices of its layers is lost. Nothing was
# measured on a GPU, where a right run must not end because of a guess.
_BOUNDS = {
    ("float32", "cpu"): ((1e-3, 5e-5), (1e-3, 5e-5)),
    ("float32", "cuda"): ((1e-2, 5e-4), (1.0, 0.05)),
    ("bfloat16", "cpu"): ((1.0, 0.1), (5.0, 0.5)),
    ("bfloat16", "cuda"): ((1.0, 0.1), (5.0, 0.5)),
}
_OTHER_BOUNDS = ((1.0, 0.1), (5.0, 0.5))  # of other devices
_LARGER = 1.5  # a mean this many times that of the last proof asks for another
_IMAGE_TEXT_TOKENS = 512  # longest text with images
_TEXT_TOKENS = 64  # longest text: vLLM computes the logits of all of its tokens at once
_COMPARED_TOKENS = 16  # longest end of a text whose log-probs are compared, tokens of a response


@torch.no_grad()
def actor_logprobs(module: RLHFModule, rollout: Rollout) -> Tensor:
    """Return the (B, T) log-probs of the responses of a rollout under the actor's current weights. All ranks."""
    with module.trainer.precision_plugin.forward_context():
        return module.actor_scores("actor", rollout.to(module.device)).logprobs


def check_engine(engine: RolloutEngine, module: RLHFModule, rollout: Rollout, max_logprob_diff: float | None) -> None:
    """Raise an error if the engine does not compute the same log-probabilities as the actor. All ranks.

    Args:
        engine: engine with the actor's weights.
        module: module with the actor.
        rollout: responses of the engine.
        max_logprob_diff: argument of :func:`check_gaps`.

    Raises:
        RuntimeError: a bound is exceeded on any rank.
    """
    gaps = (actor_logprobs(module, rollout).cpu() - rollout.rollout_logprobs.cpu()).abs()
    compared = (rollout.response_mask & rollout.sampled_rows.unsqueeze(1)).cpu()
    check_gaps(engine, module, gaps[compared], max_logprob_diff, module.trainer.global_step)


def check_first_rows(
    engine: RolloutEngine, module: RLHFModule, rows: int, max_logprob_diff: float | None, rollout: Rollout
) -> None:
    """Compare log-probs of engine and actor on the first responses of a rollout; see :func:`check_engine`.

    Args:
        engine: engine with the actor's weights.
        module: module with the actor.
        rows: number of responses; 0 compares none.
        max_logprob_diff: argument of :func:`check_gaps`.
        rollout: responses of the engine.
    """
    if rows:
        check_engine(engine, module, rollout[list(range(min(rows, len(rollout))))], max_logprob_diff)


def check_gaps(
    engine: RolloutEngine, module: RLHFModule, gaps: Tensor, max_logprob_diff: float | None, version: int
) -> None:
    """Prove the transfer of weights at the first push and where log-probs differ unusually. All ranks.

    Only the mean and the 99th percentile are bounded: among millions of tokens in bfloat16, some differ by more than a
    nat, while a lost weight changes most tokens. An engine that holds all weights may compute differently: up to a
    gross bound, the difference is logged, and the run continues.

    Args:
        engine: engine, to which the actor's current weights were pushed.
        module: module with the actor.
        gaps: (N,) absolute differences of the log-probs of engine and actor of this rank's tokens, nats.
        max_logprob_diff: bound of the 99th percentile, nats, above which the run ends; the bound of the mean is a
            twentieth of it. None selects both by dtype and device.
        version: version of the policy that both computed with: the number of steps before its push.

    Raises:
        RuntimeError: the engine does not hold the actor's weights, or the gross bound is exceeded on any rank; the
            message names the first parameter that differs.
    """
    # Reduced over ranks, so that all ranks raise or none does.
    mean, percentile, largest = module.data_ranks.max(gap_statistics(gaps).to(module.device)).tolist()
    dtype = engine_dtype(str(module.trainer.precision), module.sources["actor"].dtype)
    usual, gross = _BOUNDS.get((dtype, module.device.type), _OTHER_BOUNDS)
    if max_logprob_diff is not None:
        usual = gross = (max_logprob_diff, max_logprob_diff * _MEAN_SHARE)

    def within(bounds: tuple[float, float]) -> bool:
        return percentile <= bounds[0] and mean <= bounds[1]

    if engine.proven_gap is not None and (within(usual) or (within(gross) and mean <= _LARGER * engine.proven_gap)):
        return
    adapters = engine.traits.swaps_adapters
    parameters = (module.role_strategy.iter_adapters if adapters else module.role_strategy.iter_full_params)("actor")
    name = engine.first_difference(parameters)
    deque(parameters, maxlen=0)  # gathering needs every rank for every parameter
    engine.proven_gap = mean
    figures = (
        f"after the push of step {version} their log-probabilities of the same tokens differ by {mean:.3g} nats on "
        f"average (allowed: {gross[1]:g}) and {percentile:.3g} at the 99th percentile (allowed: {gross[0]:g}, "
        f"max_logprob_diff), {largest:.3g} at most"
    )
    if name is not None:
        raise RunError(
            f"the engine does not hold the actor's weights: {figures}: the first parameter that differs is {name}"
        )
    if not within(gross):
        raise RunError(
            f"engine and actor have the same weights, but {figures}: all weights of the last push were transferred "
            f"correctly, so the engine computes differently: set precision to 32-true to compare, or raise "
            f"max_logprob_diff of RolloutLoop (the mean is allowed a twentieth of it)"
        )
    if not within(usual):
        log.warning(
            "Engine and actor have the same weights, but %s; usual is at most %g on average.", figures, usual[1]
        )


def gap_statistics(gaps: Tensor) -> Tensor:
    """Return mean, 99th percentile and maximum of the differences; infinity if one of them is NaN.

    With fewer than a hundred tokens, the percentile is the maximum.

    Args:
        gaps: (N,) absolute differences of the tokens, nats; may be empty.
    """
    gaps = torch.cat([gaps.double().nan_to_num(nan=torch.inf), gaps.new_zeros(1, dtype=torch.float64)])
    count = len(gaps) - 1  # without the 0, which was added for an empty rollout
    ordered = gaps.sort(descending=True).values
    return torch.stack([gaps.sum() / max(count, 1), ordered[count // 100], ordered[0]])


@dataclass(frozen=True)
class _Comparison:
    """Texts that the engine evaluates after a push, with the actor's log-probs of their ends under the same weights.

    Args:
        version: version of the policy that was pushed.
        texts: token ids of each text.
        logprobs: the actor's log-probs of the last tokens of each text.
        pending: the engine's log-probs of the texts.
    """

    version: int
    texts: list[list[int]]
    logprobs: list[Tensor]
    pending: PendingCompletions

    def gaps(self) -> Tensor:
        """Wait for the engine; return (N,) absolute differences of log-probs, nats.

        An engine that loads weights while it generates may evaluate a text with those of a later push; it is left out.

        Raises:
            RuntimeError: the engine returned no log-probs of the texts, or used older weights.
        """
        gaps = [torch.zeros(0)]
        for text, logprobs, completion in zip(self.texts, self.logprobs, self.pending.result(), strict=True):
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
        max_logprob_diff: argument of :func:`check_gaps`.
    """

    sampler: ResponseSampler
    module: RLHFModule
    rows: int
    max_logprob_diff: float | None
    _pending: deque[_Comparison] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self._pending)

    def launch(self, request: StepRequests, version: int) -> None:
        """Evaluate texts with the actor, and request their log-probs from the engine. All ranks.

        A rank without sampled responses evaluates a text of two tokens, because a sharded forward pass needs all ranks.

        Args:
            request: finished responses.
            version: version of the policy that was pushed.
        """
        if not self.rows:
            return
        sampler = self.sampler
        prompts = request.prompts[: self.rows]
        responses = request.completions()[: len(prompts) * request.sampling.samples : request.sampling.samples]
        room = sampler.max_length - 1  # the engine samples a token after the text
        parts: list[tuple[list[int], list[int]]] = []
        images: list[PromptImages | None] = []
        for prompt, response in zip(prompts, responses, strict=True):
            of_prompt = prompt.images
            if of_prompt is not None and of_prompt.images:  # whole prompts, because images cannot be cut
                longest = min(_IMAGE_TEXT_TOKENS, room)
                if len(prompt.token_ids) >= longest:
                    continue
            else:
                longest = min(_TEXT_TOKENS, room)
            parts.append(shortened(prompt.token_ids, self._before_images(response.token_ids), longest))
            if of_prompt is not None:
                unexpanded = of_prompt.unexpanded_ids if of_prompt.images else tuple(parts[-1][0])
                of_prompt = replace(of_prompt, unexpanded_ids=(*unexpanded, *parts[-1][1]))
            images.append(of_prompt)
        evaluated = parts or [([0], [0])]
        pairs = zip(evaluated, images or [None], strict=True)
        known = [Prompt(ids, "", images=of_prompt, position=i) for i, ((ids, _), of_prompt) in enumerate(pairs)]
        completions = [Completion(end, [0.0] * len(end), "length", version) for _, end in evaluated]
        with every_token(self.module.actor):
            rollout = scored_rollout(PromptBatch(known), completions, [], sampler.tokenizer)
            logprobs = actor_logprobs(self.module, rollout).float().cpu()
        texts = [[*prompt, *end] for prompt, end in parts]
        asked = [TokenPrompt(text, of_prompt) for text, of_prompt in zip(texts, images, strict=True)]
        pending = submit(sampler.engine, asked, SamplingParams(1, echo=True), [0] * len(texts))
        unpadded = [row[: len(end)] for row, (_, end) in zip(logprobs, parts, strict=False)]
        self._pending.append(_Comparison(version, texts, unpadded, pending))

    def _before_images(self, response: list[int]) -> list[int]:
        """Return the tokens of a response before the first image of an environment."""
        tokens = self.module.image_tokens
        end = next((index for index, token in enumerate(response) if token in tokens), len(response))
        return response[:end]

    def check_until(self, version: int) -> None:
        """Wait for the comparisons of pushes up to a version. All ranks; the engine has the actor's weights.

        Args:
            version: largest version of the policy.

        Raises:
            RuntimeError: log-probs differ by more than a bound.
        """
        while self._pending and self._pending[0].version <= version:
            comparison = self._pending.popleft()
            check_gaps(self.sampler.engine, self.module, comparison.gaps(), self.max_logprob_diff, comparison.version)


@contextmanager
def every_token(actor: Any) -> Iterator[None]:
    """Give a probability to every token for some time, as engines do for the tokens of a prompt.

    Args:
        actor: language model of the module.
    """
    excluded, actor.never_sampled = actor.never_sampled, ()
    try:
        yield
    finally:
        actor.never_sampled = excluded


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
