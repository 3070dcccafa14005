"""The options that a script of the shell sets, which is read and never executed."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.migration.hydra import BASES, configuration_options, find_configuration

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w@]*(?:\.[\w@-]+)+)=(.*)", re.DOTALL)
_OPTION = re.compile(r"\+{0,2}([A-Za-z_][\w/@.-]*)=(.*)", re.DOTALL)  # after the name of a program, without a dot too
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?:(:?)[-=]([^{}]*))?\}|\$(\w+)")  # innermost first
_DEFAULT = re.compile(r"\$\{(\w+):?=([^{}]*)\}")  # which also sets the variable
_VARIABLES_ONLY = re.compile(r"(?:\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\$\w+|\s)+")
# A quoted text, which may contain #, or a comment. A comment takes the \ at its end with it, as in the shell.
_COMMENT = re.compile(r"""(\\.|'[^']*'|"(?:\\.|[^"\\])*")|(?<![^\s;()&|])#[^\n]*""", re.DOTALL)
_SUM = re.compile(r"\$\(\((.{1,200}?)\)\)(?!\))")
_EXPR = re.compile(r"\$\(expr ([^()]*)\)")
_COMMAND = re.compile(r"\$\([^()]*\)|`[^`]*`")
_CONFIGURATION = re.compile(r"(?<!\S)(--config-(?:name|path|dir)|-c[np])[= ](\S+)")
_PROCESSES = re.compile(r"--(nproc[-_]per[-_]node|nnodes)(?:=(.*))?")
_OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARISONS = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip
_MOST = 10**12  # largest number of an expression


def overrides(text: str, folder: Path = Path()) -> tuple[dict[str, str], list[str]]:
    """Return the options ``a.b.c=value`` of a script with their values, and notes about what could not be read.

    Variables with a value or a default, arrays, continued lines, sums, and comparisons of known texts are understood.
    Of the branches of another condition all are read, and the last one counts. If the script starts several programs,
    the options are those of the last one that trains. Below its options are those of the configuration that
    ``--config-name`` names, if its file is here.

    Args:
        text: the script.
        folder: folder of the script.

    Raises:
        UsageError: its only programs of verl do not train, or the file of its configuration cannot be read.
    """
    text = _COMMENT.sub(lambda match: match[1] or "", f"{text}\n").replace("\\\n", " ")
    script = _Script()
    for words, end in _statements(text, script.variables):
        script.read(words, end)
    program, notes = script.chosen(text)
    below, notes_below = script.configuration(text, folder)
    notes = notes_below + notes
    found = {**below, **{name: script.expanded(value) for name, value in program.options.items()}}
    notes += [f"{name}: {value!r:.80} depends on the machine" for name, value in found.items() if "$" in value]
    notes += [f"{name}: the script gives it an empty text" for name, value in found.items() if not value]
    for name, value in found.items():
        if name.endswith("custom_reward_function.path"):  # a file that is copied: its folder does not matter
            found[name] = value.rpartition("/")[2] if "$" in value else value
    return {name: value for name, value in found.items() if "$" not in value}, notes


