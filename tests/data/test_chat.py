"""The assistant's tokens are marked, by the generation marks of the template or by rendering the turns one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lightning_rlhf.data.chat import Chat, chat_of
from lightning_rlhf.data.columns import TEMPLATE_FIELDS, Columns
from lightning_rlhf.data.conversations import ConversationDataModule
from lightning_rlhf.data.messages import common_prefix, messages_of
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.data.turns import tokenize_turns
from lightning_rlhf.extras.tokenizers.byte_pairs import BytePairTokenizer
from tests.data.rows_given import LETTERS, GivenRows, error_of, first_batch
from tests.helpers import properties

MARKED = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '</s>' }}{% endgeneration %}{% else %}{{ m.content + '</s>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# As models with thoughts do: of all answers but the last, what stands before the colon is left out.
FORGETFUL = PLAIN.replace(
    "{{ m.content + '</s>' }}", "{{ (m.content if loop.last else m.content.split(':')[-1]) + '</s>' }}", 1
)
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TURNS = PLAIN.replace("'</s>'", "'<end>'")
OPENED = "{{ 'answer</s>' }}" + TURNS
SILENT = "</s>{% for m in messages %}{% endfor %}"
ALPHABET = LETTERS + "é✓/"


def characters(template):
    tokenizer = CharacterTokenizer(ALPHABET).load()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory):
    """A byte-pair tokenizer whose tokens do not end at message boundaries on their own."""
    path = tmp_path_factory.mktemp("data") / "x.csv"
    path.write_text("text\n" + "\n".join(["assistant user who are you? me and you ✓ é\t\n  yes"] * 20))
    return BytePairTokenizer(str(path), vocab_size=400).load()


def output(*contents, roles=("user", "assistant")):
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def one_text(chat, messages, label="conversation", first=0):
    """Return tokens and mask of a conversation that is one text."""
    (text,), _ = tokenize_turns(chat, messages, label, first)
    return text


def decoded(template, ids, marks):
    """Return a text and its marked part."""
    tokenizer = characters(template)
    return tokenizer.decode(ids), tokenizer.decode([token for token, mark in zip(ids, marks, strict=True) if mark])


def marked_parts(tokenizer, messages, **how):
    """Return the text and each marked part of it."""
    ids, marks = one_text(Chat(tokenizer, **how), messages)
    parts, before = [], False
    for token, mark in zip(ids, marks, strict=True):
        if mark and not before:
            parts.append([])
        if mark:
            parts[-1].append(token)
        before = mark
    return tokenizer.decode(ids), [tokenizer.decode(part) for part in parts]


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["with marks", "without"])
def test_each_assistant_turn_is_marked_with_its_end_token_and_nothing_else(template):
    text, parts = marked_parts(characters(template), output("who?", "me", "and?", "you"))
    assert text == "<s>user\nwho?</s>\n<s>assistant\nme</s>\n<s>user\nand?</s>\n<s>assistant\nyou</s>"
    assert parts == ["me</s>", "you</s>"]


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["with marks", "without"])
def test_messages_after_the_last_answer_are_dropped(template):
    text, parts = marked_parts(characters(template), output("who?", "me", "thanks"))
    assert text.endswith("me</s>")
    assert parts == ["me</s>"]


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["with marks", "without"])
def test_only_messages_from_the_given_index_are_marked(template):
    messages = output("who?", "me", "and?", "you")
    tokenizer = characters(template)
    ids, marks = one_text(Chat(tokenizer), messages, first=2)
    assert tokenizer.decode([token for token, mark in zip(ids, marks, strict=True) if mark]) == "you</s>"
    with pytest.raises(BadRow, match="the conversation has no assistant message"):
        one_text(Chat(tokenizer), messages, first=4)


def test_first_assistant_message_is_marked_without_the_prefix_of_the_template():
    messages = [{"role": "assistant", "content": "hi"}, *output("who?", "me")]
    for template in (MARKED, PLAIN):
        text, parts = marked_parts(characters(template), messages)
        assert text.startswith("<s>assistant\nhi</s>\n<s>user")
        assert parts == ["hi</s>", "me</s>"]
    assert marked_parts(characters(ENDLESS), messages) == (
        "assistant: hi|user: who?|assistant: me|</s>",
        ["hi|", "me|</s>"],
    )
    headless = "{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}"
    assert marked_parts(characters(headless), messages) == ("hi</s>who?</s>me</s>", ["i</s>", "me</s>"])  # first token
    thoughtful = PLAIN.replace("{{ '<s>assistant\n' }}", "{{ '<s>assistant\nhm ' }}")
    with pytest.raises(BadRow, match="the assistant's tokens cannot be located"):
        marked_parts(characters(thoughtful), messages)


def test_end_token_is_appended_and_marked_if_the_template_has_none():
    text, parts = marked_parts(characters(ENDLESS), output("who?", "me"))
    assert (text, parts) == ("user: who?|assistant: me|</s>", ["me|</s>"])


def test_end_token_outside_the_generation_marks_is_kept_and_not_marked():
    template = MARKED.replace("{{ m.content + '</s>' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}</s>")
    text, parts = marked_parts(characters(template), output("who?", "me"))
    assert (text, parts) == ("<s>user\nwho?</s>\n<s>assistant\nme</s>", ["me"])


def test_turns_that_render_differently_later_are_texts_of_their_own():
    texts, notes = tokenize_turns(Chat(characters(FORGETFUL)), output("who?", "hm:me", "and?", "oh:you"), "talk")
    assert [decoded(FORGETFUL, *text) for text in texts] == [
        ("<s>user\nwho?</s>\n<s>assistant\nhm:me</s>", "hm:me</s>"),
        ("<s>user\nwho?</s>\n<s>assistant\nme</s>\n<s>user\nand?</s>\n<s>assistant\noh:you</s>", "oh:you</s>"),
    ]
    assert notes == [
        "the chat template writes earlier answers otherwise, so each answer is a text behind its own prompt"
    ]
    assert marked_parts(characters(FORGETFUL), output("who?", "hm:me"))[1] == ["hm:me</s>"]  # alone it is the last


def test_generation_marks_of_turns_that_render_differently_later_are_not_used():
    forgetful = MARKED.replace(
        "{{ m.content + '</s>' }}", "{{ (m.content if loop.last else m.content.split(':')[-1]) + '</s>' }}", 1
    )
    chat, messages = Chat(characters(forgetful)), output("who?", "hm, I think that it is:me", "you?", "you")
    assert decoded(forgetful, *one_text(chat, messages, "talk", first=2))[1] == "you</s>"
    assert chat.tokenizer.decode(one_text(chat, messages, "talk", first=3)[0]).endswith("you</s>")


talks = st.lists(st.text(ALPHABET, max_size=12).filter(str.strip), min_size=2, max_size=7)


@properties
@given(talks, st.booleans())
def test_marks_equal_those_of_transformers(bytes_tokenizer, talk, whole):
    messages = output(*talk)
    tokenizer = characters(MARKED) if whole else bytes_tokenizer
    tokenizer.chat_template = MARKED
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    expected_ids, expected = theirs["input_ids"], [mark == 1 for mark in theirs["assistant_masks"]]
    for template in (MARKED, PLAIN):
        tokenizer.chat_template = template
        ids, marks = one_text(Chat(tokenizer), messages)
        assert ids == expected_ids[: len(ids)]
        assert marks == expected[: len(ids)]
        assert not any(expected[len(ids) :])
        assert ids[-1] == tokenizer.eos_token_id


def fields(**row):
    return Columns({}, TEMPLATE_FIELDS).find(row)


def test_tools_and_variables_reach_the_template_and_those_of_the_row_take_precedence():
    tokenizer = characters("{{ mood }} {{ tools[0].name }}{% for m in messages %} {{ m.content }}{% endfor %}")
    messages = output("hi")
    for tools in ([{"name": "clock"}], '[{"name": "clock"}]'):
        assert chat_of(tokenizer, fields(tools=tools), {"mood": "glad"}).render(messages, "prompt") == "glad clock hi"
    instance = fields(tools=[{"name": "clock"}], chat_template_kwargs={"mood": "sad"})
    assert chat_of(tokenizer, instance, {"mood": "glad"}).render(messages, "prompt") == "sad clock hi"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tools": "{"}, "tools is not valid JSON"),
        ({"tools": ["clock"]}, "tools is not valid JSON"),
        ({"tools": [["clock"]]}, "tools must be a list of JSON schemas"),
        ({"tools": 3}, "tools must be a list"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs is a list, expected a mapping of names to values"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs must not contain 'tokenize'"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs must not contain 'chat_template'"),
    ],
)
def test_invalid_tools_and_variables_are_rejected(row, reason):
    with pytest.raises(BadRow, match=reason):
        chat_of(characters(PLAIN), fields(**row), {})


def test_configured_variables_must_not_change_the_template_call():
    with pytest.raises(ValueError, match="chat_template_kwargs must not contain 'add_generation_prompt'"):
        ConversationDataModule("x", "y", chat_template_kwargs={"add_generation_prompt": True})


def test_from_and_value_keys_are_renamed_to_role_and_content():
    inputs = [{"from": "system", "value": "be good"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    roles = ["system", "user", "assistant"]
    assert [message["role"] for message in messages_of(inputs, "conversation")] == roles
    assert messages_of({"from": "observation", "value": "3"}, "x") == [{"role": "tool", "content": "3"}]


def test_tool_call_needs_no_content_and_null_keys_are_dropped():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}], "name": None}
    canonical = {"type": "function", "function": {"name": "clock", "arguments": {}}}
    assert messages_of([call], "x") == [{"role": "assistant", "content": "", "tool_calls": [canonical]}]


@pytest.mark.parametrize("speaker", ["cat", ["human"], 3])
def test_unknown_roles_are_rejected(speaker):
    with pytest.raises(BadRow, match=r"expected one of .*'gpt', 'human'"):
        messages_of([{"from": speaker, "value": "x"}], "conversation")


def test_common_prefix_of_conversations_is_found():
    one, other = output("a", "b", "c", "d"), output("a", "b", "c", "e")
    assert [common_prefix(one, other), common_prefix(one, one), common_prefix(one, one[:2])] == [3, 4, 2]


class Plain:
    """Source of a character tokenizer with a chat template."""

    def load(self):
        return characters(PLAIN)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": output("who?", "me")},
        {"conversations": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "me"}]},
        {"prompt": output("who?"), "completion": [{"role": "assistant", "content": "me"}]},
        {"prompt": output("who?"), "completion": {"role": "assistant", "content": "me"}},
        {"messages": output("who?", "me"), "prompt": "who?", "completion": None},
    ],
)
def test_all_formats_of_a_conversation_give_the_same_batch(row):
    module = ConversationDataModule(GivenRows((row,)), Plain(), batch_size=1)
    module.setup("fit")
    batch = first_batch(module)
    assert module.tokenizer.decode(batch.input_ids[0]) == "<s>user\nwho?</s>\n<s>assistant\nme</s>"
    assert module.tokenizer.decode(batch.input_ids[0][batch.loss_mask[0]]) == "me</s>"


def test_answers_as_messages_with_a_text_prompt_are_rejected():
    row = {"prompt": "who?", "completion": output("who?", "me")[1:]}
    assert "given:1: the completion is messages, and the prompt is text: set" in error_of(
        ConversationDataModule, row, chat=True
    )


def test_tokenizer_without_offsets_needs_generation_marks(monkeypatch):
    tokenizer = characters(PLAIN)
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(ValueError, match="conversations need a fast tokenizer, or a chat template with"):
        one_text(Chat(tokenizer), output("who?", "me"))


@pytest.mark.parametrize(
    ("template", "token"),
    [
        (PLAIN, "</s>"),
        (MARKED, "</s>"),
        (TURNS, "<end>"),
        (OPENED, "<end>"),
        (SILENT, None),
        (ENDLESS, None),
        (None, None),
        ("{{ raise_exception('no') }}", None),
    ],
    ids=["plain", "marked", "another token", "words before", "no answer", "no token", "no template", "refused"],
)
def test_token_that_ends_a_turn_is_found(template, token):
    tokenizer = characters(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    result = Chat(tokenizer).end_of_turn()
    assert result == (None if token is None else tokenizer.convert_tokens_to_ids(token))
