"""The schema of configurations, made from the signatures of this package's classes and of Lightning's Trainer.

A class accepts what the parser does: its name, ``class_path`` with ``init_args``, and its options alone. These belong
to the class of the default, or of an earlier file, so only the options below a known ``class_path`` are judged.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_rlhf import callbacks
from lightning_rlhf.cli.merging import CLASS_KEYS
from lightning_rlhf.cli.signatures import CLASSES, Schema, full_name, known_class, parameters_of
from lightning_rlhf.modules.role_module import RoleModule

_PACKAGE = "lightning_rlhf"
_WITHOUT_OPTIONS = tuple(f"{_PACKAGE}.{name}" for name in (
    "__main__", "cli", "extras.commands", "extras.doctor", "extras.plan", "extras.report.inspector",
    "extras.sandbox.bootstrap", "extras.schema", "extras.serve", "extras.servers.plugin", "rollout.vllm.core",
    "strategies.deepspeed.state",
))  # fmt: skip
_OF_COMMANDS = ("weights_only", "verbose", "return_predictions")  # in the config.yaml of a run
_CALLBACK = full_name(Callback)  # its public subclasses have a table
# The name of a class, a reference to a function or a file.
_NAME = {"type": "string", "pattern": "^[A-Z]|[./:]"}
_FILE = {"type": "string", "pattern": r"\.ya?ml$"}
_TEXT = {"type": "string", "pattern": r"^\s*[\[{]"}  # in the form of YAML


def as_text() -> str:
    """Return the schema as the text of ``schema.json``."""
    whole = _Schema().whole()
    entries = whole.pop("$defs")  # one in a line, so that a change is easy to read
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries))
    return f'{json.dumps(whole, indent=1)[:-2]},\n "$defs": {{\n{lines}\n}}\n}}\n'


class _Schema:
    """The definitions of the schema, each made when an option first needs it."""

    def __init__(self) -> None:
        self._names = _public_names()
        self._kinds = {full_name(kind): kind for kind in self._names}
        self._defs: dict[str, Schema] = {}
        self._protocols: dict[str, set[str]] = {}  # those of options that a class has the methods of

    def whole(self) -> Schema:
        """Return the schema."""
        sections = {
            "model": self._node({CLASSES: [full_name(RoleModule)]}),
            "data": self._node({CLASSES: [full_name(LightningDataModule)]}),
            "trainer": {"anyOf": [self._options(Trainer), _FILE]},
            "seed_everything": {"description": "seed of the run; true draws one"},
            "ckpt_path": {"description": "checkpoint to continue from, or last", "type": ["string", "null"]},
            **{name: {} for name in ("config", *_OF_COMMANDS)},
        }
        for kind in self._names:
            if issubclass(kind, Optimizer | LRScheduler):  # made by factories, whose annotation names no class of ours
                self._options(kind)
        for path, protocols in self._protocols.items():
            self._defs[path]["x-bases"] += sorted(protocols)
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "configuration of lightning-rlhf",
            "type": "object",
            "properties": sections,
            "additionalProperties": False,
            "$defs": self._defs,
        }

    def _options(self, kind: type) -> Schema:
        """Return a reference to the options of a class."""
        path = full_name(kind)
        if path not in self._defs:
            self._defs[path] = {}  # for a class with an option of its own kind
            parameters = parameters_of(kind)
            known = known_class(kind)
            self._defs[path] = {
                "title": kind.__name__,
                "description": (inspect.getdoc(kind) or "").partition("\n")[0],
                "type": "object",
                "properties": {each.name: self._option(each, known.options[each.name]) for each in parameters},
                "additionalProperties": not parameters,
                "x-required": [each.name for each in parameters if each.default is inspect.Parameter.empty],
                "x-bases": [base for base in known.bases if base.startswith((_PACKAGE, "lightning."))],
                **({"x-needs-groups": True} if getattr(kind, "needs_groups", False) is True else {}),
                "x-names": self._names.get(kind, [path]),
            }
        return {"$ref": f"#/$defs/{path}"}

    def _option(self, parameter: Any, node: Schema) -> Schema:
        """Return the node of an option with its description and its default."""
        node = self._node(node)
        if parameter.doc:
            node["description"] = " ".join(parameter.doc.split())
        default = parameter.default
        if isinstance(default, bool | int | float | str):
            node["default"] = default
        # jsonargparse has read the call that makes a default object of another class
        path = default.get("class_path") if isinstance(default, dict) else full_name(type(default))
        if path in self._kinds:
            node["x-default"] = path
            self._options(self._kinds[path])
        return node

    def _node(self, node: Schema) -> Schema:
        """Return a node of a signature with what else a file may have in its place."""
        if CLASSES in node:
            return {**node, "anyOf": [_NAME, self._value(node[CLASSES])]}
        if "anyOf" in node:
            return {"anyOf": [self._node(option) for option in node["anyOf"]]}
        inner = {name: self._node(node[name]) for name in ("items", "additionalProperties") if name in node}
        if node.get("type") not in ("array", "object"):
            return node | inner
        return {"anyOf": [node | inner, _TEXT, _FILE]}

    def _value(self, bases: list[str]) -> Schema:
        """Return a reference to the forms that a class has as the value of an option."""
        name = f"value:{'+'.join(bases)}"
        if name not in self._defs:
            self._defs[name] = {}
            kinds = [kind for kind in self._names if any(_is_one(kind, base) for base in bases)]
            for kind in kinds:
                protocols = {base for base in bases if base not in known_class(kind).bases and _is_one(kind, base)}
                self._protocols.setdefault(full_name(kind), set()).update(protocols)
            shorts = {each.name: self._option(each, {}) for kind in kinds for each in parameters_of(kind)}
            self._defs[name] = {
                "type": "object",
                "properties": {
                    **{option: {"description": node.get("description", "")} for option, node in shorts.items()},
                    "class_path": {"anyOf": [{"enum": [self._names[kind][0] for kind in kinds]}, {"type": "string"}]},
                    "init_args": {"type": ["object", "null", "string"]},
                    CLASS_KEYS[2]: {"type": ["object", "null", "string"]},
                },
                **({"allOf": [self._rule(kind) for kind in kinds]} if kinds else {}),
            }
        return {"$ref": f"#/$defs/{name}"}

    def _rule(self, kind: type) -> Schema:
        """Return the rule that ``init_args`` below the name of a class are its options."""
        arguments = {"anyOf": [self._options(kind), {"type": ["null", "string"]}]}
        return {
            "if": {"required": ["class_path"], "properties": {"class_path": {"enum": self._names[kind]}}},
            "then": {"properties": {"init_args": arguments}},
        }


def _is_one(kind: type, base: str) -> bool:
    """Return whether a class is a subclass of one with a full name, or has the methods of a protocol with that name."""
    if base in known_class(kind).bases:
        return base != _CALLBACK or kind.__name__ in callbacks.__all__
    module, _, name = base.rpartition(".")
    if not module.startswith(_PACKAGE):
        return False
    protocol = getattr(import_module(module), name)
    methods = [name for name, part in vars(protocol).items() if inspect.isfunction(part) and name != "__init__"]
    own = [name for name in methods if name not in ("__subclasshook__", "_no_init_or_replace_init")]
    return getattr(protocol, "_is_protocol", False) and bool(own) and all(hasattr(kind, name) for name in own)


def _public_names() -> dict[type, list[str]]:
    """Return the names of each public class: first the one to write, and last the one without a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages
        modules = [import_module(name) for name in _modules()]
    homes = {
        kind: {full_name(kind)}
        for module in modules
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and not name.startswith("_")
        and not inspect.isabstract(kind) and not getattr(kind, "_is_protocol", False)
    }  # fmt: skip
    for module in modules:
        if hasattr(module, "__path__"):
            for name in getattr(module, "__all__", ()):
                kind = getattr(module, name)
                if isinstance(kind, type) and kind in homes:
                    homes[kind].add(f"{module.__name__}.{name}")
    ordered = sorted(homes.items(), key=lambda item: full_name(item[0]))
    return {kind: [*sorted(names, key=lambda name: (len(name), name)), kind.__name__] for kind, names in ordered}


def _modules() -> Iterator[str]:
    """Yield the names of the modules with classes that an option may name."""
    yield _PACKAGE
    for module in pkgutil.walk_packages(import_module(_PACKAGE).__path__, f"{_PACKAGE}."):
        if not module.name.startswith(_WITHOUT_OPTIONS):
            yield module.name
