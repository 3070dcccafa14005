"""``lightning-rlhf doctor --try``: run kernels, the rollout engine and two steps of PPO on a small random model."""

from __future__ import annotations

import hashlib
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.commands.separate_process import error_line, print_result, run_apart
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.rewards.function import RewardFunction

# All attention kernels of vLLM support heads of 64; the vocabulary is the tokenizer's.
ARCHITECTURE = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 128,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # for results near 1; large enough for TF32
_STEPS = 2
# Time limits in seconds; a first start of vLLM compiles kernels.
_KERNELS_SECONDS = 120.0
_STEPS_SECONDS = 300.0
Fact = tuple[str, str, str]  # name, value, and a fault or an empty string


def checks() -> dict[str, tuple[Callable[[], str], float]]:
    """Return the checks by name, each with its time limit in seconds.

    They run kernels, then two steps of PPO with the engine that ``auto`` selects. The engine is compared with the actor
    in both steps, after each sync of the weights.
    """
    limited: dict[str, tuple[Callable[[], str], float]] = {}
    for dtype in _TOLERANCE:
        limited[f"kernels in {str(dtype).removeprefix('torch.')}"] = partial(kernels, dtype), _KERNELS_SECONDS
    for precision in ("32-true", "bf16-mixed"):
        limited[f"PPO in {precision}"] = partial(steps, precision), _STEPS_SECONDS
    return limited


def try_out() -> Iterator[Fact]:
    """Run each check in a separate process and yield its finding; one that crashes or hangs does not end the others."""
    for name, (_, seconds) in checks().items():
        result, failure, _ = run_apart([sys.executable, "-m", __name__, name], seconds)
        yield (name, "failed", f"{name}: {failure}") if result is None else tuple(result)


def run_check(name: str) -> Fact:
    """Run a check in this process; any error of CUDA, vLLM, torch or this package becomes a fault."""
    began = time.monotonic()
    try:
        finding = checks()[name][0]()
    except Exception as error:
        traceback.print_exc()
        return name, "failed", f"{name}: {error_line(error)}"
    return name, f"{finding}; {time.monotonic() - began:.1f} s", ""


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernels(dtype: torch.dtype) -> str:
    """Compare a matrix product, attention and their gradients on a device with float64 on the CPU.

    Raises:
        ArithmeticError: a result differs by more than rounding.
    """
    device = _device()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, 64, 64, generator=generator, dtype=torch.float64) for _ in range(3)]
    expected = _attention(inputs)
    results = _attention([values.to(device, dtype) for values in inputs])
    worst = max(
        ((result.cpu().double() - values).abs().max() / values.abs().max()).item()
        for result, values in zip(results, expected, strict=True)
    )
    if not worst <= _TOLERANCE[dtype]:
        raise ArithmeticError(f"attention on {device} differs by {worst:.2g} from float64 on the CPU")
    return f"matrix product, attention and gradients on {device} within {worst:.1g} of float64"


def _attention(inputs: list[Tensor]) -> list[Tensor]:
    query, key, value = (values.clone().requires_grad_() for values in inputs)
    result = scaled_dot_product_attention(query, key, value, is_causal=True) @ value.transpose(-1, -2) / 8
    result.square().mean().backward()
    return [result.detach(), *(values.grad for values in (query, key, value) if values.grad is not None)]


def steps(precision: str) -> str:
    """Run two steps of PPO on a random model with the engine that ``auto`` selects.

    Raises:
        ArithmeticError: the weights are not finite, or did not change.
    """
    adam = partial(torch.optim.AdamW, lr=1e-3)
    source = FromConfig(ARCHITECTURE, seed=0)
    module = PPOModule(source, optimizer=adam, critic_optimizer=adam, minibatch_size=8)
    rows = InMemory([{"prompt": "abc"}] * 8 * _STEPS)
    data = PromptDataModule(rows, CharacterTokenizer("abcdefg"), batch_size=8, max_tokens=8)
    loop = RolloutLoop([RewardFunction(share_of_a)], max_response_tokens=16, check_rows=8, validate_at_ends=False)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        trainer = Trainer(
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=1,
            strategy="rlhf_single",
            precision=precision,  # type: ignore[arg-type]
            max_steps=_STEPS,
            callbacks=[loop],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, datamodule=data)
    actor: Any = module.actor
    after = digest(actor)
    if not all(bool(parameter.isfinite().all()) for parameter in module.parameters()):
        raise ArithmeticError("weights are not finite after two steps of PPO")
    if after == digest(source.causal()):
        raise ArithmeticError("weights are the same after two steps of PPO as before")
    metrics: dict[str, Any] = trainer.callback_metrics
    mean = float(metrics["rollout/logprob_diff_mean"])
    largest = float(metrics["rollout/logprob_diff_max"])
    return (
        f"{loop.engine_description}; {_STEPS} syncs, the last in {float(metrics['time/sync_s']):.2f} s; engine and "
        f"actor differ by {mean:.1g} nats on average, {largest:.1g} at most; weights updated"
    )


def share_of_a(completions: list[str]) -> list[float]:
    """Return the fraction of the letter a in each completion."""
    return [text.count("a") / max(len(text), 1) for text in completions]


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of a model's parameters."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the messages of Lightning about small Trainers."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_rlhf")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


if __name__ == "__main__":
    print_result(run_check(sys.argv[1]))
