"""RolloutLog: writes prompts, responses and rewards to files, prints some of them, and logs them as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from rich.console import Console as RichConsole
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.loggers import log_table
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.types import Experience, PromptBatch, Rollout

from .checks import check_at_least, check_module
from .rollout_loop import RolloutLoop


class RolloutLog(Callback):
    """Writes the responses of each step to ``rollouts/step-000001.jsonl``, and some as a table to console and loggers.

    Loggers also get a table of the first 64 prompts of each validation with their greedy responses and rewards.

    Args:
        max_rows: number of responses to write per step and rank, at least 1.
        table_every_n_steps: steps between tables; 0 prints none.
        table_rows: number of responses in a table, equally spaced from the best to the worst, at least 1.
        max_token_values: number of tokens per step and rank whose texts, log-probabilities and advantages are written,
            about 90 bytes each; responses behind this limit are written without them.
    """

    def __init__(
        self, max_rows: int = 64, table_every_n_steps: int = 10, table_rows: int = 4, max_token_values: int = 2048
    ) -> None:
        check_at_least(1, max_rows=max_rows, table_rows=table_rows)
        check_at_least(0, table_every_n_steps=table_every_n_steps, max_token_values=max_token_values)
        self.max_rows = max_rows
        self.max_token_values = max_token_values
        self.table_every_n_steps = table_every_n_steps
        self.table_rows = table_rows

    def setup(self, trainer: Trainer, pl_module: RLHFModule, stage: str) -> None:
        """Validate the module."""
        check_module(self, pl_module, RLHFModule)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RLHFModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the file of a step, and print a table when it is due."""
        if trainer.fast_dev_run:
            return
        rows = self.rows(trainer, pl_module, correct_answers(pl_module.experience.rollout, batch))
        directory = Path(trainer.default_root_dir) / "rollouts"
        directory.mkdir(parents=True, exist_ok=True)
        rank = f"-rank{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = directory / f"step-{trainer.global_step:06d}{rank}.jsonl"
        # Answers may be any value of the data, such as dates of a parquet file or invalid Unicode.
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
        if self.table_every_n_steps and trainer.global_step % self.table_every_n_steps == 0 and trainer.is_global_zero:
            self._print_table(rows, trainer.global_step, trainer.loggers)

    def on_validation_end(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Log the greedy responses of a validation as a table, where a logger has tables."""
        samples = [
            sample
            for callback in trainer.callbacks
            if isinstance(callback, RolloutLoop)
            for sample in callback.validation_samples
        ]
        if trainer.sanity_checking or not trainer.is_global_zero or not samples:
            return
        columns = list(dict.fromkeys(["prompt", "response", *samples[0]]))
        rows = [[sample.get(name, "") for name in columns] for sample in samples]
        for logger in trainer.loggers:
            log_table(logger, "validation", columns, rows, trainer.global_step)

    def rows(self, trainer: Trainer, module: RLHFModule, answers: list[Any]) -> list[dict[str, Any]]:
        """Return the first responses of the step as plain values.

        Args:
            trainer: trainer of the run.
            module: module with the experience of the step.
            answers: correct answer to each response's prompt; empty if the data has no answers.
        """
        count = min(self.max_rows, len(module.experience.rollout))
        experience = module.experience[list(range(count))].to("cpu")
        rollout = experience.rollout
        tokenizer = trainer.datamodule.tokenizer
        kl = (experience.old_logprobs - experience.ref_logprobs).sum(1)
        rows = []
        left = self.max_token_values
        group_size = len(module.experience.rollout) // len(module.experience.rollout.group.unique())
        for i in range(count):
            left -= int(rollout.response_lengths[i])
            prompt = rollout.prompt_ids[i, : rollout.prompt_lengths[i]]
            response = rollout.response_ids[i, : rollout.response_lengths[i]]
            rows.append(
                {
                    "prompt": tokenizer.decode(prompt, skip_special_tokens=True),
                    "response": tokenizer.decode(response, skip_special_tokens=True),
                    **segments_of(tokenizer, rollout, i),
                    **({"ground_truth": answers[i]} if answers else {}),
                    "reward": experience.reward[i].item(),
                    "rewards": {name: values[i].item() for name, values in rollout.rewards.items()},
                    "kl": kl[i].item(),
                    "truncated": bool(rollout.truncated[i]),
                    "policy_version": int(rollout.policy_version[i][rollout.response_mask[i]].min()),
                    "group": int(rollout.position[i]) // group_size,
                    **({"tokens": token_values(tokenizer, experience, i)} if left >= 0 else {}),
                }
            )
        return rows

    def _print_table(self, rows: list[dict[str, Any]], step: int, loggers: Sequence[Logger] = ()) -> None:
        """Print some responses, and log them as a table where a logger has tables."""
        ranked = sorted(rows, key=lambda row: row["reward"], reverse=True)
        count = min(self.table_rows, len(ranked))
        shown = [ranked[round(i * (len(ranked) - 1) / max(count - 1, 1))] for i in range(count)]
        marks = "; turns of the policy are in ⟦ ⟧" if any("segments" in row for row in shown) else ""
        table = Table(title=f"Responses of step {step}, best to worst{marks}", title_justify="left", expand=False)
        texts = ("prompt", "response", *(["ground_truth"] if "ground_truth" in shown[0] else []))
        columns = (*texts, "reward", *shown[0]["rewards"])
        for heading in columns:
            table.add_column(heading, overflow="fold")
        cells = [
            [
                *(_marked(row) if name == "response" else str(row[name]) for name in texts),
                row["reward"],
                *row["rewards"].values(),
            ]
            for row in shown
        ]
        for row in cells:
            table.add_row(*(_short(cell) if isinstance(cell, str) else f"{cell:.2f}" for cell in row))
        RichConsole(highlight=False, markup=False).print(table)
        for logger in loggers:
            log_table(logger, "rollouts", columns, cells, step)


def segments_of(tokenizer: PreTrainedTokenizerBase, rollout: Rollout, row: int) -> dict[str, Any]:
    """Return the parts of a response that policy and environment wrote in turns; nothing without an environment's part.

    A turn before the last has its ``reward``, times the weight of the environment, if it is not 0.

    Args:
        tokenizer: tokenizer that decodes them, special tokens included.
        rollout: rollout of the step, on the CPU.
        row: number of the response.
    """
    length = int(rollout.response_lengths[row])
    mask = rollout.response_mask[row, :length].tolist()
    if all(mask):
        return {}
    rewards = [0.0] * length if rollout.step_rewards is None else rollout.step_rewards[row, :length].tolist()
    tokens = zip(mask, rollout.response_ids[row, :length].tolist(), rewards, strict=True)
    segments = []
    for sampled, part in groupby(tokens, key=itemgetter(0)):
        _, ids, values = zip(*part, strict=True)
        reward = {"reward": sum(values)} if any(values) else {}
        segments.append({"from": "policy" if sampled else "environment", "text": tokenizer.decode(list(ids)), **reward})
    return {"segments": segments}


def _marked(row: dict[str, Any]) -> str:
    """Return the response of a row; of a conversation all its parts, those of the policy in marks."""
    if "segments" not in row:
        return str(row["response"])
    return "".join(f"⟦{part['text']}⟧" if part["from"] == "policy" else part["text"] for part in row["segments"])


def token_values(tokenizer: PreTrainedTokenizerBase, experience: Experience, row: int) -> dict[str, list[Any]]:
    """Return values of each token of a response, by name.

    Args:
        tokenizer: tokenizer that decodes single tokens, special tokens included.
        experience: experience of the step, on the CPU.
        row: number of the response.

    Returns:
        ``ids``, ``texts``, log-probabilities in nats of the actor before the update (``logprob``), of the engine
        (``rollout_logprob``) and of the reference (``ref_logprob``), ``entropy`` of the actor's distribution in nats if
        it was evaluated, ``advantage``, importance ``weight`` in the loss, policy ``version``, and whether a token is
        ``sampled`` and ``in_loss``.
    """
    rollout = experience.rollout
    length = int(rollout.response_lengths[row])
    ids = rollout.response_ids[row, :length].tolist()
    numbers = {
        "logprob": experience.old_logprobs,
        "rollout_logprob": rollout.rollout_logprobs,
        "ref_logprob": experience.ref_logprobs,
        **({} if experience.entropies is None else {"entropy": experience.entropies}),
        "advantage": experience.advantages,
        "weight": experience.weights,
    }
    return {
        "ids": ids,
        "texts": [str(tokenizer.decode([token])) for token in ids],
        **{name: [round(value, 4) for value in values[row, :length].tolist()] for name, values in numbers.items()},
        "version": rollout.policy_version[row, :length].tolist(),
        "sampled": rollout.response_mask[row, :length].tolist(),
        "in_loss": experience.mask[row, :length].tolist(),
    }


def correct_answers(rollout: Rollout, batch: PromptBatch) -> list[Any]:
    """Return the correct answer to the prompt of each response; an empty list if the data has no answers.

    Args:
        rollout: rollout of this rank.
        batch: prompts of this rank.
    """
    answers = getattr(batch, "columns", {}).get("ground_truth")  # a custom loop may have batches of another type
    if answers is None:
        return []
    size = len(rollout) // len(rollout.group.unique())
    prompts = {position: number for number, position in enumerate(batch.positions or range(len(batch)))}
    return [answers[prompts[position // size]] for position in rollout.position.tolist()]


def _short(text: str, limit: int = 300) -> str:
    text = text.strip().encode(errors="backslashreplace").decode()  # data may contain invalid Unicode
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
