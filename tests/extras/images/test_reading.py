"""Images are read from every form in which data sets hold them; each bad one gives one clear sentence."""

import base64
import io
import pickle
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile

from lightning_rlhf.encoded_image import EncodedImage, sha256_of
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.extras.images.reading import read_image
from lightning_rlhf.images import BadImage, ImageSettings
from tests.helpers import properties

ORIENTATION = 0x112


def encode(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(mode="RGB"):
    """Return a red picture of 6 x 4 pixels, whose left upper pixel is blue."""
    image = Image.new("RGB", (6, 4), "red")
    image.putpixel((0, 0), (0, 0, 255))
    return image.convert(mode)


def turned(orientation, kind="PNG"):
    """Return the picture with EXIF data that turn it."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encode(picture(), kind, exif=exif)


def header_of(width, height):
    """Return a PNG of a few bytes that claims a size."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


PNG = encode(picture())
BASE64 = base64.b64encode(PNG).decode()
NOISE = encode(Image.effect_noise((64, 64), 50))  # base64 of several lines
PIXELS = list(picture().get_flattened_data())


def pixels(image):
    return list(image.open().get_flattened_data())


def read(value, directory=None, /, **settings):
    return read_image(value, ImageSettings(**settings), directory)


# -- forms of a good image ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A folder with the picture, also in a subfolder."""
    (tmp_path / "inner").mkdir()
    for path in ("a.png", "inner/b c.png", "ä.png"):
        (tmp_path / path).write_bytes(PNG)
    return tmp_path


PATHS = {
    "relative path": lambda folder: "a.png",
    "path in a subfolder": lambda folder: "inner/b c.png",
    "path with other letters": lambda folder: "ä.png",
    "path that leaves the folder and returns": lambda folder: f"../{folder.name}/a.png",
    "absolute path in the folder": lambda folder: str(folder / "a.png"),
    "mapping with a path": lambda folder: {"path": "a.png"},
    "mapping as datasets write it": lambda folder: {"bytes": None, "path": "a.png"},
    "mapping with a path as url": lambda folder: {"url": "a.png"},
}
VALUES = {
    "data URL": f"data:image/png;base64,{BASE64}",
    "data URL with a parameter": f"data:image/png;charset=utf-8;base64,{BASE64}",
    "base64": BASE64,
    "bytes": PNG,
    "bytearray": bytearray(PNG),
    "mapping with bytes": {"bytes": PNG},
    "mapping with bytes and a path": {"bytes": PNG, "path": "missing.png"},
    "mapping with a data URL": {"url": f"data:image/png;base64,{BASE64}", "detail": "low"},
    "mapping with base64": {"base64": BASE64},
}


@pytest.mark.parametrize("name", PATHS)
def test_paths_are_read_from_the_folder_of_the_data(folder, name):
    image = read(PATHS[name](folder), folder)
    assert (image.sha256, image.width, image.height, image.data) == (sha256_of(PNG), 6, 4, None)
    assert (image.read(), pixels(image)) == (PNG, PIXELS)


@pytest.mark.parametrize("name", VALUES)
def test_values_with_their_content_need_no_folder(name):
    image = read(VALUES[name])
    assert (image.sha256, image.width, image.height, image.path) == (sha256_of(PNG), 6, 4, None)
    assert (image.read(), pixels(image)) == (PNG, PIXELS)


@pytest.mark.parametrize(
    "value", [base64.encodebytes(NOISE).decode(), f"data:;base64,{base64.encodebytes(NOISE).decode()}"]
)
def test_base64_may_have_several_lines(value):
    assert value.count("\n") > 1
    assert read(value).read() == NOISE


def test_image_that_was_read_already_is_returned():
    image = read(PNG)
    assert read(image) is image


def test_a_folder_that_is_set_has_priority(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    other_png = encode(Image.new("RGB", (3, 3)))
    (other / "a.png").write_bytes(other_png)
    assert read("a.png", folder, folder=str(other)).read() == other_png
    assert read("a.png", None, folder=str(other)).read() == other_png


def test_link_within_the_folder_is_followed(folder):
    (folder / "link.png").symlink_to(folder / "inner" / "b c.png")
    assert read("link.png", folder).read() == PNG


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_every_format_is_decoded(kind):
    image = read(encode(Image.new("RGB", (6, 4), "red"), kind))
    assert (image.width, image.height) == (6, 4)
    assert all(max(abs(a - b) for a, b in zip(pixel, (255, 0, 0), strict=True)) < 4 for pixel in pixels(image))


# -- pixels ---------------------------------------------------------------------------------------------------------

CORNERS = {1: (0, 0), 2: (5, 0), 3: (5, 3), 4: (0, 3), 5: (0, 0), 6: (3, 0), 7: (3, 5), 8: (0, 5)}


@pytest.mark.parametrize("orientation", CORNERS)
@pytest.mark.parametrize("is_opened", [False, True], ids=["bytes", "image of Pillow"])
def test_exif_orientation_is_applied(orientation, is_opened):
    data = turned(orientation)
    image = read(Image.open(io.BytesIO(data)) if is_opened else data)
    assert (image.width, image.height) == ((6, 4) if orientation < 5 else (4, 6))
    opened = image.open()
    assert opened.size == (image.width, image.height)
    assert opened.getpixel(CORNERS[orientation]) == (0, 0, 255)


def half_transparent():
    return Image.new("RGBA", (2, 2), (255, 0, 0, 128))


def palette_with_transparency():
    image = Image.new("P", (2, 2), 0)
    image.putpalette([10, 20, 30])
    return image


@pytest.mark.parametrize(
    ("image", "options", "pixel"),
    [
        (half_transparent(), {}, (255, 127, 127)),
        (Image.new("RGBA", (2, 2), (0, 0, 0, 0)), {}, (255, 255, 255)),
        (Image.new("LA", (2, 2), (0, 0)), {}, (255, 255, 255)),
        (palette_with_transparency(), {"transparency": 0}, (255, 255, 255)),
        (palette_with_transparency(), {}, (10, 20, 30)),
        (Image.new("RGB", (2, 2), (1, 2, 3)), {"transparency": (1, 2, 3)}, (255, 255, 255)),
        (Image.new("L", (2, 2), 77), {}, (77, 77, 77)),
        (Image.new("L", (2, 2), 77), {"transparency": 77}, (255, 255, 255)),
        (Image.new("1", (2, 2), 1), {}, (255, 255, 255)),
        (Image.new("I;16", (2, 2), 30000), {}, (116, 116, 116)),  # 30000 / 257
        (Image.new("I;16", (2, 2), 65535), {}, (255, 255, 255)),
    ],
)
@pytest.mark.parametrize("is_opened", [False, True], ids=["bytes", "image of Pillow"])
def test_pixels_become_rgb_on_white(image, options, pixel, is_opened):
    data = encode(image, **options)
    opened = read(Image.open(io.BytesIO(data)) if is_opened else data).open()
    assert opened.mode == "RGB"
    assert opened.getpixel((1, 1)) == pixel


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "RGBX", "L", "P", "YCbCr", "CMYK", "HSV"])
def test_images_of_pillow_of_every_mode_are_read(mode):
    image = read(picture(mode))
    assert (image.width, image.height) == (6, 4)
    assert pixels(image) == list(picture(mode).convert("RGB").get_flattened_data())


