"""Language models that answer questions of rewards with one JSON object."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from lightning_rlhf.data.image_parts import image_url
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.extras.judges.answers import Answers
from lightning_rlhf.extras.judges.endpoint import Client, Endpoint, Request, estimated_tokens
from lightning_rlhf.extras.judges.judge import chat_answer
from lightning_rlhf.ranges import check_ranges

_OWN_FIELDS = ("model", "messages")
_MOST_READ = 20_000  # last characters of an answer, in which its JSON object begins
_SHOWN = 120  # last characters of an answer that messages show
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')  # a backslash, with the rest if it is an escape of JSON
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Judge:
    """A language model behind an OpenAI-compatible chat endpoint that grades or ranks responses.

    Rewards with equal judges share its limits, its budget and its answers: an equal question is asked once, also while
    the first one waits for its answer. Answers that cannot be read are not kept.

    Args:
        endpoint: server and request limits.
        model: name of the model on the server.
        name: name in messages and metrics, which differs from those of the other judges; None is ``model``.
        answers: file that keeps the answers, for example ``runs/x/answers.jsonl``, so that a resumed run asks only new
            questions. A question is found there by its whole text, model, options and the judge's name, but not by the
            server's address. None keeps them in memory.
        max_answer_tokens: length limit of an answer, with the thoughts of a model that thinks first. One that is longer
            cannot be read.
        temperature: sampling temperature of the judge.
        structured: whether the server is asked to let the model write only JSON of the right form. Set false for a
            server that rejects ``response_format``.
        fields: further or other fields of each request, such as ``{chat_template_kwargs: {enable_thinking: false}}``
            for vLLM. null leaves a field out, as in ``{max_tokens: null, max_completion_tokens: 4096}``.

    Raises:
        ValueError: a value is not allowed.
    """

    endpoint: Endpoint
    model: str
    name: str | None = None
    answers: str | None = None
    max_answer_tokens: int = 2048
    temperature: float = 0.0
    structured: bool = True
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(self, max_answer_tokens="at least 1", temperature="at least 0")
        if own := [name for name in self.fields if name in _OWN_FIELDS]:
            raise UsageError(f"fields of a judge must not have {own[0]!r}, which the judge sets: remove it")

    @property
    def label(self) -> str:
        """Name in messages and metrics."""
        return self.name or self.model


@dataclass(frozen=True)
class Question(Generic[_Value]):
    """A question to a judge.

    Args:
        start: beginning of the text, which is equal for all questions about the same texts, so that servers compute it
            once.
        end: rest of the text.
        schema: JSON schema of the answer's object.
        read: returns the value in the object; None if it has none that is allowed.
        allowed: what is allowed, for messages.
        images: images that precede the text.
    """

    start: str
    end: str
    schema: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], _Value | None]
    allowed: str
    images: Sequence[EncodedImage] = ()


class Asker:
    """Asks a judge, and keeps its answers; see :func:`asker_of`.

    Args:
        judge: language model.
    """

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.client = Client(judge.endpoint)
        self.answers = Answers(judge.answers)

    async def ask(self, question: Question[_Value]) -> tuple[_Value, bool]:
        """Return the value in the judge's answer, and whether no request was needed.

        Raises:
            BudgetSpent: the request would exceed the budget; it is not sent.
            RuntimeError: no answer, or one without an allowed value.
        """
        body = self._body(question)
        digest = hashlib.sha256(json.dumps([self.judge.label, body], sort_keys=True).encode())

        async def fresh() -> str:
            tokens = estimated_tokens(question.start + question.end, question.images) + self.judge.max_answer_tokens
            reply = await self.client.post(Request(body, tokens, question.start.encode()))
            answer = self._text_of(reply)
            self._read(question, answer)
            return answer

        answer, is_kept = await self.answers.get(digest.hexdigest(), fresh)
        return self._read(question, answer), is_kept

    def _body(self, question: Question[Any]) -> dict[str, Any]:
        judge, text = self.judge, question.start + question.end
        parts = [*map(image_url, question.images), {"type": "text", "text": text}]
        body: dict[str, Any] = {
            "model": judge.model,
            "messages": [{"role": "user", "content": parts if question.images else text}],
            "max_tokens": judge.max_answer_tokens,
            "temperature": judge.temperature,
        }
        if judge.structured:
            form = {"name": "answer", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return {name: value for name, value in (body | judge.fields).items() if value is not None}

    def _text_of(self, reply: Any) -> str:
        text, truncated = chat_answer(self.client, reply)
        if truncated:
            raise self._error(f"was cut at max_answer_tokens={self.judge.max_answer_tokens}", text)
        return text

    def _read(self, question: Question[_Value], answer: str) -> _Value:
        found = last_object(answer)
        value = None if found is None else question.read(found)
        if value is None:
            raise self._error(f"does not end with {question.allowed}", answer)
        return value

    def _error(self, fault: str, answer: str) -> RunError:
        shown = self.client.masked(answer)[-_SHOWN:]
        return RunError(f"the answer of judge {self.judge.label} at {self.judge.endpoint} {fault}: {shown!r}")


_askers: WeakValueDictionary[str, Asker] = WeakValueDictionary()


def asker_of(judge: Judge) -> Asker:
    """Return what asks a judge: the same for equal judges, so that they share connections, budget and answers."""
    asker = _askers.get(repr(judge))
    if asker is None:
        asker = _askers[repr(judge)] = Asker(judge)
    return asker


def askers_of(judges: Judge | Sequence[Judge]) -> list[Asker]:
    """Return what asks each of several judges.

    Raises:
        UsageError: there is none, or two have the same name.
    """
    judges = [judges] if isinstance(judges, Judge) else list(judges)
    labels = [judge.label for judge in judges]
    if not judges:
        raise UsageError("judges must have at least one judge, got none")
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise UsageError(f"two judges have the name {repeated[0]!r}: set another name for one of them")
    return list(map(asker_of, judges))


def last_object(answer: str) -> dict[str, Any] | None:
    """Return the JSON object with which an answer ends, also in bold or in a fenced block.

    Its texts may have line breaks, and backslashes that JSON does not know, as formulas have.

    Returns:
        The object; None if there is none, or if a key occurs twice in it.
    """
    text = _ESCAPE.sub(lambda found: found[0] if found[1] else r"\\", answer[-_MOST_READ:].rstrip("`*. \t\r\n"))
    decoder = json.JSONDecoder(object_pairs_hook=_without_repeated, strict=False)
    start = text.find("{")
    while start >= 0:
        try:
            found, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = -1
        if end == len(text):
            return found if isinstance(found, dict) else None
        start = text.find("{", start + 1)
    return None


def _without_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise UsageError("a key occurs twice")
    return dict(pairs)
