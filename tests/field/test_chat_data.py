"""What people bring as chat data is trained on as they meant it, or an error says why."""

import json

import pytest

from lightning_rlhf.data.chat import Chat
from lightning_rlhf.data.completeness import check_complete
from lightning_rlhf.data.conversations import ConversationDataModule
from lightning_rlhf.data.messages import messages_of
from lightning_rlhf.data.preferences import PreferenceDataModule
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.data.turns import tokenize_turns
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.extras.algorithms.unpaired_rows import UnpairedDataModule
from lightning_rlhf.extras.commands.check_data import describe_batch
from lightning_rlhf.rollout.conversations import conversation_sampler
from tests.data.rows_given import GivenRows

LETTERS = "".join(map(chr, range(32, 127))) + "\n"
# Roles that it does not know are left out, as by Qwen's templates.
CHAT = (
    "{% if tools %}{{ '<tools>' + tools | tojson + '\n' }}{% endif %}{% for m in messages %}"
    "{% if m.role in ['system', 'user', 'assistant', 'tool'] %}{{ '<' + m.role + '>' + m.content | trim }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' + c.function.arguments | tojson }}"
    "{% endfor %}{{ '</s>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_TOOLS = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# The thoughts of the last answer only, and empty ones where it has none.
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think>"
    "{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content.split('</think>')[-1] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# The prompt has empty thoughts if enable_thinking is false.
WITH_OPTION = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or "
    "(m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '') }}</think>"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{{ '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
MARKED_WITH_OPTION = WITH_OPTION.replace("<think>{{ m.r", "{% generation %}<think>{{ m.r").replace(
    "{% else %}{{ m.content }}{% endif %}{{ '</s>\n' }}",
    "{{ '</s>\n' }}{% endgeneration %}{% else %}{{ m.content + '</s>\n' }}{% endif %}",
)
# All thoughts are removed, and the prompt begins them.
OPENED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant><think>\n' }}{% endif %}"
)
# The prompt has an empty thought that rendered answers do not have.
CLOSED = WITHOUT_TOOLS.replace("<assistant>{% endif %}", "<assistant><|channel>thought\n<channel|>{% endif %}")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def tokenizer_with(template):
    tokenizer = CharacterTokenizer(LETTERS).load()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel>", "<channel|>"]})
    tokenizer.chat_template = template
    return tokenizer


class Characters:
    """Source of a character tokenizer with a chat template."""

    def __init__(self, template=CHAT):
        self.template = template

    def load(self):
        return tokenizer_with(self.template)


def read(kind, *rows, template=CHAT, **options):
    """Return the data module of some rows, and what the model reads of the first one, learned parts in marks."""
    module = kind(GivenRows(rows), Characters(template), batch_size=1, shuffle=False, **options)
    module.setup("fit")
    return module, [shown(module.tokenizer, text) for text in parts(module.examples["train"][0])]


def parts(example):
    if hasattr(example, "texts"):
        return example.texts
    if hasattr(example, "text"):
        return [(example.token_ids, [False] * len(example.token_ids))]
    return [text for part in example if hasattr(part, "texts") for text in part.texts]


def shown(tokenizer, text):
    result, before = "", False
    for token, learned in zip(*text, strict=True):
        result += ("[" if learned else "]") * (learned != before) + tokenizer.decode([token])
        before = learned
    return result + "]" * before


def reason(kind, *rows, **options):
    with pytest.raises(ValueError, match=r"cannot be used|nothing reads") as caught:
        read(kind, *rows, **options)
    return str(caught.value)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


# -- one canonical form ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}, "id": None},
        {"name": "weather", "arguments": {"city": "Oslo"}},
    ],
    ids=["object", "text", "flat"],
)
def test_all_forms_of_a_tool_call_are_the_same_text(call):
    row = {"messages": [user("sky?"), assistant(None, tool_calls=[call])], "tools": json.dumps([TOOL])}
    text = read(ConversationDataModule, row)[1][0]
    assert text.endswith('<assistant>[<call>weather {"city": "Oslo"}</s>]')


@pytest.mark.parametrize(
    "messages",
    [
        [
            {"from": "human", "value": "sky?"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {}}'},
        ],
        [user("sky?"), {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}}],
        [user("sky?"), assistant([{"type": "tool_call", "value": '{"name": "weather", "arguments": {}}'}])],
    ],
    ids=["LLaMA-Factory", "OpenAI's first API", "part"],
)
def test_calls_of_other_formats_are_tool_calls(messages):
    functions = [{"name": "weather", "parameters": {}}]
    text = read(ConversationDataModule, {"messages": messages, "functions": functions})[1][0]
    assert '{"type": "function", "function": {"name": "weather", "parameters": {}}}' in text
    assert text.endswith("<assistant>[<call>weather {}</s>]")


