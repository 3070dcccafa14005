"""RolloutLog: writes prompts, responses and rewards to files, prints some of them, and logs them as tables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console as RichConsole
from rich.table import Table

from lightning_rlhf.callbacks.loop.checks import check_module, last_step_of
from lightning_rlhf.callbacks.loop.rollout_loop import RolloutLoop
from lightning_rlhf.callbacks.loop.rollout_rows import end_of, segments_of
from lightning_rlhf.callbacks.records.run_files import ROLLOUT_FILE
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import for_terminal
from lightning_rlhf.extras.console.rollout_images import Thumbnails, text_of_images, with_images
from lightning_rlhf.extras.console.row_values import (
    correct_answers,
    group_size_of,
    own_parts,
    prompt_images,
    token_values,
    value_counts,
)
from lightning_rlhf.extras.health.forms import form_metrics
from lightning_rlhf.extras.records.values import finite
from lightning_rlhf.loggers import log_table
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.ranges import check_at_least
from lightning_rlhf.types import ConversationRecord


class RolloutLog(Callback):
    """Writes the responses of each step to ``rollouts/step-000001.jsonl``, and some as a table to console and loggers.

    Use it to read what your policy writes. Each validation adds ``rollouts/validation-000010.jsonl`` with its first 64
    prompts, their greedy responses and their rewards, and logs them as a table. If you resume a run or begin it again,
    the files of later steps are removed. Images of prompts are written once to ``rollouts/images``, as thumbnails of at
    most 256 pixels and 20 kB, and at most 2,000 in a run.

    It also logs the form of the written responses of the first rank, ``form/...`` in the documentation of the metrics,
    which :class:`HealthChecks` reads.

    Args:
        max_rows: responses to write per step and rank, at least 1.
        table_every_n_steps: steps between tables. 0 prints none.
        table_rows: responses in a table, equally spaced from the best to the worst, at least 1.
        max_token_values: tokens per step and rank for which text, log-probability and advantage are written, about 90
            bytes each. They are the first tokens of each response, equally many of every response. If that were fewer
            than 16, only the best and the worst responses get them.
    """

    needs_rollouts = True  # a default of runs that have a RolloutLoop

    def __init__(
        self, max_rows: int = 64, table_every_n_steps: int = 10, table_rows: int = 4, max_token_values: int = 2048
    ) -> None:
        check_at_least(1, max_rows=max_rows, table_rows=table_rows)
        check_at_least(0, table_every_n_steps=table_every_n_steps, max_token_values=max_token_values)
        self.max_rows = max_rows
        self.max_token_values = max_token_values
        self.table_every_n_steps = table_every_n_steps
        self.table_rows = table_rows
        self._has_removed = False

    def setup(self, trainer: Trainer, pl_module: RLHFModule, stage: str) -> None:
        """Validate the module."""
        check_module(self, pl_module, RLHFModule)
        self._has_removed = False
        directory = Path(trainer.default_root_dir) / "rollouts"
        self._thumbnails = Thumbnails(directory, trainer.global_rank, trainer.world_size)

    def on_validation_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Remove the files of other steps, before the validation that precedes the first step writes one."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._remove_others(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Remove the files of other steps, if no validation has preceded."""
        self._remove_others(trainer)

    def _remove_others(self, trainer: Trainer) -> None:
        """Remove the files of an earlier run, or those of steps after the checkpoint of this one. Once in a run.

        The first rank removes those of all ranks, before any rank ends a step. Role strategies read the checkpoint
        after ``on_fit_start``, so the step is not known there.
        """
        if self._has_removed or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        self._has_removed = True
        last = -1 if trainer.ckpt_path is None else trainer.global_step
        for path in (Path(trainer.default_root_dir) / "rollouts").glob("*.jsonl"):
            match = re.fullmatch(ROLLOUT_FILE, path.name)
            if match is not None and int(match["step"]) > last:
                path.unlink()
        if trainer.ckpt_path is None:
            self._thumbnails.remove()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RLHFModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the file of a step, log the form of its responses, and print a table when it is due."""
        if trainer.fast_dev_run or not pl_module.role_strategy.is_group_leader:
            return  # ranks that split the model have the same responses
        rollout = last_step_of(self, pl_module).experience.rollout
        rows = self.rows(trainer, pl_module, correct_answers(rollout, batch, _group_size(trainer)))
        pl_module.log_step("responses", form_metrics(rows))
        images = prompt_images(rollout, batch, _group_size(trainer))
        if images:
            records = map(_conversations(trainer).get, rollout.position.tolist())
            images = [
                (*of_prompt, *record.images) if record is not None else of_prompt
                for of_prompt, record in zip(images, records, strict=True)
            ]
        rows = self._with_images(rows, images)
        self._write(trainer, "step", rows)
        if self.table_every_n_steps and trainer.global_step % self.table_every_n_steps == 0 and trainer.is_global_zero:
            self._print_table(rows, trainer.global_step, trainer.loggers)

    def on_validation_end(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        """Write the greedy responses of a validation, and log them as a table, where a logger has tables."""
        validations = [loop.validation for loop in _loops(trainer) if loop.validation is not None]
        if trainer.sanity_checking or not pl_module.role_strategy.is_group_leader:
            return
        samples = [sample for validation in validations for sample in validation.samples]
        images = [_images_of(sample) for sample in samples]
        if trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run:
            rows = [row for validation in validations for row in validation.rows]
            self._write(trainer, "validation", self._with_images(rows, images))
        if not trainer.is_global_zero or not samples:
            return
        if any(images):
            texts = [text_of_images([(image.width, image.height) for image in of_sample]) for of_sample in images]
            samples = [{**sample, "images": text} for sample, text in zip(samples, texts, strict=True)]
        columns = list(dict.fromkeys(["prompt", "response", *samples[0]]))
        cells = [[sample.get(name, "") for name in columns] for sample in samples]
        for logger in trainer.loggers:
            log_table(logger, "validation", columns, cells, trainer.global_step)

    def _with_images(
        self, rows: list[dict[str, Any]], images: Sequence[Sequence[EncodedImage]]
    ) -> list[dict[str, Any]]:
        """Return rows with the images of their texts, whose thumbnails are written.

        Args:
            rows: responses of a step or validation.
            images: images of each one's prompt and conversation, also of responses that are not written; empty
                without images.
        """
        if not any(images):
            return rows
        return [with_images(row, self._thumbnails.add(of_row)) for row, of_row in zip(rows, images, strict=False)]

    def _write(self, trainer: Trainer, kind: str, rows: list[dict[str, Any]]) -> None:
        """Write this rank's responses of a step or validation."""
        directory = Path(trainer.default_root_dir) / "rollouts"
        directory.mkdir(parents=True, exist_ok=True)
        rank = f"-rank{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = directory / f"{kind}-{trainer.global_step:06d}{rank}.jsonl"
        # Answers may be any value of the data, such as dates of a parquet file or invalid Unicode.
        lines = [json.dumps(finite(row), ensure_ascii=False, default=str) + "\n" for row in rows]
        path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")

    def rows(self, trainer: Trainer, module: RLHFModule, answers: list[Any]) -> list[dict[str, Any]]:
        """Return the first responses of the step as plain values.

        Args:
            module: module with the experience of the step.
            answers: correct answer to each response's prompt; empty if the data has no answers.
        """
        step = last_step_of(self, module).experience
        count = min(self.max_rows, len(step))
        experience = step[list(range(count))].to("cpu")
        rollout = experience.rollout
        tokenizer = trainer.datamodule.tokenizer
        text_of = cache(lambda token: str(tokenizer.decode([token])))
        kl = (experience.old_logprobs - experience.ref_logprobs).sum(1)
        scores = {}
        if "reward_model" in module.sources:
            scores = {"score": experience.reward - rollout.reward.nan_to_num(0.0)}
        rewards = {**rollout.rewards, **scores}
        conversations = _conversations(trainer)
        lengths = rollout.response_lengths.tolist()
        valued = value_counts(lengths, experience.reward.tolist(), self.max_token_values)
        group_size = _group_size(trainer) or group_size_of(step.rollout)
        rows = []
        for i in range(count):
            prompt = rollout.prompt_ids[i, : rollout.prompt_lengths[i]]
            position, truncated = int(rollout.position[i]), bool(rollout.truncated[i])
            advantages = experience.advantages[i][experience.mask[i]]
            rows.append(
                {
                    "prompt": tokenizer.decode(prompt, skip_special_tokens=True),
                    "response": tokenizer.decode(rollout.response_ids[i, : lengths[i]], skip_special_tokens=True),
                    **segments_of(tokenizer, rollout, i, module.image_tokens),
                    **({"ground_truth": answers[i]} if answers else {}),
                    "reward": experience.reward[i].item(),
                    "rewards": {name: values[i].item() for name, values in rewards.items()},
                    "advantage": advantages.mean().item() if len(advantages) else None,
                    "kl": kl[i].item() if module.has_ref else None,
                    "response_tokens": lengths[i],
                    "truncated": truncated,
                    **end_of(truncated, conversations.get(position), is_given=not bool(rollout.sampled_rows[i])),
                    "policy_version": int(rollout.policy_version[i][rollout.response_mask[i]].min()),
                    "group": position // group_size,
                    **(
                        {"tokens": token_values(text_of, experience, i, valued[i], module.has_ref)} if valued[i] else {}
                    ),
                }
            )
        return rows

    def _print_table(self, rows: list[dict[str, Any]], step: int, loggers: Sequence[Logger] = ()) -> None:
        """Print some responses, and log them as a table where a logger has tables."""
        ranked = sorted(rows, key=lambda row: -math.inf if math.isnan(row["reward"]) else row["reward"], reverse=True)
        count = min(self.table_rows, len(ranked))
        shown = [ranked[round(i * (len(ranked) - 1) / max(count - 1, 1))] for i in range(count)]
        marks = ""
        if any("segments" in row for row in shown):
            marks = "; turns of the policy are in ⟦ ⟧"
        table = Table(title=f"Responses of step {step}, best to worst{marks}", title_justify="left", expand=False)
        images = ["images"] if any("images" in row for row in shown) else []
        texts = ("prompt", *images, "response", *(["ground_truth"] if "ground_truth" in shown[0] else []))
        columns = (*texts, "reward", *shown[0]["rewards"])
        for heading in columns:
            table.add_column(heading, overflow="fold")
        cells = [
            [
                *(_text_of(row, name) for name in texts),
                row["reward"],
                *row["rewards"].values(),
            ]
            for row in shown
        ]
        for prompt, (_, *row) in zip(own_parts([row["prompt"] for row in shown]), cells, strict=True):
            table.add_row(*(_short(cell) if isinstance(cell, str) else f"{cell:.2f}" for cell in (prompt, *row)))
        RichConsole(highlight=False, markup=False).print(table)
        for logger in loggers:
            log_table(logger, "rollouts", columns, cells, step)


