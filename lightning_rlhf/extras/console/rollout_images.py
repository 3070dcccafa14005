"""Images of prompts in the files and tables of RolloutLog: thumbnails, and texts about their sizes."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from lightning_rlhf.callbacks.records.run_files import THUMBNAIL
from lightning_rlhf.encoded_image import EncodedImage

log = logging.getLogger(__name__)
_MOST = 2000  # thumbnails of a run
_MOST_BYTES = 20_000  # of a thumbnail
_TRIALS = ((256, 80), (256, 60), (256, 40), (192, 40), (128, 40))  # pixels of the longer side, quality of the JPEG
_LISTED = 8  # images of a prompt whose sizes are in a table


class Thumbnails:
    """Writes each distinct image once in a run, as a small JPEG file ``images/0123456789abcdef.jpg``.

    The name is the beginning of the SHA-256 of the image. A run has at most 2,000 thumbnails of at most 20 kB; the
    processes of a run share them equally.

    Args:
        directory: directory of the files of RolloutLog.
        rank: number of this process.
        processes: number of processes that write into the directory.
    """

    def __init__(self, directory: Path, rank: int = 0, processes: int = 1) -> None:
        self._folder = directory / "images"
        self._rank = rank
        self._processes = processes
        self._left = 0  # thumbnails that this process may still write
        self._has_file: dict[str, bool] | None = None  # by the name of a thumbnail; None before the first image

    def remove(self) -> None:
        """Remove the thumbnails of an earlier run."""
        for path in self._folder.glob("*"):
            if re.fullmatch(rf"{THUMBNAIL}(\.rank[0-9]+)?", path.name):
                path.unlink()

    def add(self, images: Sequence[EncodedImage]) -> list[dict[str, Any]]:
        """Write the thumbnails of a prompt's images that are not written yet.

        Returns:
            For each image its ``width`` and ``height`` in pixels, and ``file``, the path of its thumbnail from the
            directory; None for an image without one.
        """
        return [{"file": self._file_of(image), "width": image.width, "height": image.height} for image in images]

    def _file_of(self, image: EncodedImage) -> str | None:
        if self._has_file is None:
            names = [path.name for path in self._folder.glob("*.jpg")]
            self._has_file = {name: True for name in names if re.fullmatch(THUMBNAIL, name)}
            self._left = (_MOST - len(self._has_file)) // self._processes
        name = f"{image.sha256[:16]}.jpg"
        if name not in self._has_file and self._left > 0:
            self._has_file[name] = (self._folder / name).is_file() or self._write(name, image)  # or another process has
        return f"images/{name}" if self._has_file.get(name) else None

    def _write(self, name: str, image: EncodedImage) -> bool:
        """Write the thumbnail of an image, and return whether the image can be read."""
        self._left -= 1
        try:
            data = thumbnail(image.open())
        except (OSError, RuntimeError, ValueError) as error:
            log.warning("an image of a prompt has no thumbnail in rollouts/images: %s", error)
            return False
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f"{name}.rank{self._rank}"
        draft.write_bytes(data)
        draft.replace(self._folder / name)  # atomic: a thumbnail is complete
        return True


def thumbnail(image: Image.Image) -> bytes:
    """Return an image as a JPEG file with at most 256 pixels on its longer side, of about 20 kB at most.

    Args:
        image: image in RGB, which becomes smaller.
    """
    data = b""
    for side, quality in _TRIALS:
        image.thumbnail((side, side))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        data = buffer.getvalue()
        if len(data) <= _MOST_BYTES:
            break
    return data


def with_images(row: dict[str, Any], images: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row with the images of its prompt after the prompt; without images, the row itself.

    Args:
        row: row of a file; the values of its tokens stay last, where readers can leave them out.
        images: result of :meth:`Thumbnails.add`.
    """
    if not images:
        return row
    return {"prompt": row["prompt"], "images": images, **row}


def text_of_images(sizes: Sequence[tuple[int, int]]) -> str:
    """Return the number of images and their sizes, such as ``2 images: 640 x 480, 32 x 32``.

    Args:
        sizes: width and height of each image, in pixels.
    """
    if not sizes:
        return ""
    listed = [f"{width} x {height}" for width, height in sizes[:_LISTED]]
    rest = ["..."] if len(sizes) > _LISTED else []
    return f"{len(sizes)} image{'' if len(sizes) == 1 else 's'}: {', '.join([*listed, *rest])}"