def test_arguments_that_are_no_object_are_rejected():
    call = {"function": {"name": "weather", "arguments": "Oslo"}}
    message = reason(ConversationDataModule, {"messages": [user("sky?"), assistant("", tool_calls=[call])]})
    assert "the arguments of the tool call 'weather' are 'Oslo', expected a JSON object" in message


def test_nested_nulls_of_arrow_are_left_out_and_those_of_json_lines_are_kept(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    other = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    rows = [
        {"messages": [user("?"), assistant("", tool_calls=[call])], "extra_info": info}
        for call, info in ((CALL, {"a": 1}), (other, {"b": [None, 2]}))
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [read_file(tmp_path / name) for name in ("rows.parquet", "rows.jsonl")]
    assert texts[0] == texts[1] == ['weather {"city": "Oslo"}</s>', 'clock {"zone": "UTC"}</s>']
    prompts = PromptDataModule(str(tmp_path / "rows.parquet"), Characters(), batch_size=1)
    prompts.setup("fit")
    assert [row.columns["extra_info"] for row in prompts.examples["train"]] == [{"a": 1}, {"b": [None, 2]}]


def read_file(path):
    module = ConversationDataModule(str(path), Characters(), batch_size=1)
    module.setup("fit")
    return [module.tokenizer.decode(row.ids).split("<call>")[1] for row in module.examples["train"]]


@pytest.mark.parametrize("role", ["User", "USER", "human", "Human"])
def test_names_of_roles_of_other_formats_are_known(role):
    text = read(ConversationDataModule, {"messages": [{"role": role, "content": "hi"}, assistant("yes")]})[1][0]
    assert text == "<user>hi</s>\n<assistant>[yes</s>]"


def test_further_names_of_roles_are_configured():
    row = {"messages": [{"role": "teacher", "content": "be good"}, user("hi"), assistant("yes")]}
    assert "leaves out message 0 of the conversation, of the role 'teacher'" in reason(ConversationDataModule, row)
    text = read(ConversationDataModule, row, roles={"teacher": "system"})[1][0]
    assert text == "<system>be good</s>\n<user>hi</s>\n<assistant>[yes</s>]"
    with pytest.raises(ValueError, match="roles maps 'x' to 'y', expected one of system, developer, user"):
        ConversationDataModule("a", "b", roles={"x": "y"})


# -- nothing is dropped in silence -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "tools", "lost"),
    [
        ([{"role": "developer", "content": "Rhyme."}, user("hi"), assistant("yes")], None, "of the role 'developer'"),
        ([user("hi"), assistant("yes", reasoning_content="hm")], None, "leaves out the thoughts (reasoning_content)"),
        ([user("hi"), assistant("yes", thinking="hm")], None, "leaves out the thoughts (reasoning_content)"),
    ],
)
def test_what_a_template_leaves_out_is_named(messages, tools, lost):
    assert lost in reason(ConversationDataModule, {"messages": messages})


@pytest.mark.parametrize("kind", [ConversationDataModule, PromptDataModule, PreferenceDataModule, UnpairedDataModule])
def test_tools_that_a_template_leaves_out_are_named_in_all_data(kind):
    row = {"prompt": [user("hi")], "tools": [TOOL], "label": True}
    row |= {"completion": [assistant("yes")], "chosen": [assistant("yes")], "rejected": [assistant("no")]}
    message = reason(kind, row, template=WITHOUT_TOOLS)
    assert "leaves out the tool 'weather' of the column tools" in message
    assert read(kind, row, template=WITHOUT_TOOLS, columns={"tools": None})


@pytest.mark.parametrize(
    ("kind", "row", "options"),
    [
        (ConversationDataModule, {"text": "a"}, {}),
        (ConversationDataModule, {"completion": "a: b"}, {"split_after": ":"}),
        (ConversationDataModule, {"prompt": "a", "completion": "b"}, {}),
        (UnpairedDataModule, {"completion": "a: b", "label": True}, {"split_after": ":"}),
        (PreferenceDataModule, {"chosen": "a: b", "rejected": "a: c"}, {"split_after": ":"}),
        (PreferenceDataModule, {"chosen": "a: b", "rejected": "a: c"}, {}),
        (PreferenceDataModule, {"prompt": "a", "chosen": "b", "rejected": "c"}, {}),
        (PromptDataModule, {"prompt": "a"}, {}),
        (PromptDataModule, {"chosen": "a: b"}, {"split_after": ":"}),
    ],
)
@pytest.mark.parametrize(
    "column", [{"system": "Be brief."}, {"history": [["hi", "hello"]]}, {"tools": json.dumps([TOOL])}]
)
def test_columns_of_a_template_have_no_place_in_plain_text(kind, row, options, column):
    (name,) = column
    message = reason(kind, {**row, **column}, **options)
    assert f"would write the column {name!r} before the prompt, which is plain text" in message
    read(kind, {**row, **column}, columns={name: None}, **options)
    read(kind, {**row, name: "" if name == "system" else "[]"}, **options)


def test_parameters_that_a_template_leaves_out_are_named():
    template = CHAT.replace(
        "'<tools>' + tools | tojson + '\n'",
        "'<tools>' + tools[0].function.name + (tools[0].function.parameters.properties or {}) | tojson",
    )
    wrong = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}
    row = {"messages": [user("sky?"), assistant("blue")]}
    read(ConversationDataModule, {**row, "tools": [TOOL]}, template=template)
    message = reason(ConversationDataModule, {**row, "tools": [wrong]}, template=template)
    assert "leaves out parameters of the tool 'weather' of the column tools: its parameters must be a JSON" in message
    described = {**TOOL["function"], "description": "Sky."}
    module, _ = read(ConversationDataModule, {**row, "tools": [{**TOOL, "function": described}]}, template=template)
    assert module.reports["train"].describe_notes() == [
        "the chat template leaves out descriptions of tools (1 of 1 rows)"
    ]


