"""Validation that all models use the token ids of the run's tokenizer."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.loading import ModelSource, Pretrained, quiet_transformers

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def check_vocabularies(roles: dict[str, ModelSource], tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Validate that the models use the same token ids as the run's tokenizer, without loading weights.

    The tokenizers are compared, because models of one family may pad embeddings to different sizes. For a model without
    a tokenizer, the vocabulary size is compared with that of the first model.

    Args:
        roles: model sources by display name.
        tokenizer: tokenizer of the run; None uses the tokenizer of the first role, if it has one.

    Raises:
        ValueError: a model has too few tokens or other token ids, or its tokenizer cannot be read.
    """
    (first, source), *_ = roles.items()
    expected, whose = vocab_size(source), "the run's"
    if tokenizer is None:
        tokenizer, whose = _saved_tokenizer(first, source), f"{first}'s"
    checked: list[ModelSource] = []
    for name, source in roles.items():
        if source in checked:
            continue
        checked.append(source)
        size = vocab_size(source)
        if tokenizer is not None and len(tokenizer) > size:
            raise UsageError(
                f"the tokenizer has {len(tokenizer)} tokens, {name} only {size}: "
                f"use the tokenizer that belongs to {name}"
            )
        saved = _saved_tokenizer(name, source)
        if saved is not None and tokenizer is not None:
            _check_same_ids(saved.get_vocab(), tokenizer.get_vocab(), name, whose)
        elif size != expected:
            raise UsageError(
                f"vocabulary sizes differ ({name} {size}, {first} {expected}), and there is no tokenizer to compare: "
                f"use a model with the same vocabulary size, or one that was saved with its tokenizer"
            )


def _check_same_ids(tokens: dict[str, int], ours: dict[str, int], name: str, whose: str) -> None:
    """Raise if a token has different ids or is missing in one vocabulary; the message names the first such token."""
    order = [*sorted(ours, key=lambda token: ours[token]), *sorted(tokens, key=lambda token: tokens[token])]
    token = next((token for token in order if tokens.get(token) != ours.get(token)), None)
    if token is not None:
        here, there = (
            f"{token!r} is {ids[token]}" if token in ids else f"{token!r} is unknown" for ids in (tokens, ours)
        )
        raise UsageError(
            f"{name} was trained with another tokenizer: in its tokenizer {here}, in {whose} {there}; "
            f"all roles must use the same token ids, so choose models that share one tokenizer"
        )


def vocab_size(source: ModelSource) -> int:
    """Return the number of logits of a model."""
    return int(source.hf_config().get_text_config().vocab_size)


def _saved_tokenizer(name: str, source: ModelSource) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that was saved with a model; None if it has no tokenizer."""
    if not isinstance(source, Pretrained) or not any(_has(source, file) for file in _FILES):
        return None
    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                source.path, revision=source.revision, trust_remote_code=False
            )
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(
            f"the tokenizer of {name} at {source.path!r} cannot be read, so it cannot be compared with the run's: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return tokenizer


def _has(source: Pretrained, file: str) -> bool:
    try:
        return cached_file(source.path, file, revision=source.revision) is not None
    except OSError:
        return False
