"""The command line recognises expected errors by their class, so the package raises its own classes."""

import ast
import pickle
from pathlib import Path

import pytest

from lightning_rlhf import expected_errors
from lightning_rlhf.expected_errors import ExpectedError

ROOT = Path(__file__).resolve().parents[1]
BUILT_IN = {"ValueError", "RuntimeError", "FileNotFoundError", "ModuleNotFoundError", "FloatingPointError"}
# An error in these is an error of the caller, and shows its traceback.
MATHEMATICS = ("lightning_rlhf/functional/", "lightning_rlhf/types.py")
CLASSES = [
    kind
    for kind in vars(expected_errors).values()
    if isinstance(kind, type) and issubclass(kind, ExpectedError) and kind is not ExpectedError
]


def test_package_raises_its_own_classes():
    raised = []
    for path in sorted([*ROOT.glob("lightning_rlhf/**/*.py"), *ROOT.glob("callbacks/**/*.py")]):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in BUILT_IN:
                raised.append(f"{name}:{node.lineno}: {call.func.id}; use one of lightning_rlhf.expected_errors")
    assert not [line for line in raised if not line.startswith(MATHEMATICS)]


@pytest.mark.parametrize("kind", CLASSES)
def test_expected_error_is_a_built_in_exception_and_can_be_pickled(kind):
    assert issubclass(kind, ExpectedError)
    assert {base.__name__ for base in kind.__mro__} & BUILT_IN
    copy = pickle.loads(pickle.dumps(kind("message")))
    assert type(copy) is kind
    assert str(copy) == "message"
