"""Points 7 to 12 of the acceptance: memory, speed, pushes, the order of the start, resuming, and the quickstart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor
from torch import multiprocessing as processes

from benchmarks.acceptance_runs import LETTERS, accelerator, data_of, module_of, trainer_on
from lightning_rlhf.batching.packing import pack_responses
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.extras.doctor.trial import share_of_a
from lightning_rlhf.extras.plan import memory as terms
from lightning_rlhf.extras.plan.architecture import architecture
from lightning_rlhf.extras.plan.setup import Role, Run, Work, strategy
from lightning_rlhf.extras.records.throughput import PEAKS
from lightning_rlhf.functional.logprobs import chunked_token_scores
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.modules.optimizers import use_fused_kernels
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.vllm.sync import WeightSender, in_dtype
from tests.distributed.launch import python_path
from tests.stand_ins import ScriptedEngine

ROOT = Path(__file__).resolve().parents[1]
GIB = 2.0**30
Figures = dict[str, Any]
# 1.5 billion parameters, as Qwen2.5-1.5B
_LARGE = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_SMALL = {**_LARGE, "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}


class Worker:
    """A model that learns from random tokens on the path of training: responses packed after their shared prompts.

    Args:
        device: ``cuda`` or ``cpu``; on a CPU the texts are short.
        source: model; None: 1.5 billion parameters on a GPU, a small one on a CPU.
        rows: number of responses of a micro-batch.
        lengths: tokens of a prompt and of a response on a GPU.
        per_prompt: number of responses to a prompt.
    """

    def __init__(
        self,
        device: str,
        source: FromConfig | None = None,
        rows: int = 8,
        lengths: tuple[int, int] = (256, 768),
        per_prompt: int = 4,
    ) -> None:
        self.device, self.small = device, device == "cpu"
        self.source = source or FromConfig(_SMALL if self.small else _LARGE, seed=0)
        self.model: Any = self.source.causal().train().to(device)
        self.model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        prompt, response = (6, 10) if self.small else lengths
        self.rows, self.scored = rows, rows * response
        ids = torch.randint(3, self.model.lm.config.vocab_size, (rows, prompt + response), device=device)
        groups = [row // per_prompt for row in range(rows)]
        ids[:, :prompt] = ids[[group * per_prompt for group in groups], :prompt]
        self.packing = pack_responses([prompt] * rows, [response] * rows, groups, prompt + response, device)
        self.tokens = self.packing.lengths.tokens
        index = torch.arange(prompt - 1, prompt + response - 1, device=device).expand(rows, -1)
        targets = ids[:, prompt:]
        self.inputs = ids, index, targets, torch.ones_like(targets, dtype=torch.bool)

    def logprobs(self) -> Tensor:
        """Return the log-probabilities of all responses."""
        with torch.autocast(self.device, torch.bfloat16):
            return cast(Tensor, self.model(*self.inputs, packing=self.packing).logprobs)

    def forward_backward(self) -> None:
        """Add the gradients of one micro-batch."""
        (-self.logprobs().mean()).backward()

    def seconds(self, action: Callable[[], object], times: int = 3) -> float:
        """Return the mean seconds of an action, after one run that is not counted."""
        return timed(self.device, action, times)

    def operations(self) -> int:
        """Count the operations of a forward and a backward pass, without attention and recomputation."""
        config = self.model.lm.config
        head = config.vocab_size * config.hidden_size
        matrices = sum(parameter.numel() for parameter in self.model.parameters())
        matrices -= head * (1 if config.tie_word_embeddings else 2)
        return 6 * (matrices * self.tokens + head * self.scored)

    def host_waits(self) -> int:
        """Count the synchronizations of the host with the GPU in a micro-batch."""
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.forward_backward()
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in caught)


def timed(device: str, action: Callable[[], object], times: int = 3) -> float:
    """Return the mean seconds of an action, after one run that is not counted."""
    action()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        action()
    synchronize(device)
    return (time.perf_counter() - began) / times


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(device: str, reset: bool = False) -> float:
    """Return the most bytes allocated since the last reset; 0 on a CPU, where torch does not count them."""
    if device == "cpu":
        return 0.0
    figures = float(torch.cuda.max_memory_allocated())
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return figures


def memory(device: str, folder: Path) -> Figures:
    """Compare the memory of two steps of a 1.5B model with ``plan`` (15 %), and look for a leak and fragmentation."""
    worker = Worker(device)
    adam, peaks = torch.optim.AdamW(worker.model.parameters(), lr=1e-6), list[float]()
    use_fused_kernels(adam)
    for _ in range(3):
        worker.forward_backward()
        torch.nn.utils.clip_grad_norm_(worker.model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        peaks.append(peak_bytes(device, reset=True))
    role = Role("actor", architecture(worker.source.hf_config(), False, 1, "actor"), trained=True)
    longest = -(-worker.tokens // worker.rows)  # prompts are counted once
    work = Work(worker.rows, worker.rows, 1, longest, worker.rows * longest, evaluates_old=False)
    kind = strategy("rlhf_single", checkpointing=True)
    planned, _, when = terms.memory(Run([role], kind, work), 1)
    expected = planned.total() - planned[terms.RUNTIME]
    tokens, vocabulary, width = (64, 500, 64) if worker.small else (8192, 152_000, 1536)
    del adam, worker
    peak_bytes(device, reset=True)
    base = peak_bytes(device)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(vocabulary, width, device=device, dtype=torch.bfloat16)
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    chunked_token_scores(hidden, head, None, targets).logprobs.sum().backward()
    scores = peak_bytes(device) - base
    figures = {
        "step_gib": [round(peak / GIB, 2) for peak in peaks],
        "plan_gib": round(expected / GIB, 2),
        "plan_moment": when,
        "scores_of_8192_tokens_gib": round(scores / GIB, 2),
    }
    if device == "cpu":
        return {"ok": True, **figures, "note": "torch counts no memory on a CPU"}
    figures["reserved_to_allocated"] = round(torch.cuda.max_memory_reserved() / max(peaks), 2)
    right = abs(peaks[-1] / expected - 1) < 0.15 and peaks[2] <= peaks[1] * 1.01 and scores < 5 * GIB
    return {"ok": right, **figures}


def speed(device: str, folder: Path) -> Figures:
    """Measure tokens per second, their fraction of the GPU's peak, the forward pass, AdamW, and waits of the host."""
    worker = Worker(device)
    whole = worker.seconds(worker.forward_backward)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        full = worker.seconds(worker.logprobs)
    figures: Figures = {"tokens_per_s": round(worker.tokens / whole), "forward_share": round(full / whole, 3)}
    for name, options in (("foreach", {"foreach": True}), ("fused", {"fused": True})):
        adam = torch.optim.AdamW(worker.model.parameters(), lr=1e-6, **options)
        figures[f"adamw_{name}_s"] = round(worker.seconds(adam.step), 4)
        del adam
    if device == "cuda":
        peak = next((value for part, value in PEAKS.items() if part in torch.cuda.get_device_name()), None)
        figures["mfu"] = None if peak is None else round(worker.operations() / whole / peak / 1e12, 3)
    figures["host_waits_of_a_micro_batch"] = worker.host_waits()
    return {"ok": figures["tokens_per_s"] > 0, **figures}


