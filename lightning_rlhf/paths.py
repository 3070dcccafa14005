"""What is meant by a text that may be a path here or an id of the hub, and what is said where it is neither."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

_FIRST_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")  # of a repository, those read first


def names_a_path(text: str) -> bool:
    """Whether a text is meant as a path here; all else may be an id of the hub, ``owner/name``.

    A path is there, begins like one, has more than one slash, or its first part is a directory here.
    """
    first, *rest = text.split("/")
    begins = text.startswith((".", "/", "~"))
    return begins or len(rest) > 1 or (bool(rest) and Path(first).is_dir()) or Path(text).exists()


def looked_at(text: str) -> str:
    """Where a path that is missing was looked for, and what was perhaps meant."""
    path = Path(os.path.abspath(Path(text).expanduser()))
    said = f"looked at {path}"
    if not Path(text).expanduser().is_absolute():
        said += ", because relative paths begin at the directory of the command"
    near = _near(path, text)
    return f"{said}; did you mean {near!r}?" if near else said


def hub_failed(text: str, error: Exception) -> str:
    """Why a hub did not give what was asked of it, and what helps.

    Args:
        text: the id.
        error: what the libraries say of it in a paragraph.
    """
    reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    # A library says that it cannot connect; what lies below says why: no such name, no route, refused.
    if root is not error and isinstance(root, OSError) and root.strerror:
        reason += f" ({root.strerror})"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        hint = "HF_HUB_OFFLINE is set, so that only what was downloaded before is found"
    else:
        hint = (
            "check the name and the network; HF_TOKEN opens gated and private repositories, HF_ENDPOINT names another "
            "hub, HF_HUB_OFFLINE=1 keeps to what was downloaded before"
        )
    return f"there is no such directory here ({looked_at(text)}), and the hub did not give it: {reason}; {hint}"


def expect_hub(text: str, revision: str | None = None) -> None:
    """Raise within seconds if a hub cannot be reached, where the libraries would try for minutes.

    The hub is asked at most twice, each time for at most ``HF_HUB_ETAG_TIMEOUT`` seconds (10 unless set). It is not
    asked for a repository of which a file was downloaded before, nor with ``HF_HUB_OFFLINE``.

    Args:
        text: id of a repository with a model or tokenizer.
        revision: branch, tag or commit.

    Raises:
        ConnectionError: no answer.
    """
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
    from huggingface_hub.utils import http_backoff  # type: ignore[attr-defined]

    cached = (try_to_load_from_cache(text, name, revision=revision) for name in _FIRST_FILES)
    if constants.HF_HUB_OFFLINE or any(isinstance(file, str) for file in cached):
        return
    url = hf_hub_url(text, _FIRST_FILES[0], revision=revision)
    try:  # any status is an answer, which the libraries explain
        http_backoff("HEAD", url, max_retries=1, retry_on_status_codes=(), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HTTPError as error:
        raise ConnectionError(f"{constants.ENDPOINT} does not answer ({error})") from None


def _near(path: Path, text: str) -> str | None:
    """What exists and is called nearly so, or lies where the path would be seen from another directory."""
    parts = Path(text).parts
    if not Path(text).is_absolute() and not text.startswith(("~", "..")):
        for above in Path.cwd().parents:  # the command was started in a directory below
            if len(parts) > 1 and (above / text).exists():
                return str(above / text)
        for skipped in range(1, len(parts)):  # or in the very directory that the path begins with
            if Path.cwd().name in parts[:skipped] and Path(*parts[skipped:]).exists():
                return str(Path(*parts[skipped:]))
    there = next(parent for parent in path.parents if parent.is_dir())
    missing, *below = path.relative_to(there).parts
    try:
        names = sorted(os.listdir(there))
    except OSError:  # a directory that may not be listed has no hint to give
        return None
    for name in difflib.get_close_matches(missing, names, n=3):
        if (found := there.joinpath(name, *below)).exists():
            return str(found) if Path(text).expanduser().is_absolute() else os.path.relpath(found)
    return None
