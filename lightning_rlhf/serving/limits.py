"""What a request may ask for: known fields, and of those that cost something only so much."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "seed", *_PENALTIES)
_COMMON = {*_NUMBERS, "model", "max_tokens", "n", "stop", "stream", "stream_options", "logprobs", "user"}
_FIELDS = {
    "/v1/completions": {*_COMMON, "prompt"},
    "/v1/chat/completions": {*_COMMON, "messages", "max_completion_tokens", "top_logprobs"},
}
_ROLES = ("system", "developer", "user", "assistant")
_LOGPROBS = 5
_STOPS, _STOP_CHARACTERS = 8, 256
_MESSAGES = 1024
HEADER_BYTES = 16384  # of a request, with the address in its first line
_LARGEST = 1 << 63  # what the server reads numbers into
_Count = Callable[[str], int]


class Refused(Exception):
    """A request that is not passed on.

    Args:
        status: of HTTP.
        message: what came, what is allowed.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """What one request, and all together, may take. Each has the name of the option of ``serve`` that sets it.

    Args:
        max_body_bytes: of a request.
        max_prompt_tokens: of each prompt.
        max_tokens: of each response.
        max_responses: of a request: prompts times ``n``.
        concurrency: requests under way; a further one is told to come again.
        seconds: from the first byte of a request to the last of its answer.
        read_seconds: for the headers of a request, and again for its body.
    """

    max_body_bytes: int = 1 << 20
    max_prompt_tokens: int = 4096
    max_tokens: int = 2048
    max_responses: int = 16
    concurrency: int = 64
    seconds: float = 600.0
    read_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")


def set_by(limit: str) -> str:
    """How a refusal ends that the server's owner can do something about; ``limit`` is a field of :class:`Limits`."""
    return f"; serve --{limit.replace('_', '-')} sets the limit"


def parsed(body: bytes) -> dict[str, Any]:
    """The object of a request's body.

    Raises:
        Refused: it is none, or holds what cannot be written again: infinite numbers, halves of letters.
    """
    try:
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON that can be read: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise Refused(400, f"the body is a JSON {type(found).__name__}, expected an object")
    return found


def check(route: str, body: dict[str, Any], limits: Limits, count: _Count) -> None:
    """Refuse what is unknown or too much. May take as long as tokenising the body does.

    Args:
        route: that was asked.
        body: of the request.
        limits: what is allowed.
        count: tokens of a text.

    Raises:
        Refused: with status 422, and the field.
    """
    if unknown := sorted(body.keys() - _FIELDS[route]):
        raise Refused(422, f"unknown field {unknown[0]!r}: {route} takes {', '.join(sorted(_FIELDS[route]))}")
    for name in _NUMBERS:
        value = body.get(name, 0)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and abs(value) < _LARGEST):
            raise Refused(422, f"{name} must be a number of at most 63 bits")
    for name in ("model", "user"):
        if not isinstance(body.get(name, ""), str):
            raise Refused(422, f"{name} must be text")
    for name in ("max_tokens", "max_completion_tokens"):
        _whole(body, name, 1, limits.max_tokens, set_by("max_tokens"))
    samples = _whole(body, "n", 1, limits.max_responses, set_by("max_responses")) or 1
    _check_logprobs(route, body)
    _check_stops(body.get("stop"))
    if not isinstance(body.get("stream", False), bool):
        raise Refused(422, "stream must be true or false")
    options = body.get("stream_options")
    if options is not None and (not isinstance(options, dict) or not options.keys() <= {"include_usage"}):
        raise Refused(422, "stream_options takes include_usage only")
    completes = route == "/v1/completions"
    prompts = _prompts(body.get("prompt")) if completes else [_said(body.get("messages"))]
    if len(prompts) * samples > limits.max_responses:
        exceeded = f"{len(prompts)} prompts x n {samples} exceed the {limits.max_responses} allowed responses"
        raise Refused(422, exceeded + set_by("max_responses"))
    longest = max(count(prompt) if isinstance(prompt, str) else len(prompt) for prompt in prompts)
    if longest > limits.max_prompt_tokens:
        exceeded = f"a prompt has {longest} tokens, allowed are {limits.max_prompt_tokens}: shorten the prompt"
        raise Refused(422, exceeded + set_by("max_prompt_tokens"))


def _whole(body: dict[str, Any], name: str, least: int, most: int, more: str = "") -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Refused(422, f"{name} must be a whole number from {least} to {most}, got {str(value)[:20]}{more}")
    return value


def _check_logprobs(route: str, body: dict[str, Any]) -> None:
    if route == "/v1/completions":
        _whole(body, "logprobs", 0, _LOGPROBS)
    elif not isinstance(body.get("logprobs", False), (bool, type(None))):
        raise Refused(422, "logprobs must be true or false")
    _whole(body, "top_logprobs", 0, _LOGPROBS)


def _check_stops(value: Any) -> None:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    short = isinstance(stops, list) and all(isinstance(s, str) and len(s) <= _STOP_CHARACTERS for s in stops)
    if not short or len(stops) > _STOPS:
        raise Refused(422, f"stop must be at most {_STOPS} texts of at most {_STOP_CHARACTERS} characters")


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """Each prompt: a text, or token ids. None is tokenised before it is known how many there are."""
    wrong = Refused(422, "prompt must be a text, a list of token ids, or a list of those")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise wrong
    if all(isinstance(part, str) for part in value):
        return value
    lists = value if isinstance(value[0], list) else [value]
    for ids in lists:
        if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
            raise wrong
    return lists


def _said(value: Any) -> str:
    """What messages say; the chat template's tokens come on top, and the model's length bounds all."""
    if not isinstance(value, list) or not 0 < len(value) <= _MESSAGES:
        raise Refused(422, f"messages must be a list of 1 to {_MESSAGES} messages")
    said: list[str] = []
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in _ROLES or message.keys() - {"role", "content"}:
            raise Refused(422, f"a message has a role ({', '.join(_ROLES)}) and content, and nothing else")
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            texts = isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"
            if not texts or not isinstance(part["text"], str):
                raise Refused(422, "the content of a message must be text")
            said.append(part["text"])
    return "\n".join(said)
