"""Images of the data: their settings, their store, and what a run needs from the extra that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.entry_points import the_offered
from lightning_rlhf.expected_errors import UsageError

if TYPE_CHECKING:  # workers of environments import this file without torch
    from torch import Tensor

_MOST_PIXELS = 178_956_970  # Pillow opens no larger image


@cache
def reader() -> Any:
    """Return the module that reads images and loads processors, :mod:`lightning_rlhf.extras.images` by default.

    It has ``read_image``, ``blank_image``, ``load_processor``, ``copy_processor``; for models ``check_reads_images``,
    ``images_alike``, ``TextImages`` and ``FeatureCache``.
    """
    return the_offered("images")


class BadImage(UsageError):
    """An image that cannot be used.

    Args:
        why: error message with the image's name.
        kind: message without the name, by which such images are counted; by default ``why``.
    """

    def __init__(self, why: str, kind: str | None = None) -> None:
        super().__init__(why)
        self.kind = kind or why


@dataclass(frozen=True)
class ImageSettings:
    """Places from which images are read, and limits on their size.

    Args:
        folder: directory that contains the images; relative paths start there, and no file outside of it is read. None
            is the directory of the data file.
        remote: whether images at addresses with ``https://`` or ``http://`` are fetched; addresses of this machine and
            of private networks never are.
        max_pixels: largest number of pixels of an image, at most 178,956,970.
        max_bytes: largest number of bytes of an image's file.

    Raises:
        ValueError: a limit is not positive, or too large.
    """

    folder: str | None = None
    remote: bool = False
    max_pixels: int = 1 << 24
    max_bytes: int = 1 << 25

    def __post_init__(self) -> None:
        for name in ("max_pixels", "max_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"images: {name} must be at least 1, got {getattr(self, name)}")
        if self.max_pixels > _MOST_PIXELS:
            raise UsageError(f"images: max_pixels must be at most {_MOST_PIXELS}, got {self.max_pixels}")


class ImageProcessor(Protocol):
    """The processor of a vision-language model."""

    placeholder: str

    @property
    def tokens_of_images(self) -> set[str]:
        """Texts that stand for an image, or a part of one, and must not occur in other texts."""

    def expand(self, text: str, images: Sequence[EncodedImage]) -> str:
        """Return a text in which each placeholder is replaced by the text that stands for its image."""

    def tensors(self, image: EncodedImage) -> dict[str, Tensor]:
        """Return the inputs of the model for an image."""

    def save(self, directory: Path) -> None:
        """Write the files of the processor."""


class FeatureCache(Protocol):
    """Features of the last images that a frozen encoder has encoded."""


class TextImages(Protocol):
    """Images of the texts of a forward pass."""

    def to(self, device: Any) -> TextImages:
        """Move the tensors to a device."""

    def arguments(self, lm: Any, input_ids: Tensor, packing: Any, cache: FeatureCache | None = None) -> dict[str, Any]:
        """Return the arguments of a backbone's forward pass, besides the token ids."""

    def generation_arguments(self, lm: Any, input_ids: Tensor) -> dict[str, Any]:
        """Return the arguments of ``generate`` of transformers, besides the token ids."""


class ImageStore:
    """Distinct images of the data, and the processor of the model that reads them."""

    def __init__(self, processor: ImageProcessor) -> None:
        self.processor = processor
        self.images: dict[int, EncodedImage] = {}
        self.further = 0  # largest number of images of a text that are not in the data, but an environment's
        self._longest = 0  # largest number of images of a text of the data

    @property
    def longest(self) -> int:
        """Largest number of images of a text."""
        return self._longest + self.further

    def add(self, images: Sequence[EncodedImage]) -> tuple[int, ...]:
        """Return the number of each image of a text; new ones are added."""
        self._longest = max(self._longest, len(images))
        for image in images:
            self.images.setdefault(image.number, image)
        return tuple(image.number for image in images)

    def rows(self, numbers: Sequence[Sequence[int]]) -> Tensor:
        """Return (B, K) int64 numbers of the images of each text, padded by -1; K is the same for all batches."""
        import torch

        rows = torch.full((len(numbers), self.longest), -1)
        for row, of_text in enumerate(numbers):
            rows[row, : len(of_text)] = torch.tensor(of_text, dtype=torch.int64)
        return rows
