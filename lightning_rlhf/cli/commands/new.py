"""``lightning-rlhf new``: write a small project to begin with."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from string import Template

from lightning_rlhf.cli.commands.options import command_parser
from lightning_rlhf.cli.commands.responses_file import write_errors
from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.expected_errors import UsageError

_TEMPLATES = Path(__file__).parents[1] / "templates"
KINDS = {
    "grpo": "a reward function of Python, and groups of responses",
    "ppo": "a reward model from pairs of answers, then PPO with it",
    "sft": "supervised fine-tuning on conversations",
    "dpo": "pairs of a better and a worse answer",
    "environment": "conversations of several turns with an environment",
}
_EPILOG = """The directory then has a configuration, a few rows of data in the expected format, the reward or
environment, its test, and a README.md with the commands.

{kinds}

  lightning-rlhf new my_task --kind grpo --model Qwen/Qwen2.5-0.5B-Instruct
"""
_README = """# {title}

{description}. Made by `lightning-rlhf new`.

```bash
cd {directory}
{commands}
```

Without a GPU, begin with `--trainer.max_steps 4`. After three steps, a longer run prints its remaining time.

Change the rows in `data/`{further}, then the configuration: `lightning-rlhf fit --help` lists its options.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    kinds = "\n".join(f"  {name:<12} {description}" for name, description in KINDS.items())
    parser = command_parser("new", "Write a small project to begin with.", _EPILOG.format(kinds=kinds))
    parser.add_argument("directory", type=Path, metavar="DIR", help="new directory")
    parser.add_argument("--kind", choices=list(KINDS), default="grpo", help="(default: grpo)")
    parser.add_argument(
        "--model",
        default="Qwen/Qwen2.5-0.5B-Instruct",
        help="chat model: a directory, or a model of the hub (default: %(default)s)",
    )
    return parser


@one_line_errors
def run(arguments: list[str]) -> int:
    """Write the project.

    Returns:
        Exit code: 0, or 2 if the directory is not empty or cannot be written.
    """
    options = make_parser().parse_args(arguments)
    directory = options.directory
    with write_errors(directory, "choose another directory"):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UsageError(f"{directory} exists already and is not empty: choose another directory")
        (directory / "data").mkdir(parents=True, exist_ok=True)
        for path in sorted((_TEMPLATES / options.kind).iterdir()):
            if path.is_file():
                _write(path, directory, options.model)
        (directory / "README.md").write_text(_readme(options.kind, directory), encoding="utf-8")
    print(
        f"wrote {directory}: {KINDS[options.kind]}\n\n  cd {directory}\n"
        + "\n".join(f"  {own}" for own in _commands(directory))
    )
    return 0


def _write(path: Path, directory: Path, model: str) -> None:
    """Write a file of a template; the path of a model becomes absolute, because the run starts in the project."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        text = Template(text).substitute(model=os.path.abspath(model) if Path(model).is_dir() else model)
    folder = directory / "data" if path.suffix == ".jsonl" else directory
    (folder / path.name).write_text(text, encoding="utf-8")


def _commands(directory: Path) -> list[str]:
    """Return the commands that check and run a project."""
    configurations = [name for name in ("reward.yaml", "run.yaml") if (directory / name).is_file()]
    tests = ["python -m pytest"] if any(directory.glob("test_*.py")) else []
    runs = [f"lightning-rlhf {own} --config {name}" for name in configurations for own in ("data check", "fit")]
    return [*tests, *runs, "lightning-rlhf inspect runs/*"]


def _readme(kind: str, directory: Path) -> str:
    scripts = sorted(path.name for path in directory.glob("*.py") if not path.name.startswith("test_"))
    return _README.format(
        title=directory.resolve().name,
        description=KINDS[kind][0].upper() + KINDS[kind][1:],
        directory=directory,
        commands="\n".join(_commands(directory)),
        further="".join(f" and `{name}`" for name in scripts),
    )
