"""Train with TRL: ``python -m benchmarks.learning.trl_runs TASK VARIANT RATE SEED DIRECTORY RESULT``.

Runs in the virtual environment of the peers. TRL's defaults for GRPO stay (loss ``dapo``, beta 0, rewards scaled by the
group, vLLM's log-probabilities corrected by sequence); where both libraries need a number, it is that of the task.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.compare import trl_runs  # noqa: F401  (sets the environment of vLLM before anything imports it)

import torch  # isort: skip
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.compare.meter import Meter
from benchmarks.compare.trl_runs import common, patch_vllm, score_only_responses
from benchmarks.learning import tasks


class Points(TrainerCallback):
    """Evaluates the model every few steps of rollout."""

    def __init__(self, curve: tasks.Curve, updates: int, measured: dict[str, float]) -> None:
        self.curve, self.updates, self.measured = curve, updates, measured

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Evaluate before anything is generated, then let the time run."""
        self.curve.start()
        self.curve.point(0, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Evaluate after a step."""
        if state.global_step % self.updates == 0:
            self.curve.point(state.global_step // self.updates, model, self.measured.get("reward", float("nan")))


def main(name: str, variant: str, rate: str, seed: str, directory: str, result: str) -> None:
    """Train and write the curve."""
    from trl import GRPOConfig, GRPOTrainer

    task, folder, (weights, dtype) = tasks.TASKS[name], Path(directory) / name, variant.split("-")
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        score_only_responses()
        patch_vllm(dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    updates = task.responses // task.minibatch
    arguments = common(
        Path(result).with_suffix(""), task.steps * updates, task.minibatch, float(rate), dtype == "bfloat16"
    )
    arguments |= {"seed": int(seed), "use_cpu": not on_gpu}
    arguments |= {"steps_per_generation": updates, "num_generations": task.group}
    arguments |= {"max_completion_length": task.response_tokens, "use_vllm": True, "vllm_mode": "colocate"}
    arguments |= {"vllm_gpu_memory_utilization": 0.3 if on_gpu else 0.1}
    arguments |= {"vllm_max_model_length": task.prompt_tokens + task.response_tokens}
    measured: dict[str, float] = {}

    def reward(
        completions: list[str], answer: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        finished = [tokens[-1:] == [tokenizer.eos_token_id] for tokens in completion_ids]
        rewards = tasks.REWARDS[name](completions, answer, finished)
        measured["reward"] = sum(rewards) / len(rewards)
        return rewards

    adapters = None
    if weights == "lora":
        from peft import LoraConfig

        adapters = LoraConfig(r=tasks.RANK, lora_alpha=tasks.ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    curve = tasks.Curve(tasks.Evaluation(name, Path(directory), tokenizer), Meter(Path(result)), task.every)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(tasks.read(folder / "train.jsonl")),
        reward_funcs=reward,
        processing_class=tokenizer,
        peft_config=adapters,
        callbacks=[Points(curve, updates, measured)],
    )
    trainer.train()
    Path(result).write_text(json.dumps(curve.points))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
