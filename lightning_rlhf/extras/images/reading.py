"""Reading of images from the values of rows, within limits."""

from __future__ import annotations

import base64
import binascii
import io
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from lightning_rlhf.encoded_image import FORMATS, EncodedImage, decode, sha256_of
from lightning_rlhf.extras.images.remote import fetch
from lightning_rlhf.images import BadImage, ImageSettings

# Errors of Pillow while it reads damaged files.
_READ_ERRORS = (
    OSError, EOFError, ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError,
    struct.error, zlib.error,
)  # fmt: skip
_ANIMATED = ("GIF", "PNG", "WEBP")  # a JPEG of several pictures has the photo first, then previews or depths of it
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM")
_PNG_MODES = ("I;16", "L", "LA", "RGB", "RGBA")
_KEYS = ("bytes", "base64", "url", "path", "image", "image_url")  # the last two are those of verl and Qwen
_FILE = "file://"
_SHOWN = 60  # characters of a value in a message


def blank_image() -> EncodedImage:
    """Return a white image, for a rank whose texts have none where all ranks must encode one."""
    return read_image(Image.new("RGB", (64, 64), "white"), ImageSettings(), None)


def read_image(value: Any, settings: ImageSettings, folder: Path | None) -> EncodedImage:
    """Read an image of a row, and decode it once, so that damaged ones are found before training.

    Args:
        value: path, also as ``file://``, address, ``data:`` URL, base64, bytes, image of Pillow, or a mapping with one
            of these under ``bytes``, ``path``, ``url``, ``base64``, ``image`` or ``image_url``; an image that was read
            already is returned.
        settings: folder of the images, and limits on their size.
        folder: directory of the data file; None if the data are not in a file.

    Raises:
        BadImage: the value is not an image, or exceeds a limit; the message contains the reason.
    """
    if isinstance(value, EncodedImage):
        return value
    path: Path | None = None
    if isinstance(value, Mapping):
        keys = [key for key in _KEYS if value.get(key) is not None]
        if not keys:
            others = sorted(map(str, value))
            raise BadImage(f"an image is a mapping with {others}, expected one of {', '.join(_KEYS)}")
        value = value[keys[0]]
    if isinstance(value, Image.Image):
        data = _of_pillow(value, settings.max_pixels)
    elif isinstance(value, bytes | bytearray):
        data = bytes(value)
    elif not isinstance(value, str) or not value.strip():
        kind = "null" if value is None else "empty text" if isinstance(value, str) else type(value).__name__
        raise BadImage(f"an image is {kind}, expected a path, an address, base64 or bytes")
    elif value.startswith("data:"):
        data = _of_data_url(value)
    elif "://" in value and not value.startswith(_FILE):
        data = fetch(value, settings.remote, settings.max_bytes)
    elif (decoded := _of_base64(value)) is not None:
        data = decoded
    else:
        root = folder if settings.folder is None else Path(settings.folder).expanduser()
        path = _expect_inside(value.removeprefix(_FILE), root)
        data = _read_file(path, value, settings.max_bytes)
    name = "the image" if not isinstance(value, str) or len(value) > _SHOWN else f"the image {value!r}"
    if len(data) > settings.max_bytes:
        raise BadImage(
            f"{name} has more than {settings.max_bytes} bytes: make it smaller, or raise max_bytes under images",
            "an image has more than max_bytes",
        )
    width, height = _checked_size(data, name, settings.max_pixels)
    if path is None:
        return EncodedImage(sha256_of(data), width, height, data=data)
    return EncodedImage(sha256_of(data), width, height, path=str(path))


def _checked_size(data: bytes, name: str, max_pixels: int) -> tuple[int, int]:
    """Return width and height of an image that can be decoded."""
    if not data:
        raise BadImage(f"{name} is empty, expected one of {', '.join(FORMATS)}", "an image is empty")
    if data.lstrip()[:5].lower() in (b"<?xml", b"<svg ", b"<svg>"):
        raise BadImage(f"{name} is SVG, convert it to one of {', '.join(FORMATS)}", "an image is SVG")
    with _decoding(name, max_pixels):
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_header(image, name, max_pixels)
        return decode(data).size


