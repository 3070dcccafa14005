"""``lightning-rlhf export``: write the model in a checkpoint as a directory that transformers and vLLM load."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything
from safetensors import SafetensorError
from torch import nn

from lightning_rlhf.callbacks.hf_export import Origin, check_adapter, complete_export
from lightning_rlhf.cli.commands.options import command_parser
from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.cli.run_config import make_data, make_module, parse_run_config
from lightning_rlhf.data.tokenizers import load_tokenizer
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.loading import quiet_transformers
from lightning_rlhf.models.lora import check_adapters, frozen_names
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.strategies.checkpoints import manifest
from lightning_rlhf.strategies.checkpoints.io import AtomicCheckpointIO, load_plain
from lightning_rlhf.strategies.checkpoints.role_state import native_load

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
    config = parse_run_config(["--config", str(options.config), *further])
    to = Path(os.path.abspath(options.to))  # gives "." a name
    if to.exists() and (to.is_file() or any(to.iterdir()) or to == Path.cwd()):
        raise UsageError(f"{options.to} exists already: choose another directory, or remove it")
    seed_everything(config["seed_everything"], verbose=False)  # random weights under LoRA adapters depend on it
    root = Path(config["trainer"]["default_root_dir"] or "runs/default")
    origin, tokenizer = load_model(
        module=make_module(config),
        data=make_data(config),
        checkpoint=find_checkpoint(options.checkpoint, options.config, root),
        config_file=options.config,
        role=options.role,
        adapter=options.adapter,
    )
    write_export(origin, tokenizer, to, options.adapter)
    print(f"the model of step {origin.step} is in {options.to}")
    return 0


def load_model(
    module: RoleModule, data: Any, checkpoint: Path, config_file: Path, role: str | None, adapter: bool
) -> tuple[Origin, Any]:
    """Build one role with the weights of a checkpoint; return it with its origin, and the tokenizer.

    Args:
        module: module of the run, without models.
        data: data module of the run.
        checkpoint: path of the checkpoint.
        config_file: file of the configuration, used if the run's directory has none.
        role: name of the role; None selects the first trained one.
        adapter: whether only LoRA adapters will be exported.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: the checkpoint is damaged or of another run, or the run does not train the role.
    """
    role = role or module.trained_roles[0]
    if role not in module.trained_roles:
        trained = ", ".join(module.trained_roles)
        raise UsageError(f"the run does not train {role!r}: set --role to one of {trained}")
    if adapter:
        check_adapter(module, role, "--adapter")
    tokenizer = load_tokenizer(data.tokenizer_source)
    module.trained_roles = (role,)  # other roles are not built
    with quiet_transformers():
        setattr(module, role, module.build_role(role))
        state = load_weights(checkpoint, module, role)
    ours = state.get("lightning_rlhf", {})
    metrics = {key: float(value) for key, value in ours.get("metrics", {}).items()}
    if ours.get("validation_due"):  # the validation metrics are from an earlier step
        metrics = {key: value for key, value in metrics.items() if not key.startswith("val/")}
    saved_config = checkpoint.parent.parent / "config.yaml"
    config_file = saved_config if saved_config.is_file() else config_file
    origin = Origin(module=module, role=role, data=data, config=config_file, step=state["global_step"], metrics=metrics)
    return origin, tokenizer


def write_export(origin: Origin, tokenizer: Any, to: Path, adapter: bool) -> None:
    """Write the directory atomically.

    Raises:
        UsageError: the directory cannot be written.
    """
    draft = to.with_name(f".{to.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)  # left by a killed export
    try:
        with quiet_transformers():
            origin.module.export(draft, adapter=adapter)
        complete_export(draft, origin, tokenizer)
        draft.replace(to)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot write {to}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def find_checkpoint(name: str, config_file: Path, root: Path) -> Path:
    """Return the path of a checkpoint.

    Args:
        name: ``last``, ``best`` or a path.
        config_file: the run's configuration; the folder ``checkpoints`` next to it has priority, because the run may
            have been moved.
        root: directory of the run in the configuration.
    """
    if name not in _NAMED_CHECKPOINTS:
        return Path(name)
    path = config_file.parent / "checkpoints" / f"{name}.ckpt"
    return path if path.exists() else root / "checkpoints" / f"{name}.ckpt"


def load_weights(checkpoint: Path, module: RoleModule, role: str) -> dict[str, Any]:
    """Load the weights of a role into its model.

    Args:
        checkpoint: folder of a role strategy, or single file of one of Lightning's strategies.
        module: module whose role is built.
        role: name of the role.

    Returns:
        The rest of the checkpoint, without models.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: the checkpoint is damaged, or of another kind of run.
    """
    model: nn.Module = getattr(module, role)
    is_file = checkpoint.is_file()
    version = checkpoint if is_file else manifest.verified(checkpoint)
    state = AtomicCheckpointIO().load_checkpoint(checkpoint) if is_file else load_plain(version / "state.pt")
    adapters = {name: values for name, values in state.get("lora", {}).items() if name == role}
    check_adapters({role: module.sources[role]}, adapters)
    if is_file:
        _fill(model, role, state["state_dict"])
        return state
    if not (version / role).is_dir():
        roles = ", ".join(sorted(folder.name for folder in version.iterdir() if folder.is_dir()))
        raise UsageError(f"the checkpoint {checkpoint} contains {roles}, not {role}: use one of a similar run")
    native_load(model, None, version / role)
    return state


def _fill(model: nn.Module, role: str, module_state: dict[str, Any]) -> None:
    """Load a model's part of a module's state."""
    prefix = f"{role}."
    state = {key.removeprefix(prefix): value for key, value in module_state.items() if key.startswith(prefix)}
    expected = model.state_dict()
    different = sorted((expected.keys() - frozen_names(model)) ^ state.keys())
    different += [name for name, value in state.items() if name in expected and value.shape != expected[name].shape]
    if different:
        raise UsageError(
            f"the {role} of the checkpoint and that of the configuration differ in {different[0]}: use the "
            f"configuration of the run"
        )
    model.load_state_dict(state, strict=False)
