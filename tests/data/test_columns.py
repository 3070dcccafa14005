"""Columns of TRL, verl and other formats are found, explicit settings take precedence, and ambiguous columns raise."""

import pytest

from lightning_rlhf.data.columns import ANSWER, PROMPT, REWARD_FIELDS, AmbiguousColumns, Columns, lookup
from lightning_rlhf.data.conversations import ConversationDataModule
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.row import BadRow, TextRow
from tests.data.rows_given import error_of, first_batch, module_of
from tests.stand_ins import columns_of, each

USER = [{"role": "user", "content": "why"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": USER,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0, "answer": "so 72"},
}


def prompts(*rows, **kwargs):
    return first_batch(module_of(PromptDataModule, *rows, chat=True, batch_size=len(rows), **kwargs))


def test_row_of_verl_is_understood_and_all_its_columns_reach_rewards():
    batch = prompts(VERL)
    assert each(batch, "text") == ["user: why|assistant:"]
    assert each(batch, "messages") == [USER]
    rest = {name: [value] for name, value in VERL.items() if name != "prompt"}
    assert columns_of(batch) == {**rest, "ground_truth": ["72"]}


@pytest.mark.parametrize("name", ["ground_truth", "answer", "solution", "label"])
def test_right_answer_is_found_under_each_known_name_and_keeps_its_column(name):
    assert columns_of(prompts({"prompt": "why", name: "so"})) == {name: ["so"], "ground_truth": ["so"]}


def test_rows_of_different_formats_can_be_mixed():
    batch = prompts({"prompt": "how", "answer": "so"}, VERL)
    assert columns_of(batch)["ground_truth"] == ["so", "72"]
    assert columns_of(batch)["data_source"] == [None, "openai/gsm8k"]
    assert each(batch, "messages") == [[], USER]
    assert each(batch[:1], "messages") == [[]]


def test_text_prompts_have_no_messages():
    assert each(prompts({"prompt": "why"}, {"prompt": "how"}), "messages") == [[], []]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*USER, {"role": "assistant", "content": "so"}]},
        {"conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]},
        {"chosen": [*USER, {"role": "assistant", "content": "so"}]},
        {
            "chosen": [*USER, {"role": "assistant", "content": "so"}, {"role": "user", "content": "oh"}],
            "rejected": [*USER, {"role": "assistant", "content": "no"}, {"role": "user", "content": "oh"}],
        },
    ],
)
def test_last_answer_of_a_conversation_is_dropped(row):
    batch = prompts(row)
    assert (each(batch, "text"), each(batch, "messages")) == (
        ["user: why|assistant:"],
        [USER],
    )
    assert "messages" not in batch.column_names


def test_conversation_that_starts_with_the_assistant_is_not_a_prompt():
    row = {"messages": [{"role": "assistant", "content": "so"}]}
    assert "given:1: the conversation begins with an assistant" in error_of(PromptDataModule, row, chat=True)


def test_explicit_column_takes_precedence_and_dots_address_nested_values():
    columns = {"prompt": "extra_info.question", "ground_truth": "extra_info.answer", "level": "extra_info.level"}
    row = {"answer": "no", "solution": "no", "extra_info": {"question": "why", "answer": "so", "level": 3}}
    batch = prompts(row, columns=columns)
    assert each(batch, "text") == ["why"]
    assert columns_of(batch) == {**{name: [value] for name, value in row.items()}, "ground_truth": ["so"], "level": [3]}


