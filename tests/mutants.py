"""Mutation test of the mathematics: change one operator, constant or call at a time and see whether a test fails.

    make mutants                            the mathematics of core and extras, which takes hours
    make mutants ARGS="--every 10"          a tenth of the mutants, drawn by --seed
    make mutants ARGS="objectives/kl_controllers.py"

A mutant is a fork of a process that has imported torch and pytest; it replaces the module while it is imported, so that
no file changes. The tests of a module are those that import it. equivalent_mutants.txt lists the survivors that change
no result; docs/mutations.md says why. The command fails if another one survives.
"""

import argparse
import ast
import copy
import functools
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis  # noqa: F401
import jaxtyping
import lightning.pytorch  # noqa: F401
import pytest
import torch
import transformers.models.llama.modeling_llama  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_rlhf"
MATHEMATICS = (
    "functional/[a-z]*.py", "objectives/[a-z]*.py",
    "extras/algorithms/*_losses.py", "extras/algorithms/*advantages*.py", "extras/algorithms/*_baselines.py",
    "extras/algorithms/divergence.py", "models/packed_calls.py",
)  # fmt: skip
TESTS = ("test_seeding.py", "functional/test_*.py", "objectives/test_*.py", "extras/algorithms/test_*.py",
         "models/test_packed*.py", "modules/test_policy_loss_functions.py")  # fmt: skip
# Tests of a module through another one that they import.
THROUGH = {
    "advantages_by_source": "extras/algorithms/test_mixture.py",
    "base": "modules/test_policy_loss_functions.py",
    "divergence": "extras/algorithms/test_distillation.py",
}
SECONDS = 120  # of one mutant, after which it counts as killed

OPERATORS = {
    ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div], ast.Div: [ast.Mult], ast.Pow: [ast.Mult],
    ast.BitAnd: [ast.BitOr], ast.BitOr: [ast.BitAnd], ast.FloorDiv: [ast.Mult], ast.Mod: [ast.Mult],
    ast.Lt: [ast.LtE, ast.GtE], ast.LtE: [ast.Lt, ast.Gt], ast.Gt: [ast.GtE, ast.LtE], ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.And: [ast.Or], ast.Or: [ast.And],
}  # fmt: skip
OTHER_CALL = {
    "maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max", "amax": "amin", "amin": "amax",
    "argmax": "argmin", "argmin": "argmax", "sum": "mean", "mean": "sum", "exp": "expm1", "zeros_like": "ones_like",
    "zeros": "ones",
}  # fmt: skip
LEFT_OUT = {"detach", "masked_fill", "clamp", "abs", "sqrt", "unsqueeze", "cumsum", "flip"}


