"""A lookup in two steps: the value of a key is another key, whose value is the answer.

``k?`` asks for the answer of a key; ``*k`` looks a key up. The table is new in each conversation, so nothing of it can
be memorised: 16 answers are possible, and only two lookups reveal the right one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.data.row import Row
from lightning_rlhf.environments.protocol import Environment, Reply
from lightning_rlhf.functional.seeding import derive_seed

KEYS = "abcdefgh"
LINKS = "rstuvwxy"
ANSWERS = "ABCDEFGHIJKLMNOP"
CHARACTERS = f"{KEYS}{LINKS}{ANSWERS}*?-"


def table_of(seed: int) -> dict[str, str]:
    """Return the values of all keys and links."""
    draw = random.Random(seed)
    links = draw.sample(LINKS, len(LINKS))
    return dict(zip(KEYS, links, strict=True)) | {link: draw.choice(ANSWERS) for link in LINKS}


class Lookup(Environment):
    """Answers lookups; the reward is 1 for the answer."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Create the table."""
        self.table = table_of(seed)
        self.answer = self.table[self.table[row["key"]]]

    def step(self, text: str) -> Reply:
        """Return the value of a key, or end the conversation at an answer."""
        if not text.startswith("*"):
            return Reply(reward=float(text == self.answer), done=True)
        return Reply(self.table.get(text[1:], "-"), metrics={"lookups": 1.0})


@dataclass(frozen=True)
class Questions:
    """Questions; columns ``prompt``, ``key``.

    Args:
        num_rows: number of rows.
    """

    num_rows: int

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        for number in range(self.num_rows):
            key = KEYS[number % len(KEYS)]
            yield f"question {number}", {"prompt": [{"role": "user", "content": f"{key}?"}], "key": key}


@dataclass(frozen=True)
class Demonstrations:
    """Conversations with two lookups, one, or none before an answer; column ``messages``.

    Args:
        num_rows: number of rows.
        seed: seed of the conversations.
        two: fraction of the conversations with two lookups, whose answers are right, in [0, 1].
        one: fraction of those with one lookup, whose answers are drawn, in [0, 1].
    """

    num_rows: int
    seed: int = 0
    two: float = 0.3
    one: float = 0.3

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        for number in range(self.num_rows):
            draw = random.Random(derive_seed("lookup", self.seed, number))
            table = table_of(draw.getrandbits(32))
            key, kind = draw.choice(KEYS), draw.random()
            if kind < self.two:
                lookups = 2
            elif kind < self.two + self.one:
                lookups = 1
            else:
                lookups = 0
            messages = [{"role": "user", "content": f"{key}?"}]
            for _ in range(lookups):
                messages += [{"role": "assistant", "content": f"*{key}"}, {"role": "user", "content": table[key]}]
                key = table[key]
            answer = key if lookups == 2 else draw.choice(ANSWERS)
            yield f"question {number}", {"messages": [*messages, {"role": "assistant", "content": answer}]}
