"""``lightning-rlhf check-data`` with images: their sizes, tokens and positions in the text of a row."""

import base64
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.environments import Environment, Reply
from lightning_rlhf.extras.commands import check_data as command
from lightning_rlhf.extras.commands.data_images import DataImages
from tests.cli.conftest import LLAMA
from tests.vision_models import drawing, write_checkpoint

KINDS = {
    "PromptDataModule": "GRPOModule",
    "ConversationDataModule": "SFTModule",
    "PreferenceDataModule": "DPOModule",
    "UnpairedDataModule": "KTOModule",
}
SMALL, WIDE = drawing(1), drawing(2, 40, 16)
LOOP = {
    "class_path": "lightning_rlhf.callbacks.RolloutLoop",
    "init_args": {
        "rewards": [{"function": f"{__file__}:areas"}],
        "engine": "lightning_rlhf.rollout.transformers.TransformersEngine",
        "max_response_tokens": 4,
        "group_size": 2,
    },
}


def areas(completions, images):
    sizes = [[image.width * image.height for image in of_prompt or ()] for of_prompt in images]
    return [float(sum(of_prompt)) for of_prompt in sizes]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: str(write_checkpoint(name, tmp_path_factory.mktemp(name))) for name in ("idefics3", "qwen2_5_vl")}


@pytest.fixture
def check_data(models, capsys):
    """Run the command on rows for a data module, with files of two images in ``pictures``."""
    Path("pictures").mkdir()
    Path("pictures/small.png").write_bytes(SMALL.data)
    Path("pictures/wide.png").write_bytes(WIDE.data)

    def check_data(kind, rows, *arguments, name="idefics3", actor=None, loop=(), **options):
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = {"actor": actor or models[name]}
        trainer = {}
        if kind == "PromptDataModule":
            model["minibatch_size"] = 2
            trainer = {"callbacks": [{**LOOP, "init_args": {**LOOP["init_args"], **dict(loop)}}]}
        data = {"tokenizer": models[name], "train": "rows.jsonl", "batch_size": 2, "max_tokens": 256, **options}
        config = {
            "model": {"class_path": f"lightning_rlhf.{KINDS[kind]}", "init_args": model},
            "data": {"class_path": f"lightning_rlhf.{kind}", "init_args": data},
            "trainer": trainer,
        }
        Path("x.yaml").write_text(yaml.safe_dump(config))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # what Python does outside of tests
            code = command.run(["--config", "x.yaml", *arguments])
        shown = capsys.readouterr()
        return SimpleNamespace(code=code, out=shown.out, err=shown.err)

    return check_data


def ask(*files, text="what?"):
    content = [{"type": "image", "image": file} for file in files] + [{"type": "text", "text": text}]
    return [{"role": "user", "content": content if files else text}]


def test_first_row_with_images_is_shown_with_marks_in_their_places(check_data):
    rows = [
        {"prompt": ask()},
        {"prompt": ask("pictures/wide.png", "pictures/small.png"), "answer": "7"},
        {"prompt": ask("pictures/wide.png")},
        {"prompt": ask("pictures/wide.png")},
    ]
    result = check_data("PromptDataModule", rows)
    assert (result.code, result.err) == (0, "")
    text = result.out
    marks = "<image 1: 40 x 16, 21 tokens><image 2: 24 x 16, 34 tokens>"
    total = len("user:what?assistant:") + 21 + 34
    folder = Path.cwd().resolve()
    assert (
        f"  first prompt with 2 images, {total} tokens:\n    | user:{marks}what?assistant:\n    answer = 7\n"
        f"    ground_truth = 7\n    image 1: {folder}/pictures/wide.png\n    image 2: {folder}/pictures/small.png\n"
    ) in text
    totals = f"3 rows with images, 2 distinct images, their tokens per row: mean {(55 + 21 + 21) / 3:g}, most 55"
    assert f"  images: {totals}\n" in text
    assert "EncodedImage" not in text
    assert "warning: 1 of 4 rows of the train data have no 'images', which reward areas needs" in text


