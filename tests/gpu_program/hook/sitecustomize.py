"""Lets vLLM on a CPU run the program that it runs on a GPU; Python imports this file at its start from PYTHONPATH.

``VLLM_PROGRAM=async``: asynchronous scheduling, which vLLM switches off in one line of its module for CPUs. It is
restored after that line. ``VLLM_PROGRAM=v2``: Model Runner V2 as well. It needs Triton, whose interpreter looks to vLLM
like a compiler for CPUs. vLLM's function for CPUs replaces the kernel of top-k and top-p, which the interpreter cannot
run. No file of vLLM or Triton is changed.
"""

import importlib.abc
import importlib.util
import os
import sys

PROGRAM = os.environ.get("VLLM_PROGRAM")


class Changed(importlib.abc.MetaPathFinder):
    """Finds a module of vLLM, and changes it when it is executed."""

    def __init__(self, name, change):
        self.name, self.change = name, change

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)  # the other finders find the file
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            self.change(module)

        spec.loader.exec_module = execute_and_change
        return spec


def keep_scheduling(module):
    """Restore the scheduling that the configuration had before the platform checked it."""
    platform = module.CpuPlatform
    check = platform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        scheduling = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = scheduling

    platform.check_and_update_config = classmethod(check_and_update_config)


def show_interpreter_as_compiler():
    """Offer vLLM a Triton backend for CPUs, which is never asked to compile: the interpreter runs the kernels."""
    import triton.backends

    class Driver:
        @staticmethod
        def is_active():
            return True

    class Backend:
        driver = Driver
        compiler = None

    triton.backends.backends.clear()
    triton.backends.backends["cpu"] = Backend


def use_function_for_cpus(module):
    """Apply top-k and top-p without Triton."""
    module.HAS_TRITON = False


if PROGRAM in ("async", "v2"):
    sys.meta_path.insert(0, Changed("vllm.platforms.cpu", keep_scheduling))
if PROGRAM == "v2":
    sys.meta_path.insert(0, Changed("vllm.v1.sample.ops.topk_topp_sampler", use_function_for_cpus))
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    show_interpreter_as_compiler()
