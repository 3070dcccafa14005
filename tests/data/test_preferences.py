"""Preference pairs share their prompt and have different answers; other rows are rejected."""

import pytest

from lightning_rlhf.data.preferences import PreferenceDataModule
from tests.data.rows_given import error_of, first_batch, module_of


def decoded(module, side, row=0):
    return module.tokenizer.decode(side.input_ids[row, : side.lengths[row] - 1])


def test_both_texts_hold_the_prompt_and_end_token_and_are_padded_separately():
    rows = [{"prompt": "p:", "chosen": "abc", "rejected": "d"}, {"prompt": "qq:", "chosen": "e", "rejected": "f"}]
    module = module_of(PreferenceDataModule, *rows, batch_size=2)
    batch = first_batch(module)
    assert [decoded(module, batch.chosen, row) for row in (0, 1)] == ["p:abc", "qq:e"]
    assert [decoded(module, batch.rejected, row) for row in (0, 1)] == ["p:d", "qq:f"]
    assert batch.chosen.input_ids.shape == (2, 6)
    assert batch.rejected.input_ids.shape == (2, 5)
    assert batch.chosen.loss_mask.sum(1).tolist() == [4, 2]
    assert batch.rejected.loss_mask.sum(1).tolist() == [2, 2]
    assert (batch.chosen.input_ids[0, 5], batch.rejected.input_ids[0, 3]) == (2, 2)
    assert batch.margin.tolist() == [0, 0]


def test_whole_conversations_are_split_after_the_last_marker():
    row = {"chosen": "H: A: a H: A: yes", "rejected": "H: A: a H: A: no"}
    module = module_of(PreferenceDataModule, row, split_after="A:")
    batch = first_batch(module)
    assert (decoded(module, batch.chosen), decoded(module, batch.rejected)) == (row["chosen"], row["rejected"])
    assert (batch.chosen.loss_mask.sum(), batch.rejected.loss_mask.sum()) == (5, 4)  # " yes" and the end, " no" and it


def test_whole_conversations_need_no_marker():
    batch = first_batch(module_of(PreferenceDataModule, {"chosen": "ab", "rejected": "abc"}))
    assert batch.chosen.loss_mask.tolist() == [[False, True, True]]


def test_margin_is_read_from_its_column():
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "delta": 2}
    assert first_batch(module_of(PreferenceDataModule, row, columns={"margin": "delta"})).margin.tolist() == [2.0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "A:x", "rejected": "A:x"}, "chosen and rejected are the same text"),
        ({"chosen": "pA:x", "rejected": "qA:y"}, "chosen and rejected answer different prompts"),
        ({"chosen": "A:x"}, "no column 'rejected', only ['chosen']"),
        ({"chosen": "A:x", "rejected": ""}, "column 'rejected' is empty"),
        ({"chosen": "A:x", "rejected": "A:"}, "nothing follows the last 'A:'"),
        ({"chosen": "A:x", "rejected": "y"}, "the marker 'A:' does not occur in the text"),
        ({"chosen": "A:x", "rejected": None}, "column 'rejected' holds null, expected text"),
        ({"prompt": None, "chosen": "A:x", "rejected": "A:y"}, "column 'prompt' holds null, expected text"),
        ({"chosen": "A:x", "rejected": "A:y", "margin": float("nan")}, "margin is nan, expected a finite number"),
        ({"chosen": "A:x", "rejected": "A:y", "margin": float("inf")}, "margin is inf, expected a finite number"),
        ({"chosen": "A:x", "rejected": "A:y", "margin": "1"}, "margin holds str, expected a number"),
        ({"chosen": "A:x", "rejected": "A:y", "margin": True}, "margin holds bool, expected a number"),
        ({"chosen": "A:x", "rejected": "A:" + "y" * 20}, "a text has 23 tokens, the limit is 10"),
    ],
)
def test_unusable_rows_are_reported_with_a_reason(row, reason):
    assert f"\n  given:1: {reason}" in error_of(PreferenceDataModule, row, split_after="A:", max_tokens=10)


USER = {"role": "user", "content": "hi"}
YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": [USER], "chosen": YES, "rejected": NO},
        {"prompt": "hi", "chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": [USER], "chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": [{"from": "human", "value": "hi"}], "chosen": {"from": "gpt", "value": "yes"}, "rejected": NO},
    ],
)
def test_all_formats_of_messages_give_the_same_pair(row):
    module = module_of(PreferenceDataModule, row, chat=True)
    batch = first_batch(module)
    for side, answer in ((batch.chosen, "yes|"), (batch.rejected, "no|")):
        assert decoded(module, side) == f"user: hi|assistant: {answer}"
        assert module.tokenizer.decode(side.input_ids[0][side.loss_mask[0]]) == f" {answer}</s>"


START = [USER, YES, {"role": "user", "content": "sure"}]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [*START, YES], "rejected": [*START, NO]},
        {"prompt": START, "chosen": [YES], "rejected": [NO]},
        {"prompt": START, "chosen": [*START, YES], "rejected": [*START, NO]},
        {  # as LLaMA-Factory stores ShareGPT's pairs
            "conversations": [
                {"from": "gpt" if message["role"] == "assistant" else "human", "value": message["content"]}
                for message in START
            ],
            "chosen": {"from": "gpt", "value": YES["content"]},
            "rejected": {"from": "gpt", "value": NO["content"]},
        },
    ],
)
def test_common_start_of_both_conversations_is_the_prompt_including_answers(row):
    module = module_of(PreferenceDataModule, row, chat=True)
    batch = first_batch(module)
    assert decoded(module, batch.chosen) == "user: hi|assistant: yes|user: sure|assistant: yes|"
    assert module.tokenizer.decode(batch.chosen.input_ids[0][batch.chosen.loss_mask[0]]) == " yes|</s>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": [USER, YES], "rejected": [USER, YES]}, "chosen and rejected are the same messages"),
        (
            {"chosen": [USER, YES], "rejected": "no"},
            "every message of a rejected answer needs 'role' and text or parts in 'content'",
        ),
        ({"chosen": [USER, YES], "rejected": [USER]}, "the rejected conversation has no assistant message"),
        (
            {"chosen": [USER, {**YES, "mood": "a"}], "rejected": [USER, {**YES, "mood": "b"}]},
            "chosen and rejected have the same tokens",
        ),
        (
            {"prompt": "oh", "chosen": [USER, YES], "rejected": [USER, NO]},
            "the prompt is text, but the messages of chosen and rejected do not begin with it",
        ),
    ],
)
def test_messages_that_do_not_form_a_pair_are_reported(row, reason):
    assert f"given:1: {reason}" in error_of(PreferenceDataModule, row, chat=True)
