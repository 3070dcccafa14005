"""Conversion of requests to vLLM's format and of its results to completions."""

from __future__ import annotations

import threading
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.models.heads import EXCLUDED
from lightning_rlhf.types import AllowedTokens, Completion, SamplingParams, TokenPrompt

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
    prompts: Sequence[TokenPrompt], sampling: Sequence[SamplingParams], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return one request per prompt, with the names of vLLM's sampling parameters."""
    requests = [
        {"prompt": list(prompt), "sampling": _fields(parameters), "seed": seed}
        for prompt, parameters, seed in zip(prompts, sampling, seeds, strict=True)
    ]
    for request, prompt in zip(requests, prompts, strict=True):
        if prompt.images is not None and prompt.images.images:
            request["images"] = [image.sha256 for image in prompt.images.images]
            request["unexpanded"] = list(prompt.images.unexpanded_ids)
    return requests


def check_expansion(ours: Sequence[int], theirs: Sequence[int], images: int) -> None:
    """Validate that vLLM puts the same tokens in the place of images as the trainer.

    Args:
        ours: tokens of the prompt in the trainer.
        theirs: tokens of the prompt in vLLM.
        images: number of its images.

    Raises:
        RuntimeError: they differ.
    """
    if list(ours) == list(theirs):
        return
    pairs = enumerate(zip(ours, theirs, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    raise RunError(
        f"vLLM expands a prompt with {images} images to {len(theirs)} tokens and the trainer to {len(ours)}; token "
        f"{first} differs: their versions of the model's processor do not agree. Use TransformersEngine for this model"
    )


class SentImages:
    """Images as messages for an engine process, which keeps those that were used last.

    Args:
        max_bytes: largest number of bytes that the process keeps, besides those of the last requests.
    """

    def __init__(self, max_bytes: int = 1 << 29) -> None:
        self._max_bytes = max_bytes
        self._sent: OrderedDict[str, EncodedImage] = OrderedDict()
        self._lock = threading.Lock()

    def message(self, prompts: Sequence[TokenPrompt]) -> dict[str, Any]:
        """Return the fields of the message before requests with some images; empty if the process has all of them.

        Returns:
            ``new``, the fields of the images that the process does not have, and ``dropped``, the SHA-256 of those that
            no request uses any more.
        """
        distinct = {image.sha256: image for prompt in prompts for image in prompt.encoded_images}
        with self._lock:
            new = [image.as_fields() for sha256, image in distinct.items() if sha256 not in self._sent]
            for sha256, image in distinct.items():
                self._sent[sha256] = image
                self._sent.move_to_end(sha256)
            dropped, total = [], sum(map(_size, self._sent.values()))
            for sha256, image in list(self._sent.items())[: len(self._sent) - len(distinct)]:
                if total <= self._max_bytes:
                    break
                if _size(image):
                    total -= _size(self._sent.pop(sha256))
                    dropped.append(sha256)
        return {"new": new, "dropped": dropped} if new else {}

    def all(self, prompts: Sequence[TokenPrompt]) -> list[dict[str, Any]]:
        """Return the fields of the images that another process needs: those that the process has, and further ones.

        Args:
            prompts: prompts of the requests that are not finished, of which the process may have dropped some.
        """
        with self._lock:
            sent = dict(self._sent)
        needed = {image.sha256: image for prompt in prompts for image in prompt.encoded_images}
        return [image.as_fields() for image in (needed | sent).values()]


def _size(image: EncodedImage) -> int:
    """Return the number of bytes that a process keeps; none of an image in a file."""
    return len(image.data or b"")


def _fields(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        **vars(sampling.limits),
        "stop_token_ids": list(sampling.stop_token_ids),
        **({"prompt_logprobs": 0} if sampling.echo else {}),  # without a read of the prefix cache
        **(
            {"logit_bias": {str(token): EXCLUDED for token in sampling.never_sampled}} if sampling.never_sampled else {}
        ),
    }


def as_completion(message: dict[str, Any]) -> Completion:
    """Return the completion in a message of the worker."""
    try:
        fields = [message[name] for name in ("token_ids", "logprobs", "finish_reason", "policy_version")]
    except KeyError as error:
        raise RunError(f"vLLM's completion lacks {error}; it has {', '.join(sorted(message))}") from None
    later_versions = tuple((start, version) for start, version in message.get("later_versions", []))
    token_ids, logprobs, finish_reason, policy_version = fields
    further: dict[str, Any] = {}
    if (allowed := message.get("allowed")) is not None:  # numbers of allowed tokens, and their ids
        further["allowed"] = AllowedTokens.of(*(torch.tensor(each, dtype=torch.int32) for each in allowed))
    if (experts := message.get("experts")) is not None:
        numbers = torch.frombuffer(bytearray(b64decode(experts["bytes"])), dtype=torch.int16)
        further["experts"] = numbers.view(experts["shape"])
    return Completion(token_ids, logprobs, finish_reason, policy_version, later_versions, **further)


def vocabulary_of(directory: Path) -> int:
    """Return the number of tokens of the model with its ``config.json`` in a directory."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    return int(config.get_text_config().vocab_size)


def check_tokens(token_ids: Sequence[int], request: dict[str, Any], vocabulary: int) -> None:
    """Validate that tokens can be a response, so that an engine that sends others is started again or left out.

    Args:
        token_ids: tokens of a completion.
        request: one of :func:`as_requests`.
        vocabulary: number of tokens of the actor.

    Raises:
        RuntimeError: they do not begin with those of the prompt although these were requested, there are more than were
            requested, or the actor does not have one of them.
    """
    sampling = request["sampling"]
    echoed = request["prompt"][1:] if "prompt_logprobs" in sampling else []
    if echoed and "images" in request:  # vLLM may expand them to other tokens, which check_expansion reports
        return
    if list(token_ids[: len(echoed)]) != echoed:
        raise RunError("log-probabilities of other tokens than the prompt's")
    if len(token_ids) > len(echoed) + sampling["max_tokens"]:
        raise RunError(f"{len(token_ids)} tokens for a request of at most {len(echoed) + sampling['max_tokens']}")
    if unknown := [token for token in token_ids[len(echoed) :] if not 0 <= token < vocabulary]:
        raise RunError(f"token {unknown[0]}; the actor has tokens 0 to {vocabulary - 1}")
