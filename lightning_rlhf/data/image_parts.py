"""Images in the messages of a row: the parts of a message's content, and the column ``images``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_rlhf.data.columns import Fields
from lightning_rlhf.data.row import BadRow, TextRow
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.images import BadImage

MARKER = "<image>"  # stands for an image in texts of data with a column of images
_SOURCES = ("image", "image_url", "url", "path", "base64", "bytes")  # keys of a part with its image
_IMAGE_TYPES = ("image", "image_url", "input_image")
_TEXT_TYPES = ("text", "input_text", "output_text")


@contextmanager
def as_bad_row() -> Iterator[None]:
    """Raise :class:`BadRow` in place of :class:`BadImage`."""
    try:
        yield
    except BadImage as error:
        raise BadRow(str(error), error.kind) from error


def content_of(content: Any) -> str | list[dict[str, Any]] | None:
    """Return the content of a message: text, or parts of which at least one is an image.

    Args:
        content: text, or a list of parts such as ``{type: text, text: ...}`` and ``{type: image, image: ...}``.

    Returns:
        The content, with text in place of parts that are all text; None if it is neither.

    Raises:
        BadRow: a part is a video or another kind that models cannot read here.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content or not all(isinstance(part, Mapping | str) for part in content):
        return None
    parts = [_part({"type": "text", "text": part} if isinstance(part, str) else part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in _TEXT_TYPES and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in _IMAGE_TYPES:
        value = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
        return {"type": "image", "image": value}
    raise BadRow(
        f"a message has a part of type {kind!r}, expected text (with 'text') or image",
        "a message has a part that is neither text nor image",
    )


def is_image(part: Any) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") == "image"


def has_images(content: Any) -> bool:
    """Return whether the content of a message has an image."""
    return isinstance(content, list) and any(map(is_image, content))


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[EncodedImage]:
    """Return the images of messages in their order."""
    return [
        part["image"]
        for message in messages
        if not isinstance(message.get("content"), str)
        for part in message.get("content") or ()
        if is_image(part)
    ]


def given_images(fields: Fields) -> Sequence[Any]:
    """Return the values of the row's column of images; empty without one."""
    value = fields.get("images")
    if value is None or (value == "" and isinstance(fields.row, TextRow)):
        return ()
    return value if isinstance(value, list | tuple) else (value,)


def text_of_content(content: Any, marker: str = MARKER) -> str:
    """Return the text of a message's content, with a marker for each image."""
    if isinstance(content, str):
        return content
    return "".join(marker if is_image(part) else part["text"] for part in content)


def openai_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as servers with OpenAI's API read them: images are parts ``image_url`` with ``data:`` URLs."""
    return converted_images(messages, image_url)


def converted_images(
    messages: Sequence[Mapping[str, Any]], convert: Callable[[Any], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages whose images are other parts.

    Args:
        messages: messages whose parts of type image have something under ``image``.
        convert: function of that something that returns the other part.
    """
    return [
        {**message, "content": [convert(part["image"]) if is_image(part) else part for part in message["content"]]}
        if has_images(message.get("content"))
        else dict(message)
        for message in messages
    ]


def text_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with a marker in place of each image, for models that read texts."""
    return [
        {**message, "content": text_of_content(message["content"])}
        if has_images(message.get("content"))
        else dict(message)
        for message in messages
    ]


def image_url(image: EncodedImage) -> dict[str, Any]:
    """Return an image as a part of a message in OpenAI's API."""
    return {"type": "image_url", "image_url": {"url": image.data_url()}}


def user_message(text: str, images: Sequence[EncodedImage]) -> dict[str, Any]:
    """Return a user message with a text, whose markers are parts with the images.

    Args:
        text: text with one marker for each image, or without markers: images are then before the text.
        images: images in their order; empty leaves the text as it is.
    """
    message = {"role": "user", "content": text}
    return with_images([message], images, lambda image: image, is_answer=False)[0]


def with_images(
    messages: Sequence[dict[str, Any]], column: Sequence[Any], read: Callable[[Any], EncodedImage], is_answer: bool
) -> list[dict[str, Any]]:
    """Return messages whose image parts have their images.

    Parts without an image take those of the column ``images`` in their order. Where no part and no marker stands for
    them, they are put before the first message of the user.

    Args:
        messages: messages of a conversation, or of an answer alone.
        column: values of the column ``images``.
        read: function that reads an image of a row.
        is_answer: whether the messages are an answer, whose prompt has the images.

    Raises:
        BadRow: an image cannot be used, an answer has one, or the numbers of images and their places differ.
    """
    filled = [dict(message) for message in messages]
    if column:
        filled = [{**message, "content": _split(message["content"])} for message in filled]
    parts = [part for message in filled if isinstance(message["content"], list) for part in message["content"]]
    empty = [part for part in parts if is_image(part) and part["image"] is None]
    if is_answer and not any(map(is_image, parts)):
        return filled
    if column and not any(map(is_image, parts)):
        first = next((message for message in filled if message["role"] == "user"), filled[0])
        empty = [{"type": "image", "image": None} for _ in column]
        first["content"] = [*empty, {"type": "text", "text": first["content"]}]
    if len(empty) != len(column):
        raise BadRow(
            f"the messages have places for {len(empty)} images, and the column images has {len(column)}",
            "the numbers of images and of their places in the messages differ",
        )
    values = iter(column)
    for message in filled:
        if isinstance(message["content"], list):
            if message["role"] == "assistant" and any(map(is_image, message["content"])):
                raise BadRow("a message of the assistant has an image, which a language model cannot generate")
            message["content"] = [_filled(part, values, read) for part in message["content"]]
    return filled


def _filled(part: dict[str, Any], values: Iterator[Any], read: Callable[[Any], EncodedImage]) -> dict[str, Any]:
    if not is_image(part) or isinstance(part["image"], EncodedImage):
        return part
    with as_bad_row():
        return {**part, "image": read(next(values) if part["image"] is None else part["image"])}


def _split(content: Any) -> Any:
    """Return content whose markers are parts without an image."""
    if not isinstance(content, str) or MARKER not in content:
        return content
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(MARKER)):
        parts += [{"type": "image", "image": None}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts
