"""What is asked of vLLM, and what it answers, in its words and in ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_rlhf.types import Completion, SamplingParams

_TEMPERATURES = (0.01, 2.0)  # vLLM 0.32 refuses more, and quietly takes 0.01 for less


def check_temperature(sampling: SamplingParams) -> None:
    """Refuse a temperature that vLLM does not take.

    Raises:
        ValueError: it is neither 0 nor within vLLM's bounds.
    """
    low, high = _TEMPERATURES
    if sampling.temperature and not low <= sampling.temperature <= high:
        raise ValueError(
            f"vLLM samples at temperatures from {low} to {high}, got {sampling.temperature}: "
            f"take one of these or TransformersEngine"
        )


def as_requests(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Requests in vLLM's words."""
    words = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    return [
        {"prompt": list(prompt), "sampling": words, "seed": seed} for prompt, seed in zip(prompts, seeds, strict=True)
    ]


def as_completion(finished: dict[str, Any]) -> Completion:
    """A completion from the worker's message."""
    try:
        fields = [finished[name] for name in ("token_ids", "logprobs", "finish_reason", "policy_version")]
    except KeyError as error:
        raise RuntimeError(f"vLLM's answer has no {error}; it has {', '.join(sorted(finished))}") from None
    return Completion(*fields)
