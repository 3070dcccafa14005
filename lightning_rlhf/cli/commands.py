"""Table of the commands, in the order of use. The module of a command is imported when the command runs."""

from __future__ import annotations

from typing import NamedTuple

LIGHTNING = "lightning_rlhf.cli.main"
_EXTRAS = "lightning_rlhf.extras"
CHECK = f"{_EXTRAS}.schema.check"  # its function mistakes(arguments, command) is the early check of a configuration

RECORDED = f"{_EXTRAS}.recorded_rollouts.engine.RecordedEngine"  # engine of fit --rollouts-from


class Command(NamedTuple):
    """A command of ``lightning-rlhf``.

    Args:
        module: module with a function ``run(arguments)`` that returns the exit code; ``LIGHTNING`` reads ``sys.argv``.
        description: half a sentence about the command.
        reads_run: whether its arguments are those of ``fit``, which are checked before libraries are imported.
    """

    module: str
    description: str
    reads_run: bool = False


COMMANDS = {
    "new": Command(f"{_EXTRAS}.commands.new", "write a small project to begin with"),
    "doctor": Command(f"{_EXTRAS}.doctor.command", "check this machine and its installation"),
    "check-data": Command(f"{_EXTRAS}.commands.check_data", "check and describe the data of a run", reads_run=True),
    "plan": Command(f"{_EXTRAS}.plan.command", "estimate the memory of a run on GPUs, without a GPU", reads_run=True),
    "fit": Command(LIGHTNING, "train: lightning-rlhf fit --config run.yaml", reads_run=True),
    "validate": Command(LIGHTNING, "evaluate a checkpoint on the validation data", reads_run=True),
    "test": Command(LIGHTNING, "run a module's own test loop", reads_run=True),
    "predict": Command(LIGHTNING, "run a module's own predict loop", reads_run=True),
    "export": Command(
        f"{_EXTRAS}.commands.export", "write a checkpoint as a directory that transformers and vLLM load"
    ),
    "generate": Command(
        f"{_EXTRAS}.commands.generate", "generate responses of a model or a server to a file of prompts"
    ),
    "evaluate": Command(f"{_EXTRAS}.commands.evaluate", "score a file of responses, with confidence intervals"),
    "inspect": Command(f"{_EXTRAS}.report.inspect", "serve a page about runs, with a viewer of their responses"),
    "report": Command(f"{_EXTRAS}.report.command", "write a page with curves, health checks and responses of runs"),
    "serve": Command(f"{_EXTRAS}.serve.command", "start vLLM's OpenAI server with an API key and limits"),
    "completion": Command(
        f"{_EXTRAS}.commands.completion", "print a script that completes commands and options in a shell"
    ),
}
