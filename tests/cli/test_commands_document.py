"""The commands of docs/commands.md, run in their order on the files that the document describes."""

import json
import re
import shlex
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from lightning_rlhf import __main__
from lightning_rlhf.extras.commands import response_backends
from lightning_rlhf.extras.commands.generate import make_parser
from lightning_rlhf.extras.doctor import command as doctor
from lightning_rlhf.extras.serve import command as serve
from lightning_rlhf.rollout.transformers import TransformersEngine

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/commands.md").read_text()
CHECKPOINTS = {"class_path": "lightning_rlhf.callbacks.RunCheckpoint"}
# They need a vLLM that is ready, or serve until Ctrl-C; tests/extras/serve/test_serve.py and tests/report run them.
ELSEWHERE = ("serve", "--server", "inspect")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.fixture
def files(config):
    """The files that the document assumes."""
    config["trainer"] |= {"default_root_dir": "runs/x"}
    config["trainer"]["callbacks"].append(CHECKPOINTS)
    Path("x.yaml").write_text(yaml.safe_dump(config))
    (rows,), (_, functions) = blocks("json"), blocks("python")
    Path("questions.jsonl").write_text(rows)
    Path("rewards.py").write_text(functions)


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a line as the command line does."""

    def call(line):
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                code = __main__.main()
            except SystemExit as end:
                code = end.code
        shown = capsys.readouterr()
        assert code == 0, f"{line}: {shown.out}{shown.err}"
        return shown.out

    return call


@pytest.mark.slow
def test_documented_commands_work(files, call, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_output", lambda *_: "imports 0")  # vLLM takes half a minute
    monkeypatch.setattr(response_backends, "choose_engine", lambda config: (TransformersEngine(), "for this test"))
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert {line.split()[1] for line in lines} >= __main__.COMMANDS.keys() - {"validate", "test", "predict"}
    message = {line: call(line) for line in lines if not set(ELSEWHERE) & set(line.split())}
    assert len(message) == len(lines) - 4
    assert Path("runs/x/report.html").is_file()
    rows = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [(row["answer"], len(row["responses"])) for row in rows] == [("42", 4), ("10", 4)]
    right = json.loads(Path("report.json").read_text())["sources"]["data"]["rewards"]["right"]
    assert {"mean", "low", "high", "pass@4", "maj@4"} <= right.keys()
    assert Path("models/x/README.md").is_file()
    exec(compile(blocks("python")[0], "docs/commands.md", "exec"), {})
    assert capsys.readouterr().out.startswith("12+30=")


def test_documented_commands_that_need_a_server_are_parsed():
    served, requested, with_adapters = (
        line for block in blocks("bash") for line in block.splitlines() if {"serve", "--server"} & set(line.split())
    )
    assert serve.make_parser().parse_args(shlex.split(served)[2:]).model == "models/x"
    inputs = make_parser().parse_args(shlex.split(requested)[2:])
    port = serve.make_parser().parse_args(["--model", "x"]).port
    adapters = serve.make_parser().parse_args(shlex.split(with_adapters)[2:]).adapter
    assert adapters == ["math=runs/math/export", "chat=runs/chat/export"]
    assert (inputs.server, inputs.api_key_env) == ([f"http://127.0.0.1:{port}"], "KEY")


def test_functions_in_the_document_exist():
    for module, name in re.findall(r"`(lightning_rlhf[\w.]*):(\w+)`", DOCUMENT):
        assert callable(getattr(import_module(module), name))