def test_first_picture_of_a_jpeg_with_several_is_used():
    data = encode(
        Image.new("RGB", (6, 4), "red"), "MPO", save_all=True, append_images=[Image.new("RGB", (6, 4), "blue")]
    )
    assert read(data).open().getpixel((3, 3))[0] > 250


def test_damaged_exif_data_do_not_matter():
    data = turned(6, "JPEG")
    start = data.index(b"Exif") + 14
    image = read(data[:start] + b"\xff" * 12 + data[start + 12 :])
    assert (image.width, image.height) == (6, 4)


# -- equality, and reading later --------------------------------------------------------------------------------------


def test_images_are_equal_if_their_bytes_are(folder):
    one, other = read("a.png", folder), read(PNG)
    assert one == other
    assert len({one, other, read({"path": "inner/b c.png"}, folder)}) == 1
    assert one != read(encode(picture(), "BMP"))


def test_mappings_of_verl_are_read(folder):
    values = [{"image": "a.png"}, {"image": f"file://{folder / 'a.png'}"}, {"image_url": "a.png"}, "file://a.png"]
    assert {read(value, folder) for value in values} == {read("a.png", folder)}


@pytest.mark.parametrize("value", ["a.png", PNG], ids=["path", "bytes"])
def test_images_are_pickled(folder, value):
    image = read(value, folder)
    copied = pickle.loads(pickle.dumps(image))
    assert (copied, copied.path, copied.data) == (image, image.path, image.data)
    assert pixels(copied) == PIXELS


