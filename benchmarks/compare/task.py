"""The tasks of the comparison.

One is a chain of additions modulo 10, written out by a model of 2.4 M parameters: a prompt names a start, an addend and
a number of steps; the response writes each step, so that its length is the number of steps that the prompt asks for,
from 9 to 63 characters, which are tokens. The other is the sum of two numbers, asked of the chat model SmolLM2-135M.
"""

import json
import math
import random
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+-*=() abcdefghijklmnopqrstuvwxyz.?,\n:"
PAD, BOS, END, UNKNOWN = range(4)
MAX_STEPS = 7
RESPONSE_TOKENS = 64
TEMPLATES = (
    "begin {a} add {b} n {n:02d}:",
    "start {a} then add {b} steps {n:02d}:",
    "please start {a} add {b} count {n:02d}:",
)
ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": END,
}


# Parts of a step of lightning-rlhf whose times it logs.
PARTS = ("generate", "reward", "sync", "check", "evaluate", "update")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a task of GRPO or PPO, which all libraries share.

    Attributes:
        folder: folder of model, tokenizer and rows within the directory of the benchmark.
        group: responses to each prompt.
        minibatch: responses of an update.
        prompt_tokens: longest prompt.
        response_tokens: longest response.
        peer_rows: responses in a forward pass of TRL.
    """

    folder: str
    prompts: int
    group: int
    minibatch: int
    prompt_tokens: int
    response_tokens: int
    learning_rate: float
    peer_rows: int = 64

    @property
    def responses(self) -> int:
        """Responses of a step."""
        return self.prompts * self.group


CHAINS = Sizes(folder="", prompts=32, group=8, minibatch=64, prompt_tokens=64, response_tokens=64, learning_rate=1e-4)
SUMS = Sizes(
    folder="smollm2",
    prompts=8,
    group=8,
    minibatch=32,
    prompt_tokens=128,
    response_tokens=32,
    learning_rate=1e-5,
    peer_rows=8,
)

IMAGES = Sizes(
    folder="images", prompts=32, group=8, minibatch=64, prompt_tokens=32, response_tokens=4, learning_rate=1e-4
)

DISTILLED = 64  # responses of a step of distillation, all of one update
LONG_ROWS = (4_096, 16_384, 65_536)  # tokens of the one text of a step
LONG_ARCHITECTURE = {**ARCHITECTURE, "num_hidden_layers": 1, "max_position_embeddings": 2 * LONG_ROWS[-1]}
SAVED_ROWS = 8  # of a step of SFT between checkpoints of SmolLM2


def tokens_of(run: str) -> int | None:
    """Return the tokens of the long text of a run, such as sft-4096; None for a run with short texts."""
    name, _, tokens = run.removesuffix("-mkl").partition("-")
    return int(tokens) if name == "sft" and tokens.isdigit() else None


LORA = {"rank": 16, "alpha": 32}  # adapters of all linear layers over quantized weights
PICTURES = 2_048  # rows of the tasks with pictures


def sizes_of(run: str) -> Sizes:
    """Return the sizes of a run by its name."""
    return IMAGES if run.startswith("images") else SUMS if "smollm2" in run or run == "qlora" else CHAINS


# Shared by all libraries: SFT and DPO
LEARNING_RATE = 1e-4
ROWS = 64
PEER_ROWS = 8  # in a forward pass of TRL, with which it is fastest
BETA = 0.1


def problems(count: int, seed: int) -> list[dict[str, str]]:
    """Return rows with the columns `prompt` and `answer`."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        steps = min(MAX_STEPS, max(1, round(math.exp(draw.gauss(math.log(3), 0.6)))))
        start, addend = draw.randrange(10), draw.randrange(10)
        lines, value = [], start
        for left in range(steps, 0, -1):
            result = (value + addend) % 10
            lines.append(f"{left:02d}:{value}+{addend}={result}")
            value = result
        prompt = draw.choice(TEMPLATES).format(a=start, b=addend, n=steps)
        rows.append({"prompt": prompt, "answer": " ".join(lines)})
    return rows


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Return rows with a correct answer and one in which a digit is wrong."""
    draw = random.Random(seed)
    rows = []
    for row in problems(count, seed):
        answer = row["answer"]
        index = draw.choice([i for i, letter in enumerate(answer) if letter.isdigit()])
        wrong = draw.choice([digit for digit in "0123456789" if digit != answer[index]])
        rejected = answer[:index] + wrong + answer[index + 1 :]
        rows.append({"prompt": row["prompt"], "chosen": answer, "rejected": rejected})
    return rows


def reward(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Return the fraction of the answer's characters that are at their place; missing and additional ones are wrong."""
    return [
        sum(a == b for a, b in zip(text, expected, strict=False)) / max(len(text), len(expected), 1)
        for text, expected in zip(completions, answer, strict=True)
    ]


