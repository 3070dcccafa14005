"""Rows and tokenizers for the tests of the data modules."""

from dataclasses import dataclass

from lightning_rlhf.data.tokenizers import CharacterTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?!:|\n "
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message, please') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}|{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class GivenRows:
    """A row source that holds the given rows."""

    given_rows: tuple

    def rows(self):
        for number, row in enumerate(self.given_rows, start=1):
            yield f"given:{number}", row


@dataclass(frozen=True)
class Letters:
    """A tokenizer source with one token per letter, with or without a chat template."""

    chat: bool = False

    def load(self):
        tokenizer = CharacterTokenizer(LETTERS).load()
        tokenizer.chat_template = TEMPLATE if self.chat else None
        return tokenizer


def module_of(kind, *rows, chat=False, val=None, **kwargs):
    """Return a data module of the given rows after ``setup("fit")``."""
    val = None if val is None else GivenRows(tuple(val))
    module = kind(GivenRows(rows), Letters(chat), val=val, **{"batch_size": 1, "shuffle": False, **kwargs})
    module.setup("fit")
    return module


def first_batch(module):
    return next(iter(module.train_dataloader()))


def error_of(kind, *rows, **kwargs):
    """Return the message of the error that the data module raises for these rows."""
    try:
        module_of(kind, *rows, **kwargs)
    except ValueError as error:
        return str(error)
    raise AssertionError("no row was rejected")
