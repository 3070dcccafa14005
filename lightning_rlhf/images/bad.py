"""The error of an image that cannot be used."""

from __future__ import annotations

from lightning_rlhf.expected_errors import UsageError


class BadImage(UsageError):
    """An image that cannot be used.

    Args:
        why: error message with the image's name.
        kind: message without the name, by which such images are counted; by default ``why``.
    """

    def __init__(self, why: str, kind: str | None = None) -> None:
        super().__init__(why)
        self.kind = kind or why
