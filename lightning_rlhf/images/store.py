"""The distinct images of the data, with numbers that are the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.images.processor import ImageProcessor


class ImageStore:
    """Distinct images in the order in which they were added, and the processor of the model that reads them.

    Args:
        processor: processor of the model.
    """

    def __init__(self, processor: ImageProcessor) -> None:
        self.processor = processor
        self.images: list[EncodedImage] = []
        self._numbers: dict[EncodedImage, int] = {}
        self.longest = 0  # largest number of images of a text

    def add(self, images: Sequence[EncodedImage]) -> tuple[int, ...]:
        """Return the number of each image of a text; new ones are added."""
        self.longest = max(self.longest, len(images))
        for image in images:
            if image not in self._numbers:
                self._numbers[image] = len(self.images)
                self.images.append(image)
        return tuple(self._numbers[image] for image in images)

    def rows(self, numbers: Sequence[Sequence[int]]) -> Tensor:
        """Return (B, K) int64 numbers of the images of each text, padded by -1; K is the same for all batches."""
        rows = torch.full((len(numbers), self.longest), -1)
        for row, of_text in enumerate(numbers):
            rows[row, : len(of_text)] = torch.tensor(of_text, dtype=torch.int64)
        return rows