def test_the_role_of_a_reply_is_that_which_a_template_treats_as_one():
    generic = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c['function']['name'] }}{% endfor %}</s>{% endfor %}"
    )
    special = generic.replace(
        "{{ '<' + m.role", "{% if m.role == 'observation' %}{{ 'seen: ' }}{% endif %}{{ '<' + m.role"
    )
    messages = [user("sky?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "blue"}]
    assert Chat(tokenizer_with(generic)).render(messages, "x").endswith("<tool>blue</s>")
    assert Chat(tokenizer_with(special)).render(messages, "x").endswith("seen: <observation>blue</s>")


def test_calls_that_a_template_leaves_out_are_named():
    row = {
        "messages": [user("sky?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "3"}, assistant("3")]
    }
    assert "leaves out the call of 'weather' in message 1" in reason(
        ConversationDataModule, row, template=WITHOUT_TOOLS
    )


@pytest.mark.parametrize("text", ["  spaced  ", "a < b & c", 'say "hi"', "two\n\nlines", "1", "<think>not mine"])
def test_trimming_escaping_and_odd_texts_are_no_loss(text):
    assert check_complete(Chat(tokenizer_with(CHAT)), messages_of([user(text), assistant("yes")], "x"), "x") == []


def test_a_template_that_rejects_the_check_is_not_in_its_way():
    strict = "{% for m in messages %}{{ m.content + '</s>' if m.content in ['hi', 'yes'] else 1 + '' }}{% endfor %}"
    assert tokenize_turns(Chat(tokenizer_with(strict)), [user("hi"), assistant("yes")], "x")


# -- turns -----------------------------------------------------------------------------------------------------


def test_each_turn_is_a_text_where_a_template_renders_the_last_one_differently():
    thoughts = [user("a"), assistant("b", reasoning_content="hm"), user("c"), assistant("d", reasoning_content="oh")]
    module, texts = read(ConversationDataModule, {"messages": thoughts}, template=THINKING)
    assert texts == [
        "<user>a</s>\n<assistant>[<think>hm</think>b</s>]",
        "<user>a</s>\n<assistant>b</s>\n<user>c</s>\n<assistant>[<think>oh</think>d</s>]",
    ]
    assert module.examples["train"][0].shared == len("<user>a") + 1 + len("\n<assistant>")
    assert module.reports["train"].describe_notes() == [
        "the chat template leaves out thoughts of earlier messages (1 of 1 rows)",
        "the chat template writes earlier answers otherwise, so each answer is a text behind its own prompt (1 of 1 "
        "rows)",
    ]


def test_answers_are_learned_with_the_thoughts_that_the_prompt_begins():
    written = [user("a"), assistant("<think>\nhm\n</think>\nb"), user("c"), assistant("<think>\n</think>\nd")]
    assert read(ConversationDataModule, {"messages": written}, template=OPENED)[1] == [
        "<user>a</s>\n<assistant><think>\n[hm\n</think>\nb</s>]",
        "<user>a</s>\n<assistant>\nb</s>\n<user>c</s>\n<assistant><think>\n[</think>\nd</s>]",
    ]
    message = reason(ConversationDataModule, {"messages": [user("a"), assistant("b")]}, template=OPENED)
    assert "begins the thoughts of an answer ('<think>') in the prompt, and message 1" in message


@pytest.mark.parametrize(
    ("answer", "learned"),
    [("<think>\nhm</think>yes", "[hm</think>yes</s>]"), ("hm</think>yes", "[hm</think>yes</s>]")],
    ids=["with the tag", "without it"],
)
@pytest.mark.parametrize("as_text", [True, False])
def test_an_answer_does_not_begin_the_thoughts_of_the_prompt_again(answer, learned, as_text):
    row = {"prompt": [user("a")], "completion": answer if as_text else [assistant(answer)]}
    assert read(ConversationDataModule, row, template=OPENED)[1] == [f"<user>a</s>\n<assistant><think>\n{learned}"]


def test_pairs_of_texts_do_not_begin_the_thoughts_of_the_prompt_again():
    row = {"prompt": [user("a")], "chosen": "<think>\nhm</think>yes", "rejected": "<think>\noh</think>no"}
    assert read(PreferenceDataModule, row, template=OPENED)[1] == [
        "<user>a</s>\n<assistant><think>\n[hm</think>yes</s>]",
        "<user>a</s>\n<assistant><think>\n[oh</think>no</s>]",
    ]


def test_texts_get_what_the_template_writes_before_an_answer():
    row = {"prompt": [user("a")], "completion": "yes</s>"}
    assert read(ConversationDataModule, row, template=THINKING)[1] == [
        "<user>a</s>\n<assistant>[<think></think>yes</s>]"
    ]


@pytest.mark.parametrize("template", [WITH_OPTION, MARKED_WITH_OPTION], ids=["prefixes", "marks"])
@pytest.mark.parametrize(
    "answer", [assistant("b", reasoning_content="hm"), assistant("<think>hm</think>b")], ids=["key", "tags"]
)
def test_thoughts_behind_a_prompt_that_closes_them_are_rejected(template, answer):
    row = {"messages": [user("a"), answer]}
    thinking = read(ConversationDataModule, row, template=template)[1]
    assert thinking == ["<user>a</s>\n<assistant>[<think>hm</think>b</s>]"]
    message = reason(ConversationDataModule, row, template=template, chat_template_kwargs={"enable_thinking": False})
    assert "message 1 of the conversation has thoughts, and the chat template closes the thoughts" in message
    assert "enable_thinking: true" in message


def test_thoughts_in_a_content_are_not_written_behind_empty_ones():
    template = THINKING.replace("m.content.split('</think>')[-1]", "m.content")
    row = {"messages": [user("a"), assistant("<think>hm</think>\n\nb")]}
    assert read(ConversationDataModule, row, template=template)[1] == [
        "<user>a</s>\n<assistant>[<think>hm</think>b</s>]"
    ]
    both = {"messages": [user("a"), assistant("<think>hm</think>b", reasoning_content="hm")]}
    assert "message 1 of the conversation has thoughts twice" in reason(ConversationDataModule, both)


def test_answers_follow_the_prompt_of_a_generation_where_it_has_more_than_their_rendering():
    text = read(ConversationDataModule, {"messages": [user("a"), assistant("<b")]}, template=CLOSED)[1]
    assert text == ["<user>a</s>\n<assistant><|channel>thought\n<channel|>[<b</s>]"]


@pytest.mark.parametrize("flag", ["weight", "train", "training", "loss_weight", "loss"])
def test_flags_of_turns_are_obeyed(flag):
    messages = [user("a"), assistant("b", **{flag: 0}), user("c"), assistant("d", **{flag: 1})]
    assert read(ConversationDataModule, {"messages": messages})[1] == [
        "<user>a</s>\n<assistant>b</s>\n<user>c</s>\n<assistant>[d</s>]"
    ]
    half = [user("a"), assistant("b", **{flag: 0.5})]
    assert f"a message has {flag} 0.5, expected 0 or 1" in reason(ConversationDataModule, {"messages": half})
    none = [user("a"), assistant("b", **{flag: 0})]
    assert "each has a flag that says not to learn it" in reason(ConversationDataModule, {"messages": none})


def test_an_empty_answer_is_rejected():
    assert "an answer to learn, is empty" in reason(ConversationDataModule, {"messages": [user("a"), assistant(" ")]})


# -- prompts ---------------------------------------------------------------------------------------------------


def test_a_prompt_that_ends_with_words_of_the_assistant_is_continued():
    row = {"prompt": [user("a"), assistant("Let me think")]}
    assert read(PromptDataModule, row)[1] == ["<user>a</s>\n<assistant>Let me think"]


@pytest.mark.parametrize("kind", [ConversationDataModule, PromptDataModule])
def test_messages_as_json_text_are_read(kind):
    row = {"prompt": json.dumps([user("a")]), "completion": json.dumps([assistant("b")])}
    module, texts = read(kind, row)
    assert texts[0].startswith("<user>a</s>\n<assistant>")
    assert any("(messages in JSON text)" in columns for columns in module.reports["train"].column_mappings)


@pytest.mark.parametrize("words", ["<think>", "Let me see.\n<think>"])
def test_words_that_begin_thoughts_do_not_follow_empty_ones(words):
    row = {"prompt": [user("a"), assistant(words)]}
    assert read(PromptDataModule, row, template=THINKING)[1] == [f"<user>a</s>\n<assistant>{words}"]


def test_json_that_is_no_conversation_stays_a_text():
    assert read(PromptDataModule, {"prompt": '[{"role": "x"}, 3]'})[1] == ['[{"role": "x"}, 3]']


# -- columns that change the text ------------------------------------------------------------------------------


def test_columns_of_the_alpaca_format_are_read():
    row = {"instruction": "Reverse.", "input": "snow rain", "output": "rain snow", "system": "Be brief."}
    row["history"] = [["hi", "hello"]]
    columns = {"prompt": "instruction", "completion": "output"}
    text = read(ConversationDataModule, row, columns=columns, as_messages=True)[1][0]
    assert text == (
        "<system>Be brief.</s>\n<user>hi</s>\n<assistant>hello</s>\n<user>Reverse.\nsnow rain</s>\n<assistant>"
        "[rain snow</s>]"
    )
    message = reason(ConversationDataModule, row, columns=columns)
    assert "would write the column 'system' before the prompt, which is plain text: set as_messages: true" in message
    left_out = columns | {"system": None, "history": None}
    assert read(ConversationDataModule, row, columns=left_out)[1] == ["Reverse.\nsnow rain[rain snow</s>]"]


@pytest.mark.parametrize("kind", [ConversationDataModule, PromptDataModule, PreferenceDataModule])
def test_the_column_system_is_the_system_message(kind):
    row = {"prompt": [user("a")], "completion": [assistant("b")], "chosen": [assistant("b")]}
    texts = read(kind, row | {"rejected": [assistant("c")], "system": "Rhyme."})[1]
    assert all(text.startswith("<system>Rhyme.</s>\n<user>a</s>") for text in texts)
    both = row | {"prompt": [{"role": "system", "content": "x"}, user("a")], "rejected": [assistant("c")]}
    assert "and the column 'system_prompt' has another one" in reason(kind, both | {"system_prompt": "y"})


@pytest.mark.parametrize("column", ["videos", "video", "audios", "audio"])
def test_columns_that_nothing_can_read_are_named(column):
    row = {"messages": [user("<video>what?"), assistant("b")], column: ["a.mp4"]}
    assert f"the column '{column}' is part of the text in other libraries" in reason(ConversationDataModule, row)
    assert read(ConversationDataModule, row, columns={column: None})


def test_a_prompt_beside_another_conversation_is_rejected():
    row = {"prompt": "why?", "messages": [user("a"), assistant("b")]}
    assert "has a conversation without the text of the column 'prompt'" in reason(ConversationDataModule, row)
    assert read(ConversationDataModule, row, columns={"prompt": None})


@pytest.mark.parametrize("column", ["question", "instruction", "query"])
def test_pairs_without_the_column_prompt_are_rejected_with_the_line_to_add(column):
    row = {column: "why?", "chosen": "because", "rejected": "no idea"}
    line = f"to use '{column}', set data.init_args.columns: {{prompt: {column}}}"
    assert line in reason(PreferenceDataModule, row)
    pair = {"chosen": {"from": "gpt", "value": "b"}, "rejected": {"from": "gpt", "value": "c"}}
    assert "no column 'prompt'" in reason(PreferenceDataModule, {column: [user("a")], **pair})
    assert "no question in common" in reason(PreferenceDataModule, pair)


def test_conversations_beside_two_answers_are_the_prompt():
    pair = {"chosen": {"from": "gpt", "value": "b"}, "rejected": {"from": "gpt", "value": "c"}}
    row = {"conversations": [{"from": "human", "value": "a"}], **pair}
    assert read(PreferenceDataModule, row)[1] == read(PreferenceDataModule, {"prompt": [user("a")], **pair})[1]


def test_pairs_that_hold_whole_conversations_need_no_prompt():
    row = {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")], "messages": [user("a")]}
    assert len(read(PreferenceDataModule, row)[1]) == 2
    text = {"question": "why?", "chosen": "Human: why? Assistant: b", "rejected": "Human: why? Assistant: c"}
    assert len(read(PreferenceDataModule, text)[1]) == 2


def test_a_conversation_of_several_texts_is_refused_by_nothing_that_learns_rows():
    chosen = [user("a"), assistant("b"), user("c"), assistant("d")]
    rejected = [user("a"), assistant("x"), user("c"), assistant("y")]
    module, texts = read(PreferenceDataModule, {"chosen": chosen, "rejected": rejected}, template=THINKING)
    assert [text.count("[") for text in texts] == [1, 1, 1, 1]
    assert module.longest_text_tokens < module.count_tokens(module.examples["train"][0])


def test_messages_of_unknown_form_are_a_bad_row():
    with pytest.raises(BadRow, match="different thoughts"):
        messages_of([user("a"), assistant("b", thinking="x", reasoning="y")], "x")


def test_check_data_shows_each_text_of_a_row():

    row = {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}
    module, _ = read(ConversationDataModule, row, template=THINKING)
    batch = module.collate(module.examples["train"], [0], [0], 0)
    described = describe_batch(batch, module.tokenizer, lambda ids: [])
    assert {name: text["text"] for name, text in described.items()} == {
        "text, turn 1": "<user>a</s>\n<assistant>⟦<think></think>b</s>⟧",
        "text, turn 2": "<user>a</s>\n<assistant>b</s>\n<user>c</s>\n<assistant>⟦<think></think>d</s>⟧",
    }


def test_an_environment_continues_no_half_message():
    module, _ = read(PromptDataModule, {"prompt": [user("a"), assistant("Let me")]}, template=WITHOUT_TOOLS)
    settings = EnvironmentSettings("tests.environments.worlds:Echo")
    with pytest.raises(ValueError, match="a prompt ends with words of the assistant, which an environment cannot"):
        conversation_sampler(settings, module)
    for with_reset in ("Greets", "Remembers"):
        conversation_sampler(EnvironmentSettings(f"tests.environments.worlds:{with_reset}"), module)


def test_nulls_that_json_lines_have_are_rendered_and_counted():
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo", "zone": None}}}
    module, texts = read(ConversationDataModule, {"messages": [user("sky?"), assistant("", tool_calls=[call])]})
    assert '"zone": null' in texts[0]
    assert module.reports["train"].describe_notes() == [
        "tool calls have null values, which are rendered as null (1 of 1 rows)"
    ]


def test_pairs_of_turns_are_messages():
    row = {"messages": [{"human": "a", "assistant": "b"}, {"human": "c", "assistant": "d"}]}
    assert read(ConversationDataModule, row)[1] == ["<user>a</s>\n<assistant>[b</s>]\n<user>c</s>\n<assistant>[d</s>]"]


def test_labels_of_llama_factory_are_read():
    row = {"messages": [user("a"), assistant("b")], "kto_tag": False}
    assert read(UnpairedDataModule, row)[0].examples["train"][0][1] is False


@pytest.mark.parametrize(
    ("options", "warned"), [({}, True), ({"date_string": "26 Jul 2024"}, False)], ids=["today", "fixed"]
)
def test_a_template_that_writes_todays_date_is_named(options, warned):
    date = "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    data, (text,) = read(
        ConversationDataModule,
        {"messages": [{"role": "user", "content": "hi"}, assistant("yes")]},
        template=date + "{{ date_string }}" + CHAT,
        chat_template_kwargs=options,
    )
    assert ("26 Jul 2024" in text) != warned
    assert ("date_string: 26 Jul 2024" in data.date_warning) == warned
    assert not read(ConversationDataModule, {"messages": [{"role": "user", "content": "hi"}, assistant("yes")]})[
        0
    ].date_warning
