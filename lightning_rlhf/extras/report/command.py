"""``lightning-rlhf report``: write the report page of runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from urllib.parse import quote

from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.commands.options import add_runs, command_parser
from lightning_rlhf.extras.commands.responses_file import write_errors
from lightning_rlhf.extras.report.inspector.project import find_runs, is_folder_of_runs, project_page
from lightning_rlhf.extras.report.page import report_page
from lightning_rlhf.extras.report.run_directory import RunDirectory

_EPILOG = """The page has curves, health checks, times, responses and configurations, in one file that needs no network.
Several runs are drawn in the same charts, and their different settings come first. For a folder of runs, the page is a
table of them, with links to their report.html.

  lightning-rlhf report runs/quickstart/ppo
  lightning-rlhf report runs/a runs/b --to comparison.html
  lightning-rlhf report runs --to runs.html
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
        Exit code: 0, or 2 if a directory has no run, a file is damaged, or the page cannot be written.
    """
    options = make_parser().parse_args(arguments)
    path = options.to or options.runs[0] / "report.html"
    if path.suffix != ".html":
        raise UsageError(f"--to must end with .html, got {str(path)!r}")
    if len(options.runs) == 1 and is_folder_of_runs(options.runs[0]):
        page = _table_page(options.runs[0], path)
    else:
        page = report_page([RunDirectory(directory) for directory in options.runs])
    with write_errors(path, "choose another --to"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    print(f"report: {path}")
    return 0


def _table_page(folder: Path, path: Path) -> str:
    """Return the table of the runs in a folder, with links from the path of the page to their report pages."""
    runs = find_runs(folder)
    pages = [run.path / "report.html" for run in runs]
    links = [os.path.relpath(page, path.parent) if page.is_file() else "" for page in pages]
    return project_page(folder, runs, [quote(link) for link in links])
