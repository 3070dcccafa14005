"""The Python tool: programs of the policy run in the sandbox."""

import os
import socket
import textwrap
from pathlib import Path

import pytest

import lightning_rlhf
from lightning_rlhf.environments import ToolCall, Tools, Turn
from lightning_rlhf.extras.sandbox.bubblewrap import find_bwrap
from lightning_rlhf.extras.sandbox.protocol import Limits, ProgramResult
from lightning_rlhf.extras.sandbox.python_tool import PythonTool, python


class Fake:
    """A sandbox that returns a given result."""

    def __init__(self, result):
        self.result, self.sources = result, []

    def check(self):
        return "a fake"

    def run(self, source, stdin, limits):
        self.sources.append((source, stdin))
        return self.result


def run(result, **options):
    tool = PythonTool(Fake(result), **options)
    reply = Tools([tool.python]).step(Turn("", (ToolCall("python", {"code": "print(1)"}),)))
    return reply.messages[0]["content"]


def result(**values):
    return ProgramResult(
        **({"stdout": "", "stderr": "", "exit_code": 0, "timed_out": False, "truncated": False} | values)
    )


def test_output_and_mistakes_are_messages():
    assert run(result(stdout="1\n")) == "1\n"
    assert run(result(stdout="123456"), max_characters=3) == "123"
    assert run(result(exit_code=1, stderr="Traceback\nNameError: x\n")) == "Error: Traceback\nNameError: x"
    assert run(result(exit_code=9)) == "Error: exit code 9"
    assert run(result(timed_out=True), limits=Limits(seconds=2.0)) == "Error: the program took longer than 2 s"
    assert run(result(truncated=True)) == "Error: the program printed too much"


def test_tool_has_a_schema():
    (schema,) = Tools(["lightning_rlhf.extras.sandbox.python_tool:python"]).schemas
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["required"] == ["code"]


@pytest.mark.slow
@pytest.mark.skipif(find_bwrap() is None, reason="needs bubblewrap")
def test_program_runs_in_the_sandbox():
    assert python("print(sum(range(10)))") == "45\n"


REACHING = """
    import os, pathlib, signal, socket

    def attempt(name, act):
        try:
            print(name, act())
        except (OSError, ValueError) as error:
            print(name, "failed")

    run = pathlib.Path(RUN)
    attempt("read", lambda: (run / "last.ckpt").read_text())
    attempt("list", lambda: list(run.iterdir()))
    attempt("overwrite", lambda: (run / "last.ckpt").write_text("mine"))
    attempt("remove", lambda: (run / "last.ckpt").unlink())
    attempt("add", lambda: (run / "config.yaml").write_text("mine"))
    attempt("library", lambda: pathlib.Path(LIBRARY).write_text("mine"))
    attempt("kill", lambda: os.kill(TRAINER, signal.SIGTERM))
    attempt("memory", lambda: open(f"/proc/{TRAINER}/mem", "r+b"))
    attempt("connect", lambda: socket.create_connection(("127.0.0.1", PORT), timeout=1))
    attempt("secret", lambda: os.environ["SECRET"] if "SECRET" in os.environ else int("no"))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_bwrap() is None, reason="needs bubblewrap")
def test_program_cannot_reach_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "key")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last.ckpt").write_text("weights")
    library = Path(lightning_rlhf.__file__)
    before = library.read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as server:
        facts = {"RUN": str(tmp_path), "LIBRARY": str(library), "TRAINER": os.getpid(), "PORT": server.getsockname()[1]}
        code = "".join(f"{name} = {value!r}\n" for name, value in facts.items()) + textwrap.dedent(REACHING)
        reply = Tools([python]).step(Turn("", (ToolCall("python", {"code": code}),)))
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    outcomes = dict(line.rsplit(" ", 1) for line in reply.messages[0]["content"].splitlines())
    assert len(outcomes) == 10
    assert set(outcomes.values()) == {"failed"}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"last.ckpt": "weights"}
    assert library.read_bytes() == before
