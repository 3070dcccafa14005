"""Configurations with the name of a class that was moved end in one line with its new name."""

import contextlib
import pkgutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_rlhf.calls.references import load_function
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.moved import moved_modules, new_name


@pytest.mark.parametrize("old", moved_modules())
def test_each_new_name_exists(old):
    name = new_name(f"{old}.x").removesuffix(".x")
    package, _, last = name.rpartition(".")
    if last[0].isupper():  # a class, which must be defined there
        assert f"class {last}(" in Path(find_spec(package).origin).read_text().replace(
            f"class {last}:", f"class {last}("
        )
    else:
        folders = getattr(pkgutil.resolve_name(package), "__path__", [])
        assert last in {module.name for module in pkgutil.iter_modules(folders)} or pkgutil.resolve_name(name)


@pytest.mark.parametrize("old", moved_modules())
def test_no_old_name_still_exists(old):
    package, _, last = old.rpartition(".")
    if last[0].isupper() and package not in moved_modules():
        assert not hasattr(import_module(package), last)
    else:
        with contextlib.suppress(ModuleNotFoundError):
            assert getattr(find_spec(old), "origin", None) is None  # folders of an earlier commit may be left


def test_a_class_with_its_old_name_has_a_new_one():
    old, new = "lightning_rlhf.rewards.code.CodeExecution", "lightning_rlhf.extras.sandbox.code.CodeExecution"
    assert new_name(old) == new


def test_the_new_name_of_a_function_is_in_the_message():
    with pytest.raises(UsageError, match=r"^lightning_rlhf.rewards.code is now lightning_rlhf.extras.sandbox.code$"):
        load_function("lightning_rlhf.rewards.code:anything")


def test_other_names_were_not_moved():
    assert new_name("lightning_rlhf.callbacks.Report") is None
    assert new_name("lightning_rlhf.rewards.function.RewardFunction") is None


def test_the_new_name_of_a_module_is_in_the_error_of_its_import():
    with pytest.raises(
        ModuleNotFoundError, match=r"^lightning_rlhf.rewards.learned is now lightning_rlhf.extras.rewards"
    ):
        import_module("lightning_rlhf.rewards.learned")
