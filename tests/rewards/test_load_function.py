"""Importing a function by reference; errors suggest similar names."""

import re
import sys

import pytest

from lightning_rlhf.calls.references import load_function

SOURCE = """
import math

class Judge:
    strict = True
    def right(completions): return [1.0]

def brief(completions):
    return [-len(text) for text in completions]

LIMIT = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import my_rewards_of_mine\n")
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_file_is_found_by_relative_and_absolute_path(folder):
    result = load_function("my_rewards.py:brief")
    assert result(["abc"]) == [-3]
    assert load_function(f"{folder}/my_rewards.py:brief") is result
    assert load_function("./my_rewards.py:Judge.right")([]) == [1.0]


def test_lazy_and_inherited_attributes_are_found(folder):
    (folder / "lazy.py").write_text(
        "class Base:\n    def right(completions): return [1.0]\nclass Child(Base): pass\n"
        "def __getattr__(name):\n"
        "    if name == 'late': return Child.right\n"
        "    if name == 'broken': raise ImportError('no such thing')\n"
        "    raise AttributeError(name)\n"
    )
    assert load_function("lazy.py:late") is load_function("lazy.py:Child.right")
    with pytest.raises(ValueError, match=r"'lat' was not found in lazy\.py"):
        load_function("lazy.py:lat")
    with pytest.raises(ValueError, match=r"broken in lazy\.py cannot be imported: no such thing"):
        load_function("lazy.py:broken")


def test_two_files_with_the_same_name_are_two_modules(folder):
    (folder / "other").mkdir()
    (folder / "other" / "my_rewards.py").write_text("def brief(completions): return [7]")
    assert load_function("other/my_rewards.py:brief")([]) == [7]
    assert load_function("my_rewards.py:brief")([]) == []


@pytest.mark.parametrize("reference", ["os.path:join", "os.path.join", "posixpath:join"])
def test_function_of_a_module_is_found(reference):
    assert load_function(reference)("a", "b") == "a/b"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("brief", "specify a function as 'package.module:function' or 'path/to/file.py:function', got 'brief'"),
        ("my_rewards.py", "specify a function as .* got 'my_rewards.py'"),
        (":brief", "specify a function as .* got ':brief'"),
        ("my_rewards.py:", "specify a function as .* got 'my_rewards.py:'"),
        ("my_rewards.py:breif", "'breif' was not found in my_rewards.py; did you mean 'brief'?"),
        ("my_rewards.py:zzz", "'zzz' was not found in my_rewards.py; available: Judge, LIMIT, brief"),
        ("my_rewards.py:Judge.wrong", "'wrong' was not found in my_rewards.py"),
        ("my_rewards.py:LIMIT", "'LIMIT' in my_rewards.py is not callable (int: 3)"),
        ("my_reward.py:brief", r"file not found: my_reward.py; did you mean 'my_rewards.py'? (working directory: "),
        ("/nowhere/x.py:f", "file not found: /nowhere/x.py"),
        ("broken.py:f", "broken.py cannot be imported: ModuleNotFoundError: No module named 'my_rewards_of_mine'"),
        ("wrong.py:f", "wrong.py cannot be imported: ZeroDivisionError: division by zero"),
        ("folder/file:f", "file not found: folder/file"),
        (
            "no_such_package:f",
            "no module named 'no_such_package' (to import no_such_package); specify a function in a ",
        ),
        ("os.path.joins", "'joins' was not found in os.path; did you mean 'join'?"),
        ("os.path:joins", "'joins' was not found in os.path; did you mean 'join'?"),
    ],
)
def test_wrong_reference_raises_an_error_with_a_suggestion(folder, reference, message):
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        load_function(reference)


def test_file_that_failed_is_imported_again(folder):
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        load_function("wrong.py:f")
    (folder / "wrong.py").write_text("def f(): return 1")
    assert load_function("wrong.py:f")() == 1