@dataclass
class _Program:
    """A program that a script starts with options.

    Args:
        name: its module or file.
        options: texts by their names.
        notes: what could not be read.
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class _Choice:
    """An ``if`` or ``case`` whose end was not read yet.

    Args:
        subject: text that a ``case`` compares with patterns; None for an ``if``.
        holds: whether the condition of the branch holds; None if the script does not say.
        joint: sign between the last two parts of a condition.
        asks: whether a condition is being read, and no branch.
        is_read: whether the statements of the branch count.
        is_over: whether an earlier branch was taken.
        is_unsure: whether a branch was read of which the script does not say that it is taken.
    """

    subject: str | None = None
    holds: bool | None = False
    joint: str = "||"
    asks: bool = True
    is_read: bool = True
    is_over: bool = False
    is_unsure: bool = False

    def ask(self) -> None:
        """Begin a condition."""
        self.holds, self.joint = False, "||"
        self.asks = True

    def join(self, holds: bool | None, joint: str) -> None:
        """Add a part to the condition."""
        decisive = self.joint != "&&"  # the value that decides alone: True of an or, False of an and
        both = (self.holds, holds)
        self.holds = decisive if decisive in both else None if None in both else not decisive
        self.joint = joint

    def take(self, holds: bool | None) -> None:
        """Begin a branch."""
        self.holds = holds
        self.is_read = holds is not False and not self.is_over
        self.is_over |= holds is True
        self.is_unsure |= holds is None and self.is_read
        self.asks = False


class _Script:
    """What a script says up to a statement, while its statements are read in their order."""

    def __init__(self) -> None:
        # Texts; words of arrays are quoted. DEVICE is gpu or npu in verl's scripts.
        self.variables = {"HOME": "~", "PWD": ".", "pwd": ".", "DEVICE": "gpu"}
        self._programs: list[_Program] = []
        self._choices: list[_Choice] = []
        self._has_conditions = False  # that the script does not decide
        self._holders: dict[str, list[str]] = {}  # names of the options in a variable

    def expanded(self, value: str) -> str:
        """Return a value with the variables that are known."""
        return _expanded(value, self.variables)

    def chosen(self, text: str) -> tuple[_Program, list[str]]:
        """Return the program whose options count, and all notes.

        Args:
            text: the script without comments.
        """
        notes = []
        if self._has_conditions:
            notes.append("the script has conditions: the values of all branches are read, and the last one counts")
        for name, options in self._holders.items():
            if not re.search(rf"\$\{{?{name}\b", text):
                notes.append(f"{name}: the script uses it nowhere, so these are not read: {', '.join(options)}")
        training = [each for each in self._programs if not re.search("generation|eval", each.name)]
        if self._programs and not training:
            raise UsageError(f"the script starts {self._programs[-1].name}, which does not train")
        if len(training) > 1:
            others = ", ".join(each.name for each in training[:-1])
            notes.append(f"{others}: these are not read, but only {training[-1].name}, the last program of the script")
        program = training[-1] if training else _Program("")
        return program, notes + program.notes

    def configuration(self, text: str, folder: Path) -> tuple[dict[str, str], list[str]]:
        """Return the options of the configuration that the script names, and notes; empty for those of verl itself.

        Args:
            text: the script without comments.
            folder: folder of the script.
        """
        given = {kind[-4:]: self.expanded("".join(_split(value))) for kind, value in _CONFIGURATION.findall(text)}
        path = given.get("path") or given.get("-dir") or given.get("-cp") or ""
        name = given.get("name") or given.get("-cn") or ""
        if not given or name.removesuffix(".yaml") in BASES:
            return {}, []
        if (file := find_configuration(name, path, folder)) is None:
            shown = " ".join(filter(None, (path and f"--config-path={path}", name and f"--config-name={name}")))
            line = f"{shown}: there is no such file here, so its values that differ from verl's are lost"
            return {}, [f"{line}; copy it beside the script"]
        return configuration_options(file)

    def read(self, words: list[str], end: str) -> None:
        """Read a statement.

        Args:
            words: its words; after ``NAME= (`` those of an array.
            end: the sign behind it.
        """
        words = words[1:] if words[:1] in (["do"], ["{"]) else words
        first, rest = (words[0], words[1:]) if words else ("", [])
        if first == "case":
            self._choices.append(_Choice(self.expanded("".join(rest[:1]))))
            words = rest[2:]
        elif first == "if":
            self._choices.append(_Choice())
            words = rest
        choice = self._choices[-1] if self._choices else None
        if choice is None:
            self._run(words)
            return
        if first in ("fi", "esac"):
            self._choices.pop()
            return
        if first == "elif":
            choice.ask()
        elif first in ("then", "else"):
            choice.take(choice.holds if first == "then" else None if choice.is_unsure else True)
        words = rest if first in ("elif", "then", "else") else words
        if choice.asks:
            self._ask(choice, words, end)
            return
        if all(each.is_read for each in self._choices):
            self._run(words)
        if choice.subject is not None and end.startswith(";;"):
            choice.ask()

    def _ask(self, choice: _Choice, words: list[str], end: str) -> None:
        """Read a part of a condition, or a pattern."""
        words = [self.expanded(word) for word in words]
        if choice.subject is None:
            choice.join(_test(words), end)
        elif words:
            is_known = "$" not in choice.subject + words[0]
            choice.join(fnmatchcase(choice.subject, words[0]) if is_known else None, "||")
            if end.startswith(")"):
                choice.take(choice.holds)

    def _run(self, words: list[str]) -> None:
        """Read a statement that is no part of a condition."""
        if not words or words[0] in ("echo", "printf"):
            return
        for name, value in _DEFAULT.findall(" ".join(words)):
            self.variables.setdefault(name, self.expanded(value))
        if words[0] in ("[", "[["):
            self._has_conditions |= _test([self.expanded(word) for word in words]) is None
        if words[1:2] == ["("]:
            elements = [self.expanded(part) for word in words[2:] for part in self._parts(word)]
            words = [f"{words[0]} {shlex.join(elements)}"]
        while words and self._assign(words[0]):
            words = words[1:]
        parts = [part for place, word in enumerate(words) for part in self._parts(word, words[place - 1])]
        if any(map(_OVERRIDE.fullmatch, parts)):
            self._start(parts)
        else:
            for part in parts:  # such as the words after export
                self._assign(part)

    def _assign(self, word: str) -> bool:
        """Set a variable; return False if the word does not."""
        if not (match := _ASSIGNMENT.fullmatch(word)):
            return False
        name, adds, value = match.groups()
        value = self.expanded(value)
        if self._is_unsure() and "$" in value and "$" not in self.variables.get(name, "$"):
            return True  # such as the arguments of the script, of which it has defaults
        self.variables[name] = self.variables.get(name, "") + value if adds else value
        if options := [match[1] for match in map(_OVERRIDE.fullmatch, _split(value)) if match]:
            self._holders[name] = options
        return True

    def _parts(self, word: str, before: str = "") -> list[str]:
        """Return the words that a variable, or the text of a command, stands for."""
        if _VARIABLES_ONLY.fullmatch(word) or before in ("-c", "eval"):
            return _split(self.expanded(word))
        return [word]

    def _is_unsure(self) -> bool:
        """Return whether the script does not say that a statement counts."""
        is_unsure = any(choice.holds is None for choice in self._choices)
        self._has_conditions |= is_unsure
        return is_unsure

    def _start(self, words: list[str]) -> None:
        """Read the options of a program, or further ones of the last program if the words have none."""
        first = next(place for place, word in enumerate(words) if _OVERRIDE.fullmatch(word))
        modules = [place for place in range(1, first) if words[place - 1] == "-m" or words[place].endswith(".py")]
        start = modules[-1] if modules else min(first, 1) - 1
        self._is_unsure()
        if modules or not self._programs:
            self._programs.append(_Program(words[max(start, 0)]))
            self._function = self._programs[-1]
        elif first == 0:
            names = ", ".join(match[1] for match in map(_OVERRIDE.fullmatch, words) if match)
            self._programs[-1].notes.append(
                f"{names}: the shell does not pass these to verl, because the line before them ends the command (a "
                f"comment, an empty line, or a space after its \\); they are read here"
            )
        else:  # a function that starts the program, with further options
            further = _Program(words[0], dict(self._function.options), list(self._function.notes))
            self._programs = [each for each in self._programs if each is not self._function] + [further]
        program = self._programs[-1]
        for before, word in pairwise(words[max(start, 0) :] if start >= 0 else ["", *words]):
            if match := _OPTION.fullmatch(word):
                program.options[match[1]] = self.expanded(match[2])
            elif word.startswith("~") and "/" not in word:
                program.options.pop(word[1:].partition("=")[0], None)
                program.notes.append(f"{word}: an option that is taken away has its default here")
            elif word[:1] not in ("", "-") and before[:1] != "-" and ">" not in before + word:
                is_unknown = "$" in self.expanded(word)
                reason = "the script does not say what it is, so options in it are" if is_unknown else "no option, and"
                program.notes.append(f"{word}: {reason} not read")
        for word, after in pairwise(words[: start + 1]):
            if match := _PROCESSES.fullmatch(word):
                program.options["torchrun." + match[1].replace("-", "_")] = after if match[2] is None else match[2]


def _statements(text: str, variables: Mapping[str, str]) -> Iterator[tuple[list[str], str]]:
    """Yield the words of each statement, and the sign behind it; a text in quotes and an array belong to one.

    Sums are replaced by their value, and the output of a command by a variable that nothing sets.
    """
    while text:
        pending = ""
        for line in text.split("\n"):
            line = _EXPR.sub(lambda match: f"$(({match[1]}))".replace("\\", ""), line)
            line = _SUM.sub(lambda match: _sum(match[1], variables) or "$SUM", line)
            line = line.replace("$(pwd)", ".").replace("`pwd`", ".")
            while (rest := _COMMAND.sub("$OUTPUT", line)) != line:
                line = rest
            pending = f"{pending}\n{line}" if pending else line
            lexer = shlex.shlex(pending, posix=True, punctuation_chars="();&|")
            lexer.whitespace_split, lexer.commenters = True, ""
            try:
                statements = _cut(list(lexer))
            except ValueError:  # a quote or an array that a later line closes
                continue
            pending = ""
            yield from statements
        text = pending.partition("\n")[2]  # what follows a line with a quote that nothing closes


def _cut(words: Sequence[str]) -> list[tuple[list[str], str]]:
    """Return the statements of a line.

    Raises:
        ValueError: it ends within an array.
    """
    statements: list[tuple[list[str], str]] = []
    statement: list[str] = []
    is_array = False
    for word in [*words, "\n"]:
        sign = word if word and not word.strip("();&|\n") else ""
        if not is_array and sign.startswith("(") and statement and re.fullmatch(r"\w+\+?=", statement[-1]):
            statement = [statement[-1], "("]
            is_array = True
        elif not sign:
            statement.append(word)
        if is_array and ")" not in sign:
            continue
        if sign:
            statements.append((statement, sign))
            statement, is_array = [], False
    if is_array:
        raise UsageError("an array without its end")
    return statements


def _split(text: str) -> list[str]:
    """Return the words of a text; the text itself if its quotes have no end."""
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def _test(words: Sequence[str]) -> bool | None:
    """Return whether a test such as ``[ a = b ]`` holds; None if the script does not say."""
    if words[:1] == ["!"]:
        holds = _test(words[1:])
        return None if holds is None else not holds
    if words[:1] not in (["["], ["[["]) or any("$" in word for word in words):
        return None
    inner = words[1:-1]
    if len(inner) == 2 and inner[0] in ("-n", "-z"):
        return bool(inner[1]) == (inner[0] == "-n")
    if len(inner) != 3:
        return None
    left, sign, right = inner
    if sign in ("=", "==", "!="):
        return fnmatchcase(left, right) == (sign != "!=")
    if sign in _COMPARISONS and left.isdecimal() and right.isdecimal():
        return bool(_COMPARISONS[sign](int(left), int(right)))
    return None


def _expanded(value: str, variables: Mapping[str, str]) -> str:
    """Return a value with the variables that are known."""
    for _ in range(10):  # a variable may have another one in its value

        def known(match: re.Match[str]) -> str:
            name, default = match[1] or match[4], match[3]
            if name in variables and (variables[name] or not match[2]):  # :- is for an empty text, too
                return variables[name]
            return match[0] if default is None else default

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
