"""Classes of Python files with their parameters, read from the source without importing it.

Importing torch, Lightning and transformers takes seconds, which a message about a mistake in a file need not wait for.
What cannot be known without importing, such as a class that a function makes, is unknown and counts as correct.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lightning_rlhf.moved import new_name

_BUILT_IN = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
_COLLECTIONS = {"Iterable": Iterable, "Mapping": Mapping, "Sequence": Sequence, "Callable": Callable}
# Code with which a module gets names that are not in its statements.
_DYNAMIC = ("def __getattr__", "globals()", "sys.modules[", "exec(", "setattr(")
_PACKAGE = "lightning_rlhf"  # its __getattr__ has the names that are imported for type checkers


@dataclass(frozen=True)
class Absent:
    """A name that does not exist.

    Args:
        message: sentence about it, without a full stop.
    """

    message: str


@dataclass(frozen=True, eq=False)
class SourceModule:
    """A module that was read and not imported.

    Args:
        name: full name.
        file: its file.
    """

    name: str
    file: Path

    @functools.cached_property
    def text(self) -> str:
        """Content of the file."""
        return self.file.read_text(encoding="utf-8", errors="replace")

    @functools.cached_property
    def names(self) -> dict[str, tuple[ast.stmt, str]]:
        """Statement that defines each name, and for an import the name at its origin."""
        return _names_in(self.text)

    @property
    def definitions(self) -> list[str]:
        """Names of the functions and classes that the file defines itself."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return [name for name, (statement, _) in self.names.items() if isinstance(statement, kinds)]

    @property
    def is_package(self) -> bool:
        """Whether it has submodules."""
        return self.file.name == "__init__.py"

    def member(self, name: str) -> Any:
        """Return a module, class or statement by name; None if it is unknown, :class:`Absent` if it does not exist."""
        if name in self.names:
            return self._defined(*self.names[name])
        if (submodule := find_module(f"{self.name}.{name}")) is not None:
            return submodule
        stars = [
            find_module(self._absolute(statement))
            for statement, original in self.names.values()
            if isinstance(statement, ast.ImportFrom) and original == "*"
        ]
        for module in stars:
            member = None if module is None else module.member(name)
            if not isinstance(member, Absent):
                return member
        is_open = any(construct in self.text for construct in _DYNAMIC) and self.name.partition(".")[0] != _PACKAGE
        if is_open or "__invalid__" in self.names:
            return None
        return Absent(
            f"{name!r} was not found in {self.name}{suggestion(name, [known for known in self.names if known])}"
        )

    def _defined(self, statement: ast.stmt, original: str) -> Any:
        if isinstance(statement, ast.ClassDef):
            return SourceClass(self, statement)
        if isinstance(statement, ast.Import):
            return find_module(original)
        if isinstance(statement, ast.ImportFrom):
            module = find_module(self._absolute(statement))
            if module is self:  # "from . import name": a submodule
                return find_module(f"{self.name}.{original}")
            if module is None:
                return None
            return module.member(original)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name | ast.Attribute):
            return self.evaluate(statement.value)
        return statement

    def evaluate(self, expression: ast.expr) -> Any:
        """Return the value of a name or a dotted name in this module; None if it is unknown."""
        if isinstance(expression, ast.Attribute):
            owner = self.evaluate(expression.value)
            if isinstance(owner, SourceModule):
                return owner.member(expression.attr)
            return None
        if isinstance(expression, ast.Name) and expression.id in self.names:
            return self.member(expression.id)
        return None

    def _absolute(self, statement: ast.ImportFrom) -> str:
        """Return the full name of the module that a statement imports from."""
        if not statement.level:
            return statement.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - statement.level + self.is_package]
        return ".".join([*parts, *([statement.module] if statement.module else [])])


