"""Errors of the command line in one sentence."""

from __future__ import annotations

import sys
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser


class FriendlyParser(LightningArgumentParser):
    """Says what is wrong, suggests what was meant, and leaves out the usage page."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one sentence and exit with 2; parsers inside the parser raise, so that alternatives are tried."""
        if not self.exit_on_error:
            super().error(message, ex)
        print(f"lightning-rlhf: {explain(message)}", file=sys.stderr)
        sys.exit(2)


def explain(message: str) -> str:
    """The last word of jsonargparse's message."""
    return message
