"""Reward functions receive the images of prompts: as the column ``images``, and as parts of messages."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.encoded_image import EncodedImage, sha256_of
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.rewards.learned import LearnedReward
from lightning_rlhf.extras.rewards.sources import BySource
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.scorer import Scorer, check_reward_functions
from lightning_rlhf.types import Completion
from tests.extras.rewards.test_learned import own_scores, path
from tests.rewards.of_images import width
from tests.stand_ins import columns_of, each
from tests.vision_models import drawing, write_processor

__all__ = ["path"]  # a fixture
FILE = Path(__file__).with_name("of_images.py")


def parts(prompts, completions):
    """Return the number of images in the messages, which are between two texts."""
    counts = []
    for messages in prompts:
        contents = [message["content"] for message in messages if isinstance(message["content"], list)]
        images = [part["image"] for content in contents for part in content if part["type"] == "image"]
        assert all(isinstance(image, EncodedImage) for image in images)
        counts.append(float(len(images)))
    return counts


FUNCTIONS = {
    "width": {},
    "width_of_one": {},
    "awaited_width": {},
    "with_everything": {},
    "in_worker": {"function": f"{FILE}:width", "timeout_s": 60.0},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return {
        name: str(write_processor(name, tmp_path_factory.mktemp(name))) for name in ("idefics3", "qwen2_5_vl", "gemma3")
    }


def prompts_with(model, *rows):
    """Return the data module of rows, and its first batch."""
    data = PromptDataModule(tokenizer=model, train=InMemory(rows), batch_size=len(rows), max_tokens=512, shuffle=False)
    data.setup("fit")
    return data, next(iter(data.train_dataloader()))


def conversation(*images, text="what?"):
    content = [*({"type": "image", "image": image.data} for image in images), {"type": "text", "text": text}]
    return {"prompt": [{"role": "user", "content": content if images else text}]}


ROWS = (conversation(drawing(1, 40)), conversation(), conversation(drawing(2), drawing(3)))


def scored(data, batch, *functions, samples=1):
    answers = [Completion([5, 2], [0.0, 0.0], "stop", 0)] * (len(batch) * samples)
    with RewardExecutor(functions) as executor:
        scorer = Scorer(batch, executor, data.tokenizer, samples)
        for index, answer in enumerate(answers[:2]):  # while others are generated
            scorer.add(index, answer)
        return {name: values.tolist() for name, values in scorer.score(answers).rewards.items()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_receives_the_images_of_each_prompt_and_none_without_any(model, name):
    data, batch = prompts_with(model["idefics3"], *ROWS)
    options = {"function": f"{FILE}:{name}", "name": name} | FUNCTIONS[name]
    expected = [40.0, 40.0, 0.0, 0.0, 24.0, 24.0]
    assert scored(data, batch, RewardFunction(**options), samples=2) == {name: expected}


def test_images_reach_a_worker_by_their_path(model, tmp_path):
    image = drawing(4, 32)
    file = tmp_path / "a.png"
    file.write_bytes(image.data)
    batch = {"completions": ["a"], "images": [[EncodedImage(image.sha256, 32, 16, path=str(file))]]}
    with RewardExecutor([RewardFunction(f"{FILE}:width", timeout_s=60.0)]) as executor:
        assert executor.score(batch).rewards["width"].tolist() == [32.0]


def test_functions_of_sources_receive_the_images(model):
    data, batch = prompts_with(model["idefics3"], *({**row, "data_source": "s"} for row in ROWS))
    reward = RewardFunction(BySource({"*": width}), name="r")
    assert scored(data, batch, reward) == {"r": [40.0, 0.0, 24.0]}


@pytest.mark.parametrize("name", ["idefics3", "qwen2_5_vl", "gemma3"])
def test_prompts_as_text_have_a_mark_for_each_image(model, name):
    _, batch = prompts_with(model[name], *ROWS, {"prompt": "a <image> b", "images": [drawing(1).data]})
    assert [text.count("<image>") for text in each(batch, "text")] == [1, 0, 2, 1]
    assert batch.prompts[3].text == "a <image> b"
    assert batch.prompts[1].text == "user:what?assistant:"


def test_messages_have_the_images_as_parts(model):
    text = {"prompt": "look: <image> what?", "images": [drawing(1).data]}
    data, batch = prompts_with(model["idefics3"], *ROWS, text)
    assert scored(data, batch, RewardFunction(parts, messages=True)) == {"parts": [1.0, 0.0, 2.0, 1.0]}
    reward = RewardFunction(parts, messages=True)
    columns = {
        "prompts": each(batch, "text"),
        "completions": ["a"] * 4,
        "messages": each(batch, "messages"),
        **columns_of(batch),
    }
    made = reward.with_messages(columns)["prompts"]
    assert made[1] == [{"role": "user", "content": "what?"}]
    (message,) = made[3]
    assert message["content"] == [
        {"type": "text", "text": "look: "},
        {"type": "image", "image": drawing(1)},
        {"type": "text", "text": " what?"},
    ]


def test_data_without_images_have_no_such_column(model):
    data, batch = prompts_with(model["idefics3"], conversation())
    assert "images" not in batch.column_names
    with RewardExecutor([]) as executor, pytest.raises(ValueError, match="needs 'images', but a rollout provides only"):
        check_reward_functions([RewardFunction(width)], executor, data)


def test_message_of_a_failure_has_no_bytes_of_images(model):
    def fails(completions, images):
        raise KeyError("mine")

    data, batch = prompts_with(model["idefics3"], *ROWS)
    with pytest.raises(RuntimeError, match="<image>what") as caught:
        scored(data, batch, RewardFunction(fails, per_sample=True))
    assert "PNG" not in str(caught.value)


def test_classifier_reads_a_mark_in_place_of_each_image(path):
    """The vocabulary has no ``<``, so the mark is made of other letters."""
    image = [{"type": "image", "image": drawing(1)}, {"type": "text", "text": "ab"}]
    rows = [{"role": "user", "content": image}], [{"role": "assistant", "content": "c"}]
    assert LearnedReward(path)([rows[0]], [rows[1]]) == pytest.approx(own_scores(path, ["u:<image>ab;a:c;"]), abs=1e-5)


# -- images as data: URLs ----------------------------------------------------------------------------------------------


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    data = buffer.getvalue()
    return EncodedImage(sha256_of(data), *image.size, data=data)


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return {"exif": exif}


PLAIN = Image.new("RGB", (6, 4), (250, 10, 10))


@pytest.mark.parametrize(
    ("image", "kind", "options", "media_type", "is_file"),
    [
        (PLAIN, "PNG", {}, "png", True),
        (PLAIN, "JPEG", {}, "jpeg", True),
        (PLAIN, "WEBP", {"lossless": True}, "webp", True),
        (PLAIN, "GIF", {}, "gif", True),
        (PLAIN, "BMP", {}, "png", False),
        (PLAIN, "JPEG", turned(), "png", False),
        (Image.new("RGBA", (6, 4), (250, 10, 10, 0)), "PNG", {}, "png", False),
    ],
)
def test_url_shows_what_the_policy_sees(image, kind, options, media_type, is_file):
    image = encoded(image, kind, **options)
    header, content = image.data_url().split(",")
    assert header == f"data:image/{media_type};base64"
    data = base64.b64decode(content)
    assert (data == image.data) == is_file
    shown = Image.open(io.BytesIO(data)).convert("RGB")
    assert shown.size == image.open().size
    assert shown.tobytes() == image.open().tobytes()


def test_reward_model_on_a_server_that_needs_messages_for_images_is_found_before_the_run():
    class Served:
        reads_images_in_messages = True

        def __call__(self, prompts, completions):
            return [0.0] * len(prompts)

    with pytest.raises(UsageError, match=r"'served' reads images in messages only, .* set messages: true"):
        RewardFunction(Served(), name="served").check(["images"])
    RewardFunction(Served(), name="served").check([])
    RewardFunction(Served(), name="served", messages=True).check(["images"])
