"""Programs of the policy as a tool, in the sandbox."""

import pytest

from lightning_rlhf.environments import ToolCall, Tools, Turn
from lightning_rlhf.environments.python_tool import PythonTool, python
from lightning_rlhf.rewards.sandbox.bubblewrap import find_bwrap
from lightning_rlhf.rewards.sandbox.protocol import Limits, ProgramResult


class Fake:
    """A sandbox with a given result."""

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


def test_output_and_mistakes():
    assert run(result(stdout="1\n")) == "1\n"
    assert run(result(stdout="123456"), max_characters=3) == "123"
    assert run(result(exit_code=1, stderr="Traceback\nNameError: x\n")) == "Error: Traceback\nNameError: x"
    assert run(result(exit_code=9)) == "Error: exit code 9"
    assert run(result(timed_out=True), limits=Limits(seconds=2.0)) == "Error: the program took longer than 2 s"
    assert run(result(truncated=True)) == "Error: the program printed too much"


def test_the_schema_of_the_tool():
    (schema,) = Tools(["lightning_rlhf.environments.python_tool:python"]).schemas
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["required"] == ["code"]


@pytest.mark.slow
@pytest.mark.skipif(find_bwrap() is None, reason="needs bubblewrap")
def test_a_program_in_the_sandbox():
    assert python("print(sum(range(10)))") == "45\n"
