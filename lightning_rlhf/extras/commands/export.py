"""``lightning-rlhf export``: write the model in a checkpoint as a directory that transformers and vLLM load."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from lightning_rlhf.cli.config_files import check_config_files
from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.cli.merging import merged_settings
from lightning_rlhf.expected_errors import MissingFileError, UsageError
from lightning_rlhf.extras.commands.options import command_parser
from lightning_rlhf.extras.schema.known import find

_NAMED_CHECKPOINTS = ("last", "best")
# The options that each of the three ways of the command has, besides --to.
_OPTIONS_OF = {"config": ("checkpoint", "role", "adapter"), "merge": ("base",), "extract": ("base", "rank")}
_EPILOG = """further options change the configuration, as for fit: --data.init_args.tokenizer DIR

  lightning-rlhf export --config runs/x/config.yaml --checkpoint last --to models/x
  lightning-rlhf export --merge runs/x/export --base Qwen/Qwen2.5-0.5B-Instruct --to models/x
  lightning-rlhf export --extract runs/y/export --base Qwen/Qwen2.5-0.5B-Instruct --rank 16 --to models/y
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(
        "export", "Write the model in a checkpoint as a directory that transformers and vLLM load.", _EPILOG
    )
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--config", type=Path, help="the run's config.yaml, in the run's directory")
    wanted.add_argument("--merge", metavar="ADAPTER", help="merge an adapter of peft's format into --base")
    wanted.add_argument("--extract", metavar="MODEL", help="approximate a trained model by an adapter to --base")
    parser.add_argument("--base", help="base model of --merge or --extract")
    parser.add_argument("--rank", type=int, help="rank of the adapter of --extract (default: 16)")
    parser.add_argument("--checkpoint", help="last, best, or a path (default: last)")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new or empty directory")
    parser.add_argument("--role", help="actor, critic or reward_model (default: that of the run's own export)")
    parser.add_argument("--adapter", action="store_true", help="LoRA adapters only, not merged into the weights")
    return parser


@one_line_errors
def run(arguments: list[str]) -> int:
    """Export one model of a checkpoint. Needs neither the GPUs nor the number of processes of the run.

    Returns:
        Exit code: 0, or 2 if nothing was exported.
    """
    options, further = make_parser().parse_known_args(arguments)
    to = Path(os.path.abspath(options.to))  # gives "." a name
    if to.exists() and (to.is_file() or any(to.iterdir()) or to == Path.cwd()):
        raise UsageError(f"{options.to} exists already: choose another directory, or remove it")
    _check_options(options)
    if options.config is None:
        return _write_other(options, further, to)
    run_arguments = ["--config", str(options.config), *further]
    check_config_files(run_arguments)
    directory = _directory_of(merged_settings(run_arguments, find).values)
    checkpoint = find_checkpoint(options.checkpoint or "last", options.config, directory)

    # These import torch, which takes seconds.
    from lightning.pytorch import seed_everything

    from lightning_rlhf.extras.commands.checkpoint_models import load_model, write_export
    from lightning_rlhf.extras.commands.run_config import make_data, make_module, parse_run_config

    config = parse_run_config(run_arguments)
    seed_everything(config["seed_everything"], verbose=False)  # random weights under LoRA adapters depend on it
    origin, tokenizer = load_model(
        module=make_module(config),
        data=make_data(config),
        checkpoint=checkpoint,
        config_file=options.config,
        role=options.role,
        adapter=options.adapter,
    )
    write_export(origin, tokenizer, to, options.adapter)
    print(f"the model of step {origin.step} is in {options.to}")
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Raise if an option belongs to another way of the command."""
    way = next(name for name in _OPTIONS_OF if getattr(options, name) is not None)
    for name in ("checkpoint", "role", "adapter", "base", "rank"):
        if getattr(options, name) not in (None, False) and name not in _OPTIONS_OF[way]:
            owners = " and ".join(f"--{owner}" for owner, names in _OPTIONS_OF.items() if name in names)
            raise UsageError(f"--{name} belongs to {owners}: remove it beside --{way}")


def _write_other(options: argparse.Namespace, further: list[str], to: Path) -> int:
    """Merge or extract an adapter, without a run."""
    if further:
        raise UsageError(f"unknown option {further[0]}: only --config accepts options of fit")
    if options.base is None:
        raise UsageError("--merge and --extract need the base model: --base DIR, or its hub id")
    rank = 16 if options.rank is None else options.rank
    if rank < 1:
        raise UsageError(f"--rank must be at least 1, got {rank}")
    from lightning_rlhf.extras.commands.adapters import extract, merge

    draft = to.with_name(f".{to.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)  # left by a killed export
    draft.mkdir(parents=True)
    try:
        if options.merge is not None:
            sentence = merge(options.base, options.merge, draft)
        else:
            sentence = extract(options.base, options.extract, rank, draft)
        draft.replace(to)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    print(sentence.replace(str(draft), str(options.to)))
    return 0


def _directory_of(config: dict[str, Any]) -> Path:
    """Return the directory of a run by the content of its configuration."""
    trainer = config.get("trainer")
    return Path((trainer.get("default_root_dir") if isinstance(trainer, dict) else None) or "runs/default")


def find_checkpoint(name: str, config_file: Path, root: Path) -> Path:
    """Return the path of a checkpoint.

    Args:
        name: ``last``, ``best`` or a path.
        config_file: the run's configuration; the folder ``checkpoints`` next to it has priority, because the run may
            have been moved.
        root: directory of the run in the configuration.

    Raises:
        FileNotFoundError: there is no such checkpoint.
    """
    folders = [folder / "checkpoints" for folder in (config_file.parent, root)]
    if name in _NAMED_CHECKPOINTS:
        candidates = [folder / f"{name}.ckpt" for folder in folders]
    else:
        candidates = [Path(name)]
    existing = next((path for path in candidates if path.exists()), None)
    if existing is not None:
        return existing
    others = [name for name in _NAMED_CHECKPOINTS for folder in folders if (folder / f"{name}.ckpt").exists()]
    hint = f": the run has --checkpoint {others[0]}" if others else ""
    raise MissingFileError(f"no checkpoint at {candidates[-1]}{hint}")
