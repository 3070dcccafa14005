"""Reading of images from the values of rows, within limits."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from lightning_rlhf.encoded_image import FORMATS, EncodedImage, decode, sha256_of
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.images.bad import BadImage
from lightning_rlhf.images.remote import fetch

_READ_ERRORS = (OSError, ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, MemoryError)  # of Pillow
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM")
_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class ImageSettings:
    """Places from which images are read, and limits on their size.

    Args:
        folder: directory that contains the images; relative paths start there, and no file outside of it is read. None
            is the directory of the data file.
        remote: whether images at addresses with ``https://`` or ``http://`` are fetched; addresses of this machine and
            of private networks never are.
        max_pixels: largest number of pixels of an image.
        max_bytes: largest number of bytes of an image's file.

    Raises:
        ValueError: a limit is not positive.
    """

    folder: str | None = None
    remote: bool = False
    max_pixels: int = 1 << 24
    max_bytes: int = 1 << 25

    def __post_init__(self) -> None:
        for name in ("max_pixels", "max_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"images: {name} must be at least 1, got {getattr(self, name)}")


def read_image(value: Any, settings: ImageSettings, folder: Path | None) -> EncodedImage:
    """Read an image of a row, and decode it once, so that damaged ones are found before training.

    Args:
        value: path, address, ``data:`` URL, base64, bytes, image of Pillow, or a mapping with one of these under
            ``bytes``, ``path``, ``url`` or ``base64``.
        settings: where images may be read, and their limits.
        folder: directory of the data file; None if the data are not in a file.

    Raises:
        BadImage: the value is no image, or exceeds a limit; the message contains the reason.
    """
    path: Path | None = None
    if isinstance(value, Mapping):
        keys = [key for key in ("bytes", "base64", "url", "path") if value.get(key) is not None]
        if not keys:
            raise BadImage(f"an image is a mapping with {sorted(map(str, value))}, expected bytes, path, url or base64")
        value = value[keys[0]]
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        (value if value.mode in ("RGB", "RGBA", "L", "LA") else value.convert("RGBA")).save(buffer, "PNG")
        data = buffer.getvalue()
    elif isinstance(value, bytes | bytearray):
        data = bytes(value)
    elif not isinstance(value, str) or not value.strip():
        raise BadImage(f"an image is {type(value).__name__}, expected a path, an address, base64 or bytes")
    elif value.startswith("data:"):
        data = _of_data_url(value)
    elif "://" in value:
        data = fetch(value, settings.remote, settings.max_bytes)
    elif (decoded := _of_base64(value)) is not None:
        data = decoded
    else:
        path = _expect_inside(value, folder if settings.folder is None else Path(settings.folder).expanduser())
        data = _read_file(path, value, settings.max_bytes)
    name = "the image" if not isinstance(value, str) or len(value) > _SHOWN else f"the image {value!r}"
    if len(data) > settings.max_bytes:
        raise BadImage(
            f"{name} has {len(data)} bytes, more than max_bytes {settings.max_bytes} of images",
            "an image has more than max_bytes",
        )
    width, height = _checked_size(data, name, settings.max_pixels)
    if path is None:
        return EncodedImage(sha256_of(data), width, height, data=data)
    return EncodedImage(sha256_of(data), width, height, path=str(path))


def _checked_size(data: bytes, name: str, max_pixels: int) -> tuple[int, int]:
    """Return width and height of an image that can be decoded."""
    if data.lstrip()[:5].lower() in (b"<?xml", b"<svg ", b"<svg>"):
        raise BadImage(f"{name} is SVG, expected one of {', '.join(FORMATS)}", "an image is SVG")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > max_pixels:
                    raise BadImage(
                        f"{name} has {width} x {height} pixels, more than max_pixels {max_pixels} of images",
                        "an image has more than max_pixels",
                    )
                if getattr(image, "n_frames", 1) > 1:
                    raise BadImage(f"{name} is animated, with {image.n_frames} frames: use one of them")  # type: ignore[attr-defined]
        return decode(data).size
    except BadImage:
        raise
    except _READ_ERRORS as error:
        reason = "not one of these formats" if isinstance(error, UnidentifiedImageError) else str(error)
        raise BadImage(
            f"{name} cannot be decoded: {reason or type(error).__name__}; expected one of {', '.join(FORMATS)}",
            "an image cannot be decoded",
        ) from error


def _of_data_url(value: str) -> bytes:
    header, comma, content = value.partition(",")
    if not comma or not header.endswith(";base64"):
        raise BadImage("an image's data: URL has no base64 content: expected data:image/png;base64,...")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImage(f"an image's data: URL is not valid base64: {error}") from error


def _of_base64(value: str) -> bytes | None:
    """Return the bytes of a text that is the base64 of an image; None for another text, such as a path."""
    try:
        head = base64.b64decode(value[:64], validate=True)
        return base64.b64decode(value, validate=True) if head.startswith(_MAGIC) else None
    except (binascii.Error, ValueError):
        return None


def _expect_inside(value: str, folder: Path | None) -> Path:
    """Return the path of a file in the folder of images."""
    shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
    if folder is None:
        raise BadImage(
            f"the image {shown!r} is a path, but the data are not in a local file: set folder under images, the "
            f"directory with the images",
            "an image is a path, and images has no folder",
        )
    try:
        path, root = (folder / Path(value).expanduser()).resolve(), folder.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise BadImage(f"the image {shown!r} is not a path: {error}", "an image is not a path") from error
    if not path.is_relative_to(root):
        raise BadImage(
            f"the image {shown!r} is outside of {str(root)!r}: move it there, or set folder under images",
            "an image is outside of the folder of images",
        )
    return path


def _read_file(path: Path, value: str, max_bytes: int) -> bytes:
    try:
        if not path.is_file():
            raise BadImage(f"no image at {str(path)!r}", "an image is missing")
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise BadImage(
            f"the image {value[:_SHOWN]!r} cannot be read: {error.strerror}", "an image is missing"
        ) from error
