"""Models in checkpoints: loading one role, and writing it as a directory that transformers and vLLM load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from lightning_rlhf.data.tokenizers import load_tokenizer
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.export.hf_export import Origin, check_adapter, complete_export
from lightning_rlhf.models.loading import quiet_transformers
from lightning_rlhf.models.lora import check_adapters, frozen_names
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.strategies.checkpoints import manifest
from lightning_rlhf.strategies.checkpoints.io import AtomicCheckpointIO, load_plain
from lightning_rlhf.strategies.checkpoints.role_state import native_load


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
    if is_file:
        state = AtomicCheckpointIO().load_checkpoint(checkpoint)
    else:
        state = load_plain(version / "state.pt")
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
            f"the checkpoint's {role} and the configuration's differ in {different[0]}: use that run's configuration"
        )
    model.load_state_dict(state, strict=False)
