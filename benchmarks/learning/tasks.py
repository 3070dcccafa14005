"""The tasks whose time to accuracy is measured, and the evaluation that both libraries share.

addition: the quickstart's model of 0.4 M parameters, which often forgets a carry; the reward is 1 for the exact answer.
addition-ppo, addition-sft, addition-dpo, addition-distillation: the same model and answers with other algorithms.
problems: SmolLM2-135M-Instruct on word problems after two worked examples; the reward is 1 for the right number.
chainsum, backward: SmolLM2-135M-Instruct on two tasks of the package reasoning-gym after two worked examples.
"""

import itertools
import json
import random
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Task:
    """A task; both libraries get the same rows, responses, updates and learning rates.

    Attributes:
        name: name of its rows and, if it is not GRPO, of its algorithm.
        prompts: prompts of a step, each with ``group`` responses, of which ``minibatch`` make an update.
        peer_rows: responses of a forward pass of TRL, the number with which it is fast and needs little memory.
        every: steps between two evaluations, which do not count as time.
        sweep_seeds: number of seeds with which learning rates are swept, at most.
        val_rows: held-out rows of an evaluation.
        rates: learning rates that are swept, of all weights and of adapters.
    """

    name: str
    prompts: int
    group: int
    minibatch: int
    prompt_tokens: int
    response_tokens: int
    steps: int
    every: int
    rates: dict[str, tuple[float, ...]]
    peer_rows: int = 32
    sweep_seeds: int = 5
    val_rows: int = 256
    variants: tuple[str, ...] = field(default=("full-float32", "lora-float32", "full-bfloat16", "lora-bfloat16"))

    @property
    def rows(self) -> str:
        """Folder of model and rows."""
        return self.name.partition("-")[0]

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return self.name.partition("-")[2] or "grpo"

    @property
    def responses(self) -> int:
        """Responses of a step."""
        return self.prompts * self.group


TASKS = {
    task.name: task
    for task in (
        Task(
            "addition", prompts=4, group=8, minibatch=32, prompt_tokens=16, response_tokens=40, steps=16, every=1,
            rates={"full": (5e-5, 1e-4, 2e-4, 4e-4), "lora": (2.5e-4, 5e-4, 1e-3, 2e-3)},
        ),
        *(
            Task(
                f"addition-{algorithm}", prompts=32, group=1, minibatch=size, prompt_tokens=16, response_tokens=40,
                steps=steps, every=1, rates={"full": rates}, variants=("full-float32",),
            )
            for algorithm, size, steps, rates in (
                ("ppo", 16, 24, (5e-5, 1e-4, 2e-4, 4e-4)),
                ("sft", 32, 24, (2e-4, 4e-4, 8e-4)),
                ("dpo", 32, 16, (2e-5, 5e-5, 1e-4)),
                ("distillation", 32, 24, (2e-4, 4e-4, 8e-4)),
            )
        ),
        Task(
            "problems", prompts=8, group=8, minibatch=64, prompt_tokens=160, response_tokens=24, steps=12, every=2,
            rates={"full": (3e-6, 1e-5, 3e-5), "lora": (1e-4, 2e-4, 4e-4)}, peer_rows=8, sweep_seeds=1,
            variants=("full-float32", "lora-bfloat16"),
        ),
        *(
            Task(
                name, prompts=8, group=8, minibatch=64, prompt_tokens=160, response_tokens=12, steps=12, every=2,
                rates={"full": (3e-6, 1e-5, 3e-5), "lora": (1e-4, 2e-4, 4e-4)}, peer_rows=8, sweep_seeds=1,
                variants=("full-float32", "lora-bfloat16"),
            )
            for name in ("chainsum", "backward")
        ),
    )
}  # fmt: skip
RANK, ALPHA = 16, 32
BETA = 0.1  # of DPO
KL, VALUE, VALUE_CLIP = 0.05, 0.1, 0.2  # coefficients and clip range of PPO


def right_sum(completions: list[str], answer: list[str], finished: list[bool]) -> list[float]:
    """Return 1 for a finished response that equals the worked answer."""
    return [float(end and text == wanted) for text, wanted, end in zip(completions, answer, finished, strict=True)]


