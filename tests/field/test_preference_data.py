"""Lines about columns that a preference loss does not use, and about a term without which it trains."""

import logging

import pytest

from lightning_rlhf import DPOModule, IPOModule, PreferenceDataModule, RewardModule
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.algorithms.preference_losses import DPOLoss, ORPOLoss
from tests.stand_ins import TinyModel, fit

MARGINS = (0.0, 3.0, 1.0, None)


def pairs(margins=MARGINS):
    rows = [{"prompt": "ab", "chosen": "cd", "rejected": "d"} for _ in margins]
    rows = [row if margin is None else {**row, "margin": margin} for row, margin in zip(rows, margins, strict=True)]
    return PreferenceDataModule(InMemory(rows), CharacterTokenizer("abcd"), batch_size=2, shuffle=False)


@pytest.mark.parametrize(
    ("margins", "count"), [(MARGINS, "2 rows have"), ((2.0,) * 2, "2 rows have"), ((1, 0), "1 row has")]
)
def test_margins_under_a_loss_without_them_are_named(margins, count):
    data = pairs(margins)
    data.setup("fit")
    for kind in (DPOModule, IPOModule):
        assert kind.unused(data) == [
            f"{count} a margin, which {kind.__name__} does not use: its losses have none; RewardModule uses margins"
        ]
    assert RewardModule.unused(data) == []


@pytest.mark.parametrize("margins", [(0.0, 0.0), (None, None)])
def test_rows_without_margins_are_not_mentioned(margins):
    data = pairs(margins)
    data.setup("fit")
    assert DPOModule.unused(data) == []


@pytest.mark.parametrize(
    ("loss", "sft_coef", "is_reported"), [(ORPOLoss(), 0.0, True), (ORPOLoss(), 1.0, False), (DPOLoss(), 0.0, False)]
)
def test_orpo_without_its_supervised_term_is_reported(caplog, loss, sft_coef, is_reported):
    data = pairs((None,) * 2)
    data.setup("fit")
    batch = data.collate(data.examples["train"], [0, 1], [0, 1], epoch=0)
    module = DPOModule(TinyModel(seed=0), loss=loss, sft_coef=sft_coef)
    with caplog.at_level(logging.WARNING):
        fit(module, [batch])
    assert ("ORPOLoss trains without the supervised term of its paper: set sft_coef: 1.0" in caplog.text) == is_reported
