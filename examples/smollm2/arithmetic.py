"""Questions that SmolLM2 answers with a tool: sums, differences and products of numbers with three or four digits.

    python examples/smollm2/arithmetic.py data/arithmetic

This writes train.jsonl and val.jsonl. SmolLM2's chat template has no tools, so the prompts describe them by two worked
examples, and the tools' results are messages of the user. Columns: ``prompt``, ``direct`` (the same question after
examples that do not use a tool) and ``answer``.
"""

import json
import random
import re
import sys
from pathlib import Path

ROWS = {"train": 2048, "val": 128}


def add(a: int, b: int) -> int:
    """Return the sum of two numbers.

    Args:
        a: first number
        b: second number
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """Return the difference of two numbers.

    Args:
        a: first number
        b: second number
    """
    return a - b


def multiply(a: int, b: int) -> int:
    """Return the product of two numbers.

    Args:
        a: first number
        b: second number
    """
    return a * b


QUESTIONS = {
    add: ("How much is {a} plus {b}?", "Add {a} and {b}."),
    subtract: ("How much is {a} minus {b}?", "Subtract {b} from {a}."),
    multiply: ("How much is {a} times {b}?", "Multiply {a} by {b}."),
}
EXAMPLES = (("How much is 2815 plus 1467?", add, 2815, 1467), ("Multiply 214 by 365.", multiply, 214, 365))


def right(completions, answer, finished):
    """Return 1 if the last number of a finished response is the answer, else 0."""
    rewards = []
    for text, wanted, ended in zip(completions, answer, finished, strict=True):
        numbers = re.findall(r"\d+", text.replace(",", ""))
        rewards.append(float(ended and numbers[-1:] == [wanted]))
    return rewards


def messages(question, with_tool):
    """Return the chat messages of a question."""
    shown = []
    for example, tool, a, b in EXAMPLES:
        call = json.dumps({"name": tool.__name__, "arguments": {"a": a, "b": b}})
        texts = [example, *([f"<tool_call>{call}</tool_call>", str(tool(a, b))] if with_tool else []), str(tool(a, b))]
        shown += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    system = "Tools: add, subtract, multiply." if with_tool else "Answer with a number."
    return [{"role": "system", "content": system}, *shown, {"role": "user", "content": question}]


def rows(count, draw, drawn):
    """Yield the rows of a file; each problem occurs once in all files."""
    first = len(drawn)
    while len(drawn) < first + count:
        tool = draw.choice(list(QUESTIONS))
        digits = 3 if tool is multiply else 4
        b, a = sorted(draw.sample(range(10 ** (digits - 1), 10**digits), 2))
        if (tool, a, b) in drawn:
            continue
        drawn.add((tool, a, b))
        question = draw.choice(QUESTIONS[tool]).format(a=a, b=b)
        prompts = {name: messages(question, name == "prompt") for name in ("prompt", "direct")}
        yield {**prompts, "answer": str(tool(a, b))}


def write(folder, counts, rows):
    """Write a file of JSON lines for each name in ``counts``, with this number of rows."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    draw, drawn = random.Random(0), set()
    for name, count in counts.items():
        lines = [json.dumps(row) + "\n" for row in rows(count, draw, drawn)]
        path = Path(folder, f"{name}.jsonl")
        path.write_text("".join(lines))
        print(f"wrote {path}: {count} rows")


def main(folder):
    """Write the files."""
    write(folder, ROWS, rows)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit("Usage: python arithmetic.py DIRECTORY")
    main(sys.argv[1])