def sums(count: int, seed: int) -> list[dict[str, str]]:
    """Return rows with the columns `prompt`, which begins with a solved example, and `answer`."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = draw.randrange(11, 60), draw.randrange(11, 60)
        turns = [("user", "13 + 24"), ("assistant", "13 + 24 = 37"), ("user", f"{a} + {b}")]
        texts = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [("system", "Add."), *turns]]
        rows.append({"prompt": "".join(texts) + "<|im_start|>assistant\n", "answer": f"{a} + {b} = {a + b}"})
    return rows


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer whose tokens are characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(".|\n"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=512,
    ).save_pretrained(directory)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write a JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare_long(directory: Path) -> None:
    """Write a model of one layer with random weights, and long texts."""
    if (directory / f"{LONG_ROWS[-1]}.jsonl").exists():
        return
    from lightning_rlhf import FromConfig

    directory.mkdir(exist_ok=True)
    write_tokenizer(directory / "tokenizer")
    FromConfig(LONG_ARCHITECTURE, seed=1).causal().save_pretrained(directory / "model")
    texts = " ".join(row["answer"] for row in problems(30_000, seed=3))
    for tokens in LONG_ROWS:
        rows = [{"prompt": "a:", "answer": texts[first : first + tokens - 4]} for first in range(0, 8_000, 1_000)]
        write_rows(directory / f"{tokens}.jsonl", rows)


def prepare_images(directory: Path) -> None:
    """Write a vision-language model that has seen some pictures; with random weights, it would write image tokens."""
    if (directory / "model").exists():
        return
    script = Path(__file__).resolve().parents[2] / "examples" / "images" / "make_model.py"
    directory.mkdir(exist_ok=True)
    subprocess.run([sys.executable, script, "idefics3", directory / "model"], check=True)
    (directory / "tokenizer").symlink_to("model")
    import lightning as L
    import torch

    from lightning_rlhf import ConversationDataModule, Pretrained, SFTModule
    from lightning_rlhf.callbacks import complete
    from lightning_rlhf.tasks.drawings import Readings

    L.seed_everything(1)
    source = Pretrained(str(directory / "model"), train_vision=True)
    module = SFTModule(source, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0))
    data = ConversationDataModule(
        train=Readings(PICTURES), tokenizer=str(directory / "model"), batch_size=ROWS, max_tokens=IMAGES.prompt_tokens
    )
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_steps=100, callbacks=complete([]), default_root_dir=directory / "warm", **options)
    trainer.fit(module, datamodule=data)
    module.actor.save_pretrained(directory / "model")


def prepare_sums(directory: Path) -> None:
    """Write the chat model and its data."""
    if (directory / "problems.jsonl").exists():
        return
    directory.mkdir(exist_ok=True)
    script = Path(__file__).resolve().parents[2] / "examples" / "smollm2" / "make_model.py"
    runpy.run_path(str(script))["main"](str(directory / "model"))
    (directory / "tokenizer").symlink_to("model")
    write_rows(directory / "problems.jsonl", sums(2_000, seed=1))


def prepare(directory: Path, warm_steps: int = 150) -> None:
    """Write tokenizer, data and the small model that libraries start from, which is trained on answers for a while."""
    if (directory / "model" / "model.safetensors").exists():
        return
    import lightning as L
    import torch

    from lightning_rlhf import ConversationDataModule, FromConfig, SFTModule
    from lightning_rlhf.callbacks import complete

    write_tokenizer(directory / "tokenizer")
    write_rows(directory / "problems.jsonl", problems(20_000, seed=1))
    write_rows(directory / "pairs.jsonl", pairs(20_000, seed=2))
    L.seed_everything(1)
    module = SFTModule(
        FromConfig(ARCHITECTURE), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    )
    data = ConversationDataModule(
        train=str(directory / "problems.jsonl"),
        tokenizer=str(directory / "tokenizer"),
        columns={"completion": "answer"},
        batch_size=ROWS,
        max_tokens=128,
    )
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        max_steps=warm_steps, callbacks=complete([]), default_root_dir=directory / "warm", **options, accelerator="cpu"
    )
    trainer.fit(module, datamodule=data)
    module.actor.save_pretrained(directory / "model")
