"""SFT trains on the completion and its end token only."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf import SFTModule
from lightning_rlhf.data.answers import MaskedText, sequences
from lightning_rlhf.data.conversations import ConversationDataModule
from tests.data.rows_given import GivenRows, Letters, error_of, first_batch, module_of
from tests.helpers import properties
from tests.stand_ins import TinyModel, quiet_trainer

END = 2


def marked_text(module, batch, row=0):
    """Return the tokens that contribute to the loss, as text without the end token."""
    ids = batch.input_ids[row][batch.loss_mask[row]].tolist()
    assert ids[-1] == END
    return module.tokenizer.decode(ids[:-1])


def whole_text(module, batch, row=0):
    return module.tokenizer.decode(batch.input_ids[row, : batch.lengths[row] - 1])


def test_exactly_the_completion_and_its_end_token_are_marked():
    module = module_of(ConversationDataModule, {"prompt": "who?", "completion": " me"})
    batch = first_batch(module)
    assert batch.lengths.tolist() == [8]
    assert batch.loss_mask.tolist() == [[False] * 4 + [True] * 4]
    assert batch.input_ids[0, -1] == END
    assert (marked_text(module, batch), whole_text(module, batch)) == (" me", "who? me")


def test_rows_are_padded_on_the_right_and_padding_is_not_marked():
    rows = [{"prompt": "a", "completion": "bcdefg"}, {"prompt": "abc", "completion": "d"}]
    module = module_of(ConversationDataModule, *rows, batch_size=2)
    batch = first_batch(module)
    assert batch.lengths.tolist() == [8, 5]
    assert [marked_text(module, batch, row) for row in (0, 1)] == ["bcdefg", "d"]
    assert batch.input_ids[1, 5:].tolist() == [0, 0, 0]


def test_text_with_prompt_and_answer_is_split_after_the_last_marker():
    row = {"chosen": "H: hi A: hello H: who A: me"}
    module = module_of(ConversationDataModule, row, columns={"completion": "chosen"}, split_after="A:")
    batch = first_batch(module)
    assert marked_text(module, batch) == " me"
    assert whole_text(module, batch) == row["chosen"]


def test_plain_text_is_trained_on_except_for_its_first_token():
    module = module_of(ConversationDataModule, {"text": "a story"})
    batch = first_batch(module)
    assert whole_text(module, batch) == "a story"
    assert marked_text(module, batch) == " story"
    assert batch.loss_mask.tolist() == [[False] + [True] * 7]
    assert module.reports["train"].column_mappings == {"text <- text (text)": 1}


@pytest.mark.parametrize("row", [{"text": "ab</s>"}, {"prompt": "a", "completion": "b</s>"}])
def test_end_token_in_the_data_is_not_doubled(row):
    assert first_batch(module_of(ConversationDataModule, row)).input_ids[0].tolist()[2:] == [END]


def test_long_text_is_cut_with_its_end_token():
    module = module_of(ConversationDataModule, {"text": "abcdef"}, max_tokens=4, too_long="cut_end")
    batch = first_batch(module)
    assert module.tokenizer.decode(batch.input_ids[0]) == "abcd"
    assert batch.loss_mask.tolist() == [[False, True, True, True]]


def test_text_may_hold_a_prompt_before_a_marker():
    module = module_of(ConversationDataModule, {"text": "H: hi A: hello"}, split_after="A:")
    assert marked_text(module, first_batch(module)) == " hello"


def test_text_column_with_a_prompt_column_needs_a_configuration():
    row = {"prompt": "who?", "text": "me", "completion": None}
    output = error_of(ConversationDataModule, row, on_bad_row="skip")
    assert output == (
        "train data: given:1: 'text' could be the answer to 'prompt' or a text to learn as a whole; set one of the two "
        "under data.init_args: 'columns: {completion: text}' or 'columns: {text: text}'"
    )
    for columns, whole, learnt in (({"completion": "text"}, "who?me", "me"), ({"text": "text"}, "me", "e")):
        module = module_of(ConversationDataModule, row, columns=columns)
        batch = first_batch(module)
        assert (whole_text(module, batch), marked_text(module, batch)) == (whole, learnt)
    module = module_of(ConversationDataModule, {**row, "prompt": None})
    assert whole_text(module, first_batch(module)) == "me"


def test_separate_prompt_precedes_a_marker():
    row = {"prompt": "who?", "completion": "A:me"}
    module = module_of(ConversationDataModule, row, split_after="A:")
    batch = first_batch(module)
    assert (whole_text(module, batch), marked_text(module, batch)) == ("who?A:me", "A:me")


def test_messages_go_through_the_chat_template():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]
    module = module_of(ConversationDataModule, {"prompt": messages, "completion": "me"}, chat=True)
    batch = first_batch(module)
    assert whole_text(module, batch) == "user: hi|assistant: yes?me"  # words of the assistant are continued
    assert marked_text(module, batch) == "me"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": None, "completion": "a"}, "column 'prompt' holds null, expected text"),
        ({"prompt": "", "completion": "a"}, "column 'prompt' is empty"),
        ({"prompt": "a", "completion": " "}, "column 'completion' is empty"),
        ({"prompt": "a", "answer": "b"}, "no column 'completion', only ['answer', 'prompt']"),
        ({"text": ""}, "column 'text' is empty"),
        ({"text": None}, "column 'text' holds null, expected text"),
        ({"text": ["a"]}, "column 'text' holds list, expected text"),
        ({"text": "</s>"}, "the text has a single token, which has no token before it to predict it from"),
        ({"text": "abcdefghijk"}, "the text has 12 tokens, the limit is 10"),
        ({"prompt": "a\ud800", "completion": "b"}, "column 'prompt' is not valid UTF-8 text"),
        ({"prompt": "abcdefgh", "completion": "ijk"}, "the text has 12 tokens, the limit is 10"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, "the tokenizer has no chat template"),
    ],
)
def test_unusable_rows_are_reported_with_a_reason(row, reason):
    assert f"\n  given:1: {reason}" in error_of(ConversationDataModule, row, max_tokens=10).replace(
        "the prompt is a list of messages, but ", ""
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "every message of a prompt needs 'role' and text or parts in 'content'"),
        ([{"role": "user"}], "every message of a prompt needs 'role' and text or parts in 'content'"),
        (["hello"], "every message of a prompt needs 'role' and text or parts in 'content'"),
        ([{"role": "system", "content": "be good"}], "the chat template rejects the prompt: no system message, please"),
        ([{"role": "user", "content": "\udcff"}], "the prompt is not valid UTF-8 text"),
    ],
)
def test_unusable_messages_are_reported_with_a_reason(messages, reason):
    assert f"given:1: {reason}" in error_of(ConversationDataModule, {"prompt": messages, "completion": "b"}, chat=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("H: hi", "the marker 'A:' does not occur in the text"), ("H: hi A: ", "nothing follows the last 'A:'")],
)
def test_texts_that_cannot_be_split_are_reported_with_a_reason(text, reason):
    assert f"given:1: {reason}" in error_of(ConversationDataModule, {"completion": text}, split_after="A:")


def test_too_long_rows_are_dropped_and_counted_under_one_reason():
    rows = [{"prompt": "a", "completion": "b" * n} for n in (1, 20, 30, 2)]
    module = module_of(ConversationDataModule, *rows, max_tokens=10, on_bad_row="skip")
    assert str(module.reports["train"]) == (
        "train data: 4 rows read, 2 kept; dropped 2: the text longer than 10 tokens"
    )


def test_missing_files_are_reported_before_the_tokenizer_is_loaded():
    with pytest.raises(FileNotFoundError, match=r"no data at 'nothing\.jsonl'"):
        ConversationDataModule("nothing.jsonl", tokenizer="./no/tokenizer").setup("fit")
    with pytest.raises(FileNotFoundError, match=r"no data at 'nothing\.jsonl'"):
        ConversationDataModule("some/hub-id", tokenizer="./no/tokenizer", val="nothing.jsonl").setup("fit")


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"max_tokens": 0}])
def test_sizes_below_one_are_rejected(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        ConversationDataModule("x", "y", **wrong)


def test_validation_reads_every_row_in_order_with_a_smaller_last_batch():
    val = [{"prompt": "a", "completion": "b" * n} for n in range(1, 6)]
    module = module_of(ConversationDataModule, val[0], val=val, val_batch_size=3)
    assert [batch.lengths.tolist() for batch in module.val_dataloader()] == [[3, 4, 5], [6, 7]]


@properties
@given(st.data())
def test_mask_covers_each_text_from_start_to_end(data):
    texts = data.draw(st.lists(st.lists(st.integers(3, 9), min_size=2, max_size=8), min_size=1, max_size=5))
    starts = [data.draw(st.integers(1, len(text) - 1)) for text in texts]
    marked = [[position >= start for position in range(len(text))] for text, start in zip(texts, starts, strict=True)]
    batch = sequences([MaskedText(text, mask) for text, mask in zip(texts, marked, strict=True)])
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        assert batch.input_ids[row][batch.loss_mask[row]].tolist() == text[start:]
        assert torch.equal(batch.input_ids[row, : len(text)], torch.tensor(text))
        assert not batch.loss_mask[row, len(text) :].any()


def test_data_are_read_before_a_model_is_built():
    class NeverMade(SFTModule):
        def build_role(self, name):
            raise AssertionError("a model was made")

    data = ConversationDataModule(GivenRows(({"prompt": "a"},)), Letters(), batch_size=1)
    with pytest.raises(ValueError, match=r"given:1: no column 'completion', only \['prompt'\]"):
        quiet_trainer().fit(NeverMade(TinyModel()), datamodule=data)
