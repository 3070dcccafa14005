"""``lightning-rlhf new``: write a small project to begin with."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from string import Template

from safetensors import SafetensorError, safe_open

from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.expected_errors import UsageError, for_terminal
from lightning_rlhf.extras.commands.options import command_parser
from lightning_rlhf.extras.commands.recipes import listing, recipes, write_recipe
from lightning_rlhf.extras.commands.responses_file import write_errors
from lightning_rlhf.extras.migration.project import write_from_trl, write_from_verl
from lightning_rlhf.extras.migration.trl import SECTIONS_OF
from lightning_rlhf.extras.schema.known import SCHEMA
from lightning_rlhf.paths import describe_missing_path, names_a_path

_TEMPLATES = Path(__file__).parent / "templates"
KINDS = {
    "grpo": "a reward function in Python, and groups of responses",
    "ppo": "a reward model from pairs of answers, then PPO with it",
    "sft": "supervised fine-tuning on conversations",
    "dpo": "pairs of a better and a worse answer",
    "environment": "conversations of several turns with an environment",
    "quickstart": "SFT, a reward model and PPO from random weights, in minutes on a CPU, without any download",
}
_ORDER = ("sft.yaml", "reward.yaml", "ppo.yaml", "run.yaml")  # of the runs of a project
_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_USUAL_PARAMETERS = 0.5e9
_USUAL_POSITIONS = 4096


@dataclass(frozen=True)
class _Rates:
    """Learning rates for models of a size; those of docs/hyperparameters.md.

    Args:
        below: number of parameters below which the row applies.
        response_tokens: longest response.
        full: rate for all weights, for RL, SFT, reward models and DPO.
        lora: rate for adapters; empty where all weights are trained.
    """

    below: float
    response_tokens: int
    full: dict[str, float]
    lora: dict[str, float]


_RATES = (
    _Rates(2e7, 128, {"rl": 1e-4, "sft": 1e-3, "reward": 1e-3, "dpo": 1e-5}, {}),
    _Rates(
        3e8,
        128,
        {"rl": 1e-5, "sft": 2e-5, "reward": 2e-5, "dpo": 1e-6},
        {"rl": 2e-4, "sft": 5e-4, "reward": 2e-4, "dpo": 2e-5},
    ),
    _Rates(
        1e10,
        256,
        {"rl": 1e-6, "sft": 1e-5, "reward": 1e-5, "dpo": 5e-7},
        {"rl": 5e-5, "sft": 2e-4, "reward": 1e-4, "dpo": 1e-5},
    ),
    _Rates(
        math.inf,
        256,
        {"rl": 1e-6, "sft": 5e-6, "reward": 5e-6, "dpo": 5e-7},
        {"rl": 1e-5, "sft": 1e-4, "reward": 5e-5, "dpo": 5e-6},
    ),
)
_EPILOG = """The directory then has a configuration, rows of data in the expected format, the reward or
environment, its test, and a README.md with the commands. Learning rates, lengths and LoRA fit the size of
the model, which is read from its directory, or from the name of a model of the hub.

{kinds}

  lightning-rlhf new my_task --kind grpo --model Qwen/Qwen2.5-0.5B-Instruct

A recipe is a configuration of the repository, with those of the runs whose models it starts from:

  lightning-rlhf new --list
  lightning-rlhf new my_dpo --recipe preferences/dpo
  lightning-rlhf new my_grpo --recipe one_gpu/grpo_0.5b

The options of a run of TRL become a configuration, and those that could not be carried over are listed:

  lightning-rlhf new my_run --from-trl grpo.yaml --devices 8
  lightning-rlhf new my_run --from-verl run_qwen2-7b.sh
"""
_LORA = """
      class_path: lightning_rlhf.Pretrained
      init_args:
        path: {path}
        lora: {{rank: 16, alpha: 32}}  # remove this line to train all weights, with lr {full_rate}"""
