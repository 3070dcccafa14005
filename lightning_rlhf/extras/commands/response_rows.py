"""Rows of a file of responses, for evaluate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_rlhf.data.columns import IMAGES, MAX_SOURCES, PROMPT, REWARD_FIELDS, Columns, source_of
from lightning_rlhf.data.image_parts import given_images, images_of, text_of_content, with_images
from lightning_rlhf.data.messages import Message, messages_of
from lightning_rlhf.data.row import BadRow, Row
from lightning_rlhf.data.rows import OnBadRow, RowReport, use_rows
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.extras.commands.responses_file import (
    ENVIRONMENT_REWARDS,
    FINISH_REASONS,
    OF_CONVERSATIONS,
    OUTPUT_COLUMNS,
    RESPONSES,
    TOKENS,
)
from lightning_rlhf.extras.commands.row_images import image_reader
from lightning_rlhf.images import ImageSettings

ALL = "all"  # name of the statistics over all sources
Roles = Mapping[str, str]
NO_SOURCE = "data"  # source of rows without a column source or data_source
_NOT_FOR_REWARDS = ("prompt", "messages", "responses", "images", *OUTPUT_COLUMNS)


@dataclass(frozen=True)
class ResponseRow:
    """A prompt with its responses.

    ``tokens``, ``truncated`` and the columns ``of_conversations`` are empty if the row does not contain them.
    ``messages`` and ``image_column`` are those of the file, in which images are paths or base64. ``images`` has the
    images of the prompt if they are read, and ``messages_with_images`` the messages with them for reward functions.
    """

    prompt: str
    messages: list[Any]
    responses: list[str]
    tokens: list[int]
    truncated: list[bool]
    source: str
    columns: dict[str, Any]
    of_conversations: dict[str, list[Any]]
    images: list[EncodedImage]
    messages_with_images: list[Any]
    image_column: dict[str, Any]


def read_rows(
    path: str, configured: dict[str, str | None], on_bad_row: OnBadRow, images: ImageSettings | None, roles: Roles
) -> list[ResponseRow]:
    """Read rows with responses.

    Args:
        path: file of the rows.
        configured: configured column of each field.
        on_bad_row: whether bad rows are an error.
        images: directory and limits of the images of prompts, which are read; None reads none.
        roles: further names of roles, each with its role here.

    Raises:
        ValueError: rows have no responses, or images that cannot be used, and ``on_bad_row`` is ``error``.
    """
    finder = Columns(configured, ((("responses", RESPONSES),), PROMPT, *REWARD_FIELDS, IMAGES))
    report = RowReport(path)

    def convert(row: Row) -> ResponseRow:
        fields = finder.find(row)
        if "responses" not in fields:
            raise BadRow(f"no column {RESPONSES!r}, which lightning-rlhf generate writes", "no responses")
        responses = fields["responses"]
        responses = [responses] if isinstance(responses, str) else responses
        if not isinstance(responses, list) or not responses or not all(isinstance(text, str) for text in responses):
            raise BadRow("the responses are neither a text nor a list of texts", "no responses")
        name = next((name for name in ("messages", "prompt") if name in fields), None)
        prompt = "" if name is None else fields[name] or ""
        messages = []
        if not isinstance(prompt, str):
            messages = messages_of(prompt, "prompt", roles)
        filled, of_prompt = messages, list[EncodedImage]()
        if images is not None:
            read = image_reader(images, report.location)
            filled, of_prompt = _with_images(messages, given_images(fields), read)
        tokens = _list_of(row, TOKENS, len(responses))
        reasons = _list_of(row, FINISH_REASONS, len(responses))
        texts = [text_of_content(message["content"]) for message in messages]
        columns = finder.other_columns(fields, exclude=_NOT_FOR_REWARDS)
        column = fields.names.get("images")
        return ResponseRow(
            prompt=prompt if isinstance(prompt, str) else "\n".join(texts),
            messages=messages,
            responses=responses,
            tokens=[value for value in tokens if isinstance(value, int)],
            truncated=[reason == "length" for reason in reasons],
            source=source_of(columns) or NO_SOURCE,
            columns=columns,
            of_conversations=_conversation_columns(row, len(responses)),
            images=of_prompt,
            messages_with_images=filled,
            image_column={column: row[column]} if column is not None and column in row else {},
        )

    rows, report = use_rows(path, path, convert, on_bad_row, report=report)
    print(report)
    if (count := len({row.source for row in rows})) > MAX_SOURCES:
        print(f"{path} has {count} sources, too many for separate figures")
        return [replace(row, source=NO_SOURCE) for row in rows]
    return rows


def _with_images(
    messages: list[Message], column: Sequence[Any], read: Callable[[Any], EncodedImage]
) -> tuple[list[Message], list[EncodedImage]]:
    """Return the messages of a prompt with their images, and these images; of a text, only those of the column."""
    if not messages:
        return [], [read(value) for value in column]
    filled = with_images(messages, column, read, is_answer=False)
    return filled, images_of(filled)


def _list_of(row: Row, name: str, count: int) -> list[Any]:
    """Return a column that is a list with one value per response, else an empty list."""
    values = row.get(name)
    if isinstance(values, list) and len(values) == count:
        return values
    return []


def _conversation_columns(row: Row, count: int) -> dict[str, list[Any]]:
    """Return the columns of conversations of a row, by the argument of reward functions.

    Raises:
        BadRow: a reward of the environment is neither a number nor null.
    """
    columns = {name: _list_of(row, column, count) for name, column in OF_CONVERSATIONS.items()}
    for value in columns["environment_rewards"]:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise BadRow(f"{ENVIRONMENT_REWARDS!r} has {value!r}, expected numbers and null", "rewards not numbers")
    return {name: values for name, values in columns.items() if values}


def common_columns(rows: Sequence[ResponseRow]) -> list[str]:
    """Return the columns of conversations that every row contains."""
    return [name for name in OF_CONVERSATIONS if all(name in row.of_conversations for row in rows)]
