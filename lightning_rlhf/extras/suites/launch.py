"""Run a module of another package as ``python -m`` does; the process ends with the one that started it.

``python -m lightning_rlhf.extras.suites.launch lm_eval run ...`` is ``python -m lm_eval run ...``.
"""

from __future__ import annotations

import runpy
import sys

from lightning_rlhf.processes.child import end_with_parent

if __name__ == "__main__":
    if sys.platform == "linux":
        end_with_parent()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