def push(device: str, folder: Path) -> Figures:
    """Measure GB/s of weights from the device to shared memory and to another process; bits must arrive unchanged."""
    nbytes, count = (2 << 30, 32) if device == "cuda" else (8 << 20, 4)
    parameters = [(f"w{i}", torch.randn(nbytes // count // 4 // 256, 256, device=device)) for i in range(count)]
    figures: Figures = {"gb": nbytes / 1e9}

    def timed(action: Callable[[], object]) -> float:
        synchronize(device)
        began = time.perf_counter()
        action()
        synchronize(device)
        return round(nbytes / 1e9 / (time.perf_counter() - began), 2)

    for dtype in ("float32", "bfloat16"):  # GB/s of the float32 weights in both cases
        sender = WeightSender()
        write = [timed(lambda s=sender, d=dtype: s.write(in_dtype(iter(parameters), d))) for _ in range(2)]
        figures[f"write_{dtype}_first_and_second_gb_s"] = write
        sender.close()
    for name, pinned in (("pageable", False), ("pinned", True)):
        if pinned and device == "cpu":
            continue
        staging = torch.empty(parameters[0][1].shape, pin_memory=pinned)
        copies = [lambda t=t, s=staging: s.copy_(t) for _, t in parameters]
        figures[f"to_host_{name}_gb_s"] = timed(lambda c=copies: [copy() for copy in c])
    torch.set_num_threads(1)
    for name, target in (("same_dtype", torch.float32), ("to_bfloat16", torch.bfloat16)):
        here = torch.randn(parameters[0][1].shape)
        there = torch.empty_like(here, device=device, dtype=target)
        figures[f"to_device_{name}_gb_s"] = timed(lambda h=here, t=there: [t.copy_(h) for _ in range(count)])
    equal, seconds = _between_processes(parameters, device)
    figures["process_to_process_gb_s"] = round(nbytes / 1e9 / seconds, 2)
    return {"ok": equal, **figures}


def _between_processes(parameters: list[tuple[str, Tensor]], device: str) -> tuple[bool, float]:
    """Send tensors to another process by CUDA IPC, on a CPU by shared memory; return whether all came, and seconds."""
    context = processes.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    receiver = context.Process(target=_receive, args=(there, back, len(parameters), device), daemon=True)
    receiver.start()
    back.get(timeout=60)  # it is ready
    began = time.perf_counter()
    for _, tensor in parameters:
        there.put(tensor)
    sums = back.get(timeout=60)
    seconds = time.perf_counter() - began
    there.put(None)
    receiver.join(30)
    return sums == [_checksum(tensor) for _, tensor in parameters], seconds


def _receive(there: Any, back: Any, count: int, device: str) -> None:
    torch.zeros(1, device=device)  # the context of CUDA takes seconds
    back.put("ready")
    copies = [there.get().clone() for _ in range(count)]
    synchronize(device)
    back.put([_checksum(copy) for copy in copies])
    there.get()


def _checksum(tensor: Tensor) -> int:
    return int(tensor.view(torch.int32).to(torch.int64).sum())


class Measuring(ScriptedEngine):
    """Measures the free memory of the GPU twice from a child process, as vLLM does: at its start and when it is ready.

    Args:
        device: ``cuda`` or ``cpu``, where nothing is measured.
    """

    def __init__(self, device: str) -> None:
        super().__init__(["abca", "defga"], LETTERS.load())
        self.device = device
        self.measured = list[int]()
        code = "torch.cuda.mem_get_info()[0]" if device == "cuda" else "0"
        script = f"import sys, torch\nfor line in sys.stdin:\n    print({code}, flush=True)"
        self._child = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self) -> int:
        """Return the free bytes that the child sees now."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return int(self._child.stdout.readline())

    def start(self, setup: Any) -> None:
        """Measure before anything else of this engine is on the GPU."""
        super().start(setup)
        self.measure()  # makes the child's own context of CUDA
        self.measured.append(self.measure())

    def wait(self) -> str:
        """Measure again after the time that vLLM needs to load, at the first call."""
        if len(self.measured) == 1:
            time.sleep(2 if self.device == "cuda" else 0)
            self.measured.append(self.measure())
        return super().wait()

    def close(self) -> None:
        """End the child."""
        super().close()
        self._child.kill()
        self._child.wait()


def start_order(device: str, folder: Path) -> Figures:
    """Start an engine while a run begins: the free memory that it sees must not change; limit the trainer's memory."""
    engine = Measuring(device)
    loop = RolloutLoop([RewardFunction(share_of_a)], engine, max_response_tokens=8, check_rows=0)
    trainer_on(device, folder, callbacks=[loop], max_steps=1).fit(module_of("ppo"), datamodule=data_of("ppo"))
    change = engine.measured[1] - engine.measured[0]
    figures: Figures = {"free_memory_changed_bytes": change}
    refused = True
    if device == "cuda":
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(0.1)
        try:
            torch.empty(int(0.2 * total), dtype=torch.uint8, device="cuda")
            refused = False
        except torch.cuda.OutOfMemoryError:
            pass
        torch.cuda.set_per_process_memory_fraction(1.0)
        figures["allocation_beyond_the_limit_refused"] = refused
    return {"ok": abs(change) < 2**20 and refused, **figures}


def resume(device: str, folder: Path) -> Figures:
    """Kill a run of PPO after two of four steps and resume it: does it end with the bits of an undisturbed run?"""
    figures: Figures = {}
    for exact in ("default", "exact") if device == "cuda" else ("default",):
        paths = {name: folder / f"{exact}_{name}" for name in ("undisturbed", "again", "killed")}
        undisturbed = _weights(paths["undisturbed"], device, exact)
        again = _weights(paths["again"], device, exact)
        killed = _run(paths["killed"], device, exact, 2, "start").returncode
        resumed = _weights(paths["killed"], device, exact, "resume")
        figures[exact] = {
            "killed": killed == -signal.SIGKILL,
            "the_same_run_twice_has_the_same_bits": undisturbed == again,
            "resumed_has_the_same_bits": undisturbed == resumed,
        }
    # Default algorithms may differ between runs; a run that repeats itself must resume to the same bits.
    right = [run["killed"] and run["resumed_has_the_same_bits"] for run in figures.values() if _repeats(run)]
    return {"ok": bool(right) and all(right), **figures}


def _repeats(run: dict[str, bool]) -> bool:
    return run["the_same_run_twice_has_the_same_bits"]


def _run(folder: Path, device: str, exact: str, kill_after: int, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.acceptance_runs", str(folder), device, exact, str(kill_after), how]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def _weights(folder: Path, device: str, exact: str, how: str = "start") -> str:
    done = _run(folder, device, exact, 0, how)
    lines = [line for line in done.stdout.splitlines() if line.startswith("weights: ")]
    if not lines:
        raise RuntimeError(f"the run ended with code {done.returncode}: {' '.join(done.stderr.split())[-400:]}")
    return lines[-1]


def quickstart(device: str, folder: Path) -> Figures:
    """Run the three files of the quickstart with TransformersEngine on the device: seconds and validation accuracy."""
    figures: Figures = {}
    for name, path in _quickstart_files(folder, device).items():
        began = time.monotonic()
        command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", str(path)]
        environment = {**os.environ, "PYTHONPATH": python_path()}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} ended with code {done.returncode}: {' '.join(done.stderr.split())[-400:]}")
        figures[f"{name}_s"] = round(time.monotonic() - began, 1)
    rows = (folder / "runs/quickstart/ppo/metrics.csv").read_text().splitlines()
    names = rows[0].split(",")
    if "val/fraction_correct_sampled" in names:
        sampled = [row.split(",")[names.index("val/fraction_correct_sampled")] for row in rows[1:]]
        figures["val_sampled"] = [float(value) for value in sampled if value][:: max(1, len(sampled) - 1)]
    return {"ok": True, **figures}


def _quickstart_files(folder: Path, device: str) -> dict[str, Path]:
    engine = {"class_path": "lightning_rlhf.rollout.transformers.TransformersEngine"}
    written = {}
    for name in ("sft", "reward", "ppo"):
        config = yaml.safe_load((ROOT / f"configs/quickstart/{name}.yaml").read_text())
        config["trainer"]["accelerator"] = accelerator(device)
        if device == "cpu":
            config["trainer"] |= {"max_steps": 2, "limit_val_batches": 0}
        for callback in config["trainer"].get("callbacks", []):
            if "RolloutLoop" in str(callback):
                callback["init_args"]["engine"] = engine
        written[name] = folder / f"{name}.yaml"
        written[name].write_text(yaml.safe_dump(config))
    return written