ANSWER = [{"role": "assistant", "content": "yes"}]
MARKED = {
    "idefics3": "user:<image 1: 24 x 16, 34 tokens>what?assistant:",
    "qwen2_5_vl": "user:<boi><image 1: 24 x 16, 6 tokens><eoi>what?assistant:",
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", ["idefics3", "qwen2_5_vl"])
@pytest.mark.parametrize(
    ("kind", "row", "texts"),
    [
        ("PromptDataModule", {"prompt": ask("pictures/small.png")}, {"prompt": ""}),
        ("ConversationDataModule", {"messages": [*ask("pictures/small.png"), *ANSWER]}, {"text": "yes"}),
        (
            "PreferenceDataModule",
            {
                "prompt": ask("pictures/small.png"),
                "chosen": ANSWER,
                "rejected": [{"role": "assistant", "content": "no"}],
            },
            {"chosen": "yes", "rejected": "no"},
        ),
        (
            "UnpairedDataModule",
            {"prompt": ask("pictures/small.png"), "completion": ANSWER, "label": True},
            {"desirable text": "yes"},
        ),
    ],
)
def test_rows_of_every_data_module_are_shown_with_marks(check_data, name, kind, row, texts):
    result = check_data(kind, [row, row], name=name)
    assert (result.code, result.err) == (0, "")
    tokens = {"idefics3": 34, "qwen2_5_vl": 6}[name]
    for label, answer in texts.items():
        length = len("user:what?assistant:") + tokens + (2 if name == "qwen2_5_vl" else 0)
        shown, trained = MARKED[name], ""
        if answer:
            length += len(answer) + 1
            shown, trained = f"{shown}⟦{answer}</s>⟧", f", {len(answer) + 1} of them trained on"
        assert f"  first {label} with 1 image, {length} tokens{trained}:\n    | {shown}\n" in result.out
    line = f"  images: 2 rows with images, 1 distinct image, their tokens per row: mean {tokens}, most {tokens}\n"
    assert line in result.out


def test_prompts_of_text_with_a_column_of_images(check_data):
    image = f"data:image/png;base64,{base64.b64encode(WIDE.data).decode()}"
    rows = [{"prompt": "look: <image> and <image>!", "images": ["pictures/small.png", image]}] * 2
    result = check_data("PromptDataModule", rows)
    assert result.code == 0
    assert "| look: <image 1: 24 x 16, 34 tokens> and <image 2: 40 x 16, " in result.out
    assert "base64" not in result.out
    assert "image 1: " in result.out
    assert "image 2: /" not in result.out  # it is in the row


def test_json_has_the_images_and_their_totals(check_data):
    result = check_data("PromptDataModule", [{"prompt": ask("pictures/small.png")}, {"prompt": ask()}], "--json")
    train = json.loads(result.out)["data"]["train"]
    assert train["images"] == {"rows": 1, "distinct": 1, "tokens_mean": 34, "tokens_most": 34}
    file = str(Path("pictures/small.png").resolve())
    assert train["sample"]["prompt"]["images"] == [{"width": 24, "height": 16, "tokens": 34, "file": file}]
    result = check_data("PromptDataModule", [{"prompt": ask()}] * 2, "--json", loop={"rewards": []})
    train = json.loads(result.out)["data"]["train"]
    assert "images" not in train
    assert "images" not in train["sample"]["prompt"]


def test_part_of_the_data_without_images_has_no_totals(check_data):
    Path("val.jsonl").write_text(json.dumps({"prompt": ask()}) + "\n")
    result = check_data("PromptDataModule", [{"prompt": ask("pictures/small.png")}] * 2, val="val.jsonl")
    _, train, val = result.out.split("\n\n")[:3]
    assert ("images: 2 rows with images" in train, "images:" in val) == (True, False)
    assert "  first prompt, 20 tokens:\n    | user:what?assistant:" in val


def test_images_with_a_model_of_texts_are_an_error(check_data):
    actor = {"class_path": "lightning_rlhf.FromConfig", "init_args": {"architecture": {**LLAMA, "vocab_size": 200}}}
    result = check_data("PromptDataModule", [{"prompt": ask("pictures/small.png")}] * 2, actor=actor)
    assert result.code == 2
    assert "the data have images, and the actor is a llama, which reads texts only" in result.err


def test_images_with_a_setting_for_texts_are_an_error(check_data):
    teacher = {"teacher_prompt": "prompt"}
    result = check_data("PromptDataModule", [{"prompt": ask("pictures/small.png")}] * 2, loop=teacher)
    assert result.code == 2
    assert "teacher_prompt works without images: remove it, or the images of the data and environment" in result.err


def test_missing_image_is_reported_with_its_row(check_data):
    rows = [{"prompt": ask("pictures/small.png")}, {"prompt": ask("pictures/none.png")}]
    result = check_data("PromptDataModule", rows)
    assert result.code == 2
    assert "dropped: 1 row: an image is missing" in result.out
    assert "rows.jsonl:2: no image at " in result.err


def test_positions_are_found_in_their_order(models):
    rows = InMemory([{"prompt": "<image><image> a <image>", "images": [SMALL.data, WIDE.data, SMALL.data]}])
    data = PromptDataModule(tokenizer=models["idefics3"], train=rows, batch_size=1, max_tokens=512)
    data.setup("fit")
    images, (example,) = DataImages(data), data.examples["train"]
    spans = images.spans(example.token_ids, images.images_of(example))
    lengths = [span.end - span.start for span in spans]
    assert lengths == [len(images.tokens_of(image)) for image in (SMALL, WIDE, SMALL)]
    assert [spans[0].start, spans[1].start, spans[2].end] == [0, spans[0].end, len(example.token_ids)]
    assert spans[2].start == spans[1].end + len(" a ")
    assert images.spans(example.token_ids[: lengths[0] + 3], images.images_of(example)) == spans[:1]


class Draws(Environment):
    def reset(self, row, seed):
        return Reply([{"role": "user", "content": ["and ", SMALL]}])

    def step(self, turn):
        return Reply([{"role": "user", "content": [WIDE, "?"]}], done=turn.number == 1)


def test_conversation_with_an_environment_is_shown_with_its_images(check_data):
    rows = [{"prompt": ask("pictures/wide.png")}] * 2
    environment = {"factory": f"{__file__}:Draws", "max_images": 2, "timeout_s": None}
    result = check_data("PromptDataModule", rows, loop={"environment": environment, "max_response_tokens": 200})
    assert (result.code, result.err) == (0, "")
    assert "<image 1: 40 x 16, 21 tokens>" in result.out
    assert "<image 2: 24 x 16, 34 tokens>" in result.out
    assert "<image 3: 40 x 16, 21 tokens>?" in result.out


def test_environment_without_a_number_of_images_is_an_error(check_data):
    rows = [{"prompt": ask("pictures/wide.png")}] * 2
    result = check_data(
        "PromptDataModule", rows, loop={"environment": {"factory": f"{__file__}:Draws", "timeout_s": None}}
    )
    assert result.code != 0
    assert "they have images, and max_images of the environment is 0" in result.err
