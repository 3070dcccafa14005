"""Token ids at whose last position a reward model scores a response, as training data and rollouts have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.chat import Chat
from lightning_rlhf.data.image_parts import text_messages
from lightning_rlhf.data.messages import messages_of
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.data.turns import tokenize_turns
from lightning_rlhf.expected_errors import UsageError


def scored_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, response: Any, finished: bool = True, name: str = "the model"
) -> list[int]:
    """Return the token ids of a prompt and its response, with the end token if the response is finished.

    They are those of :class:`~lightning_rlhf.data.preferences.PreferenceDataModule` for the same texts or messages:
    prompt and response are tokenized separately, without special tokens but those that the text contains. A tokenizer
    of an encoder, which has a token for the whole text, adds its special tokens.

    Args:
        tokenizer: tokenizer of the reward model.
        prompt: text or chat messages.
        response: response in the same form.
        finished: whether the response ended, so that an end token follows; False for one that was cut.
        name: name of the reward model, for messages.

    Raises:
        ValueError: the tokenizer has no chat template, or it rejects the messages.
    """
    if not isinstance(prompt, str):
        return _conversation_ids(tokenizer, prompt, response, finished, name)
    if tokenizer.cls_token_id is not None:
        return list(tokenizer(prompt + response)["input_ids"])
    ids = [*_ids(tokenizer, prompt), *_ids(tokenizer, response)]
    return _ended(tokenizer, ids) if finished else ids


def _conversation_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[Mapping[str, Any]],
    response: Sequence[Mapping[str, Any]],
    finished: bool,
    name: str,
) -> list[int]:
    if tokenizer.chat_template is None:
        raise UsageError(f"{name} has no chat template: remove messages: true, so that it receives text")
    chat = Chat(tokenizer)
    try:
        messages = messages_of(text_messages([*prompt, *response]), "conversation")
        last = messages[-1]
        if not finished and last["role"] == "assistant" and isinstance(last.get("content"), str):
            before = chat.render(messages[:-1], "conversation", generation=True)
            return [*_ids(tokenizer, before), *_ids(tokenizer, last["content"])]
        text = chat.render(messages, "conversation")
        if not finished or tokenizer.cls_token_id is not None:
            return _ids(tokenizer, text)
        try:
            texts, _ = tokenize_turns(chat, messages, "conversation", len(prompt))
            return texts[-1][0]
        except BadRow:  # RewardModule cannot train on this conversation, so that there is no form to reproduce
            return _ended(tokenizer, _ids(tokenizer, text))
    except BadRow as error:
        reason = str(error).removeprefix("the chat template rejects the conversation: ")
        raise UsageError(f"the chat template of {name} rejects a conversation: {reason}") from error


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids)))


def _ended(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return the ids up to an end token at their end, behind which only white space may be, or with one appended."""
    end = tokenizer.eos_token_id
    if end is None:
        return ids
    for index in range(len(ids) - 1, -1, -1):
        if ids[index] == end and not _text(tokenizer, ids[index + 1 :]).strip():
            return ids[: index + 1]
        if _text(tokenizer, ids[index : index + 1]).strip():
            break
    return [*ids, end]
