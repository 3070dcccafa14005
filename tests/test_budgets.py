"""Sizes that keep files readable; a file is split by topic, not to fit a number."""

import ast
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*ROOT.glob("lightning_rlhf/**/*.py"), *ROOT.glob("callbacks/**/*.py")])
CONFIGS = sorted(ROOT.glob("configs/**/*.yaml"))

FILE_LINES = 450
FUNCTION_LINES = 50  # from the def to its last line, without the docstring
STEP_LINES = 45
CONSTRUCTOR_ARGUMENTS = 20
YAML_VALUES = 45


def functions(path):
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def lines(function):
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = first.end_lineno - first.lineno + 1 if is_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring


def values(node):
    """What a configuration sets; a ``class_path`` sets nothing, it names the block whose values follow."""
    if isinstance(node, dict):
        return sum(values(child) for key, child in node.items() if key != "class_path")
    if isinstance(node, list):
        return sum(values(child) for child in node)
    return 1


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_fits_its_budget(path):
    assert len(path.read_text().splitlines()) <= FILE_LINES
    for function in functions(path):
        budget = STEP_LINES if function.name == "training_step" else FUNCTION_LINES
        assert lines(function) <= budget, function.name
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
        assert len(names) <= CONSTRUCTOR_ARGUMENTS, function.name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_configuration_fits_its_budget(path):
    assert 0 < values(yaml.safe_load(path.read_text())) <= YAML_VALUES


def test_there_is_something_to_measure():
    assert len(SOURCES) > 50
    assert CONFIGS
    (step,) = (f for f in functions(ROOT / "lightning_rlhf/modules/rlhf.py") if f.name == "training_step")
    assert 10 < lines(step) <= STEP_LINES
