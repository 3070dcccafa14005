"""Processors expand texts to the tokens of transformers, and make its tensors; others are rejected in one line."""

import json

import pytest
import torch
from PIL import Image

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.expected_errors import MissingPackageError, UsageError, counted
from lightning_rlhf.extras.images import processor as processors
from lightning_rlhf.extras.images.processor import ImageProcessor, copy_processor, load_processor
from lightning_rlhf.extras.images.reading import read_image
from lightning_rlhf.images import BadImage, ImageSettings, ImageStore
from tests.vision_models import drawing, write_processor

NAMES = ("idefics3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "llava_next", "internvl")
SIZES = ((24, 16), (16, 40), (33, 33), (64, 16))


@pytest.fixture(scope="module", params=NAMES)
def loaded(request, tmp_path_factory):
    """The name and the processor of each architecture."""
    return request.param, load_processor(str(write_processor(request.param, tmp_path_factory.mktemp(request.param))))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A processor whose expansion depends on the size of an image."""
    return load_processor(str(write_processor("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))))


def image_of(width, height):
    return read_image(Image.new("RGB", (width, height), "red"), ImageSettings(), None)


def tokens_of(processor, text):
    return processor.tokenizer(text, add_special_tokens=False)["input_ids"]


def of_transformers(processor, text, images):
    """Return the inputs that transformers' processor makes of a text and its images."""
    return processor._processor(text=[text], images=[[image.open() for image in images]], return_tensors="pt")


# -- tokens and tensors -------------------------------------------------------------------------------------------


def test_tokens_are_those_of_the_processor_of_transformers(loaded):
    _, processor = loaded
    placeholder = processor.placeholder
    images = [drawing(number, *size) for number, size in enumerate(SIZES)]
    for count in (1, 2, 4):
        text = f"a{placeholder}b" * count + "c?"
        expected = of_transformers(processor, text, images[:count])["input_ids"][0].tolist()
        assert tokens_of(processor, processor.expand(text, images[:count])) == expected
        assert len(expected) > 3 * count + 2


def test_order_of_images_is_that_of_their_placeholders(qwen):
    small, large = drawing(1, 8, 8), drawing(2, 32, 32)
    assert qwen.expand("a<image>b<image>c", [small, large]) == "a<image>b" + "<image>" * 16 + "c"
    assert qwen.expand("a<image>b<image>c", [large, small]) == "a" + "<image>" * 16 + "b<image>c"


def test_text_without_images_stays_as_it_is(loaded):
    _, processor = loaded
    assert processor.expand("only text", []) == "only text"


def test_tensors_are_those_of_the_processor_of_transformers(loaded):
    _, processor = loaded
    for number, size in enumerate(SIZES):
        image = drawing(number, *size)
        expected = of_transformers(processor, processor.placeholder, [image])
        tensors = processor.tensors(image)
        assert tensors.keys() == expected.keys() - {
            "input_ids",
            "attention_mask",
            "mm_token_type_ids",
            "token_type_ids",
        }
        assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_tensors_of_recent_images_are_kept_within_a_bound(qwen, monkeypatch):
    one, two, three = (drawing(number) for number in (1, 2, 3))
    size = sum(tensor.nbytes for tensor in qwen.tensors(one).values())
    monkeypatch.setattr(qwen, "_tensors", type(qwen._tensors)())
    monkeypatch.setattr(qwen, "_bytes", 0)
    monkeypatch.setattr(processors, "_CACHED_BYTES", 2 * size)
    first, second = qwen.tensors(one), qwen.tensors(two)
    assert qwen.tensors(drawing(1)) is first  # equal bytes; now the second is the oldest
    qwen.tensors(three)
    assert qwen.tensors(one) is first
    assert qwen.tensors(two) is not second


def test_one_image_is_kept_even_if_it_is_larger_than_the_bound(qwen, monkeypatch):
    monkeypatch.setattr(processors, "_CACHED_BYTES", 1)
    image = drawing(7)
    assert qwen.tensors(image) is qwen.tensors(image)


# -- bad texts and images -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3])
def test_numbers_of_placeholders_and_images_must_be_equal(loaded, count):
    _, processor = loaded
    with pytest.raises(BadImage) as caught:
        processor.expand(f"a{processor.placeholder}b{processor.placeholder}", [drawing(1)] * count)
    assert str(caught.value) == (
        f"the text has 2 placeholders {processor.placeholder!r} for {counted(count, 'image')}: a message needs one "
        f"part of type image for each, a plain text one <image>, and texts must not contain the placeholder itself"
    )
    assert caught.value.kind == "the numbers of placeholders and images differ"


def test_token_of_a_feature_in_a_text_is_bad(tmp_path):
    processor = load_processor(str(write_processor("gemma3", tmp_path)))
    assert processor.placeholder == "<boi>"
    for text, images in (("a<image>b", []), ("<boi>a<image>", [drawing(1)])):
        with pytest.raises(
            BadImage, match="the text contains '<image>', which stands for a part of an image: remove it"
        ):
            processor.expand(text, images)


@pytest.mark.parametrize("size", [(1, 1), (20000, 1), (1, 20000), (2, 3)])
def test_small_and_long_images_are_read_or_bad(loaded, size):
    name, processor = loaded
    image = image_of(*size)
    if name.startswith("qwen") and 20000 in size:
        with pytest.raises(BadImage) as caught:
            processor.expand(processor.placeholder, [image])
        assert str(caught.value) == (
            f"the image processor rejects an image of {size[0]} x {size[1]} pixels: absolute aspect ratio must be "
            f"smaller than 200, got 20000.0"
        )
        assert caught.value.kind == "the image processor rejects an image"
        return
    expected = of_transformers(processor, processor.placeholder, [image])
    assert tokens_of(processor, processor.expand(processor.placeholder, [image])) == expected["input_ids"][0].tolist()
    assert processor.tensors(image)["pixel_values"].isfinite().all()


def test_image_that_is_rejected_is_rejected_again(qwen):
    for _ in range(2):
        with pytest.raises(BadImage, match="absolute aspect ratio"):
            qwen.expand("<image>", [image_of(20000, 1)])
    assert qwen.expand("<image>", [image_of(8, 8)]) == "<image>"


# -- loading and saving -------------------------------------------------------------------------------------------


def test_saved_processor_is_the_same(loaded, tmp_path):
    _, processor = loaded
    processor.save(tmp_path)
    again = load_processor(str(tmp_path))
    image, text = drawing(1, 40, 16), f"a{processor.placeholder}b"
    assert (again.placeholder, type(again._processor).__name__) == (
        processor.placeholder, type(processor._processor).__name__
    )  # fmt: skip
    assert tokens_of(again, again.expand(text, [image])) == tokens_of(processor, processor.expand(text, [image]))
    assert torch.equal(again.tensors(image)["pixel_values"], processor.tensors(image)["pixel_values"])


def test_directory_without_a_processor_has_nothing_to_copy(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    CharacterTokenizer("ab").load().save_pretrained(source)
    target.mkdir()
    copy_processor(str(source), target)
    assert list(target.iterdir()) == []


def text_model(directory):
    CharacterTokenizer("ab").load().save_pretrained(directory)


def text_model_with_its_configuration(directory):
    text_model(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))


def damaged_processor(directory):
    write_processor("llava", directory)
    (directory / "processor_config.json").write_text("{")


def damaged_image_processor(directory):
    write_processor("llava", directory)
    (directory / "preprocessor_config.json").write_text('{"image_processor_type": "LlavaNoSuchProcessor"}')


def unknown_processor(directory):
    write_processor("llava", directory)
    (directory / "processor_config.json").write_text('{"processor_class": "NoSuchProcessor"}')


def processor_of_another_kind(directory):
    write_processor("llava", directory)
    (directory / "processor_config.json").write_text('{"processor_class": "LlamaConfig"}')


def nothing(directory):
    """Write no file."""


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (text_model, "has no processor of a vision-language model that transformers knows: images need the directory"),
        (
            text_model_with_its_configuration,
            "has no processor of a vision-language model that transformers knows: images",
        ),
        (damaged_processor, "cannot be read"),
        (damaged_image_processor, "cannot be read"),
        (
            unknown_processor,
            "has no processor of a vision-language model that transformers knows, got 'NoSuchProcessor'",
        ),
        (processor_of_another_kind, "has no processor of a vision-language model that transformers knows"),
        (nothing, "has no processor of a vision-language model that transformers knows: images need the directory"),
    ],
)
def test_directories_without_a_good_processor_are_rejected_in_one_line(tmp_path, write, reason):
    write(tmp_path)
    with pytest.raises(UsageError) as caught:
        load_processor(str(tmp_path))
    message = str(caught.value)
    assert reason in message
    assert str(tmp_path) in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(tmp_path))


