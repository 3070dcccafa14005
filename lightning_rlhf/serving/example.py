"""A request that a model can answer, whatever its tokenizer knows and whether or not it chats."""

from __future__ import annotations

import json
import shlex
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_TEXTS = ("What is 12 + 30?", "12+30=")
_LETTERS = 4
_TOKENS = 32


def request(tokenizer: PreTrainedTokenizerBase, max_tokens: int, max_length: int) -> tuple[str, dict[str, Any]]:
    """A route, and the body for it without the model's name.

    Args:
        tokenizer: of the model; with a chat template that takes a user's message, the model is asked in a chat.
        max_tokens: longest response.
        max_length: longest prompt with response.
    """
    text = next((text for text in _TEXTS if _reads(tokenizer, text)), _own_text(tokenizer))
    messages = [{"role": "user", "content": text}]
    route, asked, whole = "/v1/completions", dict[str, Any](prompt=text), text
    if tokenizer.chat_template:
        try:
            whole = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            route, asked = "/v1/chat/completions", {"messages": messages}
        except TemplateError:  # it wants something else: it is asked without
            pass
    room = max_length - len(tokenizer(whole)["input_ids"])
    return route, {**asked, "max_tokens": max(1, min(_TOKENS, max_tokens, room))}


def _reads(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids)).strip() == text


def _own_text(tokenizer: PreTrainedTokenizerBase) -> str:
    special = set(tokenizer.all_special_ids)
    ids = [number for number in range(len(tokenizer)) if number not in special]
    return str(tokenizer.decode(ids[:_LETTERS]))


def shown(url: str, name: str, key: tuple[str, str], asked: tuple[str, dict[str, Any]]) -> str:
    """Commands of a shell that ask the model.

    Args:
        url: of the front.
        name: of the model.
        key: and how it is written on a command line; where that is the same, it was made up and nobody has it yet.
        asked: route and body.
    """
    route, body = asked
    made, told = key[0] == key[1], key[1]
    lines = [f"export KEY={told}"] if made else []
    content = shlex.quote(json.dumps({"model": name, **body}))
    headers = f"-H \"Authorization: Bearer {'$KEY' if made else told}\" -H 'Content-Type: application/json'"
    return "\n".join(f"  {line}" for line in [*lines, f"curl {url}{route} {headers} -d {content}"])