def _check_header(image: Image.Image, name: str, max_pixels: int) -> None:
    """Validate the size and the number of pictures of an image that is not decoded yet."""
    width, height = image.size
    if width * height > max_pixels:
        raise BadImage(
            f"{name} has {width} x {height} pixels, more than {max_pixels}: make it smaller, or raise max_pixels under "
            f"images",
            "an image has more than max_pixels",
        )
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format in _ANIMATED:
        raise BadImage(f"{name} is animated, with {frames} pictures: use one of them", "an image is animated")


@contextmanager
def _decoding(name: str, max_pixels: int) -> Iterator[None]:
    """Raise :class:`BadImage` in place of Pillow's errors, and ignore its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except BadImage:
        raise
    except Image.DecompressionBombError as error:
        raise BadImage(
            f"{name} has more than {max_pixels} pixels: make it smaller, or raise max_pixels under images",
            "an image has more than max_pixels",
        ) from error
    except _READ_ERRORS as error:
        reason = "its format is not known" if isinstance(error, UnidentifiedImageError) else str(error)
        raise BadImage(
            f"{name} cannot be decoded: {reason or type(error).__name__}; expected a whole file in one of the formats "
            f"{', '.join(FORMATS)}",
            "an image cannot be decoded",
        ) from error


def _of_pillow(image: Image.Image, max_pixels: int) -> bytes:
    """Return an image of Pillow, which may not be decoded yet, as PNG."""
    if image.mode in ("F", "I"):
        raise BadImage(
            f"an image of Pillow has the mode {image.mode}, whose range of values is not known: convert it to RGB, by "
            f"PIL.Image.fromarray of an array of uint8"
        )
    buffer = io.BytesIO()
    with _decoding("the image", max_pixels):
        _check_header(image, "the image", max_pixels)
        image = ImageOps.exif_transpose(image)  # PNG is written without EXIF data
        (image if image.mode in _PNG_MODES else image.convert("RGBA")).save(buffer, "PNG")
    return buffer.getvalue()


def _of_data_url(value: str) -> bytes:
    header, comma, content = value.partition(",")
    if not comma or not header.endswith(";base64"):
        raise BadImage("an image's data: URL has no base64 content: expected data:image/png;base64,...")
    return _decode_base64(content, "an image's data: URL")


def _of_base64(value: str) -> bytes | None:
    """Return the bytes of a text that is the base64 of an image; None for another text, such as a path."""
    try:
        head = base64.b64decode(_without_space(value[:200])[:64], validate=True)
    except (binascii.Error, ValueError):
        return None
    if not head.startswith(_MAGIC):
        return None
    return _decode_base64(value, "an image's text begins as base64, but")


def _decode_base64(content: str, name: str) -> bytes:
    try:
        return base64.b64decode(_without_space(content), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImage(
            f"{name} is not valid base64: {error}; encode the bytes of the file again",
            "an image is not valid base64",
        ) from error


def _without_space(text: str) -> str:
    """Return a text without line breaks, which many programs put into base64."""
    return "".join(text.split())


def _expect_inside(value: str, folder: Path | None) -> Path:
    """Return the path of a file in the folder of images."""
    shown = _shown(value)
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
        if path.is_dir():
            raise BadImage(
                f"the image {_shown(value)!r} is a directory: use the path of a file", "an image is a directory"
            )
        if not path.is_file():
            raise BadImage(
                f"no image at {_shown(str(path), 300)!r}: relative paths begin at the directory of the data file, or "
                f"at folder under images",
                "an image is missing",
            )
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise BadImage(
            f"the image {_shown(value)!r} cannot be read: {error.strerror}", "an image cannot be read"
        ) from error


def _shown(text: str, most: int = _SHOWN) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