def test_missing_package_is_named(tmp_path, monkeypatch):
    write_processor("llava", tmp_path)

    def needs_a_package(*arguments, **options):
        raise ImportError("Package `num2words` is required to run SmolVLM processor.")

    monkeypatch.setattr(processors.transformers.LlavaProcessor, "from_pretrained", needs_a_package)
    with pytest.raises(MissingPackageError, match="needs a package: Package `num2words` is required"):
        load_processor(str(tmp_path))


def test_processor_without_a_placeholder_is_rejected():
    with pytest.raises(UsageError, match="object has no placeholder for images in texts: use a model of transformers"):
        ImageProcessor(object(), "directory")


# -- distinct images ----------------------------------------------------------------------------------------------


def test_store_numbers_equal_images_once_and_pads_rows_to_the_longest_text(qwen):
    one, two, three = (drawing(n).number for n in (1, 2, 3))
    store = ImageStore(qwen)
    assert store.add([drawing(1), drawing(2)]) == (one, two)
    assert store.add([drawing(3), drawing(1), drawing(3)]) == (three, one, three)
    assert store.add([]) == ()
    assert store.images == {one: drawing(1), two: drawing(2), three: drawing(3)}
    rows = store.rows([(two,), (), (three, one, three)])
    assert rows.dtype == torch.int64
    assert rows.tolist() == [[two, -1, -1], [-1, -1, -1], [three, one, three]]
    assert store.rows([()]).shape == (1, 3)
    store.further = 2
    assert store.rows([()]).shape == (1, 5)
