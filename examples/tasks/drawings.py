"""Reading drawn three-digit numbers: a toy task with images, for supervised fine-tuning and RLHF in minutes.

A picture of 32 x 32 pixels shows three digits of seven segments in one color on another, each moved by up to two
pixels, with noise. A tenth of all numbers, selected by a hash, is held out and only used for evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageChops, ImageDraw

from lightning_rlhf.data.rows import Row
from lightning_rlhf.functional.seeding import derive_seed

CHARACTERS = "0123456789?"
_SIDE = 32
_DIGITS = 3
_WIDTH, _HEIGHT = 6, 12  # of a digit, in pixels
# Ends of the segments in units of (width, half of the height), and the segments of each digit.
_SEGMENTS = {
    "a": ((0, 0), (1, 0)), "b": ((1, 0), (1, 1)), "c": ((1, 1), (1, 2)), "d": ((0, 2), (1, 2)),
    "e": ((0, 1), (0, 2)), "f": ((0, 0), (0, 1)), "g": ((0, 1), (1, 1)),
}  # fmt: skip
_OF_DIGIT = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")


def is_held_out(number: int) -> bool:
    """Return whether a number belongs to the tenth that is only used for evaluation."""
    return derive_seed("drawings held out", number) % 10 == 0


def draw_number(number: int, generator: random.Random, noise: int = 30) -> Image.Image:
    """Return a picture of a number.

    Args:
        number: number in [0, 1000), written with three digits.
        generator: generator of colors, places and noise.
        noise: largest change of a color channel of a pixel, of 255.
    """
    dark, light = ([generator.randrange(low, low + 90) for _ in range(3)] for low in (0, 165))
    ink, paper = (dark, light) if generator.random() < 0.5 else (light, dark)
    image = Image.new("RGB", (_SIDE, _SIDE), tuple(paper))
    drawing = ImageDraw.Draw(image)
    for column, digit in enumerate(f"{number:0{_DIGITS}d}"):
        left, top = 2 + 10 * column + generator.randint(-1, 1), 10 + generator.randint(-2, 2)
        for segment in _OF_DIGIT[int(digit)]:
            ends = [(left + x * _WIDTH, top + y * _HEIGHT // 2) for x, y in _SEGMENTS[segment]]
            drawing.line(ends, fill=tuple(ink), width=2)
    random_pixels = Image.frombytes("RGB", image.size, generator.randbytes(3 * _SIDE * _SIDE))
    return ImageChops.add(image, random_pixels.point(lambda value: value * 2 * noise // 255), offset=-noise)


@dataclass(frozen=True)
class Numbers:
    """Pictures of numbers; columns ``prompt`` and ``answer``.

    Args:
        num_rows: number of rows.
        seed: seed of the numbers and their pictures.
        held_out: True draws numbers from the held-out tenth, False from the rest.
    """

    num_rows: int
    seed: int = 0
    held_out: bool = False

    def draw(self) -> Iterator[tuple[random.Random, int, Row]]:
        """Yield each number with its own random generator, and the row of its prompt."""
        drawn, attempt = 0, 0
        while drawn < self.num_rows:
            generator = random.Random(derive_seed("drawings", type(self).__name__, self.seed, self.held_out, attempt))
            attempt += 1
            if is_held_out(number := generator.randrange(10**_DIGITS)) == self.held_out:
                drawn += 1
                parts = [{"type": "image", "image": draw_number(number, generator)}, {"type": "text", "text": "?"}]
                yield generator, number, {"prompt": [{"role": "user", "content": parts}]}

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        for index, (_, number, row) in enumerate(self.draw()):
            yield f"picture {index}", {**row, "answer": f"{number:0{_DIGITS}d}"}


@dataclass(frozen=True)
class Readings(Numbers):
    """Pictures of numbers with readings that are often wrong; columns ``prompt`` and ``completion``.

    Args:
        num_rows: number of rows.
        seed: seed of the numbers and their pictures.
        held_out: True draws numbers from the held-out tenth, False from the rest.
        wrong: probability that a digit is read as another one, in [0, 1].
    """

    wrong: float = 0.2

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        for index, (generator, number, row) in enumerate(self.draw()):
            digits = [
                str((int(digit) + generator.randint(1, 9)) % 10) if generator.random() < self.wrong else digit
                for digit in f"{number:0{_DIGITS}d}"
            ]
            completion = [{"role": "assistant", "content": "".join(digits)}]
            yield f"reading {index}", {**row, "completion": completion}


def exact(completions: list[str], answer: list[str], finished: list[bool]) -> list[float]:
    """Return 1 for a finished completion that is the number, else 0."""
    triples = zip(completions, answer, finished, strict=True)
    return [float(ended and completion == expected) for completion, expected, ended in triples]
