"""The files of one role: tensors as safetensors, sharded by rank, and the optimizer's settings as JSON.

torch.distributed.checkpoint writes and reads them with its safetensors storage, because its default storage unpickles
the list of tensors, which can run code.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.strategies import ranks

SETTINGS = "optimizer.json"
_FILE_BYTES = 1 << 28  # approximate size of a file, of which torch holds two copies in memory until it is written


@dataclass(frozen=True)
class RoleState:
    """The state of a role, independent of the strategy.

    Attributes:
        tensors: tensors by torch's flat keys, ``model.<name>`` and ``optim.state.<name>.<key>``. Ranks may have shards
            of a tensor (DTensor), the same tensors, or different tensors.
        settings: class and groups of the optimizer, with parameter names and plain values, equal on all ranks; None
            without an optimizer.
        copied: whether the tensors already are copies in host memory, which training does not change.
    """

    tensors: dict[str, Tensor]
    settings: dict[str, Any] | None
    copied: bool = False


class _Writer(HuggingFaceStorageWriter):
    """Writer with several files per rank, to limit the memory for assembling a file."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign file numbers to each rank's tensors."""
        planned = super().prepare_global_plan(plans)
        return [
            dataclasses.replace(plan, storage_data={**plan.storage_data, "fqn_to_index_mapping": _numbered(plan)})
            for plan in planned
        ]


def _numbered(plan: SavePlan) -> dict[str, int]:
    numbers, written = {}, 0
    for item in plan.items:
        assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
        numbers[item.index.fqn] = 1 + written // _FILE_BYTES
        written += item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
    return numbers


def write_role(folder: Path, state: RoleState) -> None:
    """Write a role's files. All ranks.

    Raises:
        OSError: a rank could not write.
    """
    try:
        writer = _Writer(str(folder), save_distributed=True)
        with nullcontext() if threading.current_thread() is not threading.main_thread() else _quiet():
            no_dist = not ranks.is_distributed()
            save(state.tensors, storage_writer=writer, process_group=ranks.group(), no_dist=no_dist)
    except CheckpointException as gathered:
        for failure, _ in gathered.failures.values():
            if isinstance(failure, OSError):
                raise failure from None
        raise

    def write_settings() -> None:
        with (folder / SETTINGS).open("w") as file:
            json.dump(state.settings, file, indent=1)

    if state.settings is not None:
        ranks.on_first_rank(write_settings)


class _Reader(HuggingFaceStorageReader):
    """Reader that caches the list of tensors."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Read names, shapes and files of all tensors."""
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


class StoredRole:
    """The files of a role, saved under any strategy on any number of ranks.

    Args:
        folder: folder of the role.

    Raises:
        ValueError: a file is damaged, although its size and digest match the manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _check_headers(folder)
        self._reader = _Reader(str(folder))
        metadata: dict[str, Any] = self._reader.read_metadata().state_dict_metadata
        self.shapes: dict[str, torch.Size] = {key: entry.size for key, entry in metadata.items()}
        self.dtypes: dict[str, torch.dtype] = {key: entry.properties.dtype for key, entry in metadata.items()}
        self.settings = _read_settings(folder / SETTINGS)
        self._state: dict[str, dict[str, str]] = {}
        for key in sorted(self.shapes):
            if key.startswith("optim.state."):
                name, _, kind = key.removeprefix("optim.state.").rpartition(".")
                self._state.setdefault(name, {})[kind] = key

    def state_of(self, name: str) -> dict[str, str]:
        """Return the keys of a parameter's optimizer state by kind, such as ``exp_avg`` or ``step``."""
        return self._state.get(name, {})

    def check_weights(self, shapes: dict[str, torch.Size]) -> None:
        """Validate that the stored weights have the names and shapes of this run's model.

        Args:
            shapes: full shape of each weight by name.

        Raises:
            ValueError: weights are missing or unexpected, or have other shapes.
        """
        stored = {key.removeprefix("model."): shape for key, shape in self.shapes.items() if key.startswith("model.")}
        role = self.folder.name
        for names, others, verb in ((shapes, stored, "lacks"), (stored, shapes, "has, unlike this run's model,")):
            if different := [name for name in names if name not in others]:
                raise UsageError(
                    f"the {role} in the checkpoint {verb} {len(different)} weights, the first is {different[0]}; "
                    f"resume with the model that wrote it"
                )
        for name, shape in shapes.items():
            if stored[name] != shape:
                raise UsageError(
                    f"the {role}'s {name} has shape {tuple(stored[name])} in the checkpoint, but {tuple(shape)} in "
                    f"this run's model; resume with the model that wrote it"
                )

    def read(self, into: dict[str, Tensor]) -> None:
        """Load stored values into this rank's tensors or DTensors, by key."""
        with _quiet():
            load(into, storage_reader=self._reader, no_dist=True)


def _read_settings(path: Path) -> dict[str, Any] | None:
    """Read the settings of a role's optimizer; None if it has none.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text())
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not valid JSON; resume from another checkpoint") from None
    if not _well_formed(settings):
        raise UsageError(
            f"{path} is damaged: it needs 'optimizer', a class, and 'param_groups', each with its 'params'; resume "
            f"from another checkpoint"
        )
    return dict(settings)


def _well_formed(settings: Any) -> bool:
    """Return whether settings have the keys and types that this release writes."""
    if not isinstance(settings, dict) or not isinstance(settings.get("optimizer"), str):
        return False
    groups = settings.get("param_groups")
    return isinstance(groups, list) and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)


def _check_headers(folder: Path) -> None:
    """Open each file with the safetensors library, because torch's reader does not check the length in the header.

    Raises:
        ValueError: a file is damaged; the message names the first one.
    """
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise UsageError(f"{file} is not a safetensors file ({error}); resume from another checkpoint") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warning about a missing process group, which is intended in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
