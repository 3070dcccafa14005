"""Checkpoint files: atomic writes, checksums, and loading without running pickled code."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import TorchCheckpointIO

from lightning_rlhf.entry_points import the_offered
from lightning_rlhf.expected_errors import MissingFileError, UsageError


def is_url(path: str | Path) -> bool:
    """Return whether a path is a URL, such as ``s3://bucket/run/last.ckpt``."""
    return "://" in str(path)


def url_copies() -> Any:
    """Return the module that copies checkpoints to URLs, :mod:`lightning_rlhf.extras.remote_checkpoints` by default.

    It has ``check_url``, ``newest``, ``exists``, ``upload`` and ``download``.
    """
    return the_offered("remote_checkpoints")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes files atomically with a SHA-256 in ``x.ckpt.sha256``; loads only tensors and plain values.

    Lightning writes through the system's temporary folder, which is not atomic across filesystems, and without a
    checksum.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Replace the file atomically: if the process is killed, the previous file is still valid."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".new")
        with draft.open("wb") as file:
            torch.save(checkpoint, file)
            os.fsync(file.fileno())
        total = digest(draft)
        # Until the rename is complete, the file may have its old or its new content, so both digests are valid. The
        # stored list may also contain the digest of a draft whose process was killed before the rename.
        known = _sums(path) or ([digest(path)] if path.is_file() else [])
        _write_sums(path, [*known, total])
        os.replace(draft, path)
        sync_folder(path.parent)
        _write_sums(path, [total])

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load tensors and plain values of a file whose digest is correct.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the digest differs, or the file contains other objects than tensors and plain values.
        """
        path = Path(path)
        if not path.is_file():
            raise MissingFileError(f"no checkpoint at {path}")
        expected = _sums(path)
        if expected and digest(path) not in expected:
            raise UsageError(
                f"the checkpoint {path} is damaged: its SHA-256 differs from that in {path.name}.sha256; "
                f"resume from another one"
            )
        return load_plain(path, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint and its checksum."""
        super().remove_checkpoint(path)
        Path(f"{path}.sha256").unlink(missing_ok=True)


def load_plain(path: Path, map_location: Any = None) -> dict[str, Any]:
    """Load tensors and plain values of a file.

    Raises:
        ValueError: the file contains other objects or is damaged.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location=map_location or "cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UsageError(
            f"{path} is not a checkpoint of tensors and plain values; other objects are not loaded, because they could "
            f"run code: {str(error).strip().splitlines()[0] if str(error).strip() else 'the file is empty'}"
        ) from None
    return state


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def _sums(path: Path) -> list[str]:
    file = path.with_name(path.name + ".sha256")
    return file.read_text().split() if file.is_file() else []


def _write_sums(path: Path, digests: list[str]) -> None:
    draft = path.with_name(path.name + ".sha256.new")
    with draft.open("w") as file:
        file.write("\n".join(digests) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path.with_name(path.name + ".sha256"))
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync a folder's directory entries to disk."""
    folder = os.open(path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
