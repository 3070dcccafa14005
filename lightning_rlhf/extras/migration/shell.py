"""The options that a script of the shell sets, which is read and never executed."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping

from lightning_rlhf.expected_errors import UsageError

_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"\+*([A-Za-z_]\w*(?:\.\w+)+|[a-z_]+\.[\w.]+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")  # innermost first
_SUM = re.compile(r"\$\(\((.{1,200}?)\)\)(?!\))")
_COMMAND = re.compile(r"\$\([^()]*\)|`[^`]*`")
_OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_MOST = 10**12  # largest number of an expression


def overrides(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the options ``a.b.c=value`` of a script with their values, and notes about what could not be read.

    Variables with a value or a default, arrays, continued lines and sums are understood. Of the branches of a condition
    all are read, and the last one counts.

    Args:
        text: the script.
    """
    variables = {"HOME": "~", "PWD": ".", "pwd": "."}
    found: dict[str, str] = {}
    notes: list[str] = []
    if base := re.search(r"--config-(?:name|path)[= ]\S+", text):
        notes.append(
            f"{base[0]}: the configuration of that name is not read; its values that differ from verl's are lost"
        )
    if re.search(r"^\s*(if|case)\b", text, re.MULTILINE):
        notes.append("the script has conditions: the values of all branches are read, and the last one counts")
    for words in _commands(text, variables):
        for word in words:
            if match := _OVERRIDE.fullmatch(word):
                found[match[1]] = _expanded(match[2], variables)
            elif match := _ASSIGNMENT.fullmatch(word):
                variables[match[1]] = _expanded(match[3], variables)
    notes += [f"{name}: {value!r:.80} depends on the machine" for name, value in found.items() if "$" in value]
    return {name: value for name, value in found.items() if "$" not in value}, notes


def _commands(text: str, variables: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the words of each line; a continued line and a text in quotes belong to one.

    Sums are replaced by their value, and the output of a command by a variable that nothing sets.
    """
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        line = _SUM.sub(lambda match: _sum(match[1], variables) or "$SUM", line)
        line = _COMMAND.sub("$OUTPUT", line.replace("$(pwd)", ".").replace("`pwd`", "."))
        pending = f"{pending}\n{line}" if pending else line
        lexer = shlex.shlex(pending, posix=True, punctuation_chars="();")
        lexer.whitespace_split, lexer.commenters = True, "#"
        try:
            words = list(lexer)
        except ValueError:  # a quote that a later line closes
            continue
        pending = ""
        yield [word for word in words if word.strip("();")]


def _expanded(value: str, variables: Mapping[str, str]) -> str:
    """Return a value with the variables that are known."""
    for _ in range(10):  # a variable may have another one in its value

        def known(match: re.Match[str]) -> str:
            name = match[1] or match[3]
            if name in variables:
                return variables[name]
            return match[0] if match[2] is None else match[2]

        expanded = _VARIABLE.sub(known, value)
        if expanded == value or len(expanded) > 10_000:
            break
        value = expanded
    return value


def _sum(text: str, variables: Mapping[str, str]) -> str | None:
    """Return the value of a sum of whole numbers and variables; None if it is anything else."""
    text = re.sub(r"\b[A-Za-z_]\w*", lambda match: variables.get(match[0], match[0]), _expanded(text, variables))

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            result = _OPERATIONS[type(node.op)](value(node.left), value(node.right))
            if abs(result) > _MOST:
                raise UsageError("too large")
            return int(result)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        raise UsageError("not a sum")

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return None
