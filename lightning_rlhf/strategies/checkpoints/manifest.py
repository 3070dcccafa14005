"""Checkpoint folders of which the last finished version counts: files of that version, named and summed in a manifest.

::

    last.ckpt/manifest.json          which version counts; size and SHA-256 of the files of each kept version
    last.ckpt/v000007/...            that version
    last.ckpt/v000006/...            an earlier one, where several are kept; ``last.ckpt/v000006`` is its path
    last.ckpt/v000008/...            one that is being written, or whose writer was killed: it counts for nothing
    last.ckpt/first-save             there until the first manifest is written

The manifest is replaced in one step when all files of a version are on disk, so a save that is interrupted at any
point leaves the previous version whole and its own is never taken for complete. No version is removed before a newer
one is whole, and none where the manifest is lost or cannot be read.
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

from lightning_rlhf.expected_errors import MissingFileError, UsageError
from lightning_rlhf.strategies import ranks
from lightning_rlhf.strategies.checkpoints.io import digest, sync_folder

log = logging.getLogger(__name__)

NAME = "manifest.json"
_FIRST = "first-save"
_FORMAT = 1
_VERSION = re.compile(r"v(\d{6,})")
_SHARD = re.compile(r"shard-(\d+)-")  # what torch calls the files of rank N - 1


def exists(path: Path) -> bool:
    """Return whether a checkpoint was ever finished here."""
    return (path / NAME).is_file()


def is_version(name: str) -> bool:
    """Return whether a folder of this name contains a version."""
    return _VERSION.fullmatch(name) is not None


def kept_versions(path: Path) -> list[str]:
    """Return the names of the finished versions, the one that counts first; none without a readable manifest."""
    return list(_earlier(path))


def step_of(path: Path) -> int | None:
    """Return the step of the version that counts; None without a manifest, or with one that cannot be read."""
    try:
        return read(path).get("step") if exists(path) else None
    except ValueError:
        return None


def never_finished(path: Path) -> bool:
    """Return whether the folder is empty, or has only the files of an interrupted first save.

    A folder without a manifest and without the mark of a first save has lost its manifest.
    """
    if path.is_symlink() or path.is_file() or exists(path):
        return False
    return not path.is_dir() or (path / _FIRST).is_file() or not any(path.iterdir())


def remove_leftovers(path: Path) -> None:
    """Remove the files of interrupted saves.

    Nothing is removed where the manifest is lost or cannot be read, because any version may then be the one to keep.

    Args:
        path: folder of the checkpoint; may be absent.
    """
    if not exists(path):
        return
    try:
        versions = _versions(read(path))
    except ValueError:
        return
    for folder in path.iterdir():
        if _VERSION.fullmatch(folder.name) and folder.name not in versions:
            shutil.rmtree(folder)
    (path / f"{NAME}.new").unlink(missing_ok=True)
    (path / _FIRST).unlink(missing_ok=True)


def begin(path: Path, above: int = 0) -> Path:
    """Create the empty folder of the next version. All ranks.

    Args:
        path: folder of the checkpoint.
        above: number that the new version exceeds, because a copy elsewhere has versions up to it.

    Raises:
        ValueError: a file is in the way.
    """

    def prepare() -> str:
        if path.is_file():
            raise UsageError(f"{path} is a file, and a checkpoint is a folder: move it out of the way")
        remove_leftovers(path)
        if never_finished(path):
            path.mkdir(parents=True, exist_ok=True)
            (path / _FIRST).touch()
            for folder in path.glob("v*"):
                shutil.rmtree(folder)
        taken = [int(match[1]) for folder in path.glob("v*") if (match := _VERSION.fullmatch(folder.name))]
        folder = path / f"v{max([*taken, above]) + 1:06d}"
        folder.mkdir(parents=True)
        return folder.name

    return path / ranks.on_first_rank(prepare)


def publish(version: Path, keep: int = 1, step: int | None = None) -> None:
    """Make a fully written version the one that counts, then remove those that are too old. All ranks.

    Each rank syncs and sums the files that it wrote itself.

    Args:
        version: folder of it.
        keep: versions to keep, this one included, at least 1.
        step: step of the run, for information; None leaves it out.

    Raises:
        ValueError: the ranks did not write into one folder.
    """
    written = ranks.from_all_ranks(ranks.raise_on_all_ranks(lambda: _summed(version)))

    def finish() -> None:
        files = {name: entry for part in written for name, entry in part.items()}
        for name, entry in files.items():
            if not (version / name).is_file() or (version / name).stat().st_size != entry["bytes"]:
                raise UsageError(
                    f"another process wrote {name} of the checkpoint {version.parent}, and here it is not to be seen: "
                    f"every node must see the same folder, choose a default_root_dir on a shared file system"
                )
        for folder in {version, *(path for path in version.rglob("*") if path.is_dir()), version.parent}:
            sync_folder(folder)
        earlier = _newest(_earlier(version.parent), keep - 1)
        content = {"format": _FORMAT, "version": version.name, "step": step, "files": files, "earlier": earlier}
        write(version.parent, content)
        try:
            remove_leftovers(version.parent)
        except OSError as error:  # the new version counts already; somebody may still read the one before
            log.warning("An earlier version of %s could not be removed yet: %s", version.parent, error)

    ranks.on_first_rank(finish)


def verified(path: Path) -> Path:
    """Return the folder of the current version after its digests are verified. All ranks share the reading.

    Args:
        path: folder of the checkpoint, or of one of its kept versions.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: not a checkpoint of this kind, or incomplete, or damaged.
    """

    def look() -> tuple[Path, dict[str, Any]]:
        if path.is_file():
            raise UsageError(
                f"{path} is a file, and a checkpoint is a folder: it was written by another program or under a "
                f"strategy of Lightning's own"
            )
        if not path.exists():
            raise MissingFileError(f"no checkpoint at {path}")
        folder = path.parent if _VERSION.fullmatch(path.name) and exists(path.parent) else path
        if not exists(folder):
            reason = "no save into it was ever finished" if never_finished(folder) else "its manifest is lost"
            raise UsageError(f"the checkpoint {path} is incomplete: it has no {NAME}, {reason}; resume from another")
        content = read(folder)
        name = content["version"] if folder == path else path.name
        if name not in _versions(content):
            raise UsageError(
                f"the version {path} of a checkpoint was never finished; {folder / NAME} names "
                f"{', '.join(_versions(content))}"
            )
        version, files = folder / name, _versions(content)[name]
        there = {
            str(file.relative_to(version)) for file in version.rglob("*") if file.is_symlink() or not file.is_dir()
        }
        if wrong := sorted(there ^ set(files)):
            raise _damaged(folder, version / wrong[0], "was added" if wrong[0] in there else "is missing")
        if links := sorted(name for name in files if (version / name).is_symlink()):
            raise _damaged(folder, version / links[0], "is a link, and was written as a file")
        return version, files

    version, files = ranks.on_first_rank(look)

    def check() -> None:
        for name in sorted(files)[ranks.rank() :: ranks.world_size()]:
            entry, file = files[name], version / name
            if file.stat().st_size != entry["bytes"] or digest(file) != entry["sha256"]:
                raise _damaged(version.parent, file, "does not have the size and SHA-256 that it was written with")

    ranks.raise_on_all_ranks(check)
    return version


def _versions(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the files of each version in a manifest, the current version first."""
    return {content["version"]: content["files"], **content.get("earlier", {})}