_README = """# {title}

{description}. Made by `lightning-rlhf new`.

```bash
cd {directory}
{commands}
```

{further}
"""
_NEXT = """`--trainer.max_steps 4` tries everything in a few minutes. After three steps, a run prints its remaining time
if it is more than five minutes.

Measure the prompt before training, with `lightning-rlhf validate --config run.yaml`: where nearly no response has a
reward, worked examples in the prompt help more than any setting.

Change the rows in `data/`{files}, then the configuration: `lightning-rlhf fit --help` lists its options. For rows
of other columns, or of plain text, `lightning-rlhf check-data --config run.yaml` says what to set.{test}"""
_NEXT_OF_QUICKSTART = """The three runs write to `runs/quickstart/`: the model learns to add, but forgets carries, and
PPO teaches it to carry. Next, your task and model: `lightning-rlhf new DIR --kind grpo --model MODEL`."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    kinds = "\n".join(f"  {name:<12} {description}" for name, description in KINDS.items())
    parser = command_parser("new", "Write a small project to begin with.", _EPILOG.format(kinds=kinds))
    parser.add_argument("directory", type=Path, metavar="DIR", nargs="?", help="new directory")
    parser.add_argument("--kind", metavar="KIND", help="kind of the project (default: grpo)")
    parser.add_argument("--recipe", metavar="NAME", help="a configuration of the repository, such as preferences/simpo")
    parser.add_argument("--from-trl", type=Path, metavar="FILE", help="JSON or YAML file with options of TRL")
    parser.add_argument(
        "--from-verl", type=Path, metavar="FILE", help="script that starts verl, which is not executed, or its YAML"
    )
    parser.add_argument(
        "--trainer",
        choices=list(SECTIONS_OF),
        metavar="NAME",
        help=f"trainer of that file: {', '.join(SECTIONS_OF)}",
    )
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="processes of that run (default: 1)")
    parser.add_argument("--list", action="store_true", help="list the recipes, or those with a WORD, and end")
    parser.add_argument(
        "--model",
        help=f"chat model: a directory, or a model of the hub (default: {_MODEL}; the quickstart makes its own)",
    )
    return parser


@one_line_errors
def run(arguments: list[str]) -> int:
    """Write the project.

    Returns:
        Exit code: 0, or 2 if the directory is not empty or cannot be written, or the model cannot be read.
    """
    options = make_parser().parse_args(arguments)
    if options.list:
        word = "" if options.directory is None else str(options.directory)
        print(f"lightning-rlhf new DIR --recipe NAME writes one of these, with the runs before it:\n\n{listing(word)}")
        return 0
    _check(options)
    with write_errors(options.directory, "choose another directory"):
        if options.directory.exists() and (not options.directory.is_dir() or any(options.directory.iterdir())):
            raise UsageError(f"{options.directory} exists already and is not empty: choose another directory")
        text = _written(options)
    print(for_terminal(text))  # outside, because a closed pipe is no fault of the directory
    return 0


def _check(options: argparse.Namespace) -> None:
    """Validate the options.

    Raises:
        UsageError: the directory is missing, options contradict each other, or one has a wrong value.
    """
    if options.directory is None:
        raise UsageError("new needs the name of a new directory: lightning-rlhf new DIR; --list lists the recipes")
    if sum(map(bool, (options.recipe, options.kind, options.from_trl, options.from_verl))) > 1:
        raise UsageError("--kind, --recipe, --from-trl and --from-verl cannot be combined: keep one of them")
    if options.kind is not None and options.kind not in KINDS:
        found = [name for name in recipes() if options.kind.lower() in name.split("/")]
        end = f"; a recipe has the name: --recipe {found[0]}" if found else "; new --list lists the recipes"
        raise UsageError(f"--kind must be one of {', '.join(KINDS)}, got {options.kind!r}{end}")
    if options.devices > 1 and options.from_trl is None:
        raise UsageError("--devices is for --from-trl: a script of verl and a configuration set trainer.devices")
    if options.devices < 1:
        raise UsageError(f"--devices must be at least 1, got {options.devices}")
    if options.model and names_a_path(options.model) and not Path(options.model).expanduser().is_dir():
        raise UsageError(f"no model at {options.model!r}: {describe_missing_path(options.model)}")


def _written(options: argparse.Namespace) -> str:
    """Write the project; return what to print."""
    directory: Path = options.directory
    if options.from_trl:
        return write_from_trl(options.from_trl, directory, options.trainer, options.devices)
    if options.from_verl:
        return write_from_verl(options.from_verl, directory)
    change = f"  cd {shlex.quote(str(directory))}"
    if options.recipe:
        lines = write_recipe(options.recipe, directory, options.model)
        return "\n".join([f"wrote {directory}: {options.recipe}", "", change, *lines])
    kind = options.kind or "grpo"
    values, summary = {}, ""
    if kind != "quickstart":
        size = model_size(options.model or _MODEL)
        values = template_values(options.model or _MODEL, size, kind)
        summary = f"{size.origin}: {values['summary']}\n"
    elif options.model:
        raise UsageError("the quickstart makes its own model: remove --model, or choose another --kind")
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted((_TEMPLATES / kind).iterdir()):
        if path.is_file():
            _write(path, directory, values)
    (directory / "README.md").write_text(_readme(kind, directory), encoding="utf-8")
    if "LoRA" in summary and importlib.util.find_spec("peft") is None:
        summary += "LoRA needs peft, which is not installed: pip install 'lightning-rlhf[peft]'\n"
    if kind != "quickstart" and not _has_chat_template(Path(options.model or _MODEL).expanduser()):
        summary += (
            "the tokenizer has no chat template, and the rows are lists of messages, which need one: add "
            "chat_template.jinja of a chat model to its directory, or write prompts as texts\n"
        )
    commands = "\n".join(f"  {command}" for command in _commands(directory))
    return f"wrote {directory}: {KINDS[kind]}\n{summary}\n{change}\n{commands}"


@dataclass(frozen=True)
class ModelSize:
    """Size of a model.

    Args:
        parameters: number of parameters.
        positions: longest text that it can read, tokens.
        origin: sentence about where the numbers are from.
    """

    parameters: float
    positions: int
    origin: str


def model_size(model: str) -> ModelSize:
    """Return the size of a model from its files, or from its name.

    Args:
        model: a directory, or a model of the hub.

    Raises:
        UsageError: the directory has no ``config.json``, or a damaged file.
    """
    folder = Path(model)
    if not folder.is_dir():
        parameters, how = _USUAL_PARAMETERS, "assumed, because its name has no number"
        if size := re.search(r"(\d+(?:\.\d+)?)([bm])(?![a-z])", model.lower()):
            parameters, how = float(size[1]) * {"b": 1e9, "m": 1e6}[size[2]], "from its name"
        return ModelSize(parameters, _USUAL_POSITIONS, f"{model}, {_billions(parameters)} parameters ({how})")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        parameters = sum(map(_parameters_in, folder.glob("*.safetensors"))) or _USUAL_PARAMETERS
        config = config.get("text_config") or config
        positions = int(config.get("max_position_embeddings") or config.get("n_positions") or _USUAL_POSITIONS)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise UsageError(f"{model} is not the directory of a model: {type(error).__name__}: {error}") from error
    if positions < 2:
        raise UsageError(f"{model} is not the directory of a model: its config.json has {positions} positions")
    return ModelSize(parameters, positions, f"{folder.resolve().name}, {_billions(parameters)} parameters")


def template_values(model: str, size: ModelSize, kind: str = "grpo") -> dict[str, str]:
    """Return the values of the templates for a model.

    Args:
        model: a directory, whose path becomes absolute, because the run starts in the project; or a model of the hub.
        size: its size.
        kind: kind of the project, which the summary describes.
    """
    row = next(row for row in _RATES if size.parameters < row.below)
    path = os.path.abspath(model) if Path(model).is_dir() else model
    if not re.fullmatch(r"[\w./-]+", path):  # YAML would read it in another way
        path = json.dumps(path, ensure_ascii=False)
    prompt = min(256, size.positions // 2)
    response = min(row.response_tokens, size.positions // 2)
    text = min(512, size.positions)
    values = {"model": path, "prompt_tokens": str(prompt), "response_tokens": str(response), "text_tokens": str(text)}
    rates = row.lora or row.full
    weights = "LoRA" if row.lora else "all weights"
    if kind in rates:
        values["summary"] = f"{weights}, lr {rates[kind]:g} for {kind.upper()}, texts of at most {text} tokens"
    else:
        values["summary"] = f"{weights}, lr {rates['rl']:g} for RL, responses of at most {response} tokens"
    for name, rate in rates.items():
        values[f"{name}_lr"] = _yaml(rate)
        values[f"{name}_source"] = f" {path}"
        if row.lora:
            values[f"{name}_source"] = _LORA.format(path=path, full_rate=_yaml(row.full[name]))
    return values


def _has_chat_template(folder: Path) -> bool:
    """Return whether a model's directory has a chat template; True for a model of the hub, which is not read."""
    if not folder.is_dir() or (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _parameters_in(file: Path) -> int:
    """Return the number of values in a file of weights, whose header has their shapes."""
    with safe_open(file, framework="numpy") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 (no mapping)


def _billions(parameters: float) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:.3g} billion"
    return f"{parameters / 1e6:.3g} million"


