"""Uploads of exported models to a model hub, by the package huggingface_hub."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError

from lightning_rlhf.expected_errors import UsageError

log = logging.getLogger(__name__)
_TOKEN = "set HF_TOKEN, or run 'hf auth login', with a token that may write to it"
_WEIGHTS = "*.safetensors"  # an earlier export may have had more files of them


def create(repository: str, private: bool) -> None:
    """Create a repository, if it does not exist, so that a run finds out before it trains that it may not upload.

    Args:
        repository: ``owner/name``.
        private: whether a new repository is private; one that exists stays as it is.

    Raises:
        UsageError: the name is not valid, the hub cannot be reached, or the token is missing or may not write there.
    """
    try:
        HfApi().create_repo(repository, private=private, exist_ok=True)
        HfApi().auth_check(repository, write=True)
    except (HFValidationError, ValueError) as error:
        raise UsageError(f"push_to must be owner/name of a repository, got {repository!r}: {error}") from error
    except LocalTokenNotFoundError as error:
        raise UsageError(f"push_to is {repository}, but there is no token: {_TOKEN}") from error
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403):
            raise UsageError(f"push_to is {repository}, which this token may not create or change: {_TOKEN}") from error
        raise UsageError(f"push_to is {repository}, which could not be created: {_line(error)}") from error
    except (OSError, HTTPError) as error:
        raise UsageError(
            f"push_to is {repository}, but the hub cannot be reached ({_line(error)}): remove push_to on a machine "
            f"without it, and run 'hf upload {repository} DIRECTORY' elsewhere"
        ) from error


def upload(directory: Path, repository: str, message: str) -> None:
    """Upload an export as one commit; a failure is logged, because the export is on disk and the run has its result.

    Args:
        directory: directory of the export.
        repository: ``owner/name``.
        message: message of the commit.
    """
    try:
        made = HfApi().upload_folder(
            repo_id=repository, folder_path=directory, commit_message=message, delete_patterns=_WEIGHTS
        )
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        log.error(
            "%s was not uploaded (%s). It is complete: run 'hf upload %s %s' to try again.",
            directory,
            _line(error),
            repository,
            directory,
        )
        return
    log.info("Uploaded %s: %s", directory, made.commit_url)


def _line(error: Exception) -> str:
    """Return the first line of an error, which names no token."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
