"""``lightning-rlhf completion``: print a script with which a shell completes commands, options and paths."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from lightning_rlhf.cli.commands import COMMANDS
from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.cli.merging import TRAINER
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.commands.options import command_parser
from lightning_rlhf.extras.schema.known import definition, schema

_SECTIONS = {
    "model": "lightning_rlhf.modules.role_module.RoleModule",
    "data": "lightning.pytorch.core.datamodule.LightningDataModule",
}
_LOOP = "lightning_rlhf.callbacks.loop.rollout_loop.RolloutLoop"
_SHELLS = ("bash", "zsh", "fish")
_EPILOG = """The script completes commands, options and paths; for fit also the options of the Trainer,
and the arguments of the modules and data modules of this package. Write it to a file that the shell reads:

  lightning-rlhf completion bash > ~/.local/share/bash-completion/completions/lightning-rlhf
  lightning-rlhf completion zsh > ~/.zfunc/_lightning-rlhf      (~/.zfunc is in fpath)
  lightning-rlhf completion fish > ~/.config/fish/completions/lightning-rlhf.fish
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser("completion", "Print a script that completes commands and options in a shell.", _EPILOG)
    parser.add_argument("shell", choices=_SHELLS, help="shell that reads the script")
    return parser


@one_line_errors
def run(arguments: list[str]) -> int:
    """Print the script.

    Returns:
        Exit code: 0, or 2 if shtab is not installed.
    """
    options = make_parser().parse_args(arguments)
    try:
        import shtab
    except ImportError:
        raise UsageError(
            "completion needs shtab, which is not installed: pip install 'lightning-rlhf[completion]'"
        ) from None
    parser = all_commands()
    _complete_paths(parser, shtab.FILE, shtab.DIRECTORY)
    print(shtab.complete(parser, options.shell))
    return 0


def all_commands() -> argparse.ArgumentParser:
    """Return a parser with the options of all commands, which completes and is not used to parse."""
    parser = argparse.ArgumentParser("lightning-rlhf")
    commands = parser.add_subparsers(dest="command")
    for name, (module, description, _) in COMMANDS.items():
        parent = getattr(import_module(module), "make_parser", None)
        if parent is not None:
            commands.add_parser(name, help=description, parents=[parent()], add_help=False)
            continue
        command = commands.add_parser(name, help=description)
        if name == "check-data":
            command.add_argument("--json", action="store_true")
        if name == "plan":
            for option in ("--gpu", "--gpus", "--gpu-memory-gib", "--nodes"):
                command.add_argument(option)
        _add_run_options(command)
    return parser


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fit``: those of the Trainer, and those of all modules and data modules of this package."""
    parser.add_argument("--config", metavar="FILE", help="configuration")
    parser.add_argument("--ckpt_path", metavar="FILE", help="checkpoint to continue from, or last")
    parser.add_argument("--seed_everything", help="seed of the run")
    parser.add_argument("--print_config", action="store_true", help="print the configuration, and end")
    parser.add_argument("--help-all", action="store_true", help="all options")
    public = {f"lightning_rlhf.{name}" for name in import_module("lightning_rlhf").__all__}
    entries = [entry for entry in schema()["$defs"].values() if not public.isdisjoint(entry.get("x-names", ()))]
    for section, base in _SECTIONS.items():
        kinds = [entry for entry in entries if base in entry["x-bases"]]
        parser.add_argument(f"--{section}", choices=sorted(entry["title"] for entry in kinds), help="class")
        for name in sorted({name for entry in kinds for name in entry["properties"]}):
            parser.add_argument(f"--{section}.init_args.{name}")
    for name in (definition(_LOOP) or {})["properties"]:
        parser.add_argument(f"--rollout.{name}")
    for name in (definition(TRAINER) or {})["properties"]:
        is_directory = name == "default_root_dir"
        parser.add_argument(f"--trainer.{name}", metavar="DIR" if is_directory else None)


def _complete_paths(parser: argparse.ArgumentParser, file: Any, directory: Any) -> None:
    """Complete arguments with paths of files and directories, which their names in the help identify."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command, file, directory)
        elif action.metavar in ("DIR", "RUN"):
            action.complete = directory  # type: ignore[attr-defined]
        elif str(action.metavar).startswith(("FILE", "CONFIG")) or action.dest == "file":
            action.complete = file  # type: ignore[attr-defined]
