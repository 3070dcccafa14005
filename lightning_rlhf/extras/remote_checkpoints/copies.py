"""Copies of finished checkpoints at a URL that fsspec supports, such as an object store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from lightning_rlhf.expected_errors import MissingFileError, UsageError
from lightning_rlhf.strategies.checkpoints import manifest


def check_url(url: str) -> None:
    """Validate before training that fsspec supports the protocol of a URL.

    Args:
        url: URL of a folder.

    Raises:
        ValueError: the protocol is unknown, or the package for it is missing.
    """
    try:
        fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"RunCheckpoint cannot copy to {url!r}: {error}; use the URL of a folder that fsspec supports, such as "
            f"s3://bucket/run with the package s3fs installed"
        ) from error


@contextmanager
def _network_errors() -> Iterator[None]:
    """Convert errors of a storage client to OSError."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:  # classes of botocore, aiohttp, google's client, ...
        raise OSError(f"{type(error).__name__}: {error}") from error


@_network_errors()
def upload(version: Path, url: str) -> None:
    """Copy a finished version, then its manifest, then remove the versions that are not in the manifest.

    An interrupted upload leaves the previous manifest and its files intact.

    Args:
        version: folder of the version, in the folder of its checkpoint.
        url: URL of the copy of the checkpoint.

    Raises:
        OSError: the copy could not be written.
    """
    fs, root = fsspec.core.url_to_fs(url)
    for file in sorted(file for file in version.rglob("*") if file.is_file()):
        target = f"{root}/{version.name}/{file.relative_to(version).as_posix()}"
        fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        fs.put_file(str(file), target)
    fs.put_file(str(version.parent / manifest.NAME), f"{root}/{manifest.NAME}")
    current = {manifest.NAME, *manifest.kept_versions(version.parent)}
    fs.invalidate_cache()
    for entry in fs.ls(root, detail=False):
        if (name := entry.rstrip("/").rpartition("/")[2]) not in current and manifest.is_version(name):
            fs.rm(entry, recursive=True)


@_network_errors()
def exists(url: str) -> bool:
    """Return whether a URL has a finished copy."""
    fs, root = fsspec.core.url_to_fs(url)
    return bool(fs.exists(f"{root}/{manifest.NAME}"))


@_network_errors()
def newest(url: str) -> int:
    """Return the largest version number at a URL, finished or not; 0 without versions."""
    fs, root = fsspec.core.url_to_fs(url)
    if not fs.exists(root):
        return 0
    names = [entry.rstrip("/").rpartition("/")[2] for entry in fs.ls(root, detail=False)]
    return max([int(name.removeprefix("v")) for name in names if manifest.is_version(name)], default=0)


@_network_errors()
def download(url: str, folder: Path) -> None:
    """Fetch the current version of a copy into a local checkpoint folder, without verifying its digests.

    Args:
        url: URL of the copy of the checkpoint.
        folder: local checkpoint folder, which is replaced.

    Raises:
        FileNotFoundError: the URL has no finished copy.
        ValueError: the manifest is damaged.
        OSError: the copy could not be read.
    """
    fs, root = fsspec.core.url_to_fs(url)
    if not fs.exists(f"{root}/{manifest.NAME}"):
        raise MissingFileError(f"no checkpoint at {url}: there is no {manifest.NAME}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fs.get_file(f"{root}/{manifest.NAME}", str(folder / manifest.NAME))
    content: dict[str, Any] = manifest.read(folder)
    for name in content["files"]:
        target = folder / content["version"] / name
        target.parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(f"{root}/{content['version']}/{name}", str(target))
    manifest.write(folder, {**content, "earlier": {}})
