"""``lightning-rlhf inspect``: serve a page about runs, also while they continue."""

from __future__ import annotations

import argparse
from contextlib import suppress

from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.commands.options import add_runs, command_parser
from lightning_rlhf.extras.report.inspector.project import find_runs, is_folder_of_runs
from lightning_rlhf.extras.report.inspector.server import InspectServer
from lightning_rlhf.extras.report.run_directory import RunDirectory

_EPILOG = """The page updates while a run continues. It has the report and the responses that RolloutLog has written:
sorted and filtered, side by side, with their tokens coloured by log-probability, advantage and other values. The server
listens on 127.0.0.1 alone, needs the key in its address, and reads only the run directories. Ctrl-C ends it.
For a folder of runs, the page is a table of them, also of those that begin later.

  lightning-rlhf inspect runs/quickstart/ppo
  lightning-rlhf inspect runs
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser("inspect", "Serve a page about one or more runs, also while they continue.", _EPILOG)
    add_runs(parser)
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    return parser


@one_line_errors
def run(arguments: list[str]) -> int:
    """Serve the page until Ctrl-C.

    Returns:
        Exit code: 0, or 2 if a directory has no run, or the port cannot be used.
    """
    options = make_parser().parse_args(arguments)
    if not 0 <= options.port < 1 << 16:
        raise UsageError(f"--port must be between 0 and 65535, got {options.port}")
    if len(options.runs) == 1 and is_folder_of_runs(options.runs[0]):
        folder = options.runs[0]
    else:
        folder = None
    if folder is None:
        runs = [RunDirectory(directory) for directory in options.runs]
    else:
        runs = find_runs(folder)
    with InspectServer(runs, options.port, folder) as server:
        print(f"open {server.url}", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