def mutations(node):
    """Yield (description, replacement) of each change of one node."""
    text = ast.unparse(node)[:60]
    if isinstance(node, ast.BinOp):
        for kind in OPERATORS.get(type(node.op), []):
            yield f"{text}: {kind.__name__}", ast.BinOp(node.left, kind(), node.right)
        yield f"{text}: left operand", node.left
        yield f"{text}: right operand", node.right
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for kind in OPERATORS.get(type(node.ops[0]), []):
            yield f"{text}: {kind.__name__}", ast.Compare(node.left, [kind()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        (kind,) = OPERATORS[type(node.op)]
        yield f"{text}: {kind.__name__}", ast.BoolOp(kind(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        yield f"{text}: without {type(node.op).__name__}", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{text}: {not node.value}", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield f"{text}: + 1", ast.Constant(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield f"{text}: branches exchanged", ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name in OTHER_CALL:
            function = ast.Attribute(node.func.value, OTHER_CALL[name], node.func.ctx)
            yield f"{text}: {OTHER_CALL[name]}", ast.Call(function, node.args, node.keywords)
        if name in LEFT_OUT and ast.unparse(node.func.value) != "torch":
            yield f"{text}: without {name}", node.func.value


def sites(tree):
    """Yield the nodes that may change: not annotations, messages of errors, texts, or decorators."""
    skipped = set()
    for node in ast.walk(tree):
        parts = [getattr(node, name, None) for name in ("annotation", "returns", "decorator_list", "exc")]
        if isinstance(node, ast.JoinedStr):
            parts.append(node)
        for part in parts:
            for inner in part if isinstance(part, list) else [part] if isinstance(part, ast.AST) else []:
                skipped |= {id(child) for child in ast.walk(inner)}
    for node in ast.walk(tree):
        if id(node) not in skipped:
            yield node


class _Replace(ast.NodeTransformer):
    def __init__(self, number, new):
        self.number, self.new = number, new

    def visit(self, node):
        if getattr(node, "number", None) == self.number:
            return ast.copy_location(self.new, node)
        return self.generic_visit(node)


def mutants(path):
    """Yield (line, description, source) of every mutant of a file."""
    tree = ast.parse(path.read_text())
    for number, node in enumerate(ast.walk(tree)):
        node.number = number
    for node in list(sites(tree)):
        for description, new in mutations(node):
            mutant = _Replace(node.number, copy.deepcopy(new)).visit(copy.deepcopy(tree))
            yield node.lineno, description, ast.unparse(ast.fix_missing_locations(mutant))


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from a changed source."""

    def __init__(self, name, path, source):
        self.name, self.path, self.source = name, path, source

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self, origin=str(self.path)) if name == self.name else None

    def get_source(self, name):
        return self.source


def tests_of(path):
    """Return the test files that import a module, those named after it first."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    folder, _, stem = name.rpartition(".")
    files = []
    for file in sorted(file for tests in TESTS for file in ROOT.glob(f"tests/{tests}")):
        text = file.read_text()
        is_through = str(file).endswith(THROUGH.get(stem, "no such file"))
        if name in text or f"from {folder} import {stem}" in text or is_through:
            files.append(str(file))
    # An objective that imports a function of functional/ tests it as well.
    return sorted(files, key=lambda file: stem not in file)


def survives(path, tests, source):
    """Run the tests with one mutant; True if all pass in time."""
    child = os.fork()
    if child == 0:
        os.setsid()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        sys.meta_path.insert(0, _Importer(name, path, source))
        jaxtyping.install_import_hook = lambda *arguments: None  # which would import the file instead
        options = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "-m", "not slow and not gpu"]
        code = pytest.main([*options, *tests])
        os._exit(int(code))
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files below lightning_rlhf/; all of the mathematics without them")
    parser.add_argument("--every", type=int, default=1, help="try one mutant of so many")
    parser.add_argument("--seed", type=int, default=1, help="draws those that are tried")
    parser.add_argument("--processes", type=int, default=2, help="mutants at a time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.chdir(ROOT)
    paths = [PACKAGE / file for file in arguments.files]
    paths = paths or [path for pattern in MATHEMATICS for path in sorted(PACKAGE.glob(pattern))]
    known = set((ROOT / "tests/equivalent_mutants.txt").read_text().splitlines())
    tried = alive = unknown = 0
    for path in paths:
        tests = tests_of(path)
        if not survives(path, tests, path.read_text()):
            raise SystemExit(f"the tests of {path} fail without a change: {' '.join(tests)}")
        if survives(path, tests, "raise ImportError"):
            raise SystemExit(f"the tests of {path} do not use the changed source: {' '.join(tests)}")
        found = list(mutants(path))
        drawn = random.Random(f"{arguments.seed} {path.stem}").sample(
            range(len(found)), -(-len(found) // arguments.every)
        )
        chosen = [found[i] for i in sorted(drawn)]
        with ThreadPoolExecutor(arguments.processes) as pool:
            outcomes = list(pool.map(functools.partial(survives, path, tests), [source for _, _, source in chosen]))
        text = path.read_text().splitlines()
        survivors = [mutant for mutant, survived in zip(chosen, outcomes, strict=True) if survived]
        tried += len(chosen)
        alive += len(survivors)
        print(f"{path.relative_to(PACKAGE)}: {len(chosen)} mutants, {len(chosen) - len(survivors)} killed", flush=True)
        for line, description, _ in survivors:
            is_known = f"{path.relative_to(PACKAGE)}: {description} | {text[line - 1].strip()}" in known
            unknown += not is_known
            print(f"    line {line} survives{', as known' if is_known else ''}: {description}", flush=True)
    share = (tried - alive) / max(tried, 1)
    print(f"all: {tried} mutants, {tried - alive} killed ({share:.1%}), {unknown} survivors that are not known")
    sys.exit(unknown > 0)


if __name__ == "__main__":
    main()
