"""Entry point of ``lightning-rlhf`` and ``python -m lightning_rlhf``."""

import difflib
import json
import os
import signal
import sys
from importlib import import_module

from lightning_rlhf import launch_environment
from lightning_rlhf.__about__ import __version__
from lightning_rlhf.cli.commands import COMMANDS, LIGHTNING, RECORDED, Command
from lightning_rlhf.cli.errors import printed
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.processes.child import end_with_launcher
from lightning_rlhf.processes.signals import end_at_sigterm

_RUN_HELP = """usage: lightning-rlhf {command} --config FILE [--config FILE ...] [OPTION VALUE ...]

{description}. Options replace values of the files; the first ones to know:

  --config FILE                    configuration; values of a later file replace those of an earlier one
  --ckpt_path last                 continue from the last checkpoint of the run, from best, or from a path
  --model.init_args.NAME VALUE     argument of the module, such as minibatch_size or optimizer.init_args.lr
  --rollout.NAME VALUE             argument of RolloutLoop, such as group_size, temperature, rewards or engine
  --rollouts-from RUN              train on the responses that RolloutRecorder has kept of another run
  --data.init_args.NAME VALUE      argument of the data module, such as train or batch_size
  --trainer.default_root_dir DIR   run directory
  --trainer.max_steps N            number of steps, each with one batch of the data
  --trainer.devices N              number of GPUs, or of processes on a CPU
  --trainer.strategy NAME          rlhf_fsdp, rlhf_ddp, rlhf_deepspeed_stage_3 and others
  --trainer.precision NAME         bf16-mixed, or 32-true
  --trainer.fast_dev_run true      one step, whose files are not kept
  --seed_everything N              seed of the run
  --print_config                   print the configuration with all defaults, and end

  --model.help CLASS, --data.help CLASS, --trainer.callbacks.help CLASS
                                   arguments of a class, such as GRPOModule, PromptDataModule, RolloutLoop
  --help-all                       all options
"""


# Commands that people know from elsewhere.
_OTHER_NAMES = {"train": "fit", "run": "fit", "grpo": "fit", "sft": "fit", "init": "new", "eval": "evaluate"}
_FURTHER = ("test", "predict", "report", "completion")  # commands that the overview only names


def main() -> int:
    """Run a command; ``--version``, ``--help`` and unknown commands do not import libraries."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        return _show(f"lightning-rlhf {__version__}\n")
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        return _show(f"{overview()}\n")
    name = arguments[0]
    if name not in COMMANDS and name != "--help-all":
        print(f"lightning-rlhf: {_unknown(name, arguments)}", file=sys.stderr)
        return 2
    arguments = _expanded(arguments)
    end_with_launcher(launch_environment.is_first_process(), is_loading=True)
    module, description, _ = COMMANDS.get(name, Command(LIGHTNING, ""))
    if module == LIGHTNING:
        end_at_sigterm(prints=launch_environment.is_first_process())
        if name in COMMANDS and {"--help", "-h"} & set(arguments):
            return _show(_RUN_HELP.format(command=name, description=description.partition(":")[0].capitalize()))
        # Its own --help, which lists all options, is --help-all here.
        sys.argv[1:] = ["--help" if argument == "--help-all" else argument for argument in arguments]
    try:
        if not _check_files(name, arguments[1:]):
            return 2
        trains = name in ("fit", "validate") and not any(map(_shows_only, arguments))
        if trains and launch_environment.is_first_process() and not printed:  # the mistakes stay the last lines
            print("loading the libraries and the data", flush=True)
        launch_environment.apply()  # before libraries are imported that read environment variables
        return int(import_module(module).run(None if module == LIGHTNING else arguments[1:])) or _show("")
    except BrokenPipeError:
        if not _show("\n"):  # another pipe
            raise
        if module == LIGHTNING:
            print("lightning-rlhf: the program that read the output has ended, and so the run ends", file=sys.stderr)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # before the command, which handles it itself
        print("lightning-rlhf: ended by Ctrl-C", file=sys.stderr)
        return 130


def _expanded(arguments: list[str]) -> list[str]:
    """Replace short options by those that they stand for."""
    expanded = list[str]()
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, has_value, run = argument.partition("=")
        if name != "--rollouts-from" or not (has_value or remaining):
            expanded.append("--config" if argument == "-c" else argument)
            continue
        engine = {"class_path": RECORDED, "init_args": {"run": run if has_value else remaining.pop(0)}}
        expanded += [f"--rollout.engine={json.dumps(engine)}", "--rollout.check_rows=0"]
        expanded += ["--rollout.validate_at_ends=false", "--trainer.limit_val_batches=0"]
    return expanded


def _shows_only(argument: str) -> bool:
    """Return whether an argument lets a command of Lightning print something instead of its work."""
    option = argument.partition("=")[0]
    return option in ("--print_config", "--help-all") or option.endswith(".help")


def _check_files(name: str, arguments: list[str]) -> bool:
    """Return whether the files of a configuration can be read; else print why, before libraries are imported."""
    if name not in COMMANDS or not COMMANDS[name].reads_run:
        return True
    from lightning_rlhf.cli.early import check_early

    try:
        check_early(arguments, name, before=True)
    except UsageError as error:
        if launch_environment.is_first_process():  # others find the same
            print(f"lightning-rlhf: {error}", file=sys.stderr)
        return False
    return True


def _show(text: str) -> int:
    """Print a text, whose reader may end before its last line, such as ``head``."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python raises again at its end
        return 128 + signal.SIGPIPE  # what a shell reports where the signal ends a program
    return 0


def overview() -> str:
    """Return the list of all commands."""
    lines = [f"  {name:<10} {description}" for name, (_, description, _) in COMMANDS.items() if name not in _FURTHER]
    further = f"further commands: {', '.join(_FURTHER)}; COMMAND --help describes the options of one"
    return "\n".join(["usage: lightning-rlhf COMMAND ...", "", *lines, "", further])


def _unknown(name: str, arguments: list[str]) -> str:
    """Return a message about a word that is no command."""
    if name.startswith("-") and (command := next(filter(COMMANDS.__contains__, arguments), None)):
        return f"the command comes first: lightning-rlhf {command} {name} ..."
    parts = [command for command in COMMANDS if name in command.split("-")] or [*filter(None, [_OTHER_NAMES.get(name)])]
    near = parts or difflib.get_close_matches(name, COMMANDS, n=1)
    return f"unknown command {name!r}; {f'did you mean {near[0]!r}?' if near else 'lightning-rlhf --help lists all'}"


if __name__ == "__main__":
    sys.exit(main())
