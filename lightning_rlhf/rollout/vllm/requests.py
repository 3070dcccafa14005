"""Conversion of requests to vLLM's format and of its results to completions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.types import Completion, SamplingParams

T = TypeVar("T")
# vLLM 0.32 rejects higher temperatures, and silently uses 0.01 for lower ones.
_LOWEST_TEMPERATURE = 0.01
_HIGHEST_TEMPERATURE = 2.0


def check_temperature(sampling: SamplingParams) -> None:
    """Validate that vLLM supports a temperature.

    Raises:
        ValueError: the temperature is neither 0 nor within vLLM's bounds.
    """
    if sampling.temperature and not _LOWEST_TEMPERATURE <= sampling.temperature <= _HIGHEST_TEMPERATURE:
        raise UsageError(
            f"vLLM samples at temperatures from {_LOWEST_TEMPERATURE} to {_HIGHEST_TEMPERATURE}, got "
            f"{sampling.temperature}: use one of these or TransformersEngine"
        )


def as_requests(
    prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return one request per prompt, with the names of vLLM's sampling parameters."""
    return [
        {"prompt": list(prompt), "sampling": _fields(parameters), "seed": seed}
        for prompt, parameters, seed in zip(prompts, sampling, seeds, strict=True)
    ]


def _fields(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        **({"prompt_logprobs": 0} if sampling.echo else {}),  # without a read of the prefix cache
    }


def as_completion(message: dict[str, Any]) -> Completion:
    """Return the completion in a message of the worker."""
    try:
        fields = [message[name] for name in ("token_ids", "logprobs", "finish_reason", "policy_version")]
    except KeyError as error:
        raise RunError(f"vLLM's completion lacks {error}; it has {', '.join(sorted(message))}") from None
    later_versions = tuple((start, version) for start, version in message.get("later_versions", []))
    token_ids, logprobs, finish_reason, policy_version = fields
    return Completion(token_ids, logprobs, finish_reason, policy_version, later_versions)


def as_completed_with_heartbeat(futures: Collection[Future[T]], seconds: float) -> Iterator[Future[T] | None]:
    """Yield each future when it is done, and None at intervals while others are pending.

    Args:
        futures: futures in any state.
        seconds: interval in seconds.
    """
    pending = set(futures)
    while pending:
        try:
            for future in as_completed(pending, timeout=seconds):
                pending.discard(future)
                yield future
        except FutureTimeoutError:
            yield None
