"""Limit on the size of statements: no assignment of three expressions at once, no call with six positional arguments.

Print the findings of some files or folders with ``python -m tests.test_density lightning_rlhf/rollout``.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted([*ROOT.glob("lightning_rlhf/**/*.py"), *ROOT.glob("callbacks/**/*.py")])
TARGETS, POSITIONAL = 2, 5


def findings(tops=()):
    for path in FILES:
        name = str(path.relative_to(ROOT))
        if tops and not name.startswith(tuple(tops)):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                for target in node.targets:
                    if isinstance(target, ast.Tuple) and len(target.elts) > TARGETS:
                        yield f"{name}:{node.lineno}: assigns {len(target.elts)} expressions at once"
            elif isinstance(node, ast.Call) and len(node.args) > POSITIONAL:
                yield f"{name}:{node.lineno}: a call with {len(node.args)} positional arguments"


def test_statements_are_small():
    rest = list(findings())
    assert not rest, "\n".join(rest[:50])


if __name__ == "__main__":
    print(*findings(sys.argv[1:]), sep="\n")
