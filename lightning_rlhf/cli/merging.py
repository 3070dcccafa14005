"""The one rule for values that are set several times: by several files, and after them by the command line.

Options are merged by name. A value is replaced: a number, a text, a list, and names with values such as ``columns``.
A class keeps its options if the later value names no class or the same one; another class keeps nothing. Only the
sections ``model`` and ``data`` keep the options that their new class has, because they are the run's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_rlhf.cli.config_files import read_text, read_yaml
from lightning_rlhf.cli.signatures import (
    Find,
    Known,
    Schema,
    alternatives,
    classes_of,
    find_class,
    fits,
    only_class,
)
from lightning_rlhf.expected_errors import UsageError

CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
REQUIRED = ("model", "data")
TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
SECTIONS = (*REQUIRED, "trainer")
ROLLOUT = "rollout"  # --rollout.NAME is an option of the RolloutLoop, wherever it is in trainer.callbacks
_FILES = (".yaml", ".yml")
_FURTHER = ("seed_everything", "ckpt_path")  # options that are one value
_MODEL = "lightning_rlhf.models.loading.Pretrained"
_LOOP = "lightning_rlhf.callbacks.loop.rollout_loop.RolloutLoop"


class Dotted(dict[str, Any]):
    """Names of an option of the command line, such as those of ``--data.init_args.columns.prompt``."""


class OfLoop(Dotted):
    """Options of the RolloutLoop in a list of callbacks."""


class FromText(list[Any]):
    """The list that an option's text is in YAML, which may also be meant as the text, such as ``[/INST]``."""

    text = ""


class Appended(list[Any]):
    """Entries that an option of the command line adds to a list: ``--trainer.callbacks+=EarlyStopping``."""


def merge(first: dict[str, Any], second: dict[str, Any], find: Find = find_class) -> dict[str, Any]:
    """Return a configuration with the values of a later one.

    Args:
        first: content of a file, or of several that were merged.
        second: content of a later file, or :class:`Dotted` of the command line.
        find: returns a class by its name.
    """
    return _Merge(find).sections(first, second)


@dataclass
class Settings:
    """Values that the files and options of a command line set.

    Args:
        values: content of the files with the options of the command line.
        arguments: arguments that set none of the sections, such as ``--print_config``.
        dropped: a line for each value that loses options, lists or names that an earlier one set.
    """

    values: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def merged_settings(arguments: Sequence[str], find: Find = find_class) -> Settings:
    """Return the values that a command line sets: later files and options override earlier ones.

    Args:
        arguments: command line after the command's name.
        find: returns a class by its name.

    Raises:
        UsageError: a file is not a YAML mapping, or an option has no value.
    """
    settings = Settings()
    merging = _Merge(find, settings.dropped)
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, has_value, text = argument.removeprefix("--").partition("=")
        section = name.removesuffix("+").partition(".")[0]
        is_section = argument.startswith("--") and section in (*SECTIONS, ROLLOUT)
        if not is_section and argument.partition("=")[0] != "--config":
            settings.arguments.append(argument)
            if name in _FURTHER:
                value = text if has_value else next(iter(remaining), None)
                settings.values[name] = value
            continue
        if not has_value:
            if not remaining or remaining[0].startswith("--"):
                raise UsageError(f"{argument} needs a value: {argument}=VALUE")
            text = remaining.pop(0)
        later = nested(name, text) if is_section else _content(Path(text).expanduser())
        settings.values = merging.sections(settings.values, later)
    for name in REQUIRED:
        settings.values.update(_with_full_name(name, settings.values.get(name), find))
    return settings


def _with_full_name(section: str, value: Any, find: Find) -> dict[str, Any]:
    """Return a section whose class has a short name with the full one: the parser imports it."""
    path = value.get("class_path") if isinstance(value, dict) else value
    if not isinstance(path, str) or not path.isidentifier() or (kind := find(path)) is None:
        return {}
    return {section: {**(value if isinstance(value, dict) else {}), "class_path": kind.path}}


def nested(name: str, text: str) -> Dotted:
    """Return the setting of an option of the command line as nested names.

    Args:
        name: dotted name, with ``+`` at its end if it appends to a list.
        text: its value.
    """
    value = _collection(text)
    if name.endswith("+"):
        value = Appended(value if isinstance(value, list) else [value])
    section, *parts = name.removesuffix("+").split(".")
    for part in reversed(parts):
        value = Dotted({part: value})
    if section == ROLLOUT:
        return Dotted(trainer=Dotted(callbacks=OfLoop(value)))
    return Dotted({section: value})


def _content(file: Path) -> dict[str, Any]:
    """Return the content of a file, with that of the files that it names for its sections."""
    content: dict[str, Any] = read_yaml(file)
    for name in SECTIONS:
        part = content.get(name)
        if isinstance(part, str) and part.endswith(_FILES):
            content[name] = read_yaml(file.parent / part)
    return {name: _beside(file.parent, value) for name, value in content.items()}


