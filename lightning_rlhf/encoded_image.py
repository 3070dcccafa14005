"""Images as encoded files, such as PNG or JPEG."""

from __future__ import annotations

import base64
import hashlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from lightning_rlhf.expected_errors import RunError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}  # that APIs accept
_ORIENTATION = 0x0112  # of EXIF data; 1 does not turn the image


def sha256_of(data: bytes) -> str:
    """Return the hexadecimal SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class EncodedImage:
    """An image as the bytes of a file; equal if these are.

    Args:
        sha256: hexadecimal SHA-256 of the bytes.
        width: number of pixels of a row.
        height: number of rows.
        path: file with the bytes, which is read when they are needed; None if ``data`` has them.
        data: the bytes; None if they are in a file.
    """

    sha256: str
    width: int
    height: int
    path: str | None = field(default=None, compare=False)
    data: bytes | None = field(default=None, compare=False, repr=False)

    @property
    def number(self) -> int:
        """Number of the image in batches: the first 60 bits of the SHA-256, the same on every rank."""
        return int(self.sha256[:15], 16)

    def as_fields(self) -> dict[str, Any]:
        """Return the fields as values of JSON, with the bytes in base64."""
        data = None if self.data is None else base64.b64encode(self.data).decode()
        return {"sha256": self.sha256, "width": self.width, "height": self.height, "path": self.path, "data": data}

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> EncodedImage:
        """Return the image of the result of :meth:`as_fields`."""
        data = fields["data"]
        return cls(**{**fields, "data": None if data is None else base64.b64decode(data)})

    def read(self) -> bytes:
        """Return the bytes.

        Raises:
            RuntimeError: the file is missing, or has changed since it was read first.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None
        try:
            data = Path(self.path).read_bytes()
        except OSError as error:
            raise RunError(f"the image {self.path!r} can no longer be read: {error.strerror}") from error
        if sha256_of(data) != self.sha256:
            raise RunError(f"the image {self.path!r} has changed since the data were read: start the run again")
        return data

    def open(self) -> Image.Image:
        """Return the image in RGB, turned as its EXIF data demand; transparent parts are white."""
        return decode(self.read())

    def data_url(self) -> str:
        """Return the image as a ``data:`` URL, for requests to servers.

        It contains the file, or the result of :meth:`open` as PNG for a file that servers may reject or show in another
        way: BMP, 16 bits, transparent parts, or EXIF data that turn the image.
        """
        data = self.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                media_type = _MEDIA_TYPES.get(str(image.format))
                is_turned = image.getexif().get(_ORIENTATION, 1) != 1
                is_deep = image.mode[0] in "IF"  # of 16 bits, which programs convert in different ways
                if media_type is None or is_turned or is_deep or image.has_transparency_data:
                    media_type, buffer = "image/png", io.BytesIO()
                    decode(data).save(buffer, "PNG")
                    data = buffer.getvalue()
        return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def decode(data: bytes) -> Image.Image:
    """Return an image in RGB, turned as its EXIF data demand; transparent parts are white.

    Args:
        data: bytes of a file in one of :data:`FORMATS`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of pixels was checked, and damaged EXIF data do not matter
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data), formats=FORMATS))
        if image.mode.startswith("I;16"):  # Pillow would clip each level above 255 to white
            image.info.pop("transparency", None)
            image = image.point(lambda level: level * (1 / 257)).convert("L")
        if not image.has_transparency_data:
            return image.convert("RGB")
        layers = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")
