"""The places in the code at which tests kill a run exist, which only slow tests would notice."""

import ast
import pkgutil
import re
from pathlib import Path

import pytest


def places(path):
    """Yield the names ``module:name`` in a file, also those that are a constant and a further name."""
    tree = ast.parse(path.read_text())
    starts = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(left=ast.Name(id=name), right=ast.Constant(value=str(end))) if name in starts:
                text = starts[name] + end
            case ast.Constant(value=str(text)):
                pass
            case _:
                continue
        if re.fullmatch(r"lightning_rlhf[\w.]*:[\w.]*\w", text):
            yield text


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("test_*.py")), ids=lambda path: path.stem)
def test_places_exist(path):
    for place in places(path):
        assert pkgutil.resolve_name(place)
