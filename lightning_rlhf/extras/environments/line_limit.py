"""Program that runs a server of standard streams, and ends it if it writes too long a line: ``LIMIT COMMAND...``.

The client of the package mcp collects a line without a limit, in the trainer's memory. The server has the standard
input of this program. This file is run by its path and imports nothing of this package.
"""

import subprocess
import sys


def main(limit: int, command: list[str]) -> int:
    """Pass the lines of a command on; return its exit code."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while line := process.stdout.readline(limit + 1):
            if len(line) > limit:
                process.kill()
                print(f"the MCP server wrote a line of more than {limit} bytes, and was ended", file=sys.stderr)
                return 1
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
