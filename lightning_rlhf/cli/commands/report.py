"""``lightning-rlhf report``: write the report page of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_rlhf.cli.commands.options import add_runs, command_parser
from lightning_rlhf.cli.commands.responses_file import write_errors
from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.inspect.page import report_page
from lightning_rlhf.inspect.run_directory import RunDirectory

_EPILOG = """The page has curves, health checks, times, responses and configurations, in one file that needs no network.
Several runs are drawn in the same charts, and their different settings come first.

  lightning-rlhf report runs/quickstart/ppo
  lightning-rlhf report runs/a runs/b --to comparison.html
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser("report", "Write the report page of one or more runs.", _EPILOG)
    add_runs(parser)
    parser.add_argument("--to", type=Path, metavar="FILE.html", help="(default: report.html in the first directory)")
    return parser


@one_line_errors
def run(arguments: list[str]) -> int:
    """Write the page.

    Returns:
        Exit code: 0, or 2 if a directory is not that of a run, or the page cannot be written.
    """
    options = make_parser().parse_args(arguments)
    path = options.to or options.runs[0] / "report.html"
    if path.suffix != ".html":
        raise UsageError(f"--to must end with .html, got {str(path)!r}")
    page = report_page([RunDirectory(directory) for directory in options.runs])
    with write_errors(path, "choose another --to"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    print(f"report: {path}")
    return 0