@dataclass(frozen=True, eq=False)
class SourceClass:
    """A class that was read and not imported.

    Args:
        module: module with its definition.
        node: its definition.
    """

    module: SourceModule
    node: ast.ClassDef

    @property
    def name(self) -> str:
        """Name without the module."""
        return self.node.name

    @property
    def path(self) -> str:
        """Full name."""
        return f"{self.module.name}.{self.name}"

    @functools.cached_property
    def order(self) -> list[SourceClass | None]:
        """The class and its base classes, nearest first; None in the place of an unknown one."""
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in self.node.bases]
        order: list[SourceClass | None] = [self]
        for base in bases:
            if isinstance(base, ast.Name) and base.id in ("object", "Generic", "Protocol", "ABC"):
                continue
            kind = self.module.evaluate(base)
            order += kind.order if isinstance(kind, SourceClass) else [None]
        return order

    @property
    def known_order(self) -> list[SourceClass]:
        """The class and its known base classes, nearest first."""
        return [kind for kind in self.order if kind is not None]

    def is_subclass(self, path: str) -> bool:
        """Return whether it is the class with a full name or one of its subclasses."""
        return any(kind.path == path for kind in self.known_order)

    def attribute(self, name: str) -> Any:
        """Return the value of a class attribute that is a constant; None if it is unknown."""
        for kind in self.known_order:
            for statement in kind.node.body:
                targets = getattr(statement, "targets", [getattr(statement, "target", None)])
                value = getattr(statement, "value", None)
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    if isinstance(value, ast.Constant):
                        return value.value
                    return None
        return None

    @property
    def is_abstract(self) -> bool:
        """Whether a method has no implementation."""
        methods: dict[str, bool] = {}
        for kind in self.known_order:
            for statement in kind.node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    methods.setdefault(
                        statement.name, any("abstract" in ast.unparse(part) for part in statement.decorator_list)
                    )
        return any(methods.values())

    @functools.cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters of the constructor; empty if they are unknown, or if it accepts any names.

        A constructor with ``**kwargs`` has those of the base class, too, except the ones that it passes itself.
        """
        result = self._constructor_parameters()
        for kind in reversed(self.known_order):
            for name, value in kind._changed_defaults():
                if name in result:
                    result[name] = replace(result[name], default=value, default_module=kind.module)
        return result

    def _changed_defaults(self) -> Iterator[tuple[str, ast.expr]]:
        """Iterate over the defaults that a decorator ``with_defaults`` changes."""
        for decorator in self.node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("with_defaults"):
                yield from ((str(keyword.arg), keyword.value) for keyword in decorator.keywords)

    def _constructor_parameters(self) -> dict[str, Parameter]:
        result: dict[str, Parameter] = {}
        passed: set[str] = set()
        count = 0  # of arguments that are passed by position
        for kind in self.order:
            if kind is None:
                return {}
            parameters = kind._own_parameters()
            if parameters is None:
                continue
            passed |= set(list(parameters)[:count])
            result = {name: parameter for name, parameter in parameters.items() if name not in passed} | result
            constructor = kind._constructor
            if constructor is None or constructor.args.kwarg is None:
                return result
            calls = _super_calls(constructor)
            passed |= {word.arg for call in calls for word in call.keywords if word.arg}
            by_position = [[part for part in call.args if not isinstance(part, ast.Starred)] for call in calls]
            count = max(map(len, by_position), default=0)
        return {}

    @functools.cached_property
    def _constructor(self) -> ast.FunctionDef | None:
        methods = (method for method in self.node.body if isinstance(method, ast.FunctionDef))
        return next((method for method in methods if method.name == "__init__"), None)

    def _own_parameters(self) -> dict[str, Parameter] | None:
        """Return the parameters of the constructor of this class alone; None if it inherits the constructor."""
        if any("dataclass" in ast.unparse(decorator) for decorator in self.node.decorator_list):
            return self._fields()
        if self._constructor is None:
            return None
        return _parameters_of(self._constructor, self.module)

    def _fields(self) -> dict[str, Parameter]:
        """Return the parameters of the constructor of a dataclass."""
        fields: dict[str, Parameter] = {}
        for kind in reversed(self.known_order):
            for statement in kind.node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    is_constant = ast.unparse(statement.annotation).startswith("ClassVar")
                    if not is_constant and "init=False" not in ast.unparse(statement):
                        fields[statement.target.id] = Parameter(statement.annotation, kind.module, statement.value)
        return fields


@dataclass(frozen=True)
class Parameter:
    """A parameter of a constructor.

    Args:
        expression: its annotation; None without one.
        module: module in which the annotation is evaluated.
        default: its default; None without one.
        default_module: module in which the default is evaluated; None is ``module``.
    """

    expression: ast.expr | None
    module: SourceModule
    default: ast.expr | None
    default_module: SourceModule | None = None

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is None

    @functools.cached_property
    def annotation(self) -> Any:
        """The annotation as a type, ``typing.Any`` in the place of an unknown part; None without one.

        A class is an empty class with the attribute ``source``, its :class:`SourceClass`.
        """
        if self.expression is None:
            return None
        return _annotation(self.expression, self.module)


def find_class(path: str) -> Any:
    """Return the class with a full name; None if it is unknown, :class:`Absent` if it does not exist."""
    if (now := new_name(path)) is not None:
        return Absent(f"{path} is now {now}")
    first, *others = path.split(".")
    member: Any = find_module(first)
    if member is None and _spec(first) is None:
        return Absent(f"no module named {first!r}")
    for name in others:
        if not isinstance(member, SourceModule):
            if isinstance(member, Absent):
                return member
            return None
        member = member.member(name)
    return member


@functools.lru_cache(maxsize=1024)
def _names_in(text: str) -> dict[str, tuple[ast.stmt, str]]:
    """Return the statement that defines each name of a file's content, and for an import the name at its origin."""
    try:
        return dict(_definitions(ast.parse(text).body))
    except (SyntaxError, ValueError, RecursionError):
        return {"__invalid__": (ast.Pass(), "")}


