"""Thumbnails of the images of prompts, which RolloutLog writes, and their sizes in tables."""

import io
import json
from functools import partial

import pytest
import torch
from PIL import Image

from lightning_rlhf import GRPOModule, Pretrained, PromptDataModule
from lightning_rlhf.callbacks import RolloutLog, RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.encoded_image import EncodedImage, sha256_of
from lightning_rlhf.extras.console import rollout_images
from lightning_rlhf.extras.console.rollout_images import Thumbnails, text_of_images, thumbnail, with_images
from lightning_rlhf.extras.report.run_directory import RunDirectory
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from tests.stand_ins import quiet_trainer
from tests.vision_models import drawing, write_checkpoint


def files_in(folder):
    return sorted(path.name for path in (folder / "images").glob("*"))


def name_of(image):
    return f"{image.sha256[:16]}.jpg"


# -- thumbnails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"),
    [((24, 16), (24, 16)), ((1000, 500), (256, 128)), ((3, 3000), (1, 256)), ((256, 257), (255, 256))],
)
def test_thumbnail_keeps_the_proportions_of_the_image(size, expected):
    small = Image.open(io.BytesIO(thumbnail(Image.new("RGB", size, "teal"))))
    assert (small.format, small.mode, small.size) == ("JPEG", "RGB", expected)
    assert small.convert("RGB").getpixel((0, 0)) == pytest.approx((0, 128, 128), abs=4)


def test_thumbnail_of_noise_has_at_most_20_kilobytes():
    noise = torch.randint(256, (600, 600, 3), dtype=torch.uint8).numpy().tobytes()
    data = thumbnail(Image.frombytes("RGB", (600, 600), noise))
    assert 5000 < len(data) <= 20_000
    assert max(Image.open(io.BytesIO(data)).size) >= 128


def test_each_image_has_one_file(tmp_path):
    images = [drawing(1, 640, 480), drawing(2), drawing(1, 640, 480)]
    expected = [{"file": f"images/{name_of(image)}", "width": image.width, "height": image.height} for image in images]
    thumbnails = Thumbnails(tmp_path)
    assert thumbnails.add(images) == thumbnails.add(images) == expected
    assert files_in(tmp_path) == sorted({name_of(image) for image in images})  # no drafts
    assert thumbnails.add([]) == []


def test_directory_without_images_is_not_made(tmp_path):
    thumbnails = Thumbnails(tmp_path)
    assert thumbnails.add([]) == []
    thumbnails.remove()
    assert list(tmp_path.iterdir()) == []


def test_number_of_thumbnails_is_bounded_over_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_images, "_MOST", 3)
    images = [drawing(number) for number in range(5)]
    first = Thumbnails(tmp_path).add(images[:2])
    resumed = Thumbnails(tmp_path)
    result = resumed.add(images)
    assert result[:2] == first
    assert [entry["file"] is None for entry in result] == [False, False, False, True, True]
    assert result[4] == {"file": None, "width": 24, "height": 16}
    assert resumed.add(images) == result
    assert files_in(tmp_path) == sorted(map(name_of, images[:3]))


def test_resumed_run_does_not_write_a_thumbnail_again(tmp_path, monkeypatch):
    result = Thumbnails(tmp_path).add([drawing(1)])
    monkeypatch.setattr(rollout_images, "thumbnail", lambda image: pytest.fail("it is made again"))
    assert Thumbnails(tmp_path).add([drawing(1)]) == result


def test_processes_share_the_thumbnails_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_images, "_MOST", 4)
    images = [drawing(number) for number in range(6)]
    first, second = (Thumbnails(tmp_path, rank, 2) for rank in range(2))
    first.add([])
    assert [entry["file"] is None for entry in first.add(images[:3])] == [False, False, True]
    assert second.add(images[:1])[0]["file"] == f"images/{name_of(images[0])}"  # of the other process
    second.add(images[3:])
    assert len(files_in(tmp_path)) <= 4


@pytest.mark.parametrize("content", [None, b"not an image", drawing(3).data])
def test_image_that_cannot_be_read_has_no_file(tmp_path, caplog, content):
    path = tmp_path / "x.png"
    if content is not None:
        path.write_bytes(content)
    image = EncodedImage(sha256_of(b"not an image"), 24, 16, path=str(path))
    thumbnails = Thumbnails(tmp_path)
    for _ in range(2):
        assert thumbnails.add([image]) == [{"file": None, "width": 24, "height": 16}]
    assert caplog.text.count("an image of a prompt has no thumbnail in rollouts/images: ") == 1
    assert files_in(tmp_path) == []


