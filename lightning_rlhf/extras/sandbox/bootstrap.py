"""Runs inside a sandbox before the program: sets the resource limits, then executes the program.

The file is passed as text and imports nothing from this package. The limits are not set before bubblewrap starts,
because the kernel counts processes per user and user namespace: all sandboxes would share one count.
"""

import json
import os
import resource
import site
import sys
from importlib.machinery import SourceFileLoader

_limits = json.loads(sys.argv[1])
_alive = int(sys.argv[2])
os.set_blocking(_alive, False)
try:
    os.read(_alive, 1)  # end of file: the trainer was killed before --die-with-parent took effect
    os._exit(1)
except BlockingIOError:
    os.close(_alive)
for _name, _value in _limits.items():
    resource.setrlimit(getattr(resource, _name), (_value, _value))
site.setquit()  # defines exit() and quit(), as the site module does not run
sys.path[:0] = sys.argv[3:]
sys.argv = ["/program.py"]
sys.modules["__main__"].__file__ = "/program.py"
SourceFileLoader("__main__", "/program.py").exec_module(sys.modules["__main__"])
