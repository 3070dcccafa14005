"""The files of one role: tensors as safetensors, each rank its own part, and the optimizer's settings as JSON.

Written and read by torch.distributed.checkpoint, with its safetensors storage, because the storage it takes by default
unpickles its list of tensors, which can run code.
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
_FILE_BYTES = 1 << 30  # a file is put together in memory before it is written


@dataclass(frozen=True)
class RoleState:
    """The state of a role, independent of the strategy.

    Attributes:
        tensors: ``model.<name>`` and ``optim.state.<name>.<key>``, as torch flattens them. Ranks may hold parts of a
            tensor (DTensor), the same tensors, or different ones.
        settings: the optimizer's class and its groups: names of parameters and plain values; the same on all ranks.
            None without an optimizer.
        copied: whether the tensors are copies in host memory already, which training does not change.
    """

    tensors: dict[str, Tensor]
    settings: dict[str, Any] | None
    copied: bool = False


class _Writer(HuggingFaceStorageWriter):
    """Writes several files per rank, so that the buffers of a file stay small."""

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
            save(state.tensors, storage_writer=writer, process_group=ranks.group(), no_dist=_alone())
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
    """Reads the list of tensors once, not at every call."""

    _found: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Read names, shapes and files of all tensors."""
        if self._found is None:
            self._found = super().read_metadata()
        return self._found


class StoredRole:
    """The files of a role that was written, by any strategy on any number of ranks.

    Args:
        folder: folder of the role.

    Raises:
        ValueError: a file is damaged, although its size and digest agree with the manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _check_headers(folder)
        self._reader = _Reader(str(folder))
        metadata: dict[str, Any] = self._reader.read_metadata().state_dict_metadata
        self.shapes: dict[str, torch.Size] = {key: entry.size for key, entry in metadata.items()}
        self.dtypes: dict[str, torch.dtype] = {key: entry.properties.dtype for key, entry in metadata.items()}
        settings = folder / SETTINGS
        try:
            self.settings: dict[str, Any] | None = json.loads(settings.read_text()) if settings.is_file() else None
        except (ValueError, RecursionError):
            raise UsageError(f"{settings} is not the JSON of an optimizer's settings; resume from another") from None
        self._state: dict[str, dict[str, str]] = {}
        for key in sorted(self.shapes):
            if key.startswith("optim.state."):
                name, _, kind = key.removeprefix("optim.state.").rpartition(".")
                self._state.setdefault(name, {})[kind] = key

    def state_of(self, name: str) -> dict[str, str]:
        """Return the optimizer state of a parameter (``exp_avg``, ``step``), and the key of each."""
        return self._state.get(name, {})

    def check_weights(self, shapes: dict[str, torch.Size]) -> None:
        """Refuse another model's weights.

        Args:
            shapes: name and whole shape of all weights of the role.

        Raises:
            ValueError: weights are missing, too many, or of other shapes.
        """
        stored = {key.removeprefix("model."): shape for key, shape in self.shapes.items() if key.startswith("model.")}
        role = self.folder.name
        for here, there, verb in ((shapes, stored, "lacks"), (stored, shapes, "has, and this run's model has not,")):
            if odd := [name for name in here if name not in there]:
                raise UsageError(
                    f"the {role} of the checkpoint {verb} {len(odd)} weights, the first is {odd[0]}; it was written "
                    f"by another kind of run"
                )
        for name, shape in shapes.items():
            if stored[name] != shape:
                raise UsageError(
                    f"the {role}'s {name} has shape {tuple(stored[name])} in the checkpoint and {tuple(shape)} in "
                    f"this run's model; it was written by another kind of run"
                )

    def read(self, into: dict[str, Tensor]) -> None:
        """Fill tensors of this rank, whole ones or DTensors, with the stored values of their keys."""
        with _quiet():
            load(into, storage_reader=self._reader, no_dist=True)


def _check_headers(folder: Path) -> None:
    """Validate files with the reader of safetensors: torch's reader does not check the length in the header.

    Raises:
        ValueError: the first such file.
    """
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise UsageError(f"{file} is not a file of safetensors ({error}); resume from another") from None


def _alone() -> bool:
    return not ranks.is_distributed()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that a single process needs no process group, which is how it is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
