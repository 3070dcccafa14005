"""Train with TRL: ``python -m benchmarks.learning.trl_runs TASK VARIANT RATE SEED DIRECTORY RESULT``.

Runs in the virtual environment of the peers, PPO in that of TRL 1.12. TRL's defaults for GRPO stay (loss ``dapo``, beta
0, rewards scaled by the group), but vLLM's log-probabilities are not corrected, which would take one more forward pass
and which lightning-rlhf does not do either. Where both libraries need a number, it is that of the task.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.compare import trl_runs  # sets the environment of vLLM before anything imports it

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
        self.curve.point(0, getattr(model, "policy", model))  # of PPO

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Evaluate after a step."""
        if state.global_step % self.updates == 0:
            policy = getattr(model, "policy", model)
            self.curve.point(state.global_step // self.updates, policy, self.measured.get("reward", float("nan")))


def vllm_of(task: tasks.Task) -> dict[str, Any]:
    """Return the arguments of trainers that generate with vLLM."""
    return {
        "max_completion_length": task.response_tokens,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3 if torch.cuda.is_available() else 0.1,
        "vllm_max_model_length": task.prompt_tokens + task.response_tokens,
    }


def grpo(task: tasks.Task, folder: Path, weights: str, arguments: dict[str, Any], curve: tasks.Curve) -> None:
    """Train with GRPO."""
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = curve.evaluation.tokenizer
    updates = task.responses // task.minibatch
    measured: dict[str, float] = {}

    def reward(
        completions: list[str], answer: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        finished = [tokens[-1:] == [tokenizer.eos_token_id] for tokens in completion_ids]
        rewards = tasks.REWARDS[task.rows](completions, answer, finished)
        measured["reward"] = sum(rewards) / len(rewards)
        return rewards

    adapters = None
    if weights == "lora":
        from peft import LoraConfig

        adapters = LoraConfig(r=tasks.RANK, lora_alpha=tasks.ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments |= {**vllm_of(task), "max_steps": task.steps * updates, "per_device_train_batch_size": task.peer_rows}
    arguments |= {"gradient_accumulation_steps": task.minibatch // task.peer_rows, "num_generations": task.group}
    arguments |= {"steps_per_generation": task.responses // task.peer_rows}
    arguments |= {"vllm_importance_sampling_correction": False}
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(tasks.read(folder / "train.jsonl")),
        reward_funcs=reward,
        processing_class=tokenizer,
        peft_config=adapters,
        callbacks=[Points(curve, updates, measured)],
    ).train()


def ppo(task: tasks.Task, folder: Path, arguments: dict[str, Any], curve: tasks.Curve) -> None:
    """Train with PPO."""
    tokenizer, rows = curve.evaluation.tokenizer, tasks.read(folder / "train.jsonl")
    answers = {row["prompt"]: row["answer"] for row in rows}

    def reward(prompt: str, response: str, finished: bool) -> float:
        return tasks.REWARDS[task.rows]([response], [answers[prompt]], [finished])[0]

    arguments |= {"num_mini_batches": task.responses // task.minibatch, "num_ppo_epochs": 1, "max_steps": -1}
    arguments |= {"total_episodes": task.steps * task.responses, "response_length": task.response_tokens}
    arguments |= {"kl_coef": tasks.KL, "vf_coef": tasks.VALUE, "local_rollout_forward_batch_size": task.responses}
    arguments |= {"cliprange_value": tasks.VALUE_CLIP}
    judge = trl_runs.reward_as_model(tokenizer, "=", reward, trl_runs.Seen())
    parts = {"reward_model": judge, "callbacks": [Points(curve, 1, {})]}
    trl_runs.ppo_trainer(folder / "model", tokenizer, rows, arguments, **parts).train()


def others(task: tasks.Task, folder: Path, arguments: dict[str, Any], curve: tasks.Curve) -> None:
    """Train with SFT, DPO or distillation."""
    import trl

    rows = tasks.read(folder / ("pairs.jsonl" if task.algorithm == "dpo" else "train.jsonl"))
    parts: dict[str, Any] = {"processing_class": curve.evaluation.tokenizer, "callbacks": [Points(curve, 1, {})]}
    parts["model"] = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    trainer: Any
    if task.algorithm == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
        trainer, parts["args"] = trl.SFTTrainer, trl.SFTConfig(**arguments)
    elif task.algorithm == "dpo":
        trainer, parts["args"] = trl.DPOTrainer, trl.DPOConfig(**arguments, beta=tasks.BETA)
    else:
        rows = [{"prompt": row["prompt"]} for row in rows]
        trainer = trl.DistillationTrainer
        parts["args"] = trl.DistillationConfig(**arguments, **vllm_of(task), beta=1.0)
        parts["teacher_model"] = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    trainer(**parts, train_dataset=Dataset.from_list(rows)).train()


def main(name: str, variant: str, rate: str, seed: str, directory: str, result: str) -> None:
    """Train and write the curve."""
    task, (weights, dtype) = tasks.TASKS[name], variant.split("-")
    folder = Path(directory) / task.rows
    on_gpu = torch.cuda.is_available()
    if not on_gpu and task.algorithm != "ppo":
        score_only_responses()
        patch_vllm(dtype, int(seed))
    arguments = common(Path(result).with_suffix(""), task.steps, task.responses, float(rate), dtype == "bfloat16")
    arguments |= {"seed": int(seed), "use_cpu": not on_gpu}
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    curve = tasks.Curve(tasks.Evaluation(name, Path(directory), tokenizer, dtype), Meter(Path(result)), task.every)
    if task.algorithm == "grpo":
        grpo(task, folder, weights, arguments, curve)
    elif task.algorithm == "ppo":
        ppo(task, folder, arguments, curve)
    else:
        others(task, folder, arguments, curve)
    Path(result).write_text(json.dumps(curve.points))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
