"""Whether models read token ids as the run's tokenizer writes them."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from lightning_rlhf.models.loading import ModelSource, Pretrained, quiet_transformers

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def check_vocabularies(roles: dict[str, ModelSource], tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Refuse models that read token ids otherwise than the run's tokenizer; no weight is loaded for it.

    Embeddings of one family are padded to different sizes, and tokenizers of one size differ: where a model comes with
    its tokenizer, that is what is compared, else the size.

    Args:
        roles: by what a sentence calls them; one without a tokenizer of its own is measured by the first.
        tokenizer: of the run; None takes the first role's own, where it has one.

    Raises:
        ValueError: a model knows too few tokens, or other ones, or its tokenizer cannot be read.
    """
    (first, source), *_ = roles.items()
    expected, whose = vocab_size(source), "the run's"
    if tokenizer is None:
        tokenizer, whose = _own_tokenizer(first, source), f"{first}'s"
    checked: list[ModelSource] = []
    for name, source in roles.items():
        if source in checked:
            continue
        checked.append(source)
        size = vocab_size(source)
        if tokenizer is not None and len(tokenizer) > size:
            raise ValueError(
                f"the tokenizer knows {len(tokenizer)} tokens, {name} only {size}: "
                f"give the tokenizer that belongs to {name}"
            )
        own = _own_tokenizer(name, source)
        if own is not None and tokenizer is not None:
            _check_same(own.get_vocab(), tokenizer.get_vocab(), name, whose)
        elif size != expected:
            raise ValueError(
                f"{name} knows {size} tokens, {first} {expected}, and no tokenizer beside it says that they agree: "
                f"give a model of that size, or one with the tokenizer it was made with"
            )


def _check_same(own: dict[str, int], ours: dict[str, int], name: str, whose: str) -> None:
    """Name the first token, in the order of the run's ids, whose id differs or that one of the two does not know."""
    order = [*sorted(ours, key=lambda token: ours[token]), *sorted(own, key=lambda token: own[token])]
    token = next((token for token in order if own.get(token) != ours.get(token)), None)
    if token is not None:
        here, there = (f"{token!r} is {ids[token]}" if token in ids else f"{token!r} is unknown" for ids in (own, ours))
        raise ValueError(
            f"{name} was made with another tokenizer: in its own {here}, in {whose} {there}; "
            f"all roles must read the same token ids, so give models that were made with one tokenizer"
        )


def vocab_size(source: ModelSource) -> int:
    """Return the number of tokens that a model has logits for."""
    return int(source.hf_config().get_text_config().vocab_size)


def _own_tokenizer(name: str, source: ModelSource) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies beside a model's weights; None where there is none."""
    if not isinstance(source, Pretrained) or not any(_has(source, file) for file in _FILES):
        return None
    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                source.path, revision=source.revision, trust_remote_code=False
            )
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"the tokenizer of {name} at {source.path!r} cannot be read, so nobody knows whether it is the run's: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return tokenizer


def _has(source: Pretrained, file: str) -> bool:
    try:
        return cached_file(source.path, file, revision=source.revision) is not None
    except OSError:
        return False
