"""Detection of paths, and errors for missing paths and an unreachable hub."""

from pathlib import Path

import pytest

from lightning_rlhf import ConversationDataModule, SFTModule
from lightning_rlhf.data.rows import InMemory, as_rows
from lightning_rlhf.data.tokenizers import load_tokenizer
from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.paths import describe_missing_path, hub_error_message, names_a_path
from tests.stand_ins import quiet_trainer


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with a run and data in it."""
    for name in ("work/runs/sft/export", "work/examples/task"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "work/examples/task/train.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize("text", ["./a", "../a", "/a", "~/a", "a/b/c", "runs/nope", "runs", "runs/sft"])
def test_text_is_recognized_as_a_path(here, text):
    assert names_a_path(text)


@pytest.mark.parametrize("text", ["Qwen/Qwen2.5-0.5B", "gpt2", "some-one/data-v1.5"])
def test_text_is_recognized_as_a_hub_id(here, text):
    assert not names_a_path(text)


@pytest.mark.parametrize(
    ("prefix", "read"),
    [
        ("no tokenizer at", load_tokenizer),
        ("no model at", lambda path: Pretrained(path).hf_config()),
        ("no data at", as_rows),
    ],
)
def test_missing_path_below_a_directory_is_not_a_hub_id_and_error_shows_the_searched_path(
    here, monkeypatch, prefix, read
):
    def request_hub(*args, **kwargs):
        raise AssertionError("the hub was called")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", request_hub)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", request_hub)
    with pytest.raises(FileNotFoundError) as caught:
        read("runs/nope")
    assert str(caught.value).startswith(f"{prefix} 'runs/nope': ")
    assert f"looked at {here}/runs/nope, because relative paths start at the working directory" in str(caught.value)


@pytest.mark.parametrize(
    ("start", "text", "meant"),
    [
        (".", "examples/task/train1.jsonl", "examples/task/train.jsonl"),
        (".", "example/task/train.jsonl", "examples/task/train.jsonl"),
        (".", "runs/sft/exports", "runs/sft/export"),
        ("examples/task", "examples/task/train.jsonl", "{work}/examples/task/train.jsonl"),
        ("examples/task", "task/train.jsonl", "{work}/examples/task/train.jsonl"),
        (".", "{work}/examples/task/train1.jsonl", "{work}/examples/task/train.jsonl"),
        ("examples", "../runs/stf/export", "../runs/sft/export"),
    ],
)
def test_error_suggests_a_similar_path(here, monkeypatch, start, text, meant):
    monkeypatch.chdir(here / start)
    message = describe_missing_path(text.format(work=here))
    assert message.endswith(f"; did you mean {meant.format(work=here)!r}?")


def test_error_has_no_suggestion_without_a_similar_path_and_no_note_for_an_absolute_path(here):
    assert describe_missing_path("/nowhere/at/all") == "looked at /nowhere/at/all"
    assert "did you mean" not in describe_missing_path("other/x.jsonl")
    assert describe_missing_path("~/none-such") == f"looked at {Path.home()}/none-such"


def test_leading_directory_equal_to_the_working_directory_is_dropped_from_the_suggestion(here, monkeypatch):
    monkeypatch.chdir(here / "examples/task")
    (here / "examples/task/mine.jsonl").write_text("")
    assert describe_missing_path("task2/mine.jsonl").endswith("at the working directory")
    (here / "examples/task/deep").mkdir()
    (here / "examples/task/deep/x.csv").write_text("")
    monkeypatch.chdir(here / "examples/task/deep")
    assert describe_missing_path("far/deep/x.csv").endswith("did you mean 'x.csv'?")


def test_hub_error_shows_its_reason_and_the_related_variables(here, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    below = OSError(-2, "Name or service not known")
    error = OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck your connection.")
    error.__cause__ = below
    message = hub_error_message("missing/model", error)
    assert f"looked at {here}/missing/model" in message
    assert "We couldn't connect to 'https://huggingface.co' to load the files (Name or service not known); " in message
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        assert name in message
    assert "\n" not in message
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub_error_message("missing/model", error).endswith(
        "HF_HUB_OFFLINE is set, so only files that were downloaded before are available"
    )


@pytest.mark.parametrize(
    "read",
    [
        load_tokenizer,
        lambda name: Pretrained(name).hf_config(),
        lambda name: list(as_rows(name).rows()),
    ],
    ids=["tokenizer", "model", "data"],
)
def test_error_for_a_hub_id_that_cannot_be_fetched_is_one_line(here, monkeypatch, read):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises((FileNotFoundError, ValueError), match="could not be loaded from the hub: ") as caught:
        read("missing/model")
    assert "\n" not in str(caught.value)
    assert "'missing/model'" in str(caught.value)


@pytest.fixture
def unreachable(here, monkeypatch):
    """A hub address without a server and an empty cache; the waiting times between attempts."""
    sleeps = []
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", sleeps.append)
    return sleeps


@pytest.mark.parametrize(
    "read", [load_tokenizer, lambda name: Pretrained(name).hf_config()], ids=["tokenizer", "model"]
)
def test_unreachable_hub_is_tried_twice(unreachable, read):
    with pytest.raises(FileNotFoundError, match=r"http://127.0.0.1:9 does not answer \(.*refused\)") as caught:
        read("missing/model")
    assert "no " in str(caught.value)
    assert "'missing/model'" in str(caught.value)
    assert unreachable == [1]  # seconds of sleep before the second attempt


def test_missing_model_is_reported_before_a_missing_tokenizer(unreachable):
    data = ConversationDataModule(InMemory([{"prompt": "a", "completion": "b"}]), "missing/model")
    with pytest.raises(FileNotFoundError, match=r"^no model at 'missing/model': .*does not answer"):
        quiet_trainer().fit(SFTModule("missing/model"), datamodule=data)


def test_error_for_a_directory_without_model_or_data_lists_its_content(here):
    with pytest.raises(FileNotFoundError, match=f"; {here}/examples/task contains train.jsonl$"):
        Pretrained("examples/task").hf_config()
    with pytest.raises(FileNotFoundError, match=f"; {here}/runs has sft$"):
        as_rows("runs")
    (here / "notes.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=f"; {here}/notes.txt exists, but has none of these extensions$"):
        as_rows("notes.txt")