def _beside(folder: Path, value: Any) -> Any:
    """Return a value of a file whose texts that name a file beside it are full paths."""
    if isinstance(value, dict):
        return {name: _beside(folder, part) for name, part in value.items()}
    if isinstance(value, list):
        return [_beside(folder, part) for part in value]
    if isinstance(value, str) and value.endswith(_FILES) and not Path(value).exists() and (folder / value).is_file():
        return str((folder / value).resolve())
    return value


def as_yaml(config: dict[str, Any]) -> str:
    """Return a configuration as text; texts are quoted, so that they are read as texts again."""
    return yaml.dump(config, Dumper=_QuotingDumper, sort_keys=False, width=10**9)


class _QuotingDumper(yaml.SafeDumper):
    """Writes texts in quotes, and a value that occurs twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write no aliases."""
        return True


for kind in (dict, Dotted):
    _QuotingDumper.add_representer(kind, lambda dumper, value: dumper.represent_dict(value.items()))
for entries in (Appended, FromText):
    _QuotingDumper.add_representer(entries, lambda dumper, value: dumper.represent_list(value))
_QuotingDumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, '"'))


def _collection(text: str) -> Any:
    """Return the list or the names with values that a text in brackets is in YAML; other texts stay as they are."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        value = read_text(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, list):
        value = FromText(value)
        value.text = text
    return value


@dataclass
class _Merge:
    """Merges values.

    Args:
        find: returns a class by its name.
        dropped: receives a line for each value that loses options, lists or names that the earlier one set.
    """

    find: Find
    dropped: list[str] = field(default_factory=list)

    def sections(self, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        """Return the sections of a configuration with those of a later one."""
        merged = dict(first)
        for name, value in second.items():
            merged[name] = self._value(first.get(name), value, name, None)
        return merged

    def _value(self, first: Any, second: Any, key: str, schema: Schema | None) -> Any:
        """Return the value of an option that an earlier value had set to ``first``, and a later one to ``second``."""
        if isinstance(second, FromText) and _is_text(schema):
            return second.text
        if isinstance(second, Appended):
            return [*(first if isinstance(first, list) else [] if first is None else [first]), *second]
        if isinstance(second, OfLoop) and not isinstance(first, list):
            first = [first] if first else []
        if isinstance(first, list) and isinstance(second, dict) and "class_path" not in second:
            return self._with_options_of_an_entry(first, second, key, schema)
        if key == "trainer" and isinstance(first or {}, dict) and isinstance(second, dict):
            return self._options(first or {}, second, self.find(TRAINER), key)
        specs = self._spec(first, schema, second), self._spec(second, schema, first)
        if specs[0] is not None and specs[1] is not None:
            return self._class(specs[0], specs[1], key, schema)
        if isinstance(first, dict) and isinstance(second, Dotted):
            return self._options(first, second, None, key)
        if isinstance(first, str) and isinstance(second, Dotted) and specs[1] is not None:
            raise UsageError(
                f"{key} is {first!r}, whose options cannot be set one by one ({', '.join(map(str, second))}): give "
                f"class_path with init_args"
            )
        if lost := [name for name in _names(first) if name not in _names(second)]:
            self.dropped.append(f"{key}: the later value replaces the earlier one, without its {', '.join(lost)}")
        return second

    def _options(self, first: dict[str, Any], second: dict[str, Any], kind: Known | None, key: str) -> dict[str, Any]:
        """Return options merged by name."""
        known = {} if kind is None else kind.options
        merged = dict(first)
        for name, value in second.items():
            merged[name] = self._value(first.get(name), value, f"{key}.{name}", known.get(name))
        return merged

    def _class(self, first: dict[str, Any], second: dict[str, Any], key: str, schema: Schema | None) -> dict[str, Any]:
        """Return a class with its options; a later class keeps none of another one, ``model`` and ``data`` theirs."""
        before, after = self._kind(first, schema), self._kind(second, schema)
        options = dict(first.get("init_args") or {})
        named = second.get("class_path")
        if is_other := named is not None and _path(before, first) != _path(after, second):
            known = {} if after is None or key not in REQUIRED else after.options
            keeps_all = key in REQUIRED and not known  # the parser knows the options of the others
            remaining = {name: value for name, value in options.items() if keeps_all or self._has(known, name, value)}
            lost = [name for name in (*options, *(first.get("dict_kwargs") or {})) if name not in remaining]
            if lost:
                names = _short(after, second), _short(before, first), ", ".join(lost)
                self.dropped.append(f"{key}: {names[0]} replaces {names[1]} and its {names[2]}")
            options = remaining
        kind = after if named is not None else before
        merged = {name: value for name, value in first.items() if name == "dict_kwargs" and not is_other}
        merged |= {name: value for name, value in second.items() if name == "dict_kwargs"}
        if path := named or first.get("class_path"):
            merged["class_path"] = path
        merged["init_args"] = self._options(options, second.get("init_args") or {}, kind, key)
        if kind is not None and kind.path == _MODEL and "path" in merged["init_args"]:
            return dict(merged["init_args"])  # as people write a model
        return merged

    def _has(self, known: Mapping[str, Schema], name: str, value: Any) -> bool:
        """Return whether a class has an option that accepts a value, as far as its class is known."""
        if name not in known or not fits(value, known[name]):
            return False
        bases = classes_of(known[name])
        kind = self._kind(value, known[name]) if isinstance(value, dict) and "class_path" in value else None
        return kind is None or not bases or not set(bases).isdisjoint(kind.bases)

    def _spec(self, value: Any, schema: Schema | None, other: Any) -> dict[str, Any] | None:
        """Return a value as a class with ``init_args``; None for other values.

        A text for a model is short for ``{path: text}``.

        Args:
            value: value of an option.
            schema: node of the option.
            other: value of the same option that is merged with it.
        """
        bases = classes_of(schema)
        names_class = any(isinstance(each, dict) and set(each) & set(CLASS_KEYS) for each in (value, other))
        is_class = bool(bases) or names_class or _is_factory(schema)
        if isinstance(value, str) and is_class:
            is_name = all(part.isidentifier() for part in value.split("."))
            kind = self.find(value) if is_name and value.rpartition(".")[2][0].isupper() else None
            if kind is not None and (not bases or not set(bases).isdisjoint(kind.bases)):
                return {"class_path": value}
            if _MODEL in bases:
                return {"class_path": _MODEL, "init_args": {"path": value}}
            if is_name and isinstance(other, dict) and "class_path" not in other:
                return {"class_path": value}  # a class that only the parser finds, or a wrong name, which it rejects
        if not isinstance(value, dict) or not is_class or not isinstance(value.get("init_args") or {}, dict):
            return None
        spec: dict[str, Any] = {name: part for name, part in value.items() if name in CLASS_KEYS}
        direct = {name: part for name, part in value.items() if name not in CLASS_KEYS}
        return {**spec, "init_args": {**(spec.get("init_args") or {}), **direct}}

    def _kind(self, spec: dict[str, Any], schema: Schema | None) -> Known | None:
        """Return the class of a value; None if it is unknown, as of a module's default object."""
        path = spec.get("class_path")
        if isinstance(path, str):
            return self.find(path)
        if _MODEL in classes_of(schema) and "path" in (spec.get("init_args") or {}):
            return self.find(_MODEL)
        only = only_class(schema)
        return None if only is None else self.find(only)

    def _with_options_of_an_entry(
        self, entries: Sequence[Any], options: dict[str, Any], key: str, schema: Schema | None
    ) -> list[Any]:
        """Return a list with options of its last entry that has them all; of its last one, if none has.

        Raises:
            UsageError: the options are those of a RolloutLoop, and the list has none.
        """
        inner = options.get("init_args")
        names = {*options, *(inner if isinstance(inner, dict) else ())} - set(CLASS_KEYS)
        specs = [{"class_path": entry} if isinstance(entry, str) else entry for entry in entries]
        kinds = [self._kind(spec, schema) if isinstance(spec, dict) else None for spec in specs]
        if is_of_loop := isinstance(options, OfLoop):  # a class that is not known may be a user's own loop
            with_all = [i for i, kind in enumerate(kinds) if kind is None or _LOOP in kind.bases]
            with_all = [i for i in with_all if kinds[i] is not None] or with_all
        else:
            with_all = [i for i, kind in enumerate(kinds) if kind is not None and names <= kind.options.keys()]
        position = max(with_all, default=-1 if is_of_loop else len(entries) - 1)
        if is_of_loop and position < 0:
            raise UsageError(
                f"--{ROLLOUT}.{next(iter(options))} is an option of RolloutLoop, and trainer.callbacks has none: add "
                f"lightning_rlhf.callbacks.RolloutLoop to it in a file"
            )
        if position < 0:
            return [options]
        changed = self._value(specs[position], Dotted(options) if is_of_loop else options, key, schema)
        return [*entries[:position], changed, *entries[position + 1 :]]


