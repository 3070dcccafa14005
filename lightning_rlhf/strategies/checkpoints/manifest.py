"""Versioned checkpoint folders with a manifest: the current version, and sizes and digests of all files.

::

    last.ckpt/manifest.json          the current version; size and SHA-256 of the files of each kept version
    last.ckpt/v000007/...            the current version
    last.ckpt/v000006/...            an earlier version, if several are kept; ``last.ckpt/v000006`` can be loaded too
    last.ckpt/v000008/...            an unfinished version, which is ignored
    last.ckpt/first-save             mark of a first save, removed after the first manifest is written

The manifest is replaced atomically when all files of a version are on disk, so an interrupted save leaves the previous
version current and intact. Versions are removed only after a newer one is published, and not if the manifest is missing
or damaged.
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
_SHARD = re.compile(r"shard-(\d+)-")  # torch's file names; shard N is written by rank N - 1


def exists(path: Path) -> bool:
    """Return whether a folder has a finished checkpoint."""
    return (path / NAME).is_file()


def is_version(name: str) -> bool:
    """Return whether a name is that of a version's folder, such as ``v000007``."""
    return _VERSION.fullmatch(name) is not None


def kept_versions(path: Path) -> list[str]:
    """Return the names of the finished versions, the current one first; empty without a readable manifest."""
    return list(_earlier(path))


def step_of(path: Path) -> int | None:
    """Return the step of the current version; None without a readable manifest."""
    try:
        return read(path).get("step") if exists(path) else None
    except ValueError:
        return None


def never_finished(path: Path) -> bool:
    """Return whether a folder is missing, or has only the files of an interrupted first save.

    Any other folder without a manifest has lost its manifest, an empty one all of its files.
    """
    if path.is_symlink() or path.is_file() or exists(path):
        return False
    return not path.is_dir() or (path / _FIRST).is_file()


def is_empty(path: Path) -> bool:
    """Return whether a path is a folder without files, which a save never leaves, even an interrupted one."""
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def remove_leftovers(path: Path) -> None:
    """Remove the files of interrupted saves; log those that cannot be removed, because a reader may have them open.

    Nothing is removed without a readable manifest, because any version may then be the current one.

    Args:
        path: folder of the checkpoint, which may be missing.
    """
    if not exists(path):
        return
    try:
        versions = _versions(read(path))
    except ValueError:
        return
    for folder in path.iterdir():
        if _VERSION.fullmatch(folder.name) and folder.name not in versions:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                log.warning("An earlier version of %s could not be removed yet: %s", path, error)
    (path / f"{NAME}.new").unlink(missing_ok=True)
    (path / _FIRST).unlink(missing_ok=True)


def begin(path: Path, above: int = 0) -> Path:
    """Create the empty folder of the next version. All ranks.

    Args:
        path: folder of the checkpoint.
        above: number that the new version exceeds, because a remote copy has versions up to it.

    Raises:
        ValueError: the path is a file.
    """

    def prepare() -> str:
        if path.is_file():
            raise UsageError(f"{path} is a file, but a checkpoint is a folder: move or remove the file")
        remove_leftovers(path)
        if never_finished(path) or is_empty(path):
            _create_marked(path)
            for folder in path.glob("v*"):
                shutil.rmtree(folder)
        taken = [int(match[1]) for folder in path.glob("v*") if (match := _VERSION.fullmatch(folder.name))]
        folder = path / f"v{max([*taken, above]) + 1:06d}"
        folder.mkdir(parents=True)
        return folder.name

    return path / ranks.on_first_rank(prepare)


def _create_marked(path: Path) -> None:
    """Create the folder of a first save together with its mark, so that an interruption never leaves it empty."""
    if not (path / _FIRST).is_file():
        marked = path.with_name(f"{path.name}.first")
        marked.mkdir(parents=True, exist_ok=True)
        (marked / _FIRST).touch()
        os.rename(marked, path)


def publish(version: Path, keep: int = 1, step: int | None = None) -> None:
    """Make a completely written version current, then remove old versions. All ranks.

    Each rank syncs and digests the files that it has written.

    Args:
        version: folder of the version.
        keep: number of versions to keep, including this one, at least 1.
        step: step of the run, for information; None if unknown.

    Raises:
        ValueError: the folder is not on a file system shared by all ranks.
    """
    written = ranks.from_all_ranks(ranks.raise_on_all_ranks(lambda: _digests(version)))

    def finish() -> None:
        files = {name: entry for part in written for name, entry in part.items()}
        for name, entry in files.items():
            if not (version / name).is_file() or (version / name).stat().st_size != entry["bytes"]:
                raise UsageError(
                    f"{name} of the checkpoint {version.parent} was written by another process, but is missing or "
                    f"incomplete on rank 0: set default_root_dir to a folder on a file system shared by all nodes"
                )
        for folder in {version, *(path for path in version.rglob("*") if path.is_dir()), version.parent}:
            sync_folder(folder)
        earlier = _newest(_earlier(version.parent), keep - 1)
        content = {"format": _FORMAT, "version": version.name, "step": step, "files": files, "earlier": earlier}
        write(version.parent, content)
        remove_leftovers(version.parent)

    ranks.on_first_rank(finish)


