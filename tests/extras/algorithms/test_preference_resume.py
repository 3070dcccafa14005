"""A preference run that stops within an epoch resumes there with the original reference."""

from functools import partial

import pytest
import torch

from lightning_rlhf import DPOModule, KTOModule, PreferenceDataModule, UnpairedDataModule
from lightning_rlhf.callbacks import RunCheckpoint
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.lora import LoRA
from tests.stand_ins import TinyModel, quiet_trainer

WORDS = [f"{one}{other}" for one in "abcdefg" for other in "abc"]
PAIRS = [{"prompt": word, "chosen": word[::-1], "rejected": word + "g"} for word in WORDS]
JUDGED = [{"prompt": word, "completion": word[::-1], "label": bool(i % 3)} for i, word in enumerate(WORDS)]
KINDS = {
    "dpo": (DPOModule, PreferenceDataModule, PAIRS, None),
    "dpo with adapters": (DPOModule, PreferenceDataModule, PAIRS, LoRA(2, alpha=4)),
    "kto": (KTOModule, UnpairedDataModule, JUDGED, None),
}


def run(kind, directory, steps, ckpt=None):
    """Return the loss of each step, and the weights at the end; an epoch has five steps."""
    module_kind, data_kind, rows, lora = KINDS[kind]
    losses = []

    class Watch(module_kind):
        def finish_step(self, metrics, bar):
            losses.append(metrics["train/loss"])
            super().finish_step(metrics, bar)

    module = Watch(TinyModel(lora=lora), optimizer=partial(torch.optim.AdamW, lr=1e-2))
    data = data_kind(InMemory(rows), CharacterTokenizer("abcdefg"), batch_size=4)
    options = {"callbacks": [RunCheckpoint(every_n_steps=3)], "enable_checkpointing": True}
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, default_root_dir=directory, **options)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt)
    return losses, [p.detach().clone() for p in module.parameters()]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_run_stopped_within_an_epoch_resumes_like_an_uninterrupted_one(kind, tmp_path):
    undisturbed, weights = run(kind, tmp_path / "whole", 9)
    first, _ = run(kind, tmp_path / "parts", 3)
    rest, resumed = run(kind, tmp_path / "parts", 9, "last")
    assert first + rest == undisturbed
    assert all(torch.equal(one, other) for one, other in zip(weights, resumed, strict=True))
    assert len(set(undisturbed)) == 9