def right_number(completions: list[str], answer: list[str], finished: list[bool]) -> list[float]:
    """Return 1 for a finished response whose last number is the answer."""
    right: Callable[..., list[float]] = runpy.run_path(str(ROOT / "examples/smollm2/arithmetic.py"))["right"]
    return right(completions, answer, finished)


# By the name of the rows
REWARDS: dict[str, Callable[..., list[float]]] = {
    "addition": right_sum, "problems": right_number, "chainsum": right_sum, "backward": right_sum,
}  # fmt: skip
GYM: dict[str, tuple[str, dict[str, Any]]] = {
    "chainsum": ("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}),
    "backward": ("spell_backward", {"min_word_len": 3, "max_word_len": 4}),
}


def prepare(name: str, directory: Path) -> None:
    """Write the model, and train.jsonl and val.jsonl with the columns ``prompt``, a text, and ``answer``."""
    (directory / name).mkdir(parents=True, exist_ok=True)
    task = TASKS[name]
    folder = directory / task.rows
    if not (folder / "val.jsonl").exists():
        prepare_rows(task.rows, folder)
    if task.algorithm == "dpo" and not (folder / "pairs.jsonl").exists():
        write_pairs(folder / "pairs.jsonl")
    if task.algorithm == "distillation" and not (folder / "teacher").exists():
        train_teacher(folder)


def write_pairs(path: Path) -> None:
    """Write right answers beside those that forget a carry."""
    from lightning_rlhf.tasks.addition import Demonstrations, worked_answer

    rows = []
    for _, row in Demonstrations(5120, seed=4).rows():
        prompt, answer = str(row["prompt"]), str(row["completion"])
        right = worked_answer(int(prompt[:3]), int(prompt[4:7]))
        if answer != right:
            rows.append({"prompt": prompt, "chosen": right, "rejected": answer})
    write(path, rows)


def train_teacher(folder: Path) -> None:
    """Train the model on right answers for a while."""
    import lightning as L

    from lightning_rlhf import ConversationDataModule, SFTModule
    from lightning_rlhf.callbacks import complete

    L.seed_everything(1)
    model = str(folder / "model")
    module = SFTModule(model, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0))
    rows = {"train": str(folder / "train.jsonl"), "columns": {"completion": "answer"}}
    data = ConversationDataModule(**rows, tokenizer=model, batch_size=64, max_tokens=56)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_steps=200, callbacks=complete([]), default_root_dir=folder / "teaching", **options)
    trainer.fit(module, datamodule=data)
    module.actor.save_pretrained(folder / "teacher")


