"""Control characters of data, models and files reach no terminal."""

import json
import logging
from pathlib import Path

import pytest

from lightning_rlhf.cli import screen
from lightning_rlhf.expected_errors import ExpectedError, MissingFileError, UsageError, for_terminal
from lightning_rlhf.extras.commands import check_data

TITLE, RED, BELL = "\x1b]0;PWN\x07", "\x1b[31m", "\x07"


def assert_harmless(text):
    assert not set(text) & {chr(number) for number in [*range(9), *range(11, 32), *range(127, 160)]}


@pytest.fixture
def rows(config):
    """Let the run read rows whose texts and names of columns set colours and title."""
    row = {"prompt": f"1+2={RED}", "answer": f"{RED}3{TITLE}", f"note{BELL}": "\x9b31m"}
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    config["data"]["init_args"] |= {"train": "rows.jsonl", "max_tokens": 64}
    characters = "".join(dict.fromkeys(f"0123456789+=: {RED}{TITLE}"))
    config["data"]["init_args"]["tokenizer"]["init_args"] = {"characters": characters}
    config["model"]["init_args"]["actor"]["init_args"]["architecture"]["vocab_size"] = len(characters) + 4
    return config


def test_only_control_characters_are_escaped():
    assert for_terminal(f"a{RED}b{BELL}\r\n\tc\x7f\x9b") == "a\\x1b[31mb\\x07\\x0d\n\tc\\x7f\\x9b"
    for text in ("ü ż 漢字　日本", "👩\u200d💻", "a\u00a0b", "שלום", "x\n\ty"):
        assert for_terminal(text) == text


@pytest.mark.parametrize("kind", [ExpectedError, UsageError, MissingFileError])
def test_messages_of_errors_are_harmless(kind):
    assert str(kind(f"no column {RED}")) == "no column \\x1b[31m"


def test_log_is_harmless(capsys, monkeypatch):
    monkeypatch.setattr(screen.log, "handlers", [])
    screen.configure_messages()
    logging.getLogger("lightning_rlhf.data").warning("row %s", TITLE)
    assert capsys.readouterr().out == "row \\x1b]0;PWN\\x07\n"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # which Python does not show outside of tests
def test_check_data_is_harmless(rows, capsys):
    Path("run.yaml").write_text(json.dumps(rows))
    check_data.run(["--config", "run.yaml"])
    shown = capsys.readouterr()
    assert_harmless(shown.out + shown.err)
    assert "\\x1b[31m3\\x1b]0;PWN\\x07" in shown.out


def test_table_of_responses_and_the_last_validation_are_harmless(fit, rows):
    rows["trainer"]["callbacks"].append(
        {"class_path": "lightning_rlhf.callbacks.RolloutLog", "init_args": {"table_every_n_steps": 1}}
    )
    result = fit(rows, "--data.init_args.val", "rows.jsonl")
    assert result.code == 0, result.err
    assert_harmless(result.out + result.err)
    assert "\\x1b[31m3" in result.out