def test_pickle_of_a_path_is_small_and_no_repr_has_the_bytes(folder):
    (folder / "noise.png").write_bytes(NOISE)
    assert len(pickle.dumps(read("noise.png", folder))) < 1000 < len(NOISE)
    assert len(repr(read(NOISE))) < 300


def test_changed_file_is_an_error_of_the_run(folder):
    image = read("a.png", folder)
    (folder / "a.png").write_bytes(encode(picture(), optimize=True, compress_level=0))
    with pytest.raises(
        RunError, match=r"the image '.*a\.png' has changed since the data were read: start the run again"
    ):
        image.open()


def test_missing_file_is_an_error_of_the_run(folder):
    image = read("a.png", folder)
    (folder / "a.png").unlink()
    with pytest.raises(RunError, match=r"the image '.*a\.png' can no longer be read: No such file or directory"):
        image.read()


# -- bad images -------------------------------------------------------------------------------------------------------

JPEG = encode(Image.effect_noise((64, 64), 50), "JPEG")
FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (6, 4), "blue")]}
FORMATS = "one of the formats PNG, JPEG, WEBP, GIF, BMP"
NOT_DECODED = f"expected a whole file in {FORMATS}"
FILES = {
    "truncated PNG": (NOISE[:-200], f"cannot be decoded: image file is truncated; {NOT_DECODED}"),
    "truncated JPEG": (JPEG[:-200], "cannot be decoded: image file is truncated"),
    "PNG cut in its header": (PNG[:20], "cannot be decoded"),
    "first bytes of a JPEG": (JPEG[:3], "cannot be decoded"),
    "PNG with a wrong checksum": (PNG.replace(b"IDAT", b"IDAX"), "cannot be decoded"),
    "claim of 60000 x 60000 pixels": (
        header_of(60000, 60000),
        "has more than 16777216 pixels: make it smaller, or raise",
    ),
    "claim of 10000 x 10000 pixels": (header_of(10000, 10000), "has 10000 x 10000 pixels, more than 16777216: make it"),
    "claim of no pixels": (header_of(0, 10), "cannot be decoded"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is SVG, convert it to one of PNG, JPEG, WEBP, GIF, BMP"),
    "SVG with a declaration": (b"\n<?xml version='1.0'?><svg/>", "is SVG, convert it to one of PNG"),
    "TIFF": (encode(picture(), "TIFF"), f"its format is not known; {NOT_DECODED}"),
    "PDF": (b"%PDF-1.4 " + bytes(100), "its format is not known"),
    "text": (b"Dear all,", "its format is not known"),
    "text that begins as BMP": (b"BMW builds cars. " * 9, "cannot be decoded"),
    "page of a server": (b"<!DOCTYPE html><html>404</html>", "its format is not known"),
    "pointer of Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "format is not known",
    ),
    "empty": (b"", "is empty, expected one of PNG, JPEG, WEBP, GIF, BMP"),
    "animated GIF": (encode(picture(), "GIF", **FRAMES), "is animated, with 2 pictures: use one of them"),
    "animated WEBP": (encode(picture(), "WEBP", **FRAMES), "is animated, with 2 pictures: use one of them"),
    "animated PNG": (encode(picture(), "PNG", **FRAMES), "is animated, with 2 pictures: use one of them"),
}
EXPECTED = "expected a path, an address, base64 or bytes"
BAD_VALUES = {
    "null": (None, f"an image is null, {EXPECTED}"),
    "number": (7, f"an image is int, {EXPECTED}"),
    "bool": (True, f"an image is bool, {EXPECTED}"),
    "empty text": ("", f"an image is empty text, {EXPECTED}"),
    "blank text": (" \n", f"an image is empty text, {EXPECTED}"),
    "list": (["a.png"], f"an image is list, {EXPECTED}"),
    "empty mapping": ({}, "an image is a mapping with [], expected one of bytes, base64, url, path, image, image_url"),
    "mapping of other keys": ({"file": "a.png"}, "an image is a mapping with ['file'], expected one of bytes"),
    "mapping of nulls": ({"bytes": None, "path": None}, "an image is a mapping with ['bytes', 'path'], expected one"),
    "mapping of a number": ({"path": 7}, f"an image is int, {EXPECTED}"),
    "mapping in a mapping": ({"url": {"url": "a.png"}}, f"an image is dict, {EXPECTED}"),
    "invalid base64 in a data URL": ("data:image/png;base64,@@@@", "URL is not valid base64: Only base64 data is"),
    "cut base64 in a data URL": (f"data:image/png;base64,{BASE64[:-1]}", "URL is not valid base64: Incorrect padding;"),
    "cut base64": (base64.b64encode(NOISE).decode()[:-1], "begins as base64, but is not valid base64: Incorrect"),
    "data URL without base64": ("data:image/svg+xml,<svg/>", "has no base64 content: expected data:image/png;base64,"),
    "data URL without content": ("data:image/png;base64", "has no base64 content: expected data:image/png;base64,..."),
    "data URL of nothing": ("data:image/png;base64,", "is empty, expected one of PNG"),
    "missing file": ("missing.png", "missing.png': relative paths begin at the directory of the data file, or at"),
    "missing file in a mapping": ({"path": "missing.png"}, "no image at"),
    "directory": ("inner", "the image 'inner' is a directory: use the path of a file"),
    "folder itself": (".", "the image '.' is a directory: use the path of a file"),
    "path outside": ("../outside.png", "the image '../outside.png' is outside of"),
    "absolute path": ("/etc/hostname", "is outside of"),
    "path of another user": ("~nobody-of-this-name/a.png", "is not a path"),
    "null character": ("a\0.png", "is not a path: embedded null byte"),
    "half a surrogate pair": ("\ud800.png", "is not a path"),
    "long name": ("a" * 300 + ".png", "aaaaaa"),
    "file URL": ("file:///etc/hostname", "the image '/etc/hostname' is outside of"),
    "FTP": ("ftp://pictures.example/a.png", "has another protocol than https or http: use a path for a local file"),
    "address without remote": ("https://pictures.example/a.png", "is not local: set remote: true under images to"),
    "address that is not one": ("http://[::1/a.png", "has an invalid address: Invalid IPv6 URL"),
}  # fmt: skip