def test_new_run_removes_thumbnails_and_drafts_only(tmp_path):
    Thumbnails(tmp_path).add([drawing(1)])
    for name in ("0123456789abcdef.jpg.rank3", "notes.jpg", "0123456789abcdef.jpg.txt"):
        (tmp_path / "images" / name).write_text("")
    Thumbnails(tmp_path).remove()
    assert files_in(tmp_path) == ["0123456789abcdef.jpg.txt", "notes.jpg"]


# -- rows and tables --------------------------------------------------------------------------------------------------


def test_values_of_tokens_stay_last_in_a_row():
    row = {"index": 3, "prompt": "p", "response": "r", "tokens": {"ids": [1]}}
    images = [{"file": None, "width": 1, "height": 2}]
    made = with_images(row, images)
    assert made == {**row, "images": images}
    assert list(made) == ["prompt", "images", "index", "response", "tokens"]
    assert with_images(row, []) is row


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([], ""),
        ([(640, 480)], "1 image: 640 x 480"),
        ([(640, 480), (32, 32)], "2 images: 640 x 480, 32 x 32"),
        ([(8, 8)] * 9, f"9 images: {'8 x 8, ' * 8}..."),
    ],
)
def test_text_of_images_has_their_sizes(sizes, text):
    assert text_of_images(sizes) == text


def test_printed_table_has_the_sizes_of_images(capsys):
    rows = [
        {"prompt": "p", "images": [{"file": None, "width": 640, "height": 480}], "response": "r", "reward": 1.0},
        {"prompt": "q", "response": "s", "reward": 0.0},
    ]
    RolloutLog()._print_table([{**row, "rewards": {}} for row in rows], 1)
    shown = capsys.readouterr().out
    assert "images" in shown
    assert "1 image: 640 x 480" in shown


# -- a run ------------------------------------------------------------------------------------------------------------


def run_with_images(directory, model, steps, resume=None):
    """Train a small vision-language model; the third prompt has no image."""

    def rows(numbers):
        parts = {number: [{"type": "image", "image": drawing(number).data}] * (number != 2) for number in numbers}
        text = {"type": "text", "text": "number?"}
        return InMemory([{"prompt": [{"role": "user", "content": [*part, text]}]} for part in parts.values()])

    judge = RewardFunction(lambda completions: [float(len(text)) for text in completions], name="judge")
    loop = RolloutLoop(rewards=[judge], engine=TransformersEngine(), group_size=2, max_response_tokens=2)
    module = GRPOModule(actor=Pretrained(str(model)), optimizer=partial(torch.optim.SGD, lr=0.01), minibatch_size=8)
    data = PromptDataModule(
        tokenizer=str(model), train=rows(range(4)), val=rows(range(4, 6)), batch_size=4, max_tokens=64, shuffle=False
    )
    trainer = quiet_trainer(default_root_dir=directory, callbacks=[loop, RolloutLog()], max_steps=steps, max_epochs=4)
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    return trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint("idefics3", tmp_path_factory.mktemp("model"))


def images_in(directory, name):
    lines = (directory / f"rollouts/{name}.jsonl").read_text().splitlines()
    return [json.loads(line).get("images") for line in lines]


@pytest.mark.slow
def test_lines_of_steps_and_validations_name_their_images(model, tmp_path):
    def expected(number):
        return [{"file": f"images/{name_of(drawing(number))}", "width": 24, "height": 16}]

    trainer = run_with_images(tmp_path, model, 1)
    in_step = images_in(tmp_path, "step-000001")
    assert in_step == [images for i in (0, 1, 2, 3) for images in [None if i == 2 else expected(i)] * 2]
    for step in (0, 1):
        assert images_in(tmp_path, f"validation-{step:06d}") == [expected(4), expected(5)]
    thumbnails = {path.name: path.stat().st_ino for path in (tmp_path / "rollouts/images").iterdir()}
    assert thumbnails.keys() == {name_of(drawing(i)) for i in (0, 1, 3, 4, 5)}
    (tmp_path / "metrics.csv").write_text("step,a\n1,1\n")
    assert RunDirectory(tmp_path).thumbnail(name_of(drawing(0))).startswith(b"\xff\xd8\xff")

    trainer.save_checkpoint(tmp_path / "x.ckpt")
    run_with_images(tmp_path, model, 2, tmp_path / "x.ckpt")
    assert images_in(tmp_path, "step-000002") == in_step
    again = {path.name: path.stat().st_ino for path in (tmp_path / "rollouts/images").iterdir()}
    assert again == thumbnails  # none was written twice

    (tmp_path / "rollouts/images/0123456789abcdef.jpg").write_bytes(b"")
    run_with_images(tmp_path, model, 1)
    assert "0123456789abcdef.jpg" not in files_in(tmp_path / "rollouts")  # of the earlier run
