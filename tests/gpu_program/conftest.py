"""The environment in which an engine's process runs the program that vLLM runs on a GPU; see hook/sitecustomize.py."""

import os
from pathlib import Path

import pytest

from lightning_rlhf.rollout.vllm.availability import vllm_installed

HOOK = Path(__file__).with_name("hook")
TRITON = Path(__file__).parents[2] / ".triton"  # "make .triton" installs it there, beside the packages for CPUs
PROGRAMS = {
    "async": "model runner V1 with asynchronous scheduling",
    "v2": "model runner V2 with asynchronous scheduling",
}


@pytest.fixture(scope="module", params=["v2", pytest.param("async", marks=pytest.mark.slow)])
def program(request):
    """The words for a program in the first line of a run, whose engines run it while this fixture exists."""
    if not vllm_installed():
        pytest.skip("vLLM is not installed")
    if request.param == "v2" and not (TRITON / "triton").is_dir():
        pytest.skip("Triton is not in .triton: make .triton")
    folders = [str(HOOK), *([str(TRITON)] if request.param == "v2" else []), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_PROGRAM", request.param)
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
        yield PROGRAMS[request.param]
