"""Images of the data of a run, as ``check-data`` describes them: sizes, tokens, and places in a text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.data.answers import MaskedText
from lightning_rlhf.data.base import RowsDataModule
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import counted
from lightning_rlhf.types import Prompt


@dataclass(frozen=True)
class ImageSpan:
    """Position of an image in the tokens of a text.

    Args:
        start: position of the first token that stands for the image.
        end: position after the last one.
        mark: text that is shown instead.
    """

    start: int
    end: int
    mark: str


class DataImages:
    """Images of the rows of a data module, and the tokens that stand for them.

    Args:
        data: data module that was set up; its rows may have no images.
    """

    def __init__(self, data: RowsDataModule) -> None:
        self._store = data.image_store
        self._tokenizer = data.tokenizer
        self._added = set(data.tokenizer.added_tokens_decoder)
        self._tokens: dict[tuple[int, int], list[int]] = {}  # by width and height

    def tokens_of(self, image: EncodedImage) -> list[int]:
        """Return the tokens that stand for an image.

        Texts around them, such as line breaks, are left out, because a tokenizer may merge them with the text of a row.
        """
        size = (image.width, image.height)
        if size not in self._tokens:
            assert self._store is not None
            text = self._store.processor.expand(self._store.processor.placeholder, [image])
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            positions = [position for position, token in enumerate(ids) if token in self._added]
            self._tokens[size] = ids[positions[0] : positions[-1] + 1] if positions else ids
        return self._tokens[size]

    def images_of(self, example: Any) -> tuple[EncodedImage, ...]:
        """Return the images of an example of a data module of this package; of a pair, those of its prompt."""
        if isinstance(example, Prompt):
            return () if example.images is None else example.images.images
        text = example if isinstance(example, MaskedText) or not isinstance(example, tuple) else example[0]
        if self._store is None or not isinstance(text, MaskedText):
            return ()
        return tuple(self._store.images[number] for number in text.images)

    def describe(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Return numbers about the images of some rows: ``rows`` with images, ``distinct`` images, and their tokens.

        ``tokens_mean`` and ``tokens_most`` are numbers of tokens that stand for the images of a row that has some. The
        result is empty if no row has an image.
        """
        of_rows = [images for images in map(self.images_of, examples) if images]
        if not of_rows:
            return {}
        tokens = [sum(len(self.tokens_of(image)) for image in images) for images in of_rows]
        return {
            "rows": len(of_rows),
            "distinct": len({image for images in of_rows for image in images}),
            "tokens_mean": sum(tokens) / len(tokens),
            "tokens_most": max(tokens),
        }

    def first(self, examples: Sequence[Any]) -> int:
        """Return the position of the first example with an image, 0 without one."""
        return next((position for position, example in enumerate(examples) if self.images_of(example)), 0)

    def fields(self, images: Sequence[EncodedImage]) -> list[dict[str, Any]]:
        """Return the size of each image, the number of its tokens, and its file, None for one inside the data."""
        return [
            {
                "width": image.width,
                "height": image.height,
                "tokens": len(self.tokens_of(image)),
                "file": image.path,
            }
            for image in images
        ]

    def spans(self, ids: Sequence[int], images: Sequence[EncodedImage]) -> list[ImageSpan]:
        """Return the positions of images in a text, in their order.

        Args:
            ids: tokens of the text.
            images: images of the text in their order.
        """
        spans: list[ImageSpan] = []
        position = 0
        for number, image in enumerate(images, 1):
            run = self.tokens_of(image)
            starts = range(position, len(ids) - len(run) + 1)
            is_run = (ids[start] == run[0] and list(ids[start : start + len(run)]) == run for start in starts)
            start = next(itertools.compress(starts, is_run), None)
            if start is not None:
                position = start + len(run)
                mark = f"<image {number}: {image.width} x {image.height}, {counted(len(run), 'token')}>"
                spans.append(ImageSpan(start, position, mark))
        return spans
