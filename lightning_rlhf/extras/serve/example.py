"""Example request for a served model, as shell commands."""

from __future__ import annotations

import json
import shlex
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_TEXTS = ("Compute 12 + 30.", "12+30=")
_LETTERS = 4
_TOKENS = 32


def example_request(tokenizer: PreTrainedTokenizerBase, max_tokens: int, max_length: int) -> tuple[str, dict[str, Any]]:
    """Return a route and a request body without the model's name.

    Args:
        tokenizer: tokenizer of the model; with a chat template, the request is a chat completion.
        max_tokens: maximum number of tokens of a response.
        max_length: maximum number of tokens of prompt and response together.
    """
    text = next((text for text in _TEXTS if _can_encode(tokenizer, text)), _known_text(tokenizer))
    messages = [{"role": "user", "content": text}]
    route = "/v1/completions"
    body: dict[str, Any] = {"prompt": text}
    prompt = text
    if tokenizer.chat_template:
        try:
            prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            route = "/v1/chat/completions"
            body = {"messages": messages}
        except TemplateError:  # the template rejects a single user message: use a text completion
            pass
    remaining = max_length - len(tokenizer(prompt)["input_ids"])
    return route, {**body, "max_tokens": max(1, min(_TOKENS, max_tokens, remaining))}


def _can_encode(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids)).strip() == text


def _known_text(tokenizer: PreTrainedTokenizerBase) -> str:
    special = set(tokenizer.all_special_ids)
    ids = [token for token in range(len(tokenizer)) if token not in special]
    return str(tokenizer.decode(ids[:_LETTERS]))


def curl_command(url: str, name: str, key: tuple[str, str], request: tuple[str, dict[str, Any]]) -> str:
    """Return shell commands that send a request.

    Args:
        url: address of the server.
        key: result of :func:`~lightning_rlhf.extras.serve.access.load_key`: the key and a shell expression for it,
            which are equal for a generated key.
        request: route and body.
    """
    route, body = request
    generated = key[0] == key[1]
    lines = [f"export KEY={key[0]}"] if generated else []
    content = shlex.quote(json.dumps({"model": name, **body}))
    headers = f"-H \"Authorization: Bearer {'$KEY' if generated else key[1]}\" -H 'Content-Type: application/json'"
    return "\n".join(f"  {line}" for line in [*lines, f"curl {url}{route} {headers} -d {content}"])
