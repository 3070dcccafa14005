"""Code blocks of the documentation: configurations parse, commands and options exist, Python and JSON are valid."""

import ast
import copy
import json
import re
import shlex
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from lightning_rlhf.__main__ import _expanded
from lightning_rlhf.cli.commands import COMMANDS, LIGHTNING
from lightning_rlhf.extras.commands.check_data import CheckDataCLI
from lightning_rlhf.extras.commands.run_config import ConfigCLI, parse_run_config
from lightning_rlhf.extras.plan.command import PlanCLI, _gib_of
from lightning_rlhf.extras.schema.check import mistakes

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("configs/*.md"),
    *ROOT.glob("examples/*/*.md"),
]
BLOCKS = [
    pytest.param(language, block, id=f"{path.relative_to(ROOT)}-{number}")
    for path in DOCUMENTS
    for number, (language, block) in enumerate(
        re.findall(r"^```(\w+)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    )
]
WRITTEN = {
    title for path in DOCUMENTS for title in re.findall(r'^```\w+ title="(.+?)"', path.read_text(), re.MULTILINE)
}
LOOP = "lightning_rlhf.callbacks.RolloutLoop"
BASE = {
    "model": {"class_path": "lightning_rlhf.GRPOModule", "init_args": {"actor": "models/x"}},
    "data": {
        "class_path": "lightning_rlhf.PromptDataModule",
        "init_args": {"tokenizer": "models/x", "train": "train.jsonl"},
    },
    "trainer": {"max_steps": 1},
}
PROGRAMS = {"cd", "export", "mlflow", "pip", "source", "ssh", "tensorboard"}  # of others


def blocks(*languages, but=None):
    return [item for item in BLOCKS if item.values[0] in languages and not (but and item.id.startswith(but))]


def run_of(part):
    """Return a complete configuration that contains the part shown in a document."""
    if isinstance(part, list):
        is_callback = "callbacks" in part[0].get("class_path", "")
        return run_of({"trainer": {"callbacks": part}} if is_callback else {"rewards": part})
    config = copy.deepcopy(BASE)
    for name, value in part.items():
        if name in ("model", "data"):
            config[name] = value
        elif name == "trainer":
            config[name] |= value
        elif name in ("engine", "environment", "rewards"):
            config["trainer"]["callbacks"] = [{"class_path": LOOP, "init_args": {name: value}}]
        elif name == "sandbox":
            code = {"class_path": "lightning_rlhf.extras.sandbox.code.CodeExecution", "init_args": {name: value}}
            config["trainer"]["callbacks"] = [{"class_path": LOOP, "init_args": {"rewards": [{"function": code}]}}]
        elif name == "val":
            config["data"]["init_args"][name] = value
        elif name == "seed_everything":
            config[name] = value
        else:
            config["model"]["init_args"][name] = value
    return config


@cache
def functions():
    """Return files with the functions and classes that configurations in the documentation refer to, by name."""
    named = re.findall(r"\b(\w+\.py):(\w+)", "".join(path.read_text() for path in DOCUMENTS))
    files = dict.fromkeys(name for name, _ in named)
    return {
        file: "".join(f"def {instance}():\n    ...\n" for name, instance in set(named) if name == file)
        for file in files
    }


# docs/algorithms/ shows parts of configs/algorithms/, which tests/cli/test_algorithm_configs.py compares;
# tests/cli/test_own_algorithm_page.py runs docs/own_algorithm.md with its classes.
@pytest.mark.quick_cases(20)
@pytest.mark.parametrize(("language", "block"), blocks("yaml", but=("docs/algorithms/", "docs/own_algorithm.md")))
def test_yaml_blocks_are_valid_configurations(language, block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in functions().items():
        Path(name).write_text(text)
    Path("x.yaml").write_text(yaml.safe_dump(run_of(yaml.safe_load(block.replace(", ...}", "}")))))
    warnings.simplefilter("ignore")  # of jsonargparse; pytest restores the filters
    try:
        parse_run_config(["--config", "x.yaml"], ConfigCLI)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    assert mistakes(["--config", "x.yaml"], "") == {}


def commands():
    """Return every command in the documentation as a list of words, without leading environment variables.

    A loop has the commands of its first value.
    """
    result = {}
    for block in blocks("bash"):
        text = block.values[1].replace("\\\n", " ")
        for name, value in re.findall(r"^for (\w+) in (\S+).*; do$", text, re.MULTILINE):
            text = text.replace(f"${name}", value)
        for line in re.sub(r"^(for .*; do|done)$", "", text, flags=re.MULTILINE).splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"\w+=", words[0]):
                words = words[1:]
            if words:
                result[tuple(words)] = block.id
    return [pytest.param(words, id=f"{document}: {' '.join(words)[:60]}") for words, document in result.items()]


@pytest.mark.quick_cases(24)
@pytest.mark.parametrize("words", commands())
def test_commands_and_their_options_exist(words, tmp_path, monkeypatch, capsys):
    program, *arguments = words
    program = Path(program).name
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "python":
        assert_module_or_file_exists(arguments)
    elif program == "lightning-rlhf":
        monkeypatch.chdir(tmp_path)
        for name in ("configs", "examples"):
            Path(name).symlink_to(ROOT / name)
        for name in ("x.yaml", "run.yaml", "grpo.yaml", "reward.yaml", "sft.yaml", "ppo.yaml", "dpo.yaml"):
            Path(name).write_text(yaml.safe_dump(run_of({"rewards": []})))
        try:
            parse(*_expanded(arguments))
        except SystemExit:
            pytest.fail(capsys.readouterr().err)
    else:
        assert program in PROGRAMS


def assert_module_or_file_exists(arguments):
    if arguments[0] == "-m":
        assert (ROOT / f"{arguments[1].replace('.', '/')}.py").is_file() or arguments[1] in ("pip", "pytest", VLLM)
    else:
        assert (ROOT / arguments[0]).is_file() or arguments[0] in WRITTEN
    assert all((ROOT / argument).exists() for argument in arguments if argument.startswith(("tests/", "benchmarks/")))


VLLM = "vllm.entrypoints.openai.api_server"


def parse(command, *arguments):
    """Parse the arguments of a command of this project as the command does, and exit where it would."""
    module = COMMANDS[command][0]
    warnings.simplefilter("ignore")  # of jsonargparse; pytest restores the filters
    if module == LIGHTNING:
        parse_run_config(list(arguments), ConfigCLI)
    elif command == "plan" and arguments[0] == "--gpu":
        assert _gib_of(list(arguments)) > 0
    elif command == "plan":
        parse_run_config(list(arguments), PlanCLI)
    elif command == "check-data":
        parse_run_config(list(arguments), CheckDataCLI)
    else:
        import_module(module).make_parser().parse_args(arguments)


@pytest.mark.parametrize(("language", "block"), blocks("python"))
def test_python_blocks_are_well_formed_and_import_existing_names(language, block):
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("lightning_rlhf"):
            assert all(hasattr(import_module(node.module), name.name) for name in node.names)


@pytest.mark.parametrize(("language", "block"), blocks("json", "jsonl"))
def test_json_blocks_have_one_value_per_line(language, block):
    assert all(isinstance(json.loads(line), dict) for line in block.splitlines())


def test_blocks_of_every_kind_were_found():
    assert len(blocks("yaml", but="docs/algorithms/")) > 40
    assert len(commands()) > 40
    assert len(blocks("python")) > 7
    kinds = {item.values[0] for item in BLOCKS}
    assert kinds == {"bash", "json", "jsonl", "math", "py", "python", "text", "yaml"}, "a kind that no test reads"
