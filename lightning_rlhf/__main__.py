"""``lightning-rlhf`` and ``python -m lightning_rlhf``."""

import sys
from importlib import import_module

from lightning_rlhf import launch_environment
from lightning_rlhf.__about__ import __version__

# Commands beside Lightning's own; each is a module with run(arguments) -> exit code, imported when it is asked for.
COMMANDS = {
    "doctor": "lightning_rlhf.cli.doctor",
    "plan": "lightning_rlhf.cli.plan",
}


def main() -> int:
    """Answer ``--version`` at once; our own commands have modules of their own; everything else is Lightning's."""
    if sys.argv[1:] == ["--version"]:
        print(f"lightning-rlhf {__version__}")
        return 0
    launch_environment.apply()  # before anything is imported that reads it
    if sys.argv[1:] and sys.argv[1] in COMMANDS:
        return int(import_module(COMMANDS[sys.argv[1]]).run(sys.argv[2:]))
    from lightning_rlhf.cli.main import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
