"""The bridge of the package renderers: a fake with its interface, and the package itself if it is installed."""

import random
import sys
from types import ModuleType, SimpleNamespace

import pytest

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.environments import EnvironmentSettings
from lightning_rlhf.environments.bridges import TemplateBridge
from lightning_rlhf.extras.environments.renderers_bridge import RenderersBridge
from tests.environments import worlds

# As Qwen3: thoughts of earlier answers are left out, an empty block is written for the last one, and messages of tools
# that follow each other share a message of the user.
QWEN = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
SCHEMA = [{"type": "function", "function": {"name": "add", "description": "Add", "parameters": {}}}]


@pytest.fixture(scope="module")
def tokenizer():
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n<>|/_.[]{}\":,'"
    tokenizer = CharacterTokenizer(letters).load()
    special = ["<|im_start|>", "<|endoftext|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special, "eos_token": "<|im_end|>"})
    tokenizer.add_tokens(MARKERS)
    tokenizer.chat_template = QWEN
    return tokenizer


def user(text, role="user"):
    return {"role": role, "content": text}


# -- a stand-in -------------------------------------------------------------------------------------------------------


class FakeRenderer:
    """The interface of `renderers.base.Renderer` of renderers 0.1.12, for the template above without tools."""

    def __init__(self, tokenizer, config):
        if config.name == "other":
            raise AssertionError("Special token '<|eot_id|>' not found")
        self.tokenizer, self.config = tokenizer, config

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def render_ids(self, messages, *, tools=None, add_generation_prompt=False):
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        end = "\n\n" if self.config.name == "double" else "\n"
        return self.ids(text + f"<|im_start|>assistant{end}" * add_generation_prompt)

    def render(self, messages, *, tools=None):
        known = self.render_ids(messages[:-1], add_generation_prompt=True)
        answer = self.ids(f"{messages[-1]['content']}<|im_end|>")
        return SimpleNamespace(token_ids=known + answer, sampled_mask=[False] * len(known) + [True] * len(answer))

    def bridge_to_next_turn(self, before, turn, new_messages, *, tools=None):
        if self.config.name == "never" or "<think>" in self.tokenizer.decode(turn):
            return None
        end = [] if turn[-1] == self.tokenizer.eos_token_id else [self.tokenizer.eos_token_id]
        new = self.ids("\n") + self.render_ids(new_messages, add_generation_prompt=True)
        start = 1 if self.config.name == "trims" else 0
        return SimpleNamespace(token_ids=[*before, *turn, *end, *new][start:])


@pytest.fixture
def fake(monkeypatch):
    class Config(SimpleNamespace):
        def __init__(self, thinking_retention=None, name=None):
            super().__init__(name=name or Config.requested, thinking_retention=thinking_retention)

    def config_from_name(name):
        Config.requested = name
        if name not in ("same", "other", "double", "never", "trims"):
            raise ValueError(f"No renderer config registered for name={name!r}")
        return Config()

    def create_renderer(tokenizer, config, *, chat_template_kwargs=None):
        assert config.thinking_retention == "all"
        if chat_template_kwargs:
            raise ValueError(f"Unsupported chat_template_kwargs: {sorted(chat_template_kwargs)}")
        return FakeRenderer(tokenizer, config)

    base = ModuleType("renderers.base")
    base.MODEL_RENDERER_MAP = {"Team/Same-1B": "same", "Team/Double": "double"}
    package = ModuleType("renderers")
    package.config_from_name, package.create_renderer, package.base = config_from_name, create_renderer, base
    monkeypatch.setitem(sys.modules, "renderers", package)
    monkeypatch.setitem(sys.modules, "renderers.base", base)


def test_tokens_of_a_renderer_are_used(tokenizer, fake):
    bridge = RenderersBridge(tokenizer, renderer="same")
    bridge.check()
    before, turn = bridge.ids("<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"), bridge.ids("yes")
    expected = "\n<|im_start|>user\nso < |im_end|>< think><|im_end|>\n<|im_start|>assistant\n"
    behind = bridge.between([*turn, tokenizer.eos_token_id], [user("so <|im_end|><think>")], before)
    assert tokenizer.decode(behind) == expected
    assert tokenizer.decode(bridge.between(turn, [user("so <|im_end|><think>")], before)) == f"<|im_end|>{expected}"
    assert bridge.between(bridge.ids("<think>yes<|im_end|>"), [user("so")], before) is None
    cut = RenderersBridge(tokenizer, max_message_tokens=9, renderer="same").between(turn, [user("a" * 99)], before)
    assert "user\naa ... aa<|im_end|>" in tokenizer.decode(cut)
    start = bridge.prompt("", [user("one")], [user("two")])  # by the chat template
    assert tokenizer.decode(start).count("<|im_start|>user") == 2


def test_renderer_that_changes_earlier_tokens_ends_the_conversation(tokenizer, fake):
    bridge = RenderersBridge(tokenizer, renderer="trims")
    assert bridge.between(bridge.ids("yes<|im_end|>"), [user("so")], bridge.ids("abc")) is None


@pytest.mark.parametrize(
    ("renderer", "options", "message"),
    [
        ("double", {}, r"the text between a message and an answer differently: .*assistant\\n' and .*\\n\\n'"),
        ("never", {}, "the renderer 'never' cannot continue an answer with a message of role 'user'"),
        (
            "other",
            {},
            r"the renderer 'other' cannot be used: Special token '<\|eot_id\|>' not found; known renderers: ",
        ),
        ("none", {}, "the renderer 'none' cannot be used: No renderer config registered"),
        ("same", {"date": 1}, r"the renderer 'same' cannot be used: Unsupported chat_template_kwargs: \['date'\]"),
        (
            None,
            {},
            "no renderer for the model '.*': set the environment's renderer to the one for its family, one of ",
        ),
    ],
)
def test_renderers_for_another_tokenizer_are_rejected(tokenizer, fake, renderer, options, message):
    settings = EnvironmentSettings(worlds.Echo, bridge="renderers", renderer=renderer)
    with pytest.raises(ValueError, match=message):
        settings.make_bridge(tokenizer, options)


def test_renderer_of_a_known_model_is_found(tokenizer, fake, monkeypatch):
    monkeypatch.setattr(tokenizer, "name_or_path", "Team/Same-1B")
    settings = EnvironmentSettings(worlds.Echo, bridge="renderers")
    assert isinstance(settings.make_bridge(tokenizer, {}), RenderersBridge)


def test_missing_package_is_reported(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ImportError, match=r"bridge: renderers needs the package renderers: run pip install 'light"):
        RenderersBridge(tokenizer, renderer="qwen3")


def test_renderer_requires_its_bridge():
    with pytest.raises(ValueError, match="renderer 'qwen3' needs bridge: renderers, got bridge: template"):
        EnvironmentSettings(worlds.Echo, renderer="qwen3")


# -- the package ------------------------------------------------------------------------------------------------------


def qwen3(tokenizer, **arguments):
    pytest.importorskip("renderers", reason="needs renderers")
    bridge = RenderersBridge(tokenizer, renderer="qwen3", **arguments)
    bridge.check()
    return bridge


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_package_and_template_give_the_same_tokens(tokenizer, options):
    """Random conversations with thoughts, special tokens in messages, tools, and several kinds of ends of turns."""
    arguments = {"tools": SCHEMA, "options": options}
    bridges = [qwen3(tokenizer, **arguments), TemplateBridge(tokenizer, **arguments)]
    draw = random.Random(0)
    for _ in range(50):
        ids = bridges[0].prompt("", [user("hello")], [user("there")])
        assert ids == bridges[1].prompt("", [user("hello")], [user("there")])
        for _ in range(draw.randint(1, 4)):
            thoughts = "" if options or draw.random() < 0.3 else "<think>\nwell\n</think>\n\n"
            end = draw.choice(["<|im_end|>", ""])
            turn = bridges[0].ids(thoughts + "".join(draw.choices("abc xyz", k=draw.randint(1, 9))) + end)
            role = draw.choice(["user", "tool"])
            texts = ["3", "a<|im_end|>\n<|im_start|>assistant\n", "<tool_response>", "two\nlines"]
            written = [user(draw.choice(texts), role) for _ in range(draw.randint(1, 2))]
            behind, expected = (bridge.between(turn, written, ids) for bridge in bridges)
            assert behind == expected
            ids += [*turn, *behind]


def test_turn_with_unfinished_thoughts_cannot_be_continued(tokenizer):
    bridge = qwen3(tokenizer)
    before = bridge.prompt("", [user("hello")], [user("there")])
    assert bridge.between(bridge.ids("<think>\nwell<|im_end|>"), [user("so")], before) is None


def test_package_rejects_other_tokenizers(tokenizer):
    pytest.importorskip("renderers", reason="needs renderers")
    with pytest.raises(ValueError, match=r"the renderer 'llama-3' cannot be used: .*not found"):
        RenderersBridge(tokenizer, renderer="llama-3")
    with pytest.raises(ValueError, match=r"the renderer 'qwen9' cannot be used: .*there are .*qwen3\.5"):
        RenderersBridge(tokenizer, renderer="qwen9")
    with pytest.raises(ValueError, match=r"the renderer 'qwen3' cannot be used: Unsupported chat_template_kwargs"):
        RenderersBridge(tokenizer, renderer="qwen3", options={"date_string": "today"})
