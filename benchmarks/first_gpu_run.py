"""The first five minutes on a GPU: a real small model with vLLM, and one block to send back.

    python -m benchmarks.first_gpu_run                     # Qwen2.5-0.5B-Instruct of the hub
    python -m benchmarks.first_gpu_run --model DIRECTORY   # without network

It starts vLLM in both precisions, compares its log-probabilities with the actor's before and after pushes, puts it to
sleep and wakes it, measures the memory of activations on GPU and host, and takes two steps of GRPO. Each part runs in a
process with a time limit, so that one that fails ends no other. On a CPU (``--device cpu``) all but the sleep runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from transformers import AutoTokenizer

from benchmarks.acceptance_measurements import GIB, Figures, peak_bytes, timed
from lightning_rlhf import GRPOModule, PromptDataModule
from lightning_rlhf.batching.sequences import join
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.callbacks.loop.engine_comparison import gap_statistics
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.extras.commands import separate_process
from lightning_rlhf.models.loading import Pretrained, save_architecture
from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.assemble import scored_rollout
from lightning_rlhf.rollout.engine import EngineSetup, visible_gpu
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.strategies.activations import ActivationOffload
from lightning_rlhf.types import Completion, Prompt, PromptBatch, SamplingParams

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
PARTS = {"float32": 120, "bfloat16": 90, "sleep": 90, "offload": 60, "grpo": 120}  # with their limits in seconds
_LENGTH = 256
_TEXTS = (
    "The capital of France is", "Once upon a time there was a", "def fibonacci(n):", "In 1969, the first",
    "The recipe needs two cups of", "Dear Sir or Madam,", "Water boils at", "The largest planet is",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print the block; exit code 0 if all passed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_gpu_run", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL, help="directory or model of the hub (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), metavar="PART")
    parser.add_argument("--in-this-process", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_this_process is not None:
        return _run_here(options.in_this_process, options.device, options.model)
    Pretrained(options.model).expect_reachable()
    lines = []
    for part in options.parts:
        command = [sys.executable, "-m", "benchmarks.first_gpu_run", "--in-this-process", part]
        command += ["--device", options.device, "--model", options.model]
        limit = PARTS[part] * (1.0 if options.device == "cuda" else 5.0)
        result, failure, seconds = separate_process.run_apart(command, limit)
        figures = {"ok": False, "error": failure} if result is None else result
        lines.append(json.dumps({"part": part, "seconds": round(seconds, 1), **figures}))
        print(lines[-1], flush=True)
    passed = sum(json.loads(line)["ok"] for line in lines)
    print(f"\n===== lightning-rlhf first GPU run: {passed} of {len(lines)} parts passed =====")
    print(json.dumps(_machine(options.model)), *lines, "===== end =====", sep="\n")
    return 0 if passed == len(lines) else 1


def _machine(model: str) -> Figures:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"model": model, "gpu": gpu, "torch": torch.__version__, "python": sys.version.split()[0]}


def _run_here(part: str, device: str, model: str) -> int:
    """Run one part in this process and print its figures as the last line."""
    functions: dict[str, Callable[[str, str, Path], Figures]] = {
        "float32": partial(_pushes, "float32"), "bfloat16": partial(_pushes, "bfloat16"),
        "sleep": _sleep, "offload": _offload, "grpo": _grpo,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix=f"first_{part}_") as folder:
        try:
            figures = functions[part](device, model, Path(folder))
        except Exception as error:
            traceback.print_exc()
            figures = {"ok": False, "error": separate_process.error_line(error)}
    separate_process.print_result(figures)
    return 0


def _started(engine: VLLMEngine, source: Pretrained, device: str, folder: Path) -> tuple[Any, str, float]:
    """Start an engine, then load the actor; return the actor, the engine's description and the seconds of its start."""
    save_architecture(source, folder / "engine")
    devices = visible_gpu(torch.device(device, 0)) if device == "cuda" else ()
    began = time.perf_counter()
    engine.start(EngineSetup(folder / "engine", str(source.dtype), _LENGTH, folder / "engine.log", devices))
    description, seconds = engine.wait(), time.perf_counter() - began
    return source.causal().eval().to(device), description, round(seconds, 1)


def _tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


def _pushed(engine: VLLMEngine, actor: Any, version: int) -> float:
    """Push the actor's weights, and wait until the engine has them; return the seconds."""
    began = time.perf_counter()
    engine.update_weights(whole_tensors(actor.lm), version)
    generate(engine, [[1, 2]] * 8, SamplingParams(1), range(8))
    return round(time.perf_counter() - began, 2)


@torch.no_grad()
def _gap(engine: VLLMEngine, actor: Any, model: str, device: str) -> list[float]:
    """Return mean, 99th percentile and maximum of the differences of the log-probs of 40 tokens after each prompt."""
    tokenizer = _tokenizer(model)
    prompts = [tokenizer(text)["input_ids"] for text in _TEXTS]
    completions: list[Completion] = generate(engine, prompts, SamplingParams(40), range(len(prompts)))
    known = [Prompt(ids, "", position=index) for index, ids in enumerate(prompts)]
    rollout = scored_rollout(PromptBatch(known), completions, [], tokenizer).to(torch.device(device))
    input_ids, index = join(rollout)
    logprobs = actor(input_ids, index, rollout.response_ids, rollout.response_mask).logprobs
    gaps = (logprobs - rollout.rollout_logprobs).abs()[rollout.response_mask].cpu()
    return [round(value, 6) for value in gap_statistics(gaps).tolist()]


