"""``lightning-rlhf export``: the model in a checkpoint as a directory that transformers and vLLM load."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything
from safetensors import SafetensorError
from torch import nn

from lightning_rlhf.callbacks.hf_export import Origin, check_adapter, complete_export
from lightning_rlhf.cli.arguments import command_parser
from lightning_rlhf.cli.main import is_for_users
from lightning_rlhf.cli.understood import data_of, module_of, understood
from lightning_rlhf.data.tokenizers import load_tokenizer
from lightning_rlhf.models.loading import quiet_transformers
from lightning_rlhf.models.lora import check_adapters, frozen_names
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.strategies.checkpoints import manifest
from lightning_rlhf.strategies.checkpoints.io import AtomicCheckpointIO, load_plain
from lightning_rlhf.strategies.checkpoints.role_state import native_load

_NAMED = ("last", "best")
_EPILOG = """further options change the configuration, as for fit: --data.init_args.tokenizer DIR

  lightning-rlhf export --config runs/x/config.yaml --checkpoint last --to models/x
"""


def run(arguments: list[str]) -> int:
    """Export one model of one checkpoint. Needs neither the GPUs nor the number of processes of the run.

    Args:
        arguments: behind ``export``.

    Returns:
        Exit code: 0, or 2 where nothing could be exported.
    """
    parser = command_parser(
        "export", "Write the model in a checkpoint as a directory that transformers and vLLM load.", _EPILOG
    )
    parser.add_argument("--config", type=Path, required=True, help="the run's config.yaml, in the run's directory")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a path (default: last)")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="a directory that is not there yet")
    parser.add_argument("--role", help="actor, critic or reward_model (default: what the run's own export holds)")
    parser.add_argument("--adapter", action="store_true", help="LoRA adapters by themselves, not merged into weights")
    given, further = parser.parse_known_args(arguments)
    config = understood(["--config", str(given.config), *further])
    try:
        to = Path(os.path.abspath(given.to))  # "." has a name then
        if to.exists() and (to.is_file() or any(to.iterdir()) or to == Path.cwd()):
            raise ValueError(f"{given.to} is there already: choose another directory, or remove it")
        step = export(config, given.config, given.checkpoint, to, given.role, given.adapter)
    except Exception as error:
        if not is_for_users(error):
            raise
        print(f"lightning-rlhf: {error}", file=sys.stderr)
        return 2
    print(f"the model of step {step} is in {given.to}")
    return 0


def export(config: Any, file: Path, name: str, to: Path, role: str | None, adapter: bool) -> int:
    """Write a model.

    Args:
        config: of the run, parsed.
        file: it was read from.
        name: ``last``, ``best`` or the path of the checkpoint.
        to: directory that is empty or absent.
        role: which model; None takes the first that is trained.
        adapter: LoRA adapters by themselves.

    Returns:
        The step of the checkpoint.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is damaged or another run's, the run trains no such model, or it cannot be written.
    """
    seed_everything(config["seed_everything"], verbose=False)  # weights that LoRA is put beside may be drawn from it
    module, data = module_of(config), data_of(config)
    role = role or module.trained_roles[0]
    if role not in module.trained_roles:
        trained = ", ".join(module.trained_roles)
        raise ValueError(f"the run trains {trained}, and no {role}: choose --role among them")
    if adapter:
        check_adapter(module, role, "--adapter")
    checkpoint = find(name, file, Path(config["trainer"]["default_root_dir"] or "runs/default"))
    tokenizer = load_tokenizer(data.tokenizer_source)
    module.trained_roles = (role,)  # the others are not built
    with quiet_transformers():
        setattr(module, role, module.build_role(role))
        rest = load(checkpoint, module, role)
    kept = rest.get("lightning_rlhf", {})
    metrics = {key: float(value) for key, value in kept.get("metrics", {}).items()}
    if kept.get("validation_due"):  # what it holds of validations is of an earlier model
        metrics = {key: value for key, value in metrics.items() if not key.startswith("val/")}
    own = checkpoint.parent.parent / "config.yaml"
    origin = Origin(module, role, data, own if own.is_file() else file, rest["global_step"], metrics)
    draft = to.with_name(f".{to.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
    try:
        with quiet_transformers():
            module.export(draft, adapter=adapter)
        complete_export(draft, origin, tokenizer)
        draft.replace(to)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write {to}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return origin.step


def find(name: str, config: Path, root: Path) -> Path:
    """Where a checkpoint lies.

    Args:
        name: ``last``, ``best`` or a path.
        config: the run's configuration, beside whose directory ``checkpoints`` it may lie.
        root: the run's directory as the configuration knows it.
    """
    if name not in _NAMED:
        return Path(name)
    beside = config.parent / "checkpoints" / f"{name}.ckpt"  # a run's directory may have been moved
    return beside if beside.exists() else root / "checkpoints" / f"{name}.ckpt"


def load(checkpoint: Path, module: RoleModule, role: str) -> dict[str, Any]:
    """Put the weights of a role into its model.

    Args:
        checkpoint: folder of a role strategy, or single file of a plain one.
        module: whose role is built.
        role: its name.

    Returns:
        What the checkpoint holds beside models.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or was written by another kind of run.
    """
    model: nn.Module = getattr(module, role)
    if checkpoint.is_file():
        rest = AtomicCheckpointIO().load_checkpoint(checkpoint)
        check_adapters({role: module.sources[role]}, _of_role(rest.get("lora", {}), role))
        _fill(model, role, rest["state_dict"])
        return rest
    version = manifest.verified(checkpoint)
    rest = load_plain(version / "state.pt")
    check_adapters({role: module.sources[role]}, _of_role(rest.get("lora", {}), role))
    if not (version / role).is_dir():
        held = ", ".join(sorted(folder.name for folder in version.iterdir() if folder.is_dir()))
        raise ValueError(f"the checkpoint {checkpoint} holds {held}, and no {role}: it is another kind of run's")
    native_load(model, None, version / role)
    return rest


def _of_role(stored: dict[str, Any], role: str) -> dict[str, Any]:
    return {name: values for name, values in stored.items() if name == role}


def _fill(model: nn.Module, role: str, stored: dict[str, Any]) -> None:
    """Fill a model with the part of a module's state that is its own."""
    state = {key.removeprefix(f"{role}."): value for key, value in stored.items() if key.startswith(f"{role}.")}
    ours, left_out = model.state_dict(), frozen_names(model)
    odd = sorted((ours.keys() - left_out) ^ state.keys())
    odd += [name for name, tensor in state.items() if name in ours and tensor.shape != ours[name].shape]
    if odd:
        raise ValueError(
            f"the {role} of the checkpoint is not the one that the configuration describes: they differ in {odd[0]}"
        )
    model.load_state_dict(state, strict=False)
