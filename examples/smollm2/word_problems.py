"""Word problems with one sum or difference, and the reward for their answers.

    python examples/smollm2/word_problems.py data/word_problems

This writes train.jsonl and val.jsonl with the columns ``prompt`` (chat messages with two worked examples) and
``answer``. No problem of val.jsonl is in train.jsonl.
"""

import json
import random
import re
import sys
from pathlib import Path

ROWS = {"train": 2048, "val": 256}
NUMBERS = range(2, 30)
NAMES = ["Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Kate", "Leo"]
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


def right(completions, answer, finished):
    """Return 1 if the last number of a finished response is the answer, else 0."""
    rewards = []
    for text, wanted, ended in zip(completions, answer, finished, strict=True):
        numbers = re.findall(r"\d+", text.replace(",", ""))
        rewards.append(float(ended and numbers[-1:] == [wanted]))
    return rewards


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
        yield {"prompt": [*EXAMPLES, {"role": "user", "content": question}], "answer": str(a + sign * b)}


def main(folder):
    """Write the files."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    draw, drawn = random.Random(0), set()
    for name, count in ROWS.items():
        lines = [json.dumps(row) + "\n" for row in rows(count, draw, drawn)]
        Path(folder, f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("Usage: python word_problems.py DIRECTORY")
    main(sys.argv[1])
