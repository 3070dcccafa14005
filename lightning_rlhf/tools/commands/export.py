"""``lightning-rlhf export``: write the model in a checkpoint as a directory that transformers and vLLM load."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from lightning_rlhf.cli.config_mistakes import read_settings
from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.expected_errors import MissingFileError, UsageError
from lightning_rlhf.tools.commands.options import command_parser

_NAMED_CHECKPOINTS = ("last", "best")
_EPILOG = """further options change the configuration, as for fit: --data.init_args.tokenizer DIR

  lightning-rlhf export --config runs/x/config.yaml --checkpoint last --to models/x
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(
        "export", "Write the model in a checkpoint as a directory that transformers and vLLM load.", _EPILOG
    )
    parser.add_argument("--config", type=Path, required=True, help="the run's config.yaml, in the run's directory")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a path (default: last)")
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
    run_arguments = ["--config", str(options.config), *further]
    checkpoint = find_checkpoint(options.checkpoint, options.config, _directory_of(read_settings(run_arguments) or {}))

    # These import torch, which takes seconds.
    from lightning.pytorch import seed_everything

    from lightning_rlhf.tools.commands.checkpoint_models import load_model, write_export
    from lightning_rlhf.tools.commands.run_config import make_data, make_module, parse_run_config

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
