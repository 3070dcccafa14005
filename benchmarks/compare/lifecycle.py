"""Start, checkpoints and resume of a run: ``python -m benchmarks.compare.lifecycle LIBRARY PART DIRECTORY RESULT``.

LIBRARY is ours, or trl in the virtual environment of the peers. PART is start-sft or start-grpo, from the start of the
process to the end of the first step; save, SFT of SmolLM2 with a checkpoint after every third step; or resume, from
the start of a process that continues the run of save to the end of its next step.
"""

import importlib
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.compare import task
from benchmarks.compare.meter import Meter

TASKS = {"start-sft": "sft", "start-grpo": "grpo", "save": "sft-smollm2", "resume": "sft-smollm2"}
EVERY = 3  # steps from one checkpoint to the next
STEPS = {"start-sft": 1, "start-grpo": 1, "save": 2 * EVERY + 1, "resume": 2 * EVERY + 2}


class Clock:
    """Seconds from the start of this process to the end of its first step, and those of checkpoints.

    Args:
        part: argument of the command.
        result: JSON file to write.
    """

    def __init__(self, part: str, result: Path) -> None:
        self.part, self.result, self.meter = part, result, Meter(result)
        self.first: dict[str, float] | None = None
        self.waits: list[float] = []

    def step(self) -> None:
        """End a step."""
        if self.first is None:
            wall = time.time() - self.meter.process.create_time()
            self.first = {"wall": wall, "cpu": self.meter.cpu_seconds()}

    def saved(self, began: float) -> None:
        """End the wait for a checkpoint.

        Args:
            began: when it began, by ``time.perf_counter``.
        """
        self.waits.append(time.perf_counter() - began)

    def write(self, folder: Path) -> None:
        """Write the seconds; of a run with checkpoints also the bytes of the newest one."""
        assert self.first is not None
        content: dict[str, float] = {**self.first, "peak_bytes": self.meter.peak()}
        if self.waits:
            sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
            content |= {"wait": statistics.median(self.waits), "megabytes": sum(sizes) / 1e6}
        self.result.write_text(json.dumps(content))


def ours(clock: Clock, directory: Path, folder: Path) -> Path:
    """Train with lightning-rlhf; return where the checkpoints are."""
    runs = importlib.import_module("benchmarks.compare.ours")  # sets the environment, so it comes first
    import lightning as L

    from lightning_rlhf.callbacks import RunCheckpoint, complete

    class TimedCheckpoint(RunCheckpoint):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            began = time.perf_counter()
            super().on_train_batch_end(trainer, *rest)
            if trainer.global_step % EVERY == 0:
                clock.saved(began)

    class Ends(L.Callback):
        def on_train_batch_end(self, *rest: Any) -> None:
            clock.step()

    L.seed_everything(1)
    module, data, callbacks = runs.parts_of(TASKS[clock.part], directory)
    saves = clock.part in ("save", "resume")
    callbacks += [Ends(), TimedCheckpoint(every_n_steps=EVERY, every_n_minutes=None)] if saves else [Ends()]
    trainer = L.Trainer(
        max_steps=STEPS[clock.part],
        callbacks=complete(callbacks),
        default_root_dir=folder,
        accelerator="cpu",
        strategy="rlhf_single",
        logger=False,
        enable_checkpointing=saves,
        enable_progress_bar=False,
    )
    last = folder / "checkpoints" / "last.ckpt"
    trainer.fit(module, datamodule=data, ckpt_path=str(last) if clock.part == "resume" else None)
    return last


def trl(clock: Clock, directory: Path, folder: Path) -> Path:
    """Train with TRL; return where the checkpoints are."""
    trl_runs = importlib.import_module("benchmarks.compare.trl_runs")  # sets the environment, so it comes first
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            if clock.part != "start-grpo" or state.global_step == task.CHAINS.responses // task.CHAINS.minibatch:
                clock.step()

    class Timed(SFTTrainer):
        def _save_checkpoint(self, *rest: Any, **options: Any) -> None:
            began = time.perf_counter()
            super()._save_checkpoint(*rest, **options)
            if self.state.global_step % EVERY == 0:
                clock.saved(began)

    if clock.part == "start-grpo":
        trl_runs.score_only_responses()
        trl_runs.grpo(directory, clock.meter, 1, "grpo-vllm", [Ends()])
        return folder
    source = directory / task.sizes_of(TASKS[clock.part]).folder
    arguments = trl_runs.common(directory, STEPS[clock.part], task.SAVED_ROWS if source != directory else task.ROWS)
    arguments |= {"output_dir": str(folder), "gradient_accumulation_steps": 1}
    if clock.part != "start-sft":
        arguments |= {"save_strategy": "steps", "save_steps": EVERY, "save_total_limit": 1}
    rows = trl_runs.rows_of(source / "problems.jsonl")
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(source / "model", dtype=torch.float32),
        args=SFTConfig(**arguments, max_length=128),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(source / "tokenizer"),
        callbacks=[Ends()],
    )
    trainer.train(resume_from_checkpoint=clock.part == "resume")
    return max(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime, default=folder)


def main(library: str, part: str, directory: str, result: str) -> None:
    """Train and write the seconds."""
    folder = Path(directory) / f"lifecycle-{library}"
    if part != "resume":
        shutil.rmtree(folder, ignore_errors=True)
    clock = Clock(part, Path(result))
    clock.write({"ours": ours, "trl": trl}[library](clock, Path(directory), folder))
    sys.stdout.flush()
    os._exit(0)  # the threads of TRL's vLLM would keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
