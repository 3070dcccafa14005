"""All that a new supervised thing needs, here a process that doubles numbers; run as a module it is that process."""

import contextlib
import socket
import sys

from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.processes.child import Child, describe_exit, end_with_parent, inherited_environment


class Doubler:
    def __init__(self, log):
        self._connection, theirs = socket.socketpair()
        self._replies = self._connection.makefile("r")
        with theirs:
            command = [sys.executable, "-m", "tests.processes.example", str(theirs.fileno())]
            self.process = Child(command, inherited_environment(), log, pass_fds=[theirs.fileno()])

    def double(self, number):
        with contextlib.suppress(OSError):  # it has died, which the missing reply shows
            self._connection.sendall(f"{number}\n".encode())
        if reply := self._replies.readline():
            return int(reply)
        ended = describe_exit(self.process.end(5))
        raise RunError(f"the doubler died: {ended}; {self.process.log} ends with:\n{self.process.log_tail()}")

    def close(self):
        self._replies.close()
        self._connection.close()  # asks it to end
        self.process.end(5)


if __name__ == "__main__":
    end_with_parent()
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rw") as lines:
        while line := lines.readline():
            lines.write(f"{2 * int(line)}\n")
            lines.flush()