def test_column_name_with_a_dot_takes_precedence_over_a_nested_value():
    assert lookup({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert lookup({"a": {"b": {"c": 2}}}, "a.b.c") == 2
    with pytest.raises(BadRow, match=r"no column 'a.x', only \['a'\]"):
        lookup({"a": {"b": 2}}, "a.x")


def test_missing_explicit_column_makes_a_bad_row():
    row = {"prompt": "why", "reward_model": {}}
    output = error_of(PromptDataModule, row, columns={"ground_truth": "reward_model.ground_truth"})
    assert "given:1: no column 'reward_model.ground_truth', only ['prompt', 'reward_model']" in output


@pytest.mark.parametrize(
    ("kind", "row", "question", "settled"),
    [
        (
            PromptDataModule,
            {"prompt": "why", "answer": "so", "solution": "no"},
            "both 'answer' and 'solution' could be the ground_truth; set one of the two under data.init_args: "
            "'columns: {ground_truth: answer}' or 'columns: {ground_truth: solution}'",
            {"ground_truth": "answer"},
        ),
        (
            PromptDataModule,
            {"prompt": "why", "messages": USER},
            "both 'prompt' and 'messages' could be the prompt; set one of the two under data.init_args: "
            "'columns: {prompt: prompt}' or 'columns: {messages: messages}'",
            {"messages": "messages"},
        ),
        (
            ConversationDataModule,
            {"prompt": "why", "completion": "so", "messages": [*USER, {"role": "assistant", "content": "so"}]},
            "both 'completion' and 'messages' could be the answer; set one of the two under data.init_args: "
            "'columns: {completion: completion}' or 'columns: {messages: messages}'",
            {"completion": "completion"},
        ),
        (
            ConversationDataModule,
            {"text": "so", "messages": [*USER, {"role": "assistant", "content": "so"}]},
            "both 'messages' and 'text' could be the answer; set one of the two under data.init_args: "
            "'columns: {messages: messages}' or 'columns: {text: text}'",
            {"text": "text"},
        ),
        (
            ConversationDataModule,
            {"prompt": "why", "completion": "so", "text": "why so"},
            "both 'completion' and 'text' could be the answer; set one of the two under data.init_args: "
            "'columns: {completion: completion}' or 'columns: {text: text}'",
            {"text": "text"},
        ),
    ],
)
def test_ambiguous_columns_raise_even_if_bad_rows_are_skipped(kind, row, question, settled):
    for on_bad_row in ("error", "skip"):
        output = error_of(kind, row, chat=True, on_bad_row=on_bad_row)
        assert output == f"train data: given:1: {question}"
    module_of(kind, row, chat=True, columns=settled)


def test_null_column_is_not_a_second_candidate():
    row = {"prompt": "why", "answer": None, "solution": "so", "messages": None}
    assert Columns({}, (PROMPT, *REWARD_FIELDS)).find(row).names == {"prompt": "prompt", "ground_truth": "solution"}


def test_two_columns_for_the_same_field_raise_before_reading():
    with pytest.raises(ValueError, match="columns sets both 'completion' and 'messages'; set only one"):
        Columns({"completion": "a", "messages": "b"}, (ANSWER,))


def test_renamed_column_is_not_a_candidate_for_other_fields():
    row = {"prompt": "why", "answer": "so", "solution": "no"}
    result = Columns({"hint": "answer"}, (PROMPT, *REWARD_FIELDS))
    assert result.find(row).names["ground_truth"] == "solution"
    assert result.other_columns(result.find(row), exclude=("prompt",)) == {
        "hint": "so",
        "solution": "no",
        "ground_truth": "no",
    }


def test_ambiguity_error_has_a_separate_class_so_that_it_is_never_skipped():
    with pytest.raises(AmbiguousColumns):
        Columns({}, REWARD_FIELDS).find({"answer": 1, "label": 2})
    assert not issubclass(AmbiguousColumns, BadRow)


def test_text_is_converted_to_numbers_and_flags_only_for_untyped_formats():
    columns = Columns({}, ((("label", "label"),),))
    for value, flag in (("true", True), ("False", False), ("1", True), ("0 ", False)):
        assert columns.find(TextRow(label=value)).flag("label") is flag
        with pytest.raises(BadRow, match=f"label holds '{value}', expected true or false"):
            columns.find({"label": value}).flag("label")
    assert columns.find(TextRow(label="1.5")).number("label") == 1.5
    with pytest.raises(BadRow, match="label holds 'much', expected a number"):
        columns.find(TextRow(label="much")).number("label")
    for value in (0.5, None, "yes", [1], 2):
        with pytest.raises(BadRow, match="expected true or false"):
            columns.find({"label": value}).flag("label")


def test_recognized_columns_are_counted():
    rows = [{"prompt": "why", "answer": "so"}, {"prompt": "how", "answer": "so"}, VERL]
    module = module_of(PromptDataModule, *rows, chat=True)
    assert module.reports["train"].column_mappings == {
        "prompt <- prompt (text), ground_truth <- answer (text)": 2,
        "prompt <- prompt (messages), ground_truth <- reward_model.ground_truth (text), "
        "data_source <- data_source (text), extra_info <- extra_info (dict)": 1,
    }


def test_similar_column_is_suggested_for_a_missing_one():
    with pytest.raises(BadRow, match=r"no column 'prompt', only \['answer', 'question'\]; to use 'question', set"):
        lookup({"question": "who?", "answer": "me"}, "prompt")
    with pytest.raises(BadRow, match=r"to use 'Prompt', set data.init_args.columns: \{prompt: Prompt\}$"):
        lookup({"Prompt": "who?"}, "prompt")
    with pytest.raises(BadRow, match=r"no column 'prompt', only \['text'\]$"):
        lookup({"text": "who?"}, "prompt")
