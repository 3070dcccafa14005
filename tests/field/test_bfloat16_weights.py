"""Trained weights of a source in bfloat16 are stored in float32, so that small updates change them."""

from functools import partial

import pytest
import torch

from lightning_rlhf import ConversationDataModule, FromConfig, SFTModule
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.lora import LoRA
from tests.cli.conftest import LLAMA
from tests.stand_ins import quiet_trainer

ROWS = [{"prompt": "12"[: 1 + i % 2], "completion": "3456"[: 1 + i % 4]} for i in range(8)]


def trained(rate=1e-6, steps=3, precision="32-true", lora=None, dtype="bfloat16"):
    """Return the state before and after a run, and its module."""
    torch.manual_seed(0)
    module = SFTModule(
        FromConfig(LLAMA, seed=0, dtype=dtype, lora=lora), optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=0)
    )
    trainer = quiet_trainer(max_steps=steps, precision=precision)
    module.trainer = trainer
    module.configure_model()
    before = {name: value.clone() for name, value in module.actor.state_dict().items()}
    data = ConversationDataModule(InMemory(ROWS), CharacterTokenizer("0123456789+=: "), batch_size=4, shuffle=False)
    trainer.fit(module, datamodule=data)
    return before, module.actor.state_dict(), module, trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_move_at_small_rates(precision):
    before, after, module, _ = trained(precision=precision)
    assert {value.dtype for value in after.values()} == {torch.float32}
    moved = sum(int((before[name] != after[name]).sum()) for name in before)
    assert moved > 0.9 * sum(p.numel() for p in module.actor.parameters())


def test_products_stay_in_bfloat16_and_start_from_the_same_weights():
    before, _, _, trainer = trained(rate=0.0, steps=1)
    assert all(torch.equal(value, value.bfloat16().float()) for value in before.values())
    loss = float(trainer.callback_metrics["train/loss"])
    whole = float(trained(rate=0.0, steps=1, dtype="float32")[3].callback_metrics["train/loss"])
    mixed = float(trained(rate=0.0, steps=1, precision="bf16-mixed")[3].callback_metrics["train/loss"])
    assert loss == mixed
    assert loss != whole
    assert loss == pytest.approx(whole, rel=0.02)


def test_base_under_adapters_stays_in_bfloat16():
    _, _, module, _ = trained(lora=LoRA(2, 4))
    frozen = {name: p.dtype for name, p in module.actor.named_parameters() if not p.requires_grad}
    assert set(frozen.values()) == {torch.bfloat16}
    assert not module.actor.computes_in_bfloat16