def _earlier(path: Path) -> dict[str, dict[str, Any]]:
    """Return the versions in the current manifest; none if it is missing or cannot be read."""
    try:
        return _versions(read(path)) if exists(path) else {}
    except ValueError:
        return {}


def _newest(versions: dict[str, dict[str, Any]], count: int) -> dict[str, dict[str, Any]]:
    names = sorted(versions, key=lambda name: int(name.removeprefix("v")), reverse=True)
    return {name: versions[name] for name in names[:count]}


def _damaged(path: Path, file: Path, what: str) -> ValueError:
    return UsageError(f"the checkpoint {path} is damaged: {file.relative_to(path)} {what}; resume from another")


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


def read(path: Path) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        ValueError: it is damaged, or of another release.
    """
    try:
        stored = json.loads((path / NAME).read_text())
        content, its_sum = stored["checkpoint"], stored["sha256"]
        whole = its_sum == _sum_of(content)
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole or not isinstance(content, dict):
        raise _damaged(path, path / NAME, "does not have the content that it was written with")
    if content.get("format") != _FORMAT:
        raise UsageError(
            f"the checkpoint {path} has format {content.get('format')!r}, and this release reads {_FORMAT}: resume "
            f"with the release that wrote it"
        )
    if not _well_formed(content):
        raise _damaged(path, path / NAME, "names versions or files as no release of this package does")
    return dict(content)


def _well_formed(content: dict[str, Any]) -> bool:
    """Return whether a manifest has the keys and types of its format, and only files inside its versions."""
    earlier = content.get("earlier", {})
    if not isinstance(content.get("version"), str) or not isinstance(earlier, dict):
        return False
    versions = {content["version"]: content.get("files"), **earlier}
    return all(_VERSION.fullmatch(name) and _are_files(files) for name, files in versions.items())


def _are_files(files: Any) -> bool:
    return isinstance(files, dict) and all(
        not name.startswith("/")
        and ".." not in Path(name).parts
        and isinstance(entry, dict)
        and isinstance(entry.get("bytes"), int)
        and isinstance(entry.get("sha256"), str)
        for name, entry in files.items()
    )


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace the manifest in one step."""
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
