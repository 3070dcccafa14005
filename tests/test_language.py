"""The phrases that made earlier versions hard to read stay out of code and documentation.

Print the findings of some files or folders with ``python -m tests.test_language lightning_rlhf/rollout docs``.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("lightning_rlhf", "callbacks", "examples", "benchmarks")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "configs", "constraints", "examples")
GENERATED = ("docs/performance.md",)

RULES = yaml.safe_load(Path(__file__).with_name("language.yaml").read_text())
PHRASES = {re.compile(rule["pattern"], re.IGNORECASE): rule["use"] for rule in RULES["phrases"]}


def phrases(text, line):
    """Yield findings of a text: (line, words, remedy)."""
    for number, part in enumerate(text.splitlines()):
        part = re.sub(r"``[^`]*``|`[^`]*`|:\w+:`[^`]*`|https?://\S+", "", part)
        for pattern, remedy in PHRASES.items():
            for match in pattern.finditer(part):
                yield line + number, match.group().strip(), remedy


def source_findings(path):
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from phrases(node.value, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from phrases(token.string, token.start[0])


def document_findings(path):
    """Yield findings in the prose of a page without its code blocks, or in the comments of a configuration."""
    fenced, lines = False, []
    for line in path.read_text().splitlines():
        fenced ^= line.lstrip().startswith("```")
        prose = line.partition("#")[2] if path.suffix == ".yaml" else line
        lines.append("" if fenced else prose)
    yield from phrases("\n".join(lines), 1)


def files():
    for top in SOURCES:
        yield from ((path, source_findings) for path in sorted((ROOT / top).rglob("*.py")))
    for top in DOCUMENTS:
        paths = [ROOT / top] if (ROOT / top).is_file() else sorted((ROOT / top).rglob("*"))
        yield from ((path, document_findings) for path in paths if path.suffix in (".md", ".yaml"))


def findings(tops=()):
    for path, look in files():
        name = str(path.relative_to(ROOT))
        if (not tops or name.startswith(tuple(tops))) and name not in GENERATED:
            yield from (f"{name}:{line}: {words} -> {remedy}" for line, words, remedy in sorted(set(look(path))))


def test_docstrings_comments_messages_and_pages_are_plain():
    rest = list(findings())
    assert not rest, "\n".join(rest[:50])


if __name__ == "__main__":
    print(*findings(sys.argv[1:]), sep="\n")