def _loops(trainer: Trainer) -> list[RolloutLoop]:
    return [callback for callback in trainer.callbacks if isinstance(callback, RolloutLoop)]


def _group_size(trainer: Trainer) -> int | None:
    """Return the number of responses per prompt; None without a RolloutLoop."""
    return next((loop.group_size for loop in _loops(trainer)), None)


def _conversations(trainer: Trainer) -> dict[int, ConversationRecord]:
    """Return the records of the conversations of the last step by their positions."""
    return {position: record for loop in _loops(trainer) for position, record in loop.conversations.items()}


def _images_of(sample: dict[str, Any]) -> list[EncodedImage]:
    """Return the images of the prompt of a validation, which are in the column ``images`` of the data."""
    value = sample.get("images")
    return [image for image in value if isinstance(image, EncodedImage)] if isinstance(value, list) else []


def _text_of(row: dict[str, Any], name: str) -> str:
    """Return a value of a row as text of a table."""
    if name == "images":
        return text_of_images([(image["width"], image["height"]) for image in row.get("images", ())])
    return _marked(row) if name == "response" else str(row[name])


def _marked(row: dict[str, Any]) -> str:
    """Return the response of a row; of a conversation all its parts, those of the policy in marks."""
    if "segments" not in row:
        return str(row["response"])
    return "".join(f"⟦{part['text']}⟧" if part["from"] == "policy" else part["text"] for part in row["segments"])


def _short(text: str, limit: int = 300) -> str:
    text = for_terminal(text.strip().encode(errors="backslashreplace").decode())  # data may contain invalid Unicode
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
