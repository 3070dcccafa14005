"""Settings of a run as short texts, which a resumed run compares with the settings in its checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rlhf.callbacks.loop.rollout_loop import RolloutLoop
from lightning_rlhf.callbacks.loop.rollout_settings import RolloutSettings
from lightning_rlhf.functional.seeding import run_seed
from lightning_rlhf.models.loading import ModelSource, Pretrained
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.types import Prompt

# Settings that determine which rows precede a checkpoint's position in the data.
WHICH_ROWS = ("seed_everything", "training rows", "order of the data", "batch_size")
# Fields of RolloutSettings that do not change what is trained on, or that are compared part by part.
_NOT_COMPARED = (
    "rewards", "environment", "engine", "val_samples", "val_metric", "val_answer", "validate_at_ends", "check_rows",
    "max_logprob_diff",
)  # fmt: skip
_IGNORED = ("micro_batch_tokens", "kl_coef")  # the first does not change the result, KLControl restores the second


def run_settings(trainer: Trainer, module: RoleModule) -> dict[str, str]:
    """Describe data, seed, batch sizes, sampling, rewards, models and algorithm of a run, each as a short text.

    The texts of rows and of reward functions' source code contain the first digits of their SHA-256.

    Args:
        trainer: trainer with its data module set up.
    """
    settings = {"seed_everything": str(run_seed()), "precision": str(trainer.precision)}
    settings |= _data_settings(trainer.datamodule)
    settings |= rollout_settings(trainer.callbacks)
    settings |= {f"source of the {role}": _source(source) for role, source in module.sources.items()}
    settings["module"] = type(module).__name__
    return settings | _module_settings(module)


def changes(stored: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str]:
    """Describe each setting that differs, by name.

    Args:
        stored: settings of the run that wrote the checkpoint.
        current: settings of this run.
    """
    # A setting that an older checkpoint lacks was not there, and so had no value.
    names = [name for name in {**stored, **current} if stored.get(name, "None") != current.get(name, "None")]
    return {name: f"{name} is {current.get(name, 'absent')}, was {stored.get(name, 'absent')}" for name in names}


def rollout_settings(callbacks: Sequence[Any]) -> dict[str, str]:
    """Describe what the RolloutLoop of a run trains on, among its callbacks."""
    settings: dict[str, str] = {}
    for loop in (callback for callback in callbacks if isinstance(callback, RolloutLoop)):
        names = [field.name for field in dataclasses.fields(RolloutSettings)]
        settings |= {name: _text(getattr(loop, name)) for name in names if name not in _NOT_COMPARED}
        settings |= {f"reward {reward.label}": _reward(reward) for reward in loop.rewards}
        if (environment := loop.environment) is not None:
            fields = [field.name for field in dataclasses.fields(environment)]
            settings |= {f"{name} of the environment": _text(getattr(environment, name)) for name in fields}
    return settings


def _data_settings(data: Any) -> dict[str, str]:
    settings = {}
    for part, examples in getattr(data, "examples", {}).items():
        rows = {"train": "training rows", "val": "validation rows"}[part]
        settings[rows] = f"{len(examples)} with SHA-256 {_digest(examples)}"
    if hasattr(data, "batch_size"):
        settings["batch_size"] = str(data.batch_size)
    if hasattr(data, "shuffle"):
        if data.sampler:
            settings["order of the data"] = _text(data.sampler)
        else:
            settings["order of the data"] = f"shuffle: {data.shuffle}".lower()
    return settings


def _module_settings(module: RoleModule) -> dict[str, str]:
    """Return the constructor arguments that the module stores under their names as plain values."""
    settings = {}
    for kind in reversed(type(module).__mro__):
        if issubclass(kind, RoleModule) and "__init__" in vars(kind):
            for name in inspect.signature(kind.__init__).parameters:
                value = vars(module).get(name)
                plain = value is None or isinstance(value, (bool, int, float, str)) or dataclasses.is_dataclass(value)
                if name in vars(module) and plain and name not in _IGNORED:
                    settings[name] = _text(value)
    return settings


def _reward(reward: RewardFunction) -> str:
    return f"weight {reward.weight:g}, source code {_source_code(reward.target)}"


def _source_code(function: Any) -> str:
    """Return the digest of a function's source code, or of that of an object's class."""
    try:
        return _digest(inspect.getsource(function if inspect.isroutine(function) else type(function)))
    except (OSError, TypeError):  # built in, or created at run time
        return "unknown"


def _source(source: ModelSource) -> str:
    if isinstance(source, Pretrained) and Path(source.path).is_dir():
        sizes = [(file.name, file.stat().st_size) for file in sorted(Path(source.path).glob("*.safetensors"))]
        return f"{_text(source)} of {sum(size for _, size in sizes)} bytes"
    return _text(source)


def _text(value: Any) -> str:
    if inspect.isfunction(value):
        return f"{value.__qualname__}, source code {_source_code(value)}"
    text = repr(value)
    if " at 0x" in text:  # the address is different in each process
        return f"a {type(value).__name__}"
    return text


def _digest(value: Any) -> str:
    total = hashlib.sha256()
    _add(total, value)
    return total.hexdigest()[:12]


def _add(total: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        total.update(value.contiguous().numpy().tobytes())
    elif isinstance(value, Prompt):  # without its place in a batch, in the order of values that old checkpoints have
        _add(total, (value.text, value.token_ids, value.columns, value.messages, value.images))
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _add(total, getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            total.update(repr(key).encode())
            _add(total, value[key])
    elif isinstance(value, (list, tuple)):
        total.update(f"[{len(value)}".encode())
        if value and all(type(part) is int for part in value):
            total.update(repr(value).encode())
        else:
            for part in value:
                _add(total, part)
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        total.update(repr(value).encode())
    else:
        total.update(type(value).__name__.encode())