def _pushes(dtype: str, device: str, model: str, folder: Path) -> Figures:
    """Start the engine, and compare log-probs after two pushes; the second one has changed weights."""
    engine = VLLMEngine(gpu_memory_utilization=0.4)
    try:
        actor, description, seconds = _started(engine, Pretrained(model, dtype=dtype), device, folder)  # type: ignore[arg-type]
        figures: Figures = {"engine": description, "start_s": seconds, "first_push_s": _pushed(engine, actor, 0)}
        figures["gap_mean_p99_max"] = _gap(engine, actor, model, device)
        with torch.no_grad():
            for parameter in actor.lm.parameters():
                parameter.mul_(1.01)
        figures["second_push_s"] = _pushed(engine, actor, 1)
        figures["gap_after_push"] = _gap(engine, actor, model, device)
        figures["first_lost_weight"] = engine.first_difference(whole_tensors(actor.lm))
    finally:
        engine.close()
    bound = 0.1 if dtype == "bfloat16" else 0.01
    right = max(figures["gap_mean_p99_max"][0], figures["gap_after_push"][0]) < bound
    return {"ok": right and figures["first_lost_weight"] is None, **figures}


def _sleep(device: str, model: str, folder: Path) -> Figures:
    """Put the engine to sleep, and compare log-probs after the push that wakes it."""
    if device == "cpu":
        return {"ok": True, "skipped": "vLLM does not sleep on a CPU"}
    engine = VLLMEngine(gpu_memory_utilization=0.4, sleep_while_learning=True)
    try:
        actor, _, _ = _started(engine, Pretrained(model, dtype="bfloat16"), device, folder)
        _pushed(engine, actor, 0)
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        asleep = torch.cuda.mem_get_info()[0]
        figures: Figures = {"freed_gib": round((asleep - awake) / GIB, 2), "wake_s": _pushed(engine, actor, 1)}
        figures["gap_mean_p99_max"] = _gap(engine, actor, model, device)
    finally:
        engine.close()
    return {"ok": figures["freed_gib"] > 1 and figures["gap_mean_p99_max"][0] < 0.1, **figures}


def _offload(device: str, model: str, folder: Path) -> Figures:
    """Compare memory and seconds of a forward and a backward pass with activations on the GPU and on the host."""
    actor = Pretrained(model, dtype="bfloat16").causal().train().to(device)
    tokens = 4096 if device == "cuda" else 64
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, actor.lm.config.vocab_size, (1, tokens), generator=generator).to(device)
    index = torch.arange(tokens - 1, device=device).unsqueeze(0)

    def forward_backward() -> None:
        actor(ids, index, ids[:, 1:], torch.ones_like(index, dtype=torch.bool)).logprobs.mean().backward()

    figures: Figures = {"tokens": tokens}
    for place in ("gpu", "host"):
        actor.zero_grad()
        with nullcontext() if place == "gpu" else ActivationOffload(torch.device(device), actor.parameters()):
            peak_bytes(device, reset=True)
            before = peak_bytes(device)
            figures[f"on_{place}_s"] = round(timed(device, forward_backward, 1), 3)
        figures[f"on_{place}_gib"] = round((peak_bytes(device) - before) / GIB, 2)
    return {"ok": device == "cpu" or figures["on_host_gib"] < figures["on_gpu_gib"], **figures}


def _grpo(device: str, model: str, folder: Path) -> Figures:
    """Take two steps of GRPO under bf16-mixed, with vLLM on the same device."""
    adam = partial(torch.optim.AdamW, lr=1e-6)
    module = GRPOModule(Pretrained(model), optimizer=adam, minibatch_size=8)
    data = PromptDataModule(InMemory([{"prompt": text} for text in _TEXTS]), model, batch_size=2, max_tokens=32)
    loop = RolloutLoop(
        [RewardFunction(even_length)], VLLMEngine(gpu_memory_utilization=0.4), group_size=4, max_response_tokens=32,
        validate_at_ends=False,
    )  # fmt: skip
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else "cpu", devices=1, strategy="rlhf_single", precision="bf16-mixed",
        max_steps=2, callbacks=[loop], default_root_dir=folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    before = next(module.sources["actor"].causal().parameters()).detach().float().sum()
    trainer.fit(module, datamodule=data)
    metrics = {name: round(float(value), 6) for name, value in trainer.callback_metrics.items()}
    names = ("rollout/logprob_diff_mean", "rollout/logprob_diff_max", "time/sync_s", "loss/policy")
    finite = all(bool(parameter.isfinite().all()) for parameter in module.parameters())
    changed = bool(before != next(module.actor.parameters()).detach().float().cpu().sum())
    return {
        "ok": finite and changed and trainer.global_step == 2,
        "engine": loop.engine_description,
        "peak_gib": round(peak_bytes(device) / GIB, 2),
        **{name: metrics.get(name) for name in names},
    }


def even_length(completions: list[str]) -> list[float]:
    """Return 1 for texts of an even length, so that responses to a prompt differ."""
    return [float(len(text) % 2 == 0) for text in completions]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
