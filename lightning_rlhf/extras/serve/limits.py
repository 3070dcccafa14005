"""Validation of requests: only known fields, and limits for fields that determine the cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.images.reading import read_image
from lightning_rlhf.images import BadImage, ImageSettings
from lightning_rlhf.ranges import check_ranges

HEADER_BYTES = 16384  # maximum size of a request's headers and URL together
HEADERS_TOO_LONG = f"the headers and the URL of a request may have at most {HEADER_BYTES} bytes"
_INTEGER_LIMIT = 1 << 63  # the server reads numbers into 64 bits
_Number = Annotated[int | float, Field(gt=-_INTEGER_LIMIT, lt=_INTEGER_LIMIT)]
_Count = Annotated[int, Field(ge=1)]
_LogprobCount = Annotated[int, Field(ge=0, le=5)]
_Stop = Annotated[str, Field(max_length=256)]


class Rejected(Exception):
    """Error for a request that is not passed to the model.

    Args:
        status: HTTP status.
        message: message with the value, the allowed values, and the option that sets the limit.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Limits of requests; each is named like the option of ``serve`` that sets it.

    Args:
        max_body_bytes: maximum size of a request's body.
        max_prompt_tokens: maximum number of tokens of a prompt.
        max_tokens: maximum number of tokens of a response.
        max_responses: maximum number of responses to a request: prompts times ``n``.
        max_images: maximum number of images of a request, as ``data:`` URLs; 0 for texts only.
        concurrency: maximum number of concurrent requests; further ones are rejected with status 429.
        seconds: maximum time from the first byte of a request to the last byte of its response.
        read_seconds: maximum time to receive the headers of a request, and the same for its body.
    """

    max_body_bytes: int = 1 << 20
    max_prompt_tokens: int = 4096
    max_tokens: int = 2048
    max_responses: int = 16
    max_images: int = 0
    concurrency: int = 64
    seconds: float = 600.0
    read_seconds: float = 10.0

    def __post_init__(self) -> None:
        check_ranges(self, max_images="at least 0")
        for name, value in vars(self).items():
            if name != "max_images" and not value > 0:
                raise UsageError(f"{name} must be positive, got {value}")


def option_hint(limit: str) -> str:
    """Return the suffix of an error message that names the option of ``serve`` for a field of :class:`Limits`."""
    return f"; serve --{limit.replace('_', '-')} sets the limit"


class _Strict(BaseModel):
    """Base of JSON objects; unknown fields and values of another type are rejected."""

    model_config = ConfigDict(strict=True, extra="forbid")


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class _ImageAddress(_Strict):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class _ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: _ImageAddress


_Part = Annotated[_TextPart | _ImagePart, Field(discriminator="type")]


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_Part], Field(fail_fast=True)]

    @property
    def images(self) -> list[str]:
        """Addresses of the images."""
        if isinstance(self.content, str):
            return []
        return [part.image_url.url for part in self.content if isinstance(part, _ImagePart)]


class _StreamOptions(_Strict):
    include_usage: bool = False


class _Request(_Strict):
    model: str = ""
    user: str = ""
    max_tokens: _Count | None = None
    n: _Count | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=8, fail_fast=True)] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    temperature: _Number | None = None
    top_p: _Number | None = None
    top_k: _Number | None = None
    min_p: _Number | None = None
    seed: _Number | None = None
    presence_penalty: _Number | None = None
    frequency_penalty: _Number | None = None
    repetition_penalty: _Number | None = None


class CompletionRequest(_Request):
    """Body of ``/v1/completions``; the prompt is validated by :func:`check`."""

    prompt: Any = None
    logprobs: _LogprobCount | None = None


class ChatRequest(_Request):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[_Message], Field(min_length=1, max_length=1024, fail_fast=True)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: _LogprobCount | None = None


BODIES: dict[str, type[CompletionRequest] | type[ChatRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises:
        Rejected: the body is not a JSON object, or has infinite numbers or unpaired surrogates.
    """
    try:
        content = json.loads(body)
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise Rejected(400, f"the body is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(content, dict):
        raise Rejected(400, f"the body must be a JSON object, got {type(content).__name__}")
    return content


def check(route: str, body: dict[str, Any], limits: Limits, count_tokens: Callable[[str], int]) -> None:
    """Validate a request's body; tokenizes its prompts, which may take long.

    Args:
        route: route of the request, a key of :data:`BODIES`.
        body: body of the request.
        limits: limits of a request.
        count_tokens: function that returns the number of tokens of a text.

    Raises:
        Rejected: a field is unknown, invalid or over its limit (status 422).
    """
    try:
        request = BODIES[route].model_validate(body)
    except ValidationError as error:
        raise Rejected(422, _first_error(error)) from error
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(request, name, None)
        if value is not None and value > limits.max_tokens:
            hint = option_hint("max_tokens")
            raise Rejected(422, f"{name} must be at most {limits.max_tokens}, got {str(value)[:20]}{hint}")
    if isinstance(request, CompletionRequest):
        prompts = _prompts(request.prompt)
    else:
        prompts = [_joined_text(request.messages)]
        _check_images([url for message in request.messages for url in message.images], limits)
    samples = request.n or 1
    if len(prompts) * samples > limits.max_responses:
        exceeded = f"{len(prompts)} prompts x n {str(samples)[:20]} exceed the {limits.max_responses} allowed responses"
        raise Rejected(422, exceeded + option_hint("max_responses"))
    longest = max(count_tokens(prompt) if isinstance(prompt, str) else len(prompt) for prompt in prompts)
    if longest > limits.max_prompt_tokens:
        exceeded = f"a prompt has {longest} tokens, allowed are {limits.max_prompt_tokens}: shorten the prompt"
        raise Rejected(422, exceeded + option_hint("max_prompt_tokens"))


def _check_images(urls: list[str], limits: Limits) -> None:
    """Validate the number of images, and read each; only ``data:`` URLs are read."""
    if len(urls) > limits.max_images:
        allowed = f"{len(urls)} images in a request, allowed are {limits.max_images}"
        raise Rejected(422, allowed + option_hint("max_images"))
    for url in urls:
        if not url.startswith("data:"):
            raise Rejected(422, "an image must be a data: URL with its file in base64; addresses are not fetched")
        try:
            read_image(url, ImageSettings(), None)
        except BadImage as error:
            raise Rejected(422, f"an image cannot be used: {error.kind}") from error


def _first_error(error: ValidationError) -> str:
    details = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        return f"unknown field {path!r}"
    return f"{path}: {details['msg']}"


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """Return the prompts, each as a text or as token ids."""
    invalid = Rejected(422, "prompt must be a text, a list of token ids, or a list of those")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise invalid
    if all(isinstance(part, str) for part in value):
        return value
    lists = value if isinstance(value[0], list) else [value]
    for ids in lists:
        if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
            raise invalid
    return lists


def _joined_text(messages: list[_Message]) -> str:
    """Return the text of all messages; tokens of the chat template are not included, vLLM limits the total."""
    texts: list[str] = []
    for message in messages:
        content = message.content
        parts = [content] if isinstance(content, str) else content
        texts += [part if isinstance(part, str) else part.text for part in parts if not isinstance(part, _ImagePart)]
    return "\n".join(texts)