def reason_of(value, directory=None, /, **settings):
    """Return the message of a bad image, which is a single sentence and is counted without the image's name."""
    with pytest.raises(BadImage) as caught:
        read(value, directory, **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert 20 < len(message) < 420
    assert str(directory) not in caught.value.kind
    assert "a.png" not in caught.value.kind
    assert caught.value.kind
    return message


def test_kinds_of_bad_images_are_numerous():
    assert len(FILES) + len(BAD_VALUES) >= 50


@pytest.mark.parametrize("name", FILES)
def test_bad_files_give_one_sentence(folder, name):
    content, reason = FILES[name]
    (folder / "bad.png").write_bytes(content)
    message = reason_of("bad.png", folder)
    assert message.startswith("the image 'bad.png' ")
    assert reason in message
    assert reason_of(content) == message.replace("the image 'bad.png'", "the image")


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_give_one_sentence(folder, name):
    value, reason = BAD_VALUES[name]
    (folder.parent / "outside.png").write_bytes(PNG)
    assert reason in reason_of(value, folder)


@pytest.mark.parametrize("size", [(60000, 60000), (10000, 10000), (20000, 20000)])
def test_images_with_too_many_pixels_are_never_decoded(monkeypatch, size):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("the image is decoded"))
    assert "16777216" in reason_of(header_of(*size))
    assert "16777216" in reason_of(Image.open(io.BytesIO(header_of(5000, 5000))))


