"""Distinction of local paths and hub ids, and error messages for names that are neither."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

# Errors of transformers while it reads damaged files: a file is trusted to have the keys and types of its format.
READ_ERRORS = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, StrictDataclassError,
)  # fmt: skip
_FIRST_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")  # files that are read first


def names_a_path(text: str) -> bool:
    """Return whether a text is a local path and not a hub id, ``owner/name``.

    A text is a path if it exists, begins with ``.``, ``/`` or ``~``, has several slashes, or if the part before the
    slash is a local directory.
    """
    first, *rest = text.split("/")
    has_path_prefix = text.startswith((".", "/", "~"))
    return has_path_prefix or len(rest) > 1 or (bool(rest) and Path(first).is_dir()) or Path(text).exists()


def describe_missing_path(text: str) -> str:
    """Return the absolute path at which a missing path was searched, with a suggestion if a similar one exists."""
    path = Path(os.path.abspath(Path(text).expanduser()))
    message = f"looked at {path}"
    if not Path(text).expanduser().is_absolute():
        message += ", because relative paths start at the working directory"
    if "$" in text:
        message += "; variables are not replaced by their values"
    similar = _similar_path(path, text)
    return f"{message}; did you mean {similar!r}?" if similar else message


def hub_error_message(text: str, error: Exception) -> str:
    """Return one line with the reason why a hub id could not be loaded, and a remedy.

    Args:
        text: hub id.
        error: exception of the hub's library.
    """
    reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    # The library reports only that it cannot connect; the root cause has the reason, such as an unknown host.
    if root is not error and isinstance(root, OSError) and root.strerror:
        reason += f" ({root.strerror})"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        hint = "HF_HUB_OFFLINE is set, so only files that were downloaded before are available"
    else:
        hint = (
            "check the name and the network; HF_TOKEN gives access to gated and private repositories, HF_ENDPOINT sets "
            "another hub, HF_HUB_OFFLINE=1 uses only files that were downloaded before"
        )
    return (
        f"not a local directory ({describe_missing_path(text)}), and could not be loaded from the hub: {reason}; {hint}"
    )


def read_error_message(error: Exception) -> str:
    """Return one line with the reason why transformers could not read a file.

    Args:
        error: one of ``READ_ERRORS``.
    """
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, StrictDataclassError):  # its first line names only the validator
        return lines[-1].strip().removeprefix("ValueError: ")
    if type(error) in (OSError, ValueError) and lines[0]:
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}"


def expect_hub(text: str, revision: str | None = None) -> None:
    """Raise within seconds if the hub cannot be reached; the libraries would retry for minutes.

    Sends at most two requests with a timeout of ``HF_HUB_ETAG_TIMEOUT`` seconds (default 10), but none if a file of the
    repository is cached or ``HF_HUB_OFFLINE`` is set.

    Args:
        text: hub id of a repository with a model or tokenizer.
        revision: branch, tag or commit.

    Raises:
        ConnectionError: the hub does not respond.
    """
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
    from huggingface_hub.utils import http_backoff  # type: ignore[attr-defined]

    cached = (try_to_load_from_cache(text, name, revision=revision) for name in _FIRST_FILES)
    if constants.HF_HUB_OFFLINE or any(isinstance(file, str) for file in cached):
        return
    url = hf_hub_url(text, _FIRST_FILES[0], revision=revision)
    try:  # any HTTP status is accepted here; the libraries report errors later
        http_backoff("HEAD", url, max_retries=1, retry_on_status_codes=(), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HTTPError as error:
        raise ConnectionError(f"{constants.ENDPOINT} does not answer ({error})") from None


def _similar_path(path: Path, text: str) -> str | None:
    """Return an existing path with a similar name, or the same path relative to another directory; None if missing."""
    parts = Path(text).parts
    if not Path(text).is_absolute() and not text.startswith(("~", "..")):
        for above in Path.cwd().parents:  # the command may have been started in a subdirectory
            if len(parts) > 1 and (above / text).exists():
                return str(above / text)
        for skipped in range(1, len(parts)):  # or in the directory with which the path begins
            if Path.cwd().name in parts[:skipped] and Path(*parts[skipped:]).exists():
                return str(Path(*parts[skipped:]))
    existing = next(parent for parent in path.parents if parent.is_dir())
    missing, *below = path.relative_to(existing).parts
    try:
        names = sorted(os.listdir(existing))
    except OSError:  # the directory cannot be listed
        return None
    for name in difflib.get_close_matches(missing, names, n=3):
        if (similar := existing.joinpath(name, *below)).exists():
            if Path(text).expanduser().is_absolute():
                return str(similar)
            return os.path.relpath(similar)
    return None