def _is_text(schema: Schema | None) -> bool:
    """Return whether an option is a text, or null."""
    return bool(alternatives(schema)) and all(
        option.get("type") in ("string", ["null", "string"]) for option in alternatives(schema)
    )


def _is_factory(schema: Schema | None) -> bool:
    """Return whether an option is an optimizer or a schedule, or unknown: values with names are its options."""
    return schema is not None and not any(option.get("type") == "object" for option in alternatives(schema))


def _path(kind: Known | None, spec: dict[str, Any]) -> Any:
    return spec.get("class_path") if kind is None else kind.path


def _short(kind: Known | None, spec: dict[str, Any]) -> str:
    return str(spec.get("class_path", "the default")).rpartition(".")[2] if kind is None else kind.name


def _names(value: Any) -> list[str]:
    """Return the entries of a list, or the names of a mapping, for a line about those that are gone."""
    if isinstance(value, dict):
        return [str(name) for name in value]
    if isinstance(value, list):
        return [name for entry in value if (name := _name(entry))]
    return []


def _name(entry: Any) -> str:
    """Return the text of an entry of a list, or its function or class; empty for an entry that has none."""
    if isinstance(entry, dict):
        entry = entry.get("class_path") or entry.get("function")
    return entry if isinstance(entry, str) else ""
