"""Plain technical English in code and documentation: the patterns that made earlier versions hard to read stay out.

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
SOURCES = ("lightning_rlhf", "callbacks", "examples", "benchmarks", "tests")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "configs", "constraints", "examples")
GENERATED = ("docs/performance.md",)

RULES = yaml.safe_load(Path(__file__).with_name("language.yaml").read_text())
PHRASES = {re.compile(rule["pattern"], re.IGNORECASE): rule["use"] for rule in RULES["phrases"]}
ARGUMENT_STARTS, NAME_PARTS, NAMES, VERBS = (
    set(RULES[key].split()) for key in ("argument_starts", "name_parts", "names", "verbs")
)
# A noun phrase may describe the result of a formula.
MATHEMATICS = ("lightning_rlhf/functional", "lightning_rlhf/objectives")
SHAPE = r"\([^)]*\)(?: (?:bool|int64|float32|float64|int)\b)?,? *"  # before the noun of an argument line
PROPERTIES = ("property", "setter", "fixture", "contextmanager")


def phrases(text, line):
    """Yield findings of a text: (line, words, remedy)."""
    for number, part in enumerate(text.splitlines()):
        part = re.sub(r"``[^`]*``|`[^`]*`|:\w+:`[^`]*`|https?://\S+", "", part)
        for pattern, remedy in PHRASES.items():
            for match in pattern.finditer(part):
                yield line + number, match.group().strip(), remedy


def argument_lines(docstring):
    """Yield (offset, first word) of each entry under Args, Arguments and Attributes of a Google docstring."""
    section, indent = "", 0
    for number, line in enumerate(docstring.splitlines()):
        if header := re.fullmatch(r"(Args|Arguments|Attributes):", line.strip()):
            section, indent = header.group(1), len(line) - len(line.lstrip()) + 4
        elif section and line.strip() and len(line) - len(line.lstrip()) < indent:
            section = ""
        elif section and (entry := re.match(rf" {{{indent}}}\**\w[\w, *`]*(?: \([^)]*\))?: *(?:{SHAPE})?(.+)", line)):
            possessive = re.match(r"the \w+'s(?=[,.]| (?:now|before|after|at)\b)", entry.group(1))
            yield number, possessive.group() if possessive else entry.group(1).split()[0].strip(",.;:`")


def docstring_findings(node, in_mathematics):
    docstring = ast.get_docstring(node, clean=True)
    if docstring is None:
        return
    line = node.body[0].lineno
    for number, first in argument_lines(docstring):
        if first in ARGUMENT_STARTS or first.startswith("the "):
            yield line + number, f"an argument line begins with {first!r}", "begin with the noun"
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if is_function and not in_mathematics and not node.name.startswith("test_"):
        decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
        first = docstring.split()[0].strip(".,:;")
        if first not in VERBS and not any(kind in decorators for kind in PROPERTIES):
            yield line, f"the docstring of {node.name} begins with {first!r}", "begin with an imperative verb of VERBS"


def names_of(node):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


def source_findings(path):
    text = path.read_text()
    in_mathematics = str(path.relative_to(ROOT)).startswith(MATHEMATICS)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            if node.body:
                yield from docstring_findings(node, in_mathematics)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from phrases(node.value, node.lineno)
        for name in names_of(node):
            parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+", name)}
            if parts & NAME_PARTS or name in NAMES:
                yield getattr(node, "lineno", 0), f"the name {name}", "name the thing"
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


def test_names_docstrings_messages_and_documents_are_plain():
    rest = list(findings())
    assert not rest, "\n".join(rest[:50])


if __name__ == "__main__":
    print(*findings(sys.argv[1:]), sep="\n")
