"""Loading of tokenizers, and construction of new ones for training from scratch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from lightning_rlhf.expected_errors import MissingFileError, UsageError
from lightning_rlhf.paths import (
    READ_ERRORS,
    describe_missing_path,
    expect_hub,
    hub_error_message,
    names_a_path,
    read_error_message,
)

# Text that tokenizers split differently: spaces, digits, punctuation, line breaks and non-ASCII letters.
_SAMPLE = "Is it  12+30?\n\tIt's 42, I'd guess: not 1,000.5! (a b c) _x_ naïve 東京\n"
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

_TURNS = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}</s>"
    "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


@runtime_checkable
class TokenizerSource(Protocol):
    """Protocol of an object that creates a tokenizer. In YAML, you set it by ``class_path``."""

    def load(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer."""


@dataclass(frozen=True)
class CharacterTokenizer:
    """A tokenizer with one token per character, for small models that you train from scratch.

    Args:
        characters: unique characters of the vocabulary. Other characters become ``<unk>``. Their ids follow the special
            tokens: pad 0, begin 1, end 2, unknown 3.
        chat: whether the tokenizer gets a chat template, which writes the texts of all messages, and an end token after
            each message of the assistant.
    """

    characters: str
    chat: bool = False

    def __post_init__(self) -> None:
        if len(set(self.characters)) != len(self.characters) or not self.characters:
            raise UsageError(f"characters must be non-empty and unique, got {self.characters!r}")

    def load(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer."""
        vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS.values(), *self.characters])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        template = {"chat_template": _TURNS} if self.chat else {}
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS, **template)


def unknown_parts(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """Return the parts of a text that become the unknown token, one entry per occurrence."""
    unknown = tokenizer.unk_token_id
    # Some tokenizers can encode any text, and use another special token as the unknown token.
    if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        return []
    if not tokenizer.is_fast:  # slow tokenizers do not report offsets
        return [str(tokenizer.unk_token)] * tokenizer(text, add_special_tokens=False)["input_ids"].count(unknown)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
    return [text[start:end] for token, (start, end) in tokens if token == unknown]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that texts of responses leave out: named ones, and those that were added as special."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(index for index, token in added if token.special)}


def end_tokens_of(tokenizer: PreTrainedTokenizerBase, source: object) -> tuple[int, ...]:
    """Return the tokens at which answers end: the tokenizer's end token, then those of the model beside it.

    Args:
        source: its directory or hub id, or another source, which has no model.
    """
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *generation_ends(source if isinstance(source, str) else None)]))


def generation_ends(model: str | None) -> list[int]:
    """Return the tokens at which a model's generation settings end responses; empty without settings.

    Args:
        model: directory or hub id of the model; None has no settings.
    """
    if model is None:
        return []
    try:
        file = cached_file(model, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    except OSError:  # no directory or hub id
        return []
    if file is None:  # a model without generation settings
        return []
    try:
        settings = json.loads(Path(file).read_text(encoding="utf-8"))
        ends = settings.get("eos_token_id")
    except (ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"{file} is not a JSON object: {error}") from error
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
        raise UsageError(f"{file} has eos_token_id {ends!r}, expected the id of a token, or a list of ids")
    return ends


def load_tokenizer(source: str | TokenizerSource) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory, hub id or source.

    Raises:
        FileNotFoundError: a path has no tokenizer files, or the hub does not provide them.
        ValueError: the files are damaged, or the tokenizer has no end-of-sequence token, so responses could never end.
    """
    tokenizer = _load_saved(source) if isinstance(source, str) else source.load()
    if tokenizer.eos_token_id is None:
        raise UsageError(f"the tokenizer {source!r} has no end-of-sequence token; responses could never end")
    return tokenizer


def _load_saved(source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory or hub id."""
    absent = f"no tokenizer at {source!r}"
    path = Path(source).expanduser()
    if names_a_path(source) or "/" not in source:
        expected = "expected a directory that save_pretrained wrote, or a hub id such as 'Qwen/Qwen2.5-0.5B-Instruct'"
        if not path.is_dir():
            raise MissingFileError(f"{absent}: {expected}; {describe_missing_path(source)}")
        if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise MissingFileError(f"{absent}: {expected}; {path.absolute()} has no tokenizer.json")
        source = str(path)
    try:
        if not path.is_dir():
            expect_hub(source)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except READ_ERRORS as error:
        if path.is_dir():
            reason = read_error_message(error)
            raise UsageError(f"the tokenizer in {source!r} cannot be read, its files are damaged: {reason}") from error
        if not isinstance(error, OSError):
            raise
        raise MissingFileError(f"{absent}: {hub_error_message(source, error)}") from None
    _check_reloaded(path / "tokenizer.json", tokenizer)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _template_of_processor(source)
    return tokenizer


def _template_of_processor(source: str) -> str | None:
    """Return the chat template that a vision-language model has beside its processor; None without one.

    Raises:
        ValueError: the file is damaged.
    """
    file = cached_file(
        source,
        "chat_template.json",
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return None
    try:
        template = json.loads(Path(file).read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"the chat_template.json of {source!r} cannot be read: {error!r}") from error
    return template if isinstance(template, str) else None


def _check_reloaded(file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Validate that the loaded tokenizer of a directory splits text in the same way as its ``tokenizer.json``.

    If the directory has a ``config.json``, transformers chooses a tokenizer class by the model type, and some classes
    split text differently; one of them drops all spaces.

    Raises:
        ValueError: the tokens differ.
    """
    if not file.is_file():
        return
    expected = Tokenizer.from_file(str(file)).encode(_SAMPLE, add_special_tokens=False)
    ids = tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
    if ids != expected.ids:
        raise UsageError(
            f"the tokenizer in {str(file.parent)!r} was loaded as {type(tokenizer).__name__}, which splits texts "
            f"differently from tokenizer.json ({len(ids)} tokens of a sample, expected {len(expected.ids)}): move it "
            f"to a separate directory without config.json, and use that as tokenizer"
        )


def end_tokens(
    tokenizer: PreTrainedTokenizerBase, responses: Sequence[Sequence[int]], finished: Sequence[bool]
) -> list[str]:
    """Return the text of the special token that ended each response, empty without one.

    Args:
        tokenizer: tokenizer of the policy.
        responses: token ids of the responses.
        finished: whether each response ended, and was not cut.
    """
    special = special_ids(tokenizer)
    ends = [
        ids[-1:] if ended and ids and ids[-1] in special else [] for ids, ended in zip(responses, finished, strict=True)
    ]
    return [str(tokenizer.decode(list(end))) for end in ends]
