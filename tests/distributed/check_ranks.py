"""Comparisons of heads and layouts before the first step on several ranks; see :func:`checks`."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from typing import Any
from unittest import mock

from lightning.pytorch import Callback, Trainer

from lightning_rlhf.batching.packing import PackedLengths, Packing, pack_texts
from lightning_rlhf.models import packed_attention
from lightning_rlhf.models.heads import Head, head_of
from lightning_rlhf.modules import text_layout
from tests.distributed.tasks import parts, strategy_of
from tests.stand_ins import quiet_trainer


def doubled(lm: Any) -> Head:
    """Return the head of a model with logits that are twice as large."""
    head = head_of(lm)
    return head._replace(scale=2 * head.scale)


def unseparated(*arguments: Any) -> Packing:
    """Lay out several texts in one row without masking attention between them."""
    packing = pack_texts(*arguments)
    return dataclasses.replace(packing, lengths=PackedLengths((packing.lengths.tokens,), ((),)))


class Checks(Callback):
    """Repeats the comparisons with correct models, with texts that are not separated, and with a wrong head."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {}
        self.steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        layout = pl_module.layout
        self.result["packed at the start"] = layout.packed
        with mock.patch.object(packed_attention, "ARCHITECTURES", frozenset()):  # the texts are compared, too
            layout.check()
            self.result["packed"] = layout.packed
            with mock.patch.object(text_layout, "pack_texts", unseparated):
                layout.check()
            self.result["packed without separation"] = layout.packed
        layout.packed = True
        # Ranks that split tensors have the same outputs, so that both find a fault.
        fault = "a reason" if trainer.global_rank or pl_module.data_ranks.size == 1 else None
        with mock.patch.object(text_layout, "packing_fault", return_value=fault):
            layout.check()
        self.result["packed with a fault on one rank"] = layout.packed
        with mock.patch("lightning_rlhf.models.causal.head_of", doubled):
            try:
                layout.check()
            except ValueError as error:
                self.result["error"] = str(error)

    def on_train_batch_end(self, *_: Any) -> None:
        self.result["steps"] = self.steps = self.steps + 1


def checks(strategies: list[Any]) -> list[dict[str, Any]]:
    """Return the results of the comparisons under each strategy; each run then takes two steps of PPO."""
    result = []
    for strategy in strategies:
        module, data, callbacks = parts("ppo", heads=2)
        check = Checks()
        with tempfile.TemporaryDirectory() as folder:
            trainer = quiet_trainer(
                strategy=strategy_of(strategy), max_steps=2, max_epochs=-1, devices=int(os.environ["WORLD_SIZE"]),
                default_root_dir=folder, use_distributed_sampler=False, callbacks=[*callbacks, check],
            )  # fmt: skip
            trainer.fit(module, datamodule=data)
        result.append(check.result)
    return result


def wrong_head(strategy: Any, folder: str) -> None:
    """Train a model with a wrong head; each rank writes the error that ends the run to a file."""

    class Note(Callback):
        def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
            with open(f"{folder}/{trainer.global_rank}", "w") as file:
                file.write(str(exception))

    module, data, callbacks = parts("ppo", heads=2)
    trainer = quiet_trainer(
        strategy=strategy_of(strategy), max_steps=2, max_epochs=-1, devices=int(os.environ["WORLD_SIZE"]),
        default_root_dir=folder, use_distributed_sampler=False, callbacks=[*callbacks, Note()],
    )  # fmt: skip
    with mock.patch("lightning_rlhf.models.causal.head_of", doubled):
        trainer.fit(module, datamodule=data)