def verified(path: Path) -> Path:
    """Verify the digests of a version and return its folder. All ranks; each reads a part of the files.

    Args:
        path: folder of the checkpoint, for its current version, or of one of its kept versions.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: the folder is not a checkpoint of this format, or is incomplete or damaged.
    """

    def read_version() -> tuple[Path, dict[str, Any]]:
        if path.is_file():
            raise UsageError(
                f"{path} is a file, but a checkpoint is a folder: it was written by another program or under a "
                f"strategy of Lightning"
            )
        if not path.exists():
            raise MissingFileError(f"no checkpoint at {path}")
        folder = path.parent if _VERSION.fullmatch(path.name) and exists(path.parent) else path
        if not exists(folder):
            raise _without_manifest(path, folder)
        content = read(folder)
        name = content["version"] if folder == path else path.name
        if name not in _versions(content):
            raise UsageError(
                f"the version {path} of a checkpoint is unfinished; {folder / NAME} lists the finished versions "
                f"{', '.join(_versions(content))}"
            )
        version, files = folder / name, _versions(content)[name]
        present = {
            str(file.relative_to(version)) for file in version.rglob("*") if file.is_symlink() or not file.is_dir()
        }
        if wrong := sorted(present ^ set(files)):
            raise _damaged(folder, version / wrong[0], "was added" if wrong[0] in present else "is missing")
        if links := sorted(name for name in files if (version / name).is_symlink()):
            raise _damaged(folder, version / links[0], "is a symbolic link, but was written as a file")
        return version, files

    version, files = ranks.on_first_rank(read_version)

    def check() -> None:
        for name in sorted(files)[ranks.rank() :: ranks.world_size()]:
            entry, file = files[name], version / name
            if file.stat().st_size != entry["bytes"] or digest(file) != entry["sha256"]:
                raise _damaged(version.parent, file, "does not have the size and SHA-256 in the manifest")

    ranks.raise_on_all_ranks(check)
    return version


def _versions(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the files of each version in a manifest, the current version first."""
    return {content["version"]: content["files"], **content.get("earlier", {})}


def _earlier(path: Path) -> dict[str, dict[str, Any]]:
    """Return the versions in a folder's manifest; empty if it is missing or damaged."""
    try:
        return _versions(read(path)) if exists(path) else {}
    except ValueError:
        return {}


def _newest(versions: dict[str, dict[str, Any]], count: int) -> dict[str, dict[str, Any]]:
    names = sorted(versions, key=lambda name: int(name.removeprefix("v")), reverse=True)
    return {name: versions[name] for name in names[:count]}


def _damaged(path: Path, file: Path, what: str) -> ValueError:
    return UsageError(f"the checkpoint {path} is damaged: {file.relative_to(path)} {what}; resume from another one")


def _without_manifest(path: Path, folder: Path) -> ValueError:
    if is_empty(folder):
        return UsageError(
            f"the checkpoint {path} is an empty folder: its files were removed; resume from another checkpoint, or "
            f"remove the folder to start from the beginning"
        )
    if (folder / "config.json").is_file():
        return UsageError(f"{path} is a model and no checkpoint: set it as the model of the configuration, as actor")
    reason = "its manifest is lost"
    if never_finished(folder):
        reason = "its first save was interrupted"
    return UsageError(f"the checkpoint {path} has no {NAME}: {reason}; resume from another one")


def _digests(version: Path) -> dict[str, dict[str, Any]]:
    """Sync this rank's files and return their sizes and digests."""
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
        ValueError: the manifest is damaged or was written by another release.
    """
    try:
        stored = json.loads((path / NAME).read_text())
        content = stored["checkpoint"]
        intact = stored["sha256"] == _digest_of(content)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact or not isinstance(content, dict):
        raise _damaged(path, path / NAME, "was changed after it was written")
    if content.get("format") != _FORMAT:
        raise UsageError(
            f"the checkpoint {path} has format {content.get('format')!r}, but this release reads format {_FORMAT}: "
            f"resume with the release that wrote it"
        )
    if not _well_formed(content):
        raise _damaged(path, path / NAME, "has invalid names of versions or files")
    return dict(content)


def _well_formed(content: dict[str, Any]) -> bool:
    """Return whether a manifest has the keys and types of its format, and no path outside of its versions."""
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
    """Replace the manifest atomically."""
    draft = path / f"{NAME}.new"
    with draft.open("w") as file:
        json.dump({"sha256": _digest_of(content), "checkpoint": content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _put(draft, path / NAME)


def _put(draft: Path, path: Path) -> None:
    os.replace(draft, path)
    sync_folder(path.parent)
    sync_folder(path.parent.parent)


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
