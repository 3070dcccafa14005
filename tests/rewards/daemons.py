"""A reward function that starts a daemon and ends its process at once."""

import os
import subprocess
import sys
import time
from pathlib import Path


def dies(completions):
    start_daemon(*completions[0].split())
    os._exit(3)


def start_daemon(how, path):
    """Start a daemon in a separate session, write its process id to a file, and return the id."""
    if how == "exec":
        options = "start_new_session=True, stdout=-3, stderr=-3"
        code = f"import subprocess; print(subprocess.Popen(['sleep', '60'], {options}).pid)"
        pid = int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout)
        Path(path).write_text(str(pid))
        return pid
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            Path(path).write_text(str(os.getpid()))
            time.sleep(60)
        while not (Path(path).exists() and Path(path).read_text()):
            time.sleep(0.001)
        os._exit(0)
    os.waitpid(child, 0)
    return int(Path(path).read_text())