def prepare_rows(name: str, folder: Path) -> None:
    """Write model and rows."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "addition":
        from lightning_rlhf.tasks.addition import Problems

        command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", "configs/quickstart/sft.yaml"]
        command += ["--trainer.default_root_dir", str(folder / "sft")]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (folder / "model").symlink_to("sft/export")
        for file, problems in (("train", Problems(2560, seed=2)), ("val", Problems(512, held_out=True))):
            rows = [{"prompt": row["prompt"], "answer": row["answer"]} for _, row in problems.rows()]
            write(folder / f"{file}.jsonl", rows)
        return
    from transformers import AutoTokenizer

    examples = ROOT / "examples/smollm2"
    runpy.run_path(str(examples / "make_model.py"))["main"](str(folder / "model"))
    if name in GYM:
        write_gym(name, folder, AutoTokenizer.from_pretrained(folder / "model"))
        return
    subprocess.run([sys.executable, examples / "word_problems.py", folder / "messages"], check=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for file in ("train", "val"):
        rows = [json.loads(line) for line in (folder / f"messages/{file}.jsonl").read_text().splitlines()]
        texts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in rows]
        write(
            folder / f"{file}.jsonl",
            [{"prompt": text, "answer": row["answer"]} for text, row in zip(texts, rows, strict=True)],
        )


def write_gym(name: str, folder: Path, tokenizer: Any) -> None:
    """Write questions of reasoning-gym after two worked examples."""
    from lightning_rlhf.extras.environments.reasoning_gym import ReasoningGym

    dataset, arguments = GYM[name]
    for file, count, seed in (("train", 2_000, 1), ("val", 256, 2)):
        drawn = [row for _, row in ReasoningGym(dataset, count + 2, seed, arguments).rows()]
        turns = [
            {"role": role, "content": str(row[column])}
            for row in drawn[:2]
            for role, column in (("user", "prompt"), ("assistant", "answer"))
        ]
        rows = [
            {
                "prompt": tokenizer.apply_chat_template(
                    [*turns, {"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
                ),
                "answer": str(row["answer"]),
            }
            for row in drawn[2:]
        ]
        write(folder / f"{file}.jsonl", rows)


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[dict[str, str]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class Evaluation:
    """Greedy accuracy on held-out rows, by transformers, whatever the library that trains."""

    def __init__(self, name: str, directory: Path, tokenizer: Any, dtype: str) -> None:
        self.task, self.tokenizer, self.in_bfloat16 = TASKS[name], tokenizer, dtype == "bfloat16"
        self.reward = REWARDS[self.task.rows]
        drawn = read(directory / self.task.rows / "val.jsonl")
        self.rows = random.Random(0).sample(drawn, min(self.task.val_rows, len(drawn)))
        self.texts = [tokenizer.encode(row["prompt"], add_special_tokens=False) for row in self.rows]
        # Number of tokens that all prompts begin with, which the model reads once. Of sorted texts, all begin with what
        # the first and the last one share.
        pairs = zip(min(self.texts), max(self.texts), strict=False)
        equal = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        self.shared = min(equal, *(len(text) - 1 for text in self.texts))

    @torch.no_grad()
    def __call__(self, model: Any) -> float:
        """Return the fraction of right greedy responses of a model of transformers, in the dtype of the run."""
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=self.in_bfloat16):
            return self._accuracy(model)

    def _accuracy(self, model: Any) -> float:
        training, device, pad = model.training, next(model.parameters()).device, self.tokenizer.pad_token_id
        model.eval()
        end, scores = self.tokenizer.eos_token_id, []
        for first in range(0, len(self.rows), 128):
            texts, rows = self.texts[first : first + 128], self.rows[first : first + 128]
            longest, shared = max(map(len, texts)), self.shared
            ids = torch.tensor(
                [text[:shared] + [pad] * (longest - len(text)) + text[shared:] for text in texts], device=device
            )
            mask = torch.tensor(
                [[1] * shared + [0] * (longest - len(text)) + [1] * (len(text) - shared) for text in texts],
                device=device,
            )
            cache = None
            if shared:
                cache = model(input_ids=ids[:1, :shared], use_cache=True).past_key_values
                cache.batch_repeat_interleave(len(texts))
            made = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=self.task.response_tokens,
                eos_token_id=end, pad_token_id=pad, temperature=None, top_p=None, top_k=None, past_key_values=cache,
            )[:, longest:].tolist()  # fmt: skip
            finished = [end in tokens for tokens in made]
            cut = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in made]
            answers = [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in cut]
            scores += self.reward(answers, [row["answer"] for row in rows], finished)
        model.train(training)
        return sum(scores) / len(scores)


class Curve:
    """Accuracy against the processor and wall seconds that training took until then."""

    def __init__(self, evaluation: Evaluation, meter: Any, every: int) -> None:
        self.evaluation, self.meter, self.every = evaluation, meter, every
        self.points: list[dict[str, float]] = []
        self.cpu = self.wall = 0.0
        self.begun: tuple[float, float] | None = None

    def start(self) -> None:
        """Let the time run."""
        self.begun = (self.meter.cpu_seconds(), time.perf_counter())

    def stop(self) -> None:
        """Stop the time."""
        assert self.begun is not None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.cpu += self.meter.cpu_seconds() - self.begun[0]
        self.wall += time.perf_counter() - self.begun[1]

    def point(self, step: int, model: Any, reward: float = float("nan")) -> None:
        """Evaluate every few steps while the time stands still."""
        if step % self.every:
            return
        self.stop()
        accuracy = self.evaluation(model)
        point = {"step": step, "cpu": self.cpu, "wall": self.wall, "accuracy": accuracy, "reward": reward}
        self.points.append(point | {"gpus": torch.cuda.device_count()})
        print(f"step {step}: {accuracy:.3f} after {self.cpu:.1f} CPU s, {self.wall:.1f} s", flush=True)
        self.start()
