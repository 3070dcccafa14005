"""``generate`` and ``evaluate`` on rows with images."""

import base64
import json
from pathlib import Path

import pytest

from lightning_rlhf.data.conversations import ConversationDataModule
from lightning_rlhf.extras.commands import evaluate as evaluate_command
from lightning_rlhf.extras.commands import generate as generate_command
from lightning_rlhf.extras.commands.responses_file import read_lines
from lightning_rlhf.images import ImageSettings
from tests.extras.commands.test_generate_server import stub
from tests.vision_models import drawing, write_checkpoint

__all__ = ["stub"]  # a fixture
HERE = Path(__file__).parent
IMAGES = [drawing(number, 24 if number % 2 else 40) for number in range(4)]
REWARDS = """
def wide(completions, images):
    return [float(one[0].open().width) if one else 0.0 for one in images]

def parts(prompts, completions, **kwargs):
    contents = [messages[-1]["content"] for messages in prompts]
    found = [[] if isinstance(each, str) else [part["image"] for part in each if "image" in part] for each in contents]
    return [float(images[0].width) if images else 0.0 for images in found]

def length(completions):
    return [float(len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint("idefics3", tmp_path_factory.mktemp("model")))


def ask(*images):
    return [
        {
            "role": "user",
            "content": [*({"type": "image", "image": each} for each in images), {"type": "text", "text": "?"}],
        }
    ]


TWO_IMAGES, NO_IMAGE, TEXT = 4, 5, 6  # rows after one with each image
WIDTHS = [40, 24, 40, 24, 40, 0, 40]  # of the first image of each row


@pytest.fixture
def rows():
    """Write images, and beside them a file of prompts; return its rows."""
    Path("data").mkdir()
    for number, image in enumerate(IMAGES):
        Path(f"data/{number}.png").write_bytes(image.data)
    rows = [
        *({"prompt": ask(f"{number}.png")} for number in range(len(IMAGES))),
        {"prompt": ask("0.png", "1.png")},
        {"prompt": ask()},
        {"prompt": "a <image>?", "images": [base64.b64encode(IMAGES[2].data).decode()]},
    ]
    rows = [{**row, "answer": str(number)} for number, row in enumerate(rows)]
    Path("data/prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@pytest.fixture
def generate(capsys, model):
    def generate(*arguments, source="data/prompts.jsonl", to="data/out.jsonl", who=None):
        who = who or ["--model", model, "--engine", "transformers"]
        inputs = [*who, "--prompts", source, "--to", to, "--max-tokens", "4"]
        code = generate_command.run([*inputs, *arguments])
        return code, capsys.readouterr().err

    return generate


def test_responses_depend_on_the_images_and_not_on_batches(generate, rows):
    for name, size in (("a", "1"), ("b", "7")):
        assert generate("-n", "2", "--batch-size", size, to=f"{name}.jsonl") == (0, "")
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    written = read_lines(Path("a.jsonl"))
    for name in ("prompt", "answer"):
        assert [row[name] for row in written] == [row[name] for row in rows]
    lengths = [row["prompt_tokens"] for row in written]
    assert lengths[TWO_IMAGES] > lengths[0] > lengths[NO_IMAGE]
    Path("data/0.png").write_bytes(IMAGES[2].data)
    assert generate("-n", "2", to="c.jsonl") == (0, "")
    changed = read_lines(Path("c.jsonl"))
    assert changed[0]["responses"] != written[0]["responses"]
    assert changed[1]["responses"] == written[1]["responses"]


def test_changed_image_is_noticed_when_a_file_is_continued(generate, rows):
    assert generate() == (0, "")
    Path("data/0.png").write_bytes(IMAGES[2].data)
    code, error = generate()
    assert code == 2
    assert "was started with other settings (prompts was " in error


def test_images_are_read_in_the_given_directory(generate, rows):
    Path("data/prompts.jsonl").rename("prompts.jsonl")
    code, error = generate(source="prompts.jsonl")
    assert code == 2
    assert "no image at " in error
    assert "--images DIR sets the directory with the images, by default that of the file" in error
    assert generate("--images", "data", source="prompts.jsonl") == (0, "")


def test_bytes_of_a_row_are_written_in_base64(generate):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [[{"bytes": IMAGES[0].data, "path": None}]]
    parquet.write_table(pyarrow.table({"prompt": ["a <image>?"], "images": images}), "rows.parquet")
    assert generate(source="rows.parquet", to="out.jsonl") == (0, "")
    (row,) = read_lines(Path("out.jsonl"))
    assert base64.b64decode(row["images"][0]["bytes"]) == IMAGES[0].data
    Path("rewards.py").write_text(REWARDS)
    assert evaluate_command.run(["out.jsonl", "--reward", "rewards.py:wide", "--json", "r.json"]) == 0
    assert json.loads(Path("r.json").read_text())["sources"]["data"]["rewards"]["wide"]["mean"] == 40


def test_model_of_texts_is_an_error_before_it_is_loaded(generate, rows, tiny_export):
    code, error = generate(who=["--model", str(tiny_export), "--engine", "transformers"])
    assert code == 2
    assert "processor" in error


# -- an environment that writes pictures -------------------------------------------------------------------------------


@pytest.fixture
def drawing_run(model):
    """Write a run whose environment answers with pictures; return the path of its configuration.

    The model has random weights: of some 100 tokens, 67 end a turn, so that most conversations have several turns.
    """
    stop_token_ids = list(range(30, 97))
    text = (HERE / "draws.yaml").read_text().replace("MODEL", model).replace("STOP_TOKEN_IDS", str(stop_token_ids))
    Path("run.yaml").write_text(text)
    return "run.yaml"


@pytest.fixture
def responses_with_pictures(generate, rows, model, drawing_run, request):
    """Generate two conversations for each row, in the engine of the parameter; return the written rows."""
    who = ["--model", model, "--engine", request.param, "--environment", drawing_run]
    # Room for three turns of 9 tokens and two pictures.
    assert generate("--max-tokens", "150", "-n", "2", to="out.jsonl", who=who) == (0, "")
    return read_lines(Path("out.jsonl"))


BOTH_ENGINES = ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # which Python does not show outside of tests
@pytest.mark.parametrize("responses_with_pictures", BOTH_ENGINES, indirect=True)
def test_pictures_of_an_environment_are_written_and_evaluated(responses_with_pictures, capsys):
    conversations = [messages for row in responses_with_pictures for messages in row["response_messages"]]
    pictures = [str(messages).count("data:image/png;base64,") for messages in conversations]
    assert max(pictures) == 2  # three turns are the most, and an answer follows each but the last
    arguments = ["out.jsonl", "--reward", f"{HERE / 'draws.py'}:seen", "--json", "r.json"]
    assert evaluate_command.run([*arguments, "--keep", "above", "-1", "--to", "kept.jsonl"]) == 0
    assert capsys.readouterr().err == ""
    mean = json.loads(Path("r.json").read_text())["sources"]["data"]["rewards"]["seen"]["mean"]
    sum_of_widths = {0: 0, 1: 20, 2: 20 + 21}
    assert mean == pytest.approx(sum(sum_of_widths[count] for count in pictures) / len(pictures))


# -- a server ----------------------------------------------------------------------------------------------------------


def test_server_receives_images_in_messages(generate, rows, stub):
    choice = {"message": {"content": "x"}, "text": "x", "finish_reason": "stop"}
    stub.answers = [(200, {"choices": [choice]})] * 9
    server = ["--server", stub.url]
    code, error = generate(who=server)
    assert code == 2
    assert "a text with images cannot be sent to a server: set --as-messages" in error
    assert stub.requested == []
    assert generate("--as-messages", who=server) == (0, "")
    contents = {json.dumps(body["messages"][-1]["content"]) for _, body in stub.requested}

    def part(image):
        url = f"data:image/png;base64,{base64.b64encode(image.data).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    text = {"type": "text", "text": "?"}
    expected = [[part(image), text] for image in IMAGES] + [[part(IMAGES[0]), part(IMAGES[1]), text], "?"]
    expected += [[{"type": "text", "text": "a "}, part(IMAGES[2]), text]]
    assert contents == {json.dumps(content) for content in expected}
    assert read_lines(Path("data/out.jsonl"))[0]["prompt"] == rows[0]["prompt"]


def test_rejection_that_repeats_an_image_is_shown_without_it(generate, rows, stub):
    url = f"data:image/png;base64,{base64.b64encode(IMAGES[0].data).decode()}"
    stub.answers = [(400, {"error": url})] * 20
    code, error = generate("--as-messages", who=["--server", stub.url])
    assert code == 1
    assert "data:image/png;base64,..." in error
    assert url[-20:] not in error


# -- evaluate ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def evaluate(generate, rows, capsys):
    """Evaluate a file of responses in another directory than the images."""
    Path("rewards.py").write_text(REWARDS)
    assert generate("-n", "2", to="out.jsonl") == (0, "")

    def evaluate(name, *arguments):
        code = evaluate_command.run(["out.jsonl", "--reward", f"rewards.py:{name}", "--json", "r.json", *arguments])
        shown = capsys.readouterr()
        mean = json.loads(Path("r.json").read_text())["sources"]["data"]["rewards"][name]["mean"] if code == 0 else None
        return code, mean, shown.err

    return evaluate


@pytest.mark.parametrize(("name", "arguments"), [("wide", ()), ("parts", ("--messages",))])
def test_reward_functions_receive_the_images(evaluate, name, arguments):
    code, mean, _ = evaluate(name, "--images", "data", *arguments)
    assert code == 0
    assert mean == pytest.approx(sum(WIDTHS) / len(WIDTHS))


def test_images_are_read_only_for_functions_that_receive_them(evaluate):
    assert evaluate("length")[0] == 0
    code, _, error = evaluate("wide")
    assert code == 2
    assert "--images DIR sets the directory with the images" in error


def test_kept_rows_have_the_images_of_the_file(evaluate, rows, model):
    # Only finished responses are kept, and at 4 tokens most are cut off.
    written = [{**row, "finish_reasons": ["stop"] * 2} for row in read_lines(Path("out.jsonl"))]
    Path("out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    code, _, _ = evaluate("length", "--keep", "above", "-1", "--to", "kept.jsonl")
    assert code == 0
    kept = {row["answer"]: row for row in read_lines(Path("kept.jsonl"))}
    without_response = {answer: row["messages"][:-1] for answer, row in kept.items() if "messages" in row}
    expected = {row["answer"]: row["prompt"] for row in rows[:TEXT]}
    expected[str(NO_IMAGE)] = [{"role": "user", "content": "?"}]  # one text is written without its part
    assert without_response == expected
    assert kept[str(TEXT)]["prompt"] == rows[TEXT]["prompt"]
    assert kept[str(TEXT)]["images"] == rows[TEXT]["images"]
    folder = ImageSettings(folder="data")
    data = ConversationDataModule(tokenizer=model, train="kept.jsonl", batch_size=1, max_tokens=512, images=folder)
    data.setup("fit")
    assert list(data.image_store.images.values()) == IMAGES
