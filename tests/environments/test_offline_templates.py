"""Random conversations with the chat templates on this machine: those of vLLM's wheel, and those of a folder.

LIGHTNING_RLHF_TEMPLATES is the path of the folder, for example ``trl/chat_templates`` of an installed TRL.
"""

import os
import random
import string
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_rlhf.data.chat import Chat
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.data.turns import tokenize_turns
from lightning_rlhf.environments.bridges import TemplateBridge
from lightning_rlhf.expected_errors import UsageError

ENDS = (
    "<|im_end|>", "<|eot_id|>", "<turn|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<|end\u2581of\u2581sentence|>",
)  # fmt: skip
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "number"}}},
    },
}
FEWEST = {"user": 3, "tool": 1}  # templates of vLLM's wheel that allow messages of each role


def folders():
    package = find_spec("vllm")
    positions = [Path(package.origin).parent / "transformers_utils/chat_templates"] if package else []
    return [*positions, *map(Path, filter(None, [os.environ.get("LIGHTNING_RLHF_TEMPLATES")]))]


FILES = [file for folder in folders() for file in sorted(folder.glob("*.jinja"))]


def tokenizer_with(template):
    """Return a character tokenizer with the end token of the template."""
    tokenizer = CharacterTokenizer(string.printable).load()
    end = next((text for text in ENDS if text in template), "</s>")
    tokenizer.add_special_tokens({"eos_token": end})
    tokenizer.chat_template = template
    return tokenizer


def bridge_of(file, role):
    """Return the bridge for messages of a role, or None if the template is rejected."""
    tokenizer = tokenizer_with(file.read_text())
    bridge = TemplateBridge(tokenizer, tools=tools_of(role) or [])
    try:
        bridge.check()
    except UsageError:
        return None
    return bridge


def render(bridge, messages, role):
    return bridge.tokenizer.apply_chat_template(
        messages, tools=tools_of(role), tokenize=False, add_generation_prompt=True
    )


def tools_of(role):
    return [SCHEMA] if role == "tool" else None


@pytest.mark.skipif(not FILES, reason="vLLM is not installed, and LIGHTNING_RLHF_TEMPLATES is not set")
@pytest.mark.parametrize("role", ["user", "tool"])
def test_some_templates_are_accepted(role):
    assert sum(bridge_of(file, role) is not None for file in FILES) >= FEWEST[role]


def random_conversation(bridge, role, draw):
    """Return messages of a conversation that ends with an answer, its row of tokens, and the mask of the answers."""
    end = bridge.tokenizer.eos_token
    messages = [{"role": "user", "content": "question"}]
    row = bridge.ids(render(bridge, messages, role))
    mask = [False] * len(row)
    for turn_number in range(draw.randint(1, 4)):
        if turn_number:
            count = draw.randint(1, 2) if role == "tool" else 1
            written = [
                {"role": role, "content": "".join(draw.choices(string.ascii_letters, k=5))} for _ in range(count)
            ]
            between = bridge.between(turn, written)  # noqa: F821 (of the turn before)
            messages += written
            row, mask = [*row, *between], [*mask, *(False for _ in between)]
        answer = "".join(draw.choices(string.ascii_letters + "{}[]", k=draw.randint(1, 12)))
        turn = bridge.ids(answer + end)
        messages.append({"role": "assistant", "content": answer})
        row, mask = [*row, *turn], [*mask, *(True for _ in turn)]
    return messages, row, mask


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_rows_equal_the_rendered_text_if_the_template_keeps_earlier_turns(file, role):
    """A template keeps earlier turns if each answer follows the text that prompted it.

    In this case supervised training on the conversation has the same tokens and the same mask as a rollout.
    """
    bridge = bridge_of(file, role)
    if bridge is None:
        return  # test_some_templates_are_accepted counts them
    draw = random.Random(file.stem)
    end = bridge.tokenizer.eos_token
    saved = 0
    for _ in range(10):
        messages, row, mask = random_conversation(bridge, role, draw)
        whole = bridge.tokenizer.apply_chat_template(messages, tools=tools_of(role), tokenize=False)
        whole += end  # some templates do not end the last answer
        if all(
            whole.startswith(render(bridge, messages[:i], role) + message["content"] + end)
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        ):
            saved += 1
            assert whole.startswith(bridge.tokenizer.decode(row))
            chat = Chat(bridge.tokenizer, tools_of(role), {})
            ((ids, learned),), _ = tokenize_turns(chat, messages, "conversation")
            assert ids == row
            for i in [
                i for i, (instance, sampled) in enumerate(zip(learned, mask, strict=True)) if instance and not sampled
            ]:
                assert "generation %}" in file.read_text()  # some marks begin in the prompt, such as before <think>
                learned[i] = not all(learned[i : mask.index(True, i)])
            assert learned == mask
    if file.stem in ("template_chatml", "llama3", "qwen2_5"):
        assert saved == 10
