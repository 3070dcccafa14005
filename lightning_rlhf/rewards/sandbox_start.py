"""Runs inside a sandbox, before the program: takes on the limits, then becomes the program.

It is handed over as text and imports nothing of ours. The limits are set here, and not before bubblewrap starts,
because the kernel counts processes for each user within each user namespace: set outside, all sandboxes of a machine
would share one count.
"""

import json
import os
import resource
import site
import sys
from importlib.machinery import SourceFileLoader

_limits, _alive, _folders = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
os.set_blocking(_alive, False)
try:
    os.read(_alive, 1)  # nobody writes, so it is the end: the trainer was killed before bubblewrap had bound us to it
    os._exit(1)
except BlockingIOError:
    os.close(_alive)
for _name, _value in _limits.items():
    resource.setrlimit(getattr(resource, _name), (_value, _value))
site.setquit()  # exit() and quit() exist although the site module was not run
sys.path[:0] = _folders
sys.argv = ["/program.py"]
sys.modules["__main__"].__file__ = "/program.py"
SourceFileLoader("__main__", "/program.py").exec_module(sys.modules["__main__"])
