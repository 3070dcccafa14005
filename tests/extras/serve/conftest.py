"""A small model to serve."""

import string

import pytest

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.loading import FromConfig
from tests.rollout.engines import ARCHITECTURE

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def served_model(tmp_path_factory):
    """A directory with a small chat model for printable characters, which vLLM's attention on CPUs supports."""
    directory = tmp_path_factory.mktemp("served") / "tiny"
    FromConfig({**ARCHITECTURE, "vocab_size": 100}, seed=0).causal().save_pretrained(directory)
    tokenizer = CharacterTokenizer(string.printable[:95] + "\n").load()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory
