"""Word problems with one sum or difference; their reward is ``right`` of arithmetic.py.

    python examples/smollm2/word_problems.py data/word_problems

This writes train.jsonl and val.jsonl with the columns ``prompt`` (chat messages with two worked examples), ``question``
(the same without them), ``answer``, and for a reward model ``chosen`` and ``rejected``: the calculation, and one with
the wrong operation or a wrong result. No problem of val.jsonl is in train.jsonl.
"""

import sys

from arithmetic import write

ROWS = {"train": 2048, "val": 256}
NUMBERS = range(2, 30)
NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Kate", "Leo", "Mia", "Noah",
    "Olivia", "Paul",
)  # fmt: skip
THINGS = ["apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stickers"]
# Text of a problem, and the sign of its second number.
PROBLEMS = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", 1),
    ("{name} has {a} {things} and gives away {b}. How many {things} does {name} have now?", -1),
    ("{name} has {a} {things}. {other} has {b} {things} more than {name}. How many {things} does {other} have?", 1),
    ("{name} found {a} {things} on Monday and {b} on Tuesday. How many {things} is that?", 1),
)
EXAMPLES = (
    {"role": "system", "content": "Answer with a calculation."},
    {"role": "user", "content": "Tom has 23 pens and buys 14 more. How many pens does Tom have now?"},
    {"role": "assistant", "content": "23 + 14 = 37"},
    {"role": "user", "content": "Sue has 31 cups and gives away 12. How many cups does Sue have now?"},
    {"role": "assistant", "content": "31 - 12 = 19"},
)


def rows(count, draw, drawn):
    """Yield the rows of a file; each combination of problem and numbers occurs once in all files."""
    first = len(drawn)
    while len(drawn) < first + count:
        text, sign = draw.choice(PROBLEMS)
        b, a = sorted(draw.sample(NUMBERS, 2))
        name, other = draw.sample(NAMES, 2)
        things = draw.choice(THINGS)
        if (text, a, b, things) in drawn:
            continue
        drawn.add((text, a, b, things))
        question = text.format(name=name, other=other, things=things, a=a, b=b)
        last = {"role": "user", "content": question}
        yield {
            "prompt": [*EXAMPLES, last],
            "question": [EXAMPLES[0], last],
            "answer": str(a + sign * b),
            "chosen": calculation(a, b, sign, a + sign * b),
            "rejected": (
                calculation(a, b, -sign, a - sign * b)
                if len(drawn) % 2
                else calculation(a, b, sign, a + sign * b + len(drawn) % 4 * 5 - 1)
            ),
        }


def calculation(a, b, sign, result):
    """Return a calculation as text, such as ``23 + 14 = 37``."""
    return f"{a} {'+' if sign > 0 else '-'} {b} = {result}"


def with_examples(messages):
    """Return the prompts of a teacher: the worked examples, then the question of each student's prompt."""
    return [[*EXAMPLES, prompt[-1]] for prompt in messages]


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit("Usage: python word_problems.py DIRECTORY")
    write(sys.argv[1], ROWS, rows)
