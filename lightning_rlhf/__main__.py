"""``lightning-rlhf`` and ``python -m lightning_rlhf``."""

import sys

from lightning_rlhf.__about__ import __version__


def main() -> int:
    """Answer ``--version`` at once; everything else is Lightning's command line."""
    if sys.argv[1:] == ["--version"]:
        print(f"lightning-rlhf {__version__}")
        return 0
    from lightning_rlhf.cli.main import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