def _yaml(rate: float) -> str:
    """Return a number that YAML reads as one: with a point."""
    digits, _, exponent = f"{rate:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"


def _write(path: Path, directory: Path, values: dict[str, str]) -> None:
    """Write a file of a template."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        text = f"# yaml-language-server: $schema={SCHEMA.as_uri()}\n{Template(text).substitute(values)}"
    folder = directory / "data" if path.suffix == ".jsonl" else directory
    folder.mkdir(exist_ok=True)
    (folder / path.name).write_text(text, encoding="utf-8")


def _commands(directory: Path) -> list[str]:
    """Return the commands that check and run a project."""
    configurations = [name for name in _ORDER if (directory / name).is_file()]
    tests = ["python -m pytest  # needs pip install pytest"] if any(directory.glob("test_*.py")) else []
    commands = ["fit"]
    if (directory / "data").is_dir():
        commands = ["check-data", "fit"]
    runs = [f"lightning-rlhf {command} --config {name}" for name in configurations for command in commands]
    return [*tests, *runs, "lightning-rlhf inspect runs"]


def _readme(kind: str, directory: Path) -> str:
    scripts = sorted(path.name for path in directory.glob("*.py") if not path.name.startswith("test_"))
    files = "".join(f" and `{name}`" for name in scripts)
    tests = sorted(path.name for path in directory.glob("test_*.py"))
    test = f" The test in\n`{tests[0]}` expects today's answers: change it too." if tests else ""
    further = _NEXT_OF_QUICKSTART if kind == "quickstart" else _NEXT.format(files=files, test=test)
    return _README.format(
        title=directory.resolve().name,
        description=KINDS[kind][0].upper() + KINDS[kind][1:],
        directory=shlex.quote(str(directory)),
        commands="\n".join(_commands(directory)),
        further=further,
    )
