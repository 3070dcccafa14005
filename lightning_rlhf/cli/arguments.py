"""How commands that take options, and no configuration, understand their command lines."""

from __future__ import annotations

import argparse


def command_parser(name: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """A parser that takes options as they are written, and shows its examples as they are.

    Args:
        name: of the command.
        description: of what it does.
        epilog: behind the options.
    """
    return argparse.ArgumentParser(
        f"lightning-rlhf {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
