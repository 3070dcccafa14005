"""The recipes of ``new``: the configurations of the repository, for people who installed the package with pip."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from lightning_rlhf.cli.early import suggestion
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.schema.known import SCHEMA
from lightning_rlhf.paths import names_a_path

_PACKAGE = Path(__file__).resolve().parents[2]
# A wheel has the folder configs/ of the repository as lightning_rlhf/recipes.
FOLDER = next(path for path in (_PACKAGE / "recipes", _PACKAGE.parent / "configs") if path.is_dir())
_BASE = FOLDER / "algorithms/base.yaml"  # values that all algorithms/*.yaml share
_README = """# {name}

{description}

Written by `lightning-rlhf new --recipe {name}`. Run these commands in this directory, in this order:

```bash
{commands}
```
{needs}
"""


def recipes() -> dict[str, Path]:
    """Return the files of the recipes by their names, such as ``preferences/simpo``."""
    files = [file for file in sorted(FOLDER.glob("*/**/*.yaml")) if file != _BASE]
    return {_name(file).removeprefix("recipes/").removesuffix(".yaml"): file for file in files}


def _name(file: Path) -> str:
    return file.relative_to(FOLDER).as_posix()


def _files(recipe: Path) -> list[Path]:
    """Return the files of a run: a recipe that changes only some values of another file follows it."""
    if recipe.parent == _BASE.parent:
        return [_BASE, recipe]
    if recipe.stem == "ppo_one_step_ahead":
        return [recipe.with_stem("ppo"), recipe]
    return [recipe]


def description(file: Path) -> str:
    """Return the first sentences of the comment of a recipe, up to the end of a line."""
    lines = [line[1:].strip() for line in file.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    end = next((i for i, line in enumerate(lines) if line.endswith(".")), len(lines) - 1)
    return " ".join(lines[: end + 1])


def listing(word: str = "") -> str:
    """Return a line for each recipe, or for those whose names or sentences contain a word.

    Raises:
        UsageError: no recipe contains it.
    """
    found = {
        name: file
        for name, file in recipes().items()
        if re.search(re.escape(word), f"{name} {description(file)}", re.IGNORECASE)
    }
    if not found:
        raise UsageError(f"no recipe is about {word!r}; new --list without a word lists all")
    width = max(map(len, found))
    lines = []
    for name, file in found.items():
        hardware = re.search(r"^# Hardware: ([^,(\n]+?)\.? ?[,(\n]", file.read_text(encoding="utf-8"), re.MULTILINE)
        sentence = textwrap.shorten(re.split(r"(?<!Dr)\. |; ", description(file))[0].removesuffix("."), 90)
        parts = [part for part in (hub_model(file), hardware and hardware[1]) if part]
        end = f" ({', '.join(parts)})" if parts else ""
        lines.append(f"  {name:<{width}}  {sentence}{end}")
    return "\n".join(lines)


def write_recipe(name: str, directory: Path, model: str | None) -> list[str]:
    """Write the files of a recipe and of the recipes whose models it starts from; return the commands, in their order.

    Args:
        name: name of the recipe.
        directory: empty directory.
        model: directory or hub id of a model in place of the recipe's.

    Raises:
        UsageError: there is no such recipe, or it has no model of the hub that could be replaced.
    """
    found = recipes()
    if name not in found:
        near = [each for each in found if each.rpartition("/")[2] == name]
        end = f"; did you mean {near[0]!r}?" if near else suggestion(name, found) or "; --list lists them"
        raise UsageError(f"there is no recipe {name!r}{end}")
    steps = [*dict.fromkeys(_steps(found[name]))]
    theirs = hub_model(found[name])
    if model is not None and theirs is None:
        raise UsageError(f"the recipe {name} makes its own model: remove --model")
    if model is not None and Path(model).is_dir():
        model = os.path.abspath(model)  # the run starts in the new directory
    commands, texts = [], {}
    for file in steps:
        for each in _files(file):
            text = each.read_text(encoding="utf-8")
            texts[_name(each)] = text.replace(theirs, model) if model and theirs else text
        commands.append(f"lightning-rlhf fit {' '.join(f'--config {_name(each)}' for each in _files(file))}")
    for path, text in texts.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(f"# yaml-language-server: $schema={SCHEMA.as_uri()}\n{text}", encoding="utf-8")
    needs = _needs("\n".join(texts.values()))
    page = _README.format(
        name=name, description=description(found[name]), commands="\n".join(commands), needs="\n".join(needs)
    )
    (directory / "README.md").write_text(page, encoding="utf-8")
    return [*(f"  {command}" for command in commands), *needs]


def hub_model(file: Path) -> str | None:
    """Return the model of the hub that a recipe starts from: the one of its tokenizer; None without."""
    tokenizer = re.search(r"^    tokenizer: (\S+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return tokenizer[1] if tokenizer and not names_a_path(tokenizer[1]) else None


def _steps(file: Path) -> Iterator[Path]:
    """Yield the recipes whose models a recipe reads, and then the recipe."""
    text = "\n".join(each.read_text(encoding="utf-8") for each in _files(file))
    for run in dict.fromkeys(re.findall(r"runs/([\w./-]+)/export\b", text)):
        yield from _steps(recipes()[run.removeprefix("recipes/")])
    yield file


def _needs(text: str) -> list[str]:
    """Return sentences about what the configurations read that they do not make."""
    sentences = []
    files = [*dict.fromkeys(re.findall(r"\bdata/[\w./-]+\.(?:parquet|jsonl)", text))]
    if files:
        sentences.append(
            f"\nIt reads {', '.join(f'`{file}`' for file in files)}. Put them there, or set `data.init_args.train` and "
            f"`val` to files or hub ids of yours: `lightning-rlhf check-data` with the same options shows them."
        )
    if any("verl" in file for file in files):
        sentences.append(
            "The files under `data/verl/` are those that verl's scripts in `examples/data_preprocess` write."
        )
    if "quantization:" in text:
        sentences.append(
            "\nIts weights in 4 or 8 bits need bitsandbytes: `pip install 'lightning-rlhf[quantization]'`."
        )
    if "lora:" in text:
        sentences.append("\nAdapters need peft: `pip install 'lightning-rlhf[peft]'`.")
    if (model := re.search(r"^    tokenizer: (\S+)$", text, re.MULTILINE)) and not names_a_path(model[1]):
        sentences.append(f"\nThe first run downloads `{model[1]}` from the hub; `--model` of `new` sets another one.")
    if "RolloutLoop" in text:
        sentences.append(
            "\nResponses are generated by vLLM where it is installed (`pip install 'lightning-rlhf[vllm]'`)."
        )
    if "runs/images/model" in text:
        sentences.append("\n`runs/images/model` is written by `examples/images/make_model.py` of the repository.")
    return sentences
