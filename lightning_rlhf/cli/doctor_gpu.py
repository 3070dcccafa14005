"""Checks of a machine with an NVIDIA GPU: driver, compute capability, and what Triton compiles kernels with."""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

# NVIDIA's requirements of CUDA 13, which the locked torch and vLLM are built for. constraints/install.sh has them too.
CUDA_13_DRIVER = 580
CUDA_13_CAPABILITY = (7, 5)
SMI_QUERY = ("nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader")
_GPU = re.compile(r"(\d+)[\d.]*, *(\d+)\.(\d+)")


def driver_rows(answer: str, cuda: str | None) -> list[tuple[str, str, str]]:
    """Check that driver and GPUs are new enough for torch's version of CUDA.

    Args:
        answer: output of :data:`SMI_QUERY`, a line for each GPU.
        cuda: version of CUDA that torch is built for; None for a build without CUDA, of which nothing is required.

    Returns:
        (name, finding, fault) of each GPU; the fault is empty where there is none.
    """
    gpus = [match for line in answer.splitlines() if (match := _GPU.fullmatch(line.strip()))]
    if not gpus:
        return [("driver", "nvidia-smi reports no driver", "")]
    rows = []
    for number, gpu in enumerate(gpus):
        capability, fault = (int(gpu[2]), int(gpu[3])), ""
        if cuda is not None and int(cuda.split(".")[0]) >= 13:
            if int(gpu[1]) < CUDA_13_DRIVER:
                fault = (
                    f"torch is built for CUDA {cuda}, which needs NVIDIA driver {CUDA_13_DRIVER} or newer, and this "
                    f"machine has {gpu[0].partition(',')[0]}: update the driver"
                )
            elif capability < CUDA_13_CAPABILITY:
                fault = (
                    f"torch is built for CUDA {cuda}, which needs GPUs of compute capability 7.5 (Turing) or newer, "
                    f"and GPU {number} has {gpu[2]}.{gpu[3]}: use a newer GPU, or install for the CPU with make "
                    f"DEVICE=cpu"
                )
        rows.append((f"driver of GPU {number}", f"{gpu[0].replace(',', ', compute capability')}", fault))
    return rows


def compiler_rows(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Check for a C compiler and Python's headers, with which Triton builds the launchers of kernels at run time.

    Args:
        environ: variables; ``CC`` names the compiler.

    Returns:
        (name, finding, fault) of each; the fault is empty where there is none.
    """
    named = environ.get("CC")
    compiler = next(filter(None, map(shutil.which, [named] if named else ["gcc", "clang"])), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    needs = "Triton compiles on a GPU at run time, for vLLM and for torch.compile, and needs"
    no_compiler = f"{needs} a C compiler; {named or 'gcc or clang'} is not on the PATH: on Debian apt-get install gcc"
    no_header = f"{needs} Python's headers; {header} is missing: on Debian apt-get install python3-dev"
    return [
        ("C compiler", compiler or "not found", "" if compiler else no_compiler),
        ("Python.h", str(header) if header.is_file() else "not found", "" if header.is_file() else no_header),
    ]
