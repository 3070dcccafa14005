"""Images of rows for commands with an option ``--images``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_rlhf.data.row import BadRow
from lightning_rlhf.data.rows import folder_of
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.extras.images.reading import read_image
from lightning_rlhf.images import BadImage, ImageSettings

HELP = "directory with the images of rows (default: that of the file)"


@contextmanager
def naming_the_option() -> Iterator[None]:
    """Raise :class:`BadRow` with advice about ``--images`` in place of :class:`BadImage`."""
    try:
        yield
    except BadImage as error:
        advice = "--images DIR sets the directory with the images, by default that of the file"
        raise BadRow(str(error), error.kind, advice) from error


def image_reader(settings: ImageSettings, location: str) -> Callable[[Any], EncodedImage]:
    """Return a function that reads an image of a row.

    Args:
        settings: directory and limits of images.
        location: location of the row, such as ``file:line``.
    """
    folder = folder_of(location)

    def read(value: Any) -> EncodedImage:
        with naming_the_option():
            return read_image(value, settings, folder)

    return read
