"""A task with a tool, which both libraries run: the sum of two numbers, computed by a call and then said."""

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.compare import task

PROMPTS, GROUP, MINIBATCH = 16, 8, 64
PROMPT_TOKENS, RESPONSE_TOKENS = 32, 96
CHARACTERS = '0123456789+"{}:, abcdefghijklmnopqrstuvwxyz_\n'
SPECIAL = ("<pad>", "<bos>", "<|im_end|>", "<unk>", "<|im_start|>", "<tool_call>", "</tool_call>")
END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.content %}"
    "{{ message.content }}{% endif %}{% for call in message.tool_calls or [] %}{{ '<tool_call>' + "
    "('{\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) + '}')"
    " + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The sum.
    """
    return str(a + b)


class Calculator:
    """The same tool as TRL's environments offer it: a method of an object for each conversation."""

    def reset(self, **row: Any) -> None:
        """Begin a conversation."""

    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            The sum.
        """
        return str(a + b)


def problems(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows with the columns ``prompt``, messages, and ``answer``."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": f"{a}+{b}"}], "answer": str(a + b)} for a, b in pairs]


def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Return conversations, with a wrong argument in one of five."""
    draw = random.Random(seed)
    rows = []
    for row in problems(count, seed):
        a, b = map(int, row["prompt"][0]["content"].split("+"))
        a = draw.randrange(10, 100) if draw.random() < 0.2 else a
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
        turns = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": add(a, b)},
            {"role": "assistant", "content": add(a, b)},
        ]
        rows.append({"messages": [*row["prompt"], *turns]})
    return rows


def prepare(directory: Path, warm_steps: int = 300) -> None:
    """Write tokenizer, rows and a small model that has seen conversations."""
    if (directory / "model").exists():
        return
    import lightning as L
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from lightning_rlhf import ConversationDataModule, FromConfig, SFTModule
    from lightning_rlhf.callbacks import complete

    directory.mkdir(exist_ok=True)
    names = [*SPECIAL, *CHARACTERS]
    characters = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", bos_token="<bos>", eos_token=END, unk_token="<unk>",
        padding_side="left", chat_template=TEMPLATE,
    )  # fmt: skip
    tokenizer.add_tokens(list(SPECIAL[4:]))
    tokenizer.save_pretrained(directory / "tokenizer")
    for name, rows in (("problems", problems(4_000, seed=1)), ("demonstrations", demonstrations(9_600, seed=2))):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    L.seed_everything(1)
    module = SFTModule(
        FromConfig({**task.ARCHITECTURE, "vocab_size": len(names)}),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0),
    )
    data = ConversationDataModule(
        train=str(directory / "demonstrations.jsonl"), tokenizer=str(directory / "tokenizer"), batch_size=32,
        max_tokens=PROMPT_TOKENS + RESPONSE_TOKENS,
    )  # fmt: skip
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_steps=warm_steps, callbacks=complete([]), default_root_dir=directory / "warm", **options)
    trainer.fit(module, datamodule=data)
    module.actor.save_pretrained(directory / "model")


def ours(directory: Path, optimizer: Any) -> tuple[Any, Any, list[Any]]:
    """Return lightning-rlhf's module, data and callbacks."""
    from lightning_rlhf import GRPOModule, PromptDataModule
    from lightning_rlhf.callbacks import RolloutLoop
    from lightning_rlhf.environments import EnvironmentSettings, JSONToolCalls, Tools
    from lightning_rlhf.objectives.aggregation import TokenMean
    from lightning_rlhf.objectives.kl_controllers import KLTerm
    from lightning_rlhf.rewards.function import RewardFunction
    from lightning_rlhf.tasks.calculator import right

    module = GRPOModule(
        str(directory / "model"), kl_loss=KLTerm(0.0), aggregation=TokenMean(), optimizer=optimizer,
        minibatch_size=MINIBATCH,
    )  # fmt: skip
    data = PromptDataModule(
        train=str(directory / "problems.jsonl"), tokenizer=str(directory / "tokenizer"), batch_size=PROMPTS,
        max_tokens=PROMPT_TOKENS,
    )  # fmt: skip
    loop = RolloutLoop(
        [RewardFunction(right)],
        environment=EnvironmentSettings(Tools, {"functions": [add]}, parser=JSONToolCalls(), max_turns=3),
        group_size=GROUP,
        max_response_tokens=RESPONSE_TOKENS,
        validate_at_ends=False,
    )
    return module, data, [loop]


def trl(directory: Path, arguments: dict[str, Any], callbacks: list[Any], measured: dict[str, float]) -> Any:
    """Return TRL's trainer.

    Args:
        arguments: of its configuration.
        measured: gets tokens and reward of each step.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer")
    tokenizer.response_template = qwen3_template

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            measured["tokens"] = float(output["prompt_mask"].sum() + output["completion_mask"].sum())
            return output

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        rewards = [
            float(messages[-1]["role"] == "assistant" and messages[-1]["content"] == wanted)
            for messages, wanted in zip(completions, answer, strict=True)
        ]
        measured["reward"] = sum(rewards) / len(rewards)
        return rewards

    arguments |= {"num_generations": GROUP, "beta": 0.0, "loss_type": "dapo", "max_completion_length": RESPONSE_TOKENS}
    arguments |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1}
    arguments |= {"vllm_max_model_length": 512, "max_tool_calling_iterations": 2}
    return Trainer(
        model=AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32),
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(task.rows_of(directory / "problems.jsonl")),
        reward_funcs=reward,
        environment_factory=Calculator,
        processing_class=tokenizer,
        callbacks=callbacks,
    )
