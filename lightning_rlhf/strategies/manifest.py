"""Checkpoint folders of which the last finished version counts: files of that version, named and summed in a manifest.

::

    last.ckpt/manifest.json          which version counts; size and SHA-256 of each of its files
    last.ckpt/v000007/...            that version
    last.ckpt/v000008/...            one that is being written, or whose writer was killed: it counts for nothing

The manifest is replaced in one step when all files of a version are on disk, so a save that is interrupted at any
point leaves the previous version whole and its own is never taken for complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from lightning_rlhf.strategies import ranks
from lightning_rlhf.strategies.checkpoint_io import digest, sync_folder

log = logging.getLogger(__name__)

NAME = "manifest.json"
_FORMAT = 1
_VERSION = re.compile(r"v(\d{6,})")
_SHARD = re.compile(r"shard-(\d+)-")  # what torch calls the files of rank N - 1


def exists(path: Path) -> bool:
    """Whether a checkpoint was ever finished here."""
    return (path / NAME).is_file()


def remove_leftovers(path: Path) -> None:
    """Take away what interrupted saves left; a folder without any finished checkpoint goes too.

    Args:
        path: of the checkpoint; may be absent.
    """
    if not path.is_dir():
        return
    try:
        counts = _read(path)["version"] if exists(path) else None
    except ValueError:
        return  # which version counts is not known, so none goes; who reads the checkpoint is told
    for folder in path.iterdir():
        if _VERSION.fullmatch(folder.name) and folder.name != counts:
            shutil.rmtree(folder)
    (path / f"{NAME}.new").unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()


def begin(path: Path) -> Path:
    """The new, empty folder of the next version. All ranks.

    Raises:
        ValueError: a file is in the way.
    """

    def prepare() -> str:
        if path.is_file():
            raise ValueError(f"{path} is a file, and a checkpoint is a folder: move it out of the way")
        remove_leftovers(path)
        taken = [int(found[1]) for folder in path.glob("v*") if (found := _VERSION.fullmatch(folder.name))]
        folder = path / f"v{max(taken, default=0) + 1:06d}"
        folder.mkdir(parents=True)
        return folder.name

    return path / ranks.on_first_rank(prepare)


def publish(version: Path) -> None:
    """Make a fully written version the one that counts, then remove the one before. All ranks.

    Each rank syncs and sums the files that it wrote itself.

    Raises:
        ValueError: the ranks did not write into one folder.
    """
    written = ranks.from_all_ranks(ranks.together(lambda: _summed(version)))

    def finish() -> None:
        files = {name: entry for part in written for name, entry in part.items()}
        for name, entry in files.items():
            if not (version / name).is_file() or (version / name).stat().st_size != entry["bytes"]:
                raise ValueError(
                    f"another process wrote {name} of the checkpoint {version.parent}, and here it is not to be seen: "
                    f"every node must see the same folder, choose a default_root_dir on a shared file system"
                )
        for folder in {version, *(path for path in version.rglob("*") if path.is_dir()), version.parent}:
            sync_folder(folder)
        _write(version.parent, {"format": _FORMAT, "version": version.name, "files": files})
        try:
            remove_leftovers(version.parent)
        except OSError as error:  # the new version counts already; somebody may still read the one before
            log.warning("An earlier version of %s could not be removed yet: %s", version.parent, error)

    ranks.on_first_rank(finish)


def verified(path: Path) -> Path:
    """The folder of the version that counts, all of whose bytes are what was written. All ranks share the reading.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is no checkpoint of this kind, or incomplete, or damaged.
    """

    def look() -> dict[str, Any]:
        if path.is_file():
            raise ValueError(
                f"{path} is a file, and a checkpoint is a folder: it was written by another program or under a "
                f"strategy of Lightning's own"
            )
        if not path.exists():
            raise FileNotFoundError(f"no checkpoint at {path}")
        if not exists(path):
            raise ValueError(
                f"the checkpoint {path} is incomplete: it has no {NAME}, so no save into it was ever finished; "
                f"resume from another"
            )
        manifest = _read(path)
        version = path / manifest["version"]
        there = {str(file.relative_to(version)) for file in version.rglob("*") if not file.is_dir()}
        if wrong := sorted(there ^ set(manifest["files"])):
            raise _damaged(path, version / wrong[0], "was added" if wrong[0] in there else "is missing")
        return manifest

    manifest = ranks.on_first_rank(look)
    version = path / manifest["version"]

    def check() -> None:
        for name in sorted(manifest["files"])[ranks.rank() :: ranks.world()]:
            entry, file = manifest["files"][name], version / name
            if file.stat().st_size != entry["bytes"] or digest(file) != entry["sha256"]:
                raise _damaged(path, file, "does not have the size and SHA-256 that it was written with")

    ranks.together(check)
    return version


def _damaged(path: Path, file: Path, what: str) -> ValueError:
    return ValueError(f"the checkpoint {path} is damaged: {file.relative_to(path)} {what}; resume from another")


def _summed(version: Path) -> dict[str, dict[str, Any]]:
    """Sync and sum this rank's files."""
    entries = {}
    for file in sorted(version.rglob("*")):
        shard = _SHARD.match(file.name)
        writer = int(shard[1]) - 1 if shard else 0
        if writer == ranks.rank() and not file.is_dir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
            entries[str(file.relative_to(version))] = {"bytes": file.stat().st_size, "sha256": digest(file)}
    return entries


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads((path / NAME).read_text())
        content, its_sum = stored["checkpoint"], stored["sha256"]
        whole = its_sum == _sum_of(content)
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise _damaged(path, path / NAME, "does not have the content that it was written with")
    if content["format"] != _FORMAT or not _VERSION.fullmatch(content["version"]):
        raise ValueError(
            f"the checkpoint {path} has format {content['format']!r}, and this release reads {_FORMAT}: resume with "
            f"the release that wrote it"
        )
    return dict(content)


def _write(path: Path, content: dict[str, Any]) -> None:
    draft = path / f"{NAME}.new"
    with draft.open("w") as file:
        json.dump({"sha256": _sum_of(content), "checkpoint": content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _put(draft, path / NAME)


def _put(draft: Path, path: Path) -> None:
    os.replace(draft, path)
    sync_folder(path.parent)
    sync_folder(path.parent.parent)


def _sum_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
