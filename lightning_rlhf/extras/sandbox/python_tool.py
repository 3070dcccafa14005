"""A tool that runs Python programs of the policy in the sandbox."""

from __future__ import annotations

from functools import cached_property

from lightning_rlhf.environments.protocol import ToolError
from lightning_rlhf.extras.sandbox.bubblewrap import BubblewrapSandbox
from lightning_rlhf.extras.sandbox.protocol import Limits, Sandbox


class PythonTool:
    """Runs programs in a sandbox, without a state between calls (see docs/sandbox.md).

    Pass its method :meth:`python` to ``Tools``. If the default limits fit, pass
    ``lightning_rlhf.extras.sandbox.python_tool:python`` instead.

    Args:
        sandbox: sandbox that runs the programs. None uses bubblewrap.
        limits: resource limits of one program.
        max_characters: most characters of the output that the policy reads. Longer output is cut at the end.
    """

    def __init__(
        self, sandbox: Sandbox | None = None, limits: Limits | None = None, max_characters: int = 2000
    ) -> None:
        self._given = sandbox
        self._limits = limits or Limits()
        self._max_characters = max_characters

    @cached_property
    def _sandbox(self) -> Sandbox:
        sandbox = self._given or BubblewrapSandbox()
        sandbox.check()
        return sandbox

    def python(self, code: str) -> str:
        """Run a Python program and return its output.

        Args:
            code: source of the program
        """
        result = self._sandbox.run(code, "", self._limits)
        if result.timed_out:
            raise ToolError(f"the program took longer than {self._limits.seconds:g} s")
        if result.truncated:
            raise ToolError("the program printed too much")
        if result.exit_code != 0:
            raise ToolError(result.stderr.strip()[-self._max_characters :] or f"exit code {result.exit_code}")
        return result.stdout[: self._max_characters]


python = PythonTool().python
