"""The option as_messages: text columns become messages and are formatted by the chat template."""

import pytest

from lightning_rlhf.data.conversations import ConversationDataModule
from lightning_rlhf.data.preferences import PreferenceDataModule
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.data.text_messages import TextMessages
from lightning_rlhf.extras.algorithms.unpaired_rows import UnpairedDataModule
from tests.data.rows_given import error_of, first_batch, module_of
from tests.stand_ins import columns_of, each

USER, ASSISTANT = {"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}
HH = {"user": "\n\nHuman:", "assistant": "\n\nAssistant:"}
TALK = "\n\nHuman: why\n\nAssistant: so\n\nHuman: oh\n\nAssistant:"


def same(kind, text, messages, **kwargs):
    """Assert that a row of text gives the same examples as a row of messages, and return the module of the text."""
    made, expected = (module_of(kind, row, chat=True, **options) for row, options in ((text, kwargs), (messages, {})))
    assert str(made.examples["train"]) == str(expected.examples["train"])
    return made


@pytest.mark.parametrize("kind", [ConversationDataModule, UnpairedDataModule])
def test_prompt_and_completion_become_a_conversation(kind):
    text = {"prompt": "why", "completion": "so", "label": True}
    same(kind, text, {"prompt": [USER], "completion": [ASSISTANT], "label": True}, as_messages=True)


def test_pair_becomes_two_conversations():
    inputs = {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "no"}]}
    same(PreferenceDataModule, {"prompt": "why", "chosen": "so", "rejected": "no"}, inputs, as_messages=True)


def test_prompt_becomes_a_user_message_that_rewards_receive():
    batch = first_batch(module_of(PromptDataModule, {"prompt": "why", "answer": "so"}, chat=True, as_messages=True))
    assert (each(batch, "text"), each(batch, "messages")) == (
        ["user: why|assistant:"],
        [[USER]],
    )
    assert columns_of(batch)["ground_truth"] == ["so"]


def test_explicit_columns_become_messages_and_are_reported():
    row = {"question": "why", "answer": "so"}
    names = {"prompt": "question", "completion": "answer"}
    made = module_of(ConversationDataModule, row, chat=True, as_messages=True, columns=names)
    (described,) = made.reports["train"].column_mappings
    assert described == "completion <- answer (text as messages), prompt <- question (text as messages)"
    assert made.tokenizer.decode(made.examples["train"][0].ids).startswith("user: why|assistant: so")


def test_messages_are_not_changed():
    same(PromptDataModule, {"prompt": [USER]}, {"prompt": [USER]}, as_messages=True)


def test_text_with_markers_becomes_its_turns():
    assert TextMessages(HH)("chosen", TALK) == [USER, ASSISTANT, {"role": "user", "content": "oh"}]
    assert TextMessages(HH)("chosen", f"{TALK} well ")[-1] == {"role": "assistant", "content": "well"}


def test_preferences_with_markers_share_their_prompt():
    output = [{**ASSISTANT, "content": content} for content in ("well", "no")]
    before = [USER, ASSISTANT, {"role": "user", "content": "oh"}]
    inputs = {"chosen": [*before, output[0]], "rejected": [*before, output[1]]}
    text = {"chosen": f"{TALK} well", "rejected": f"{TALK} no"}
    same(PreferenceDataModule, text, inputs, as_messages=HH)
    made = module_of(PromptDataModule, text, chat=True, as_messages=HH)
    assert made.examples["train"][0].text == "user: why|assistant: so|user: oh|assistant:"


@pytest.mark.parametrize(("column", "options"), [("text", {}), ("chosen", {"columns": {"completion": "chosen"}})])
def test_sft_trains_on_every_answer_of_a_text_with_markers(column, options):
    inputs = {"messages": [USER, ASSISTANT, USER, {**ASSISTANT, "content": "well"}]}
    text = {column: "\n\nHuman: why\n\nAssistant: so\n\nHuman: why\n\nAssistant: well"}
    same(ConversationDataModule, text, inputs, as_messages=HH, **options)


@pytest.mark.parametrize(
    ("row", "markers", "output"),
    [
        ({"prompt": "why"}, HH, "the prompt begins with 'why', expected one of the markers of as_messages"),
        ({"prompt": " "}, True, "the prompt is empty"),
        (
            {"messages": "why"},
            True,
            "as_messages: true makes one message of each text, but 'messages' can contain several",
        ),
    ],
)
def test_text_that_cannot_become_messages_is_a_bad_row(row, markers, output):
    assert output in error_of(PromptDataModule, row, chat=True, as_messages=markers)


def test_tokenizer_without_a_template_makes_a_bad_row():
    assert "the tokenizer has no chat template" in error_of(PromptDataModule, {"prompt": "why"}, as_messages=True)


@pytest.mark.parametrize(
    ("markers", "output"),
    [
        (
            {"human": "H:", "assistant": "A:"},
            "as_messages has a marker for 'human', expected one of system, user, assis",
        ),
        ({"user": "H:"}, "as_messages needs a marker for assistant: the text"),
        ({"user": "X:", "assistant": "X:"}, "as_messages needs a different marker for each role"),
    ],
)
def test_invalid_markers_are_rejected(markers, output):
    with pytest.raises(ValueError, match=output):
        TextMessages(markers)


def test_split_after_with_as_messages_is_rejected():
    assert "set only one of them" in error_of(PromptDataModule, {"prompt": "a"}, as_messages=True, split_after="a")


def test_malformed_text_is_a_bad_row_and_raises_no_other_error():
    with pytest.raises(BadRow):
        TextMessages(HH)("chosen", "no marker")