def test_limit_of_pixels_is_exact():
    assert read(PNG, max_pixels=24).width == 6
    assert reason_of(PNG, max_pixels=23) == (
        "the image has 6 x 4 pixels, more than 23: make it smaller, or raise max_pixels under images"
    )
    assert "more than 23" in reason_of(picture(), max_pixels=23)


def test_limit_of_bytes_is_exact(folder):
    for value in ("a.png", PNG, BASE64):
        assert read(value, folder, max_bytes=len(PNG)).width == 6
        assert reason_of(value, folder, max_bytes=len(PNG) - 1).endswith(
            f"has more than {len(PNG) - 1} bytes: make it smaller, or raise max_bytes under images"
        )


def test_large_file_is_not_read_whole(folder):
    with (folder / "large.png").open("wb") as file:
        file.truncate(1 << 40)
    assert "has more than 1000 bytes" in reason_of("large.png", folder, max_bytes=1000)


@pytest.mark.parametrize("target", ["outside.png", "/etc/hostname"])
def test_link_out_of_the_folder_is_not_followed(folder, target):
    (folder.parent / "outside.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(folder.parent / target)
    assert "the image 'link.png' is outside of" in reason_of("link.png", folder)


def test_file_of_another_folder_is_read_only_if_that_folder_is_set(folder):
    assert "is outside of" in reason_of("../a.png", folder / "inner")
    assert read("a.png", folder / "inner", folder=str(folder)).read() == PNG


def test_paths_in_data_that_are_no_local_file_need_a_folder(folder):
    assert reason_of("a.png", None) == (
        "the image 'a.png' is a path, but the data are not in a local file: set folder under images, the directory "
        "with the images"
    )


def test_image_of_pillow_that_cannot_be_decoded_is_bad():
    assert "the image cannot be decoded: image file is truncated" in reason_of(Image.open(io.BytesIO(NOISE[:-200])))
    assert "is animated" in reason_of(Image.open(io.BytesIO(encode(picture(), "GIF", **FRAMES))))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_pixels": 0}, "images: max_pixels must be at least 1, got 0"),
        ({"max_bytes": -1}, "images: max_bytes must be at least 1, got -1"),
        ({"max_pixels": 10**9}, "images: max_pixels must be at most 178956970, got 1000000000"),
    ],
)
def test_limits_are_checked(settings, message):
    with pytest.raises(UsageError, match=message):
        ImageSettings(**settings)


SAMPLES = (
    PNG, JPEG, turned(6, "JPEG"), turned(3, "WEBP"), *(encode(picture(), kind) for kind in ("GIF", "WEBP", "BMP")),
    encode(picture("P"), transparency=0), encode(picture(), "MPO", **FRAMES),
)  # fmt: skip


@properties
@given(
    st.sampled_from(SAMPLES), st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=8)), max_size=8)
)
def test_damaged_files_are_read_or_bad_and_raise_no_other_error(data, changes):
    damaged = bytearray(data)
    for start, content in changes:
        damaged[start : start + len(content)] = content
    try:
        image = read(bytes(damaged))
    except BadImage as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert isinstance(image, EncodedImage)
    assert image.open().size == (image.width, image.height)
