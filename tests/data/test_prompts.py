"""Prompts reach the engine unchanged, and all other columns reach the reward functions."""

import pytest

from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.extras.rewards.answers import most_frequent_answer
from tests.data.rows_given import error_of, first_batch, module_of
from tests.stand_ins import columns_of, each


def test_prompt_batch_has_ids_text_and_further_columns():
    rows = [{"question": "why", "answer": "so", "level": 3}, {"question": "how long", "answer": "very", "level": 4}]
    module = module_of(PromptDataModule, *rows, batch_size=2, columns={"prompt": "question", "gold": "answer"})
    batch = first_batch(module)
    assert each(batch, "text") == ["why", "how long"]
    assert [module.tokenizer.decode(ids) for ids in each(batch, "token_ids")] == [prompt.text for prompt in batch]
    assert [len(ids) for ids in each(batch, "token_ids")] == [3, 8]  # no padding, no special token
    assert columns_of(batch) == {"gold": ["so", "very"], "level": [3, 4]}
    assert (each(batch, "index"), batch.epoch) == ([0, 1], 0)


def test_column_missing_in_some_rows_is_null_there():
    module = module_of(PromptDataModule, {"prompt": "a"}, {"prompt": "b", "hint": "c"}, batch_size=2)
    assert columns_of(first_batch(module)) == {"hint": [None, "c"]}


def test_every_batch_has_the_columns_of_all_rows():
    rows = [{"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": "y"}, {"prompt": "c", "level": 3}]
    module = module_of(PromptDataModule, *rows, val=[{"prompt": "d", "source": "e"}])
    batches = [*module.train_dataloader(), *module.val_dataloader()]
    assert [columns_of(batch)["level"] for batch in batches] == [[None], [None], [3], [None]]
    assert {tuple(batch.column_names) for batch in batches} == {("answer", "ground_truth", "level", "source")}


def test_preference_data_can_be_used_as_prompts():
    row = {"chosen": "H: hi A: yes H: no A: well", "rejected": "other"}
    batch = first_batch(module_of(PromptDataModule, row, split_after="A:"))
    assert each(batch, "text") == ["H: hi A: yes H: no A:"]
    assert columns_of(batch) == {key: [value] for key, value in row.items()}


def test_messages_go_through_the_chat_template():
    row = {"prompt": [{"role": "user", "content": "hi"}]}
    assert each(first_batch(module_of(PromptDataModule, row, chat=True)), "text") == ["user: hi|assistant:"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a" * 11}, "the prompt has 11 tokens, the limit is 10"),
        ({"prompt": None}, "column 'prompt' holds null, expected text"),
        ({"prompt": "\n"}, "column 'prompt' is empty"),
        ({"question": "a"}, "no column 'prompt', only ['question']"),
        ({"prompt": 7}, "column 'prompt' holds int, expected text"),
        ({"prompt": "\udce9"}, "column 'prompt' is not valid UTF-8 text"),
    ],
)
def test_unusable_rows_are_reported_with_a_reason(row, reason):
    assert f"\n  given:1: {reason}" in error_of(PromptDataModule, row, max_tokens=10)


def test_too_long_prompts_are_dropped_and_counted():
    rows = [{"prompt": "a" * n} for n in (10, 11, 12)]
    module = module_of(PromptDataModule, *rows, max_tokens=10, on_bad_row="skip")
    assert str(module.reports["train"]) == (
        "train data: 3 rows read, 1 kept; dropped 2: the prompt longer than 10 tokens"
    )


def test_fewer_rows_than_a_batch_are_rejected():
    module = module_of(PromptDataModule, {"prompt": "a"}, batch_size=2)
    with pytest.raises(ValueError, match="batch_size is 2, but the training data have only 1 usable rows"):
        module.train_dataloader()


def test_most_frequent_answer_is_that_of_texts_and_numbers():
    answers = ["b", "a", "a", 7, 7, 7, ["a"], None]
    module = module_of(PromptDataModule, *({"prompt": "x", "answer": answer} for answer in answers))
    module.setup("fit")
    assert most_frequent_answer(module, "train") == ("7", 3 / 8)
    assert most_frequent_answer(module, "val") is None
    without = module_of(PromptDataModule, {"prompt": "x"})
    without.setup("fit")
    assert most_frequent_answer(without, "train") is None


def test_answers_longer_than_a_response_are_a_warning():
    rows = [{"prompt": "x", "answer": answer} for answer in ("a", "bbbb", "ccc", ["dddddd"])]
    module = module_of(PromptDataModule, *rows)
    module.setup("fit")
    assert module.answer_lengths("train") == [1, 4, 3]
    assert module.length_warning(5) == ""
    assert module.length_warning(4) == (
        "1 of 3 correct answers do not fit into max_response_tokens 4: the longest has 5 tokens with its end token. "
        "Raise max_response_tokens of RolloutLoop"
    )
    assert module.length_warning(3).startswith("2 of 3 correct answers")
