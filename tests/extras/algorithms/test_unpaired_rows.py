"""Unpaired data: texts are read like conversations, each with its label and its index."""

import pytest
import torch

from lightning_rlhf import UnpairedDataModule
from lightning_rlhf.extras.algorithms.unpaired_rows import UnpairedBatch
from lightning_rlhf.extras.algorithms.unpaired_rows import UnpairedDataModule as Same
from lightning_rlhf.types import SequenceBatch
from tests.data.rows_given import GivenRows, Letters, error_of, first_batch, module_of

ROWS = [{"prompt": "who?", "completion": " me", "label": True}, {"prompt": "a", "completion": "b", "label": False}]


def test_answers_have_mask_label_and_index():
    module = module_of(UnpairedDataModule, *ROWS, batch_size=2)
    batch = first_batch(module)
    assert Same is UnpairedDataModule
    assert batch.desirable.tolist() == [True, False]
    assert batch.position.tolist() == [0, 1]
    assert batch.texts.loss_mask.tolist() == [[False] * 4 + [True] * 4, [False, True, True] + [False] * 5]
    assert module.tokenizer.decode(batch.texts.input_ids[0, :7]) == "who? me"


def test_conversations_can_have_labels():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    module = module_of(UnpairedDataModule, {"messages": messages, "label": 1}, chat=True)
    batch = first_batch(module)
    assert batch.desirable.tolist() == [True]
    assert module.tokenizer.decode(batch.texts.input_ids[0][batch.texts.loss_mask[0]]) == " yes|</s>"


def test_csv_labels_are_parsed_from_text(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("prompt,completion,label\nwho?,me,True\nwho?,you,false\n")
    module = UnpairedDataModule(str(path), Letters(), batch_size=2, shuffle=False)
    module.setup("fit")
    assert first_batch(module).desirable.tolist() == [True, False]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"label": None}, "label holds None, expected true or false"),
        ({"label": "yes"}, "label holds 'yes', expected true or false"),
        ({"label": 2}, "label holds 2, expected true or false"),
        ({"good": True}, "no column 'label', only ['completion', 'good', 'prompt']"),
        ({"completion": None, "prompt": None, "text": "who?me"}, "column 'completion' holds null, expected text"),
    ],
)
def test_invalid_labels_are_rejected(change, reason):
    row = {**({} if "good" in change else ROWS[0]), "prompt": "who?", "completion": "me", **change}
    assert f"given:1: {reason}" in error_of(UnpairedDataModule, row)


def test_label_column_can_be_renamed():
    row = {"prompt": "who?", "completion": "me", "good": True}
    assert first_batch(module_of(UnpairedDataModule, row, columns={"label": "good"})).desirable.tolist() == [True]


def test_rank_gets_the_indices_of_its_share():
    module = UnpairedDataModule(GivenRows(tuple(ROWS)), Letters(), batch_size=2, shuffle=False)
    module.setup("fit")
    shares = [module.collate([module.examples["train"][position]], [position], [position], 0) for position in (0, 1)]
    assert [share.position.tolist() for share in shares] == [[0], [1]]


def test_unpaired_texts_are_sliced_with_their_labels():
    ids = torch.ones(2, 3, dtype=torch.long)
    texts = SequenceBatch(ids, torch.tensor([3, 1]), ids.bool())
    batch = UnpairedBatch(texts, torch.tensor([True, False]), torch.tensor([4, 2]))
    assert (len(batch), batch.total_lengths.tolist()) == (2, [3, 1])
    assert batch[~batch.desirable].texts.lengths.tolist() == [1]
    with pytest.raises(ValueError, match=r"^UnpairedBatch.desirable has shape \(1,\), expected \(2,\)$"):
        UnpairedBatch(texts, torch.tensor([True]), torch.tensor([0, 1]))
