"""The images of the data by their numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.images.processor import ImageProcessor
from lightning_rlhf.images.reading import ImageSettings, read_image

# For a rank whose texts have no image, where all ranks must encode one.
BLANK = read_image(Image.new("RGB", (64, 64), "white"), ImageSettings(), None)


class ImageStore:
    """Distinct images of the data, and the processor of the model that reads them.

    Args:
        processor: processor of the model.
    """

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
        rows = torch.full((len(numbers), self.longest), -1)
        for row, of_text in enumerate(numbers):
            rows[row, : len(of_text)] = torch.tensor(of_text, dtype=torch.int64)
        return rows