@functools.cache
def find_module(name: str) -> SourceModule | None:
    """Return a module by its full name; None if it is not in a Python file below its package."""
    parent, _, last = name.rpartition(".")
    if not parent:
        spec = _spec(name)
        is_file = spec is not None and spec.origin is not None and spec.origin.endswith(".py")
        if is_file and spec is not None:
            return SourceModule(name, Path(str(spec.origin)))
        return None
    package = find_module(parent)
    if package is None or not package.is_package:
        return None
    folder = package.file.parent
    if name == f"{_PACKAGE}.callbacks" and not (folder / last / "defaults.py").is_file():
        folder = folder.parent  # the top-level folder of a clone
    for file in (folder / last / "__init__.py", folder / f"{last}.py"):
        if file.is_file():
            return SourceModule(name, file)
    return None


@functools.cache
def class_named(name: str) -> SourceClass | None:
    """Return the class of this package with a name."""
    root = find_module(_PACKAGE)
    assert root is not None
    clone = root.file.parents[1] / "callbacks"
    files = [*root.file.parent.rglob("*.py"), *(clone.rglob("*.py") if (clone / "defaults.py").is_file() else [])]
    for file in files:
        if f"class {name}" in file.read_text(encoding="utf-8"):
            inner = file.relative_to(root.file.parents[1]).with_suffix("").parts
            inner = inner if inner[0] == _PACKAGE else (_PACKAGE, *inner)
            module = find_module(".".join(inner))
            if module is None or name not in module.names:
                member = None
            else:
                member = module.member(name)
            if isinstance(member, SourceClass):
                return member
    return None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message with the nearest of the known names; empty if none is near."""
    by_case = {match.lower(): match for match in known}
    if name.lower() in by_case:
        near = [by_case[name.lower()]]
    else:
        near = difflib.get_close_matches(name, by_case.values(), 1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return ""


def _spec(name: str) -> Any:
    """Return where a top-level module is; this does not import it."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, tuple[ast.stmt, str]]]:
    """Yield (name, (statement, original name)) of a module, those in ``if``, ``try`` and ``with`` included."""
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name, (statement, statement.name)
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, (statement, alias.name)) if alias.asname else (first, (statement, first))
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if alias.name == "*":
                    key = f"* of {statement.level}{statement.module}"
                else:
                    key = alias.asname or alias.name
                yield key, (statement, alias.name)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Tuple | ast.List):
                    parts = target.elts
                else:
                    parts = [target]
                yield from ((part.id, (statement, part.id)) for part in parts if isinstance(part, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, (statement, statement.target.id)
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from _definitions(getattr(statement, name, []))
            for handler in getattr(statement, "handlers", []):
                yield from _definitions(handler.body)


def _super_calls(constructor: ast.FunctionDef) -> list[ast.Call]:
    """Return the calls of a base class's constructor."""
    calls = [node for node in ast.walk(constructor) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "__init__"]


def _parameters_of(function: ast.FunctionDef, module: SourceModule) -> dict[str, Parameter]:
    """Return the parameters of a constructor, without ``self`` and variadic ones."""
    signature = function.args
    positional = [*signature.posonlyargs, *signature.args]
    without = [None] * (len(positional) - len(signature.defaults))
    pairs = zip(
        [*positional, *signature.kwonlyargs], [*without, *signature.defaults, *signature.kw_defaults], strict=True
    )
    result = {argument.arg: Parameter(argument.annotation, module, default) for argument, default in pairs}
    result.pop(positional[0].arg, None)
    return result


def _annotation(expression: ast.expr, module: SourceModule) -> Any:
    """Return an annotation as a type; ``typing.Any`` if it is unknown."""
    if isinstance(expression, ast.Constant):
        if isinstance(expression.value, str):
            return _annotation(ast.parse(expression.value, mode="eval").body, module)
        if expression.value is None:
            return types.NoneType
        return Any
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.BitOr):
        return _annotation(expression.left, module) | _annotation(expression.right, module)
    if isinstance(expression, ast.Subscript):
        return _subscripted(expression, module)
    name = ast.unparse(expression).rpartition(".")[2]
    if isinstance(expression, ast.Name) and name in _BUILT_IN and name not in module.names:
        return _BUILT_IN[name]
    origin = module.evaluate(expression)
    if isinstance(origin, SourceClass):
        if origin.is_subclass("enum.Enum"):
            return Any
        return type(origin.name, (), {"__module__": origin.module.name, "source": origin})
    if isinstance(origin, ast.Assign) and origin.value is not expression:  # an alias such as Source = str | Pretrained
        owner = next(
            (source for source in _origins(module, name) if origin in [part for part, _ in source.names.values()]), None
        )
        if owner is None:
            return Any
        return _annotation(origin.value, owner)
    return _COLLECTIONS.get(name, Any)


def _subscripted(expression: ast.Subscript, module: SourceModule) -> Any:
    """Return an annotation such as ``list[int]``, ``Literal["a"]`` or ``Optional[int]`` as a type."""
    name = ast.unparse(expression.value).rpartition(".")[2]
    if isinstance(expression.slice, ast.Tuple):
        parts = expression.slice.elts
    else:
        parts = [expression.slice]
    if name == "Literal":
        choices = tuple(part.value for part in parts if isinstance(part, ast.Constant))
        if len(choices) == len(parts):
            return Literal[choices]
        return Any
    if name in ("Optional", "Union"):
        options = [_annotation(part, module) for part in parts]
        return functools.reduce(operator.or_, [*options, *([None] if name == "Optional" else [])])
    kind = {**_BUILT_IN, **_COLLECTIONS}.get(name)
    if kind is None or kind is Callable:
        if kind is None:
            return Any
        return Callable
    return types.GenericAlias(kind, tuple(_annotation(part, module) for part in parts))  # type: ignore[arg-type]


def _origins(module: SourceModule, name: str) -> Iterator[SourceModule]:
    """Yield the modules through which a name is imported, the one that defines it last."""
    current: SourceModule | None = module
    for _ in range(10):
        if current is None or name not in current.names:
            return
        yield current
        statement, name = current.names[name]
        if not isinstance(statement, ast.ImportFrom):
            return
        current = find_module(current._absolute(statement))
