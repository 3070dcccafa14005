"""What a test replaces in a module or class exists there: slow tests are not run with every change."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "monkeypatch.setattr(" in path.read_text()]


def replaced(tree):
    """Yield the name of a module or class, and the attribute of it that the test replaces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr" and len(node.args) == 3:
            target, name, _ = node.args
            if isinstance(target, ast.Name) and isinstance(name, ast.Constant) and not node.keywords:
                yield target.id, name.value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_replaced_attribute_exists(path):
    found = [*replaced(ast.parse(path.read_text()))]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # not in sys.modules, where tests of the file look for their own
    spec.loader.exec_module(module)
    for target, name in found:
        owner = getattr(module, target, None)
        if inspect.ismodule(owner) or inspect.isclass(owner):
            assert hasattr(owner, name), f"{target}.{name}"
