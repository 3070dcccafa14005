"""Layers of the package: a module imports from lower layers only, never from its own or a higher one."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (
    {
        "__about__",
        "compat",
        "directions",
        "entry_points",
        "encoded_image",
        "expected_errors",
        "launch_environment",
        "lazy_names",
        "loggers",
        "moved",
        "paths",
        "ranges",
        "run_checks",
        "tasks",  # the door to examples/tasks
        "types",
    },
    {"functional"},
    {"metrics"},
    {"objectives"},
    {"batching"},  # pads and sorts rows for all above
    {"processes"},  # starts child processes
    {"calls"},  # runs user code
    {"images"},
    {"data", "models"},
    {"rewards"},
    {"environments"},
    {"strategies"},
    {"rollout"},
    {"modules"},
    {"callbacks"},
    {"cli"},
    {"extras"},
)
DOORS = {"__init__", "__main__"}  # of the package: they name what lies inside, and nothing inside imports them
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
# Tables of public names, which may name an extra.
PUBLIC_NAMES = ("lightning_rlhf", "lightning_rlhf.callbacks.public", "lightning_rlhf.environments")
FILES = sorted([*ROOT.glob("lightning_rlhf/**/*.py"), *ROOT.glob("callbacks/**/*.py")])


def module_of(path):
    """Return the dotted name parts of a file; the top-level ``callbacks/`` is the subpackage of that name."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return parts if parts[0] == "lightning_rlhf" else ["lightning_rlhf", *parts]


def imported(path, source=None):
    """Return the dotted names of all modules of this project that a file imports, with relative imports resolved."""
    here = module_of(path)
    for node in ast.walk(ast.parse(source or path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            stem = [*base, *(node.module or "").split(".")] if node.module else base
            names = [".".join([*stem, alias.name]) for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in ("lightning_rlhf", "callbacks"))


def wrong_imports(path, source=None):
    """Return the imports of a file that its layer does not allow."""
    room = module_of(path)[1]
    if ".".join(module_of(path)).removesuffix(".__init__") in PUBLIC_NAMES and room in DOORS:
        return []
    if room in DOORS:
        return [name for name in imported(path, source) if name.startswith("lightning_rlhf.extras")]
    wrong = []
    for name in imported(path, source):
        parts = name.split(".")
        other = parts[1] if len(parts) > 1 else ""
        beside = other != room and LEVEL.get(other, len(FLOORS)) >= LEVEL[room]
        lowest = LEVEL[room] == LEVEL.get(other) == 0  # single files that make up the ground floor together
        if ".".join(module_of(path)).removesuffix(".__init__") in PUBLIC_NAMES and other == "extras":
            continue
        forbidden = (room, other) == ("modules", "rollout")
        if (beside and not lowest) or forbidden or parts[0] == "callbacks":
            wrong.append(name)
    return wrong


def test_core_imports_no_extra():
    """Nor does a text name one, except in the table of commands."""
    core = {
        ".".join(module_of(path)).removesuffix(".__init__"): path for path in FILES if module_of(path)[1] != "extras"
    }
    importing = {name for name, path in core.items() if any("lightning_rlhf.extras" in part for part in imported(path))}
    assert importing == set(PUBLIC_NAMES)
    naming = {name for name, path in core.items() if re.search(r"[\"']lightning_rlhf\.extras", path.read_text())}
    assert naming == {*PUBLIC_NAMES, "lightning_rlhf.cli.commands"}


def test_every_file_belongs_to_a_known_subpackage():
    rooms = {module_of(path)[1] for path in FILES}
    assert rooms <= LEVEL.keys() | DOORS
    assert len(FILES) > 50


def test_imports_point_to_lower_layers():
    wrong = {str(path.relative_to(ROOT)): names for path in FILES if (names := wrong_imports(path))}
    assert wrong == {}


def import_graph():
    """Return the modules that each module imports when it is loaded or type-checked, not inside functions."""
    modules = {".".join(module_of(path)).removesuffix(".__init__"): path for path in FILES}
    graph = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [ast.Pass()]
        names = set(imported(path, ast.unparse(tree)))
        graph[module] = {item for name in names for item in (name, name.rpartition(".")[0]) if item in modules} - {
            module
        }
    return graph


def test_imports_have_no_cycles():
    """Imports for type checkers count too; packages that only contain modules do not."""
    graph = {}
    for module, names in import_graph().items():
        graph[module] = {name for name in names if not module.startswith(f"{name}.")}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules of the circle


def test_small_files_with_one_importer_do_not_exist():
    """A file under 40 lines that one other file uses belongs into that file."""
    graph = import_graph()
    alone = []
    for path in FILES:
        module = ".".join(module_of(path))
        importers = [name for name, names in graph.items() if module in names]
        is_public = any(module.startswith(f"{name}.") or name == "lightning_rlhf" for name in importers)
        if len(path.read_text().splitlines()) < 40 and len(importers) == 1 and not is_public:
            alone.append(f"{module} is imported by {importers[0]} only")
    assert alone == []


def test_lowest_layer_imports_no_heavy_libraries():
    """``types`` is made of tensors; ``compat`` is where Lightning's inner workings are; the others are plain Python."""
    plain = {name: set() for name in ("expected_errors", "launch_environment", "paths", "run_checks")}
    allowed = {**plain, "types": {"torch"}, "compat": {"torch", "lightning"}}
    for room, libraries in allowed.items():
        tree = ast.parse((ROOT / f"lightning_rlhf/{room}.py").read_text())
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        result = {name.split(".")[0] for name in modules}
        assert result & {"torch", "lightning", "transformers", "datasets", "vllm"} <= libraries, room


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("lightning_rlhf/modules/x.py", "from lightning_rlhf.rollout.engine import RolloutEngine", 1),
        ("lightning_rlhf/modules/x.py", "from ..rollout import engine", 1),
        ("lightning_rlhf/modules/x.py", "import lightning_rlhf.extras.console.console", 1),
        ("lightning_rlhf/modules/x.py", "def f():\n    from lightning_rlhf.cli import main", 1),
        ("lightning_rlhf/modules/x.py", "from .base import RLHFModule\nfrom ..types import Rollout", 0),
        ("lightning_rlhf/modules/x.py", "from lightning_rlhf import PPOModule", 1),
        ("lightning_rlhf/models/x.py", "from lightning_rlhf.batching import micro", 0),
        ("lightning_rlhf/models/x.py", "from lightning_rlhf.rewards import rules", 1),
        ("lightning_rlhf/functional/x.py", "import torch", 0),
        ("callbacks/x.py", "from .console import Console\nfrom lightning_rlhf.rollout.engine import EngineDied", 0),
        ("callbacks/x.py", "from lightning_rlhf.cli.main import run", 1),
        ("lightning_rlhf/cli/x.py", "from lightning_rlhf.extras.plan import plan", 1),
        ("lightning_rlhf/__main__.py", "from lightning_rlhf.extras.plan import plan", 1),
        ("callbacks/x.py", "from callbacks.console import Console", 1),
    ],
)
def test_checks_detect_wrong_imports(path, source, wrong):
    assert len(wrong_imports(ROOT / path, source)) == wrong
