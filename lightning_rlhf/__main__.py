"""``lightning-rlhf`` and ``python -m lightning_rlhf``."""

import difflib
import sys
from importlib import import_module

from lightning_rlhf import launch_environment
from lightning_rlhf.__about__ import __version__

# Commands beside Lightning's own; each is a module with run(arguments) -> exit code, imported when it is asked for.
COMMANDS = {
    "data": "lightning_rlhf.cli.data_check",
    "doctor": "lightning_rlhf.cli.doctor",
    "evaluate": "lightning_rlhf.cli.evaluate",
    "export": "lightning_rlhf.cli.export",
    "generate": "lightning_rlhf.cli.generate",
    "plan": "lightning_rlhf.cli.plan",
    "serve": "lightning_rlhf.cli.serve",
}
LIGHTNINGS = ("fit", "validate", "test", "predict")
# In the order in which somebody needs them.
ABOUT = {
    "doctor": "what is right and wrong with this machine and its installation",
    "data": "data check: what a run would make of its data",
    "plan": "what a run takes on so many GPUs, without any",
    "fit": "train: lightning-rlhf fit --config configs/quickstart/ppo.yaml",
    "validate": "measure a checkpoint on the validation data",
    "test": "run a module's own test loop",
    "predict": "run a module's own predict loop",
    "export": "a checkpoint as a directory that transformers and vLLM load",
    "generate": "responses of a model or a server to a file of prompts",
    "evaluate": "scores of a file of responses, with intervals",
    "serve": "vLLM's OpenAI server with an API key and limits",
}


def main() -> int:
    """Answer ``--version`` and ``--help`` at once; our commands have modules of their own; the rest is Lightning's."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(f"lightning-rlhf {__version__}")
        return 0
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(overview())
        return 0
    name = arguments[0]
    if name not in COMMANDS and name not in LIGHTNINGS and not name.startswith("-"):
        near = difflib.get_close_matches(name, ["data check", *COMMANDS, *LIGHTNINGS], n=1)
        hint = (
            f"did you mean {('data check' if near[0] == 'data' else near[0])!r}?"
            if near
            else "lightning-rlhf --help lists all"
        )
        print(f"lightning-rlhf: there is no command {name!r}; {hint}", file=sys.stderr)
        return 2
    launch_environment.apply()  # before anything is imported that reads it
    try:
        if name in COMMANDS:
            return int(import_module(COMMANDS[name]).run(arguments[1:]))
        from lightning_rlhf.cli.main import run

        return run()
    except KeyboardInterrupt:  # while libraries are imported; a command at work answers for itself
        print("lightning-rlhf: ended by Ctrl-C", file=sys.stderr)
        return 130


def overview() -> str:
    """All commands, a line each."""
    listed = [name for name in ABOUT if name in COMMANDS or name in LIGHTNINGS]
    lines = [f"  {name:<10} {ABOUT[name]}" for name in listed]
    return "\n".join(
        ["usage: lightning-rlhf COMMAND ...", "", *lines, "", "lightning-rlhf COMMAND --help tells more of each"]
    )


if __name__ == "__main__":
    sys.exit(main())
