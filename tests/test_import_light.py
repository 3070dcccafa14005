"""Cost of imports, each measured in a fresh interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_rlhf
from lightning_rlhf import __version__

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {"vllm", "deepspeed", "ray", "sglang"}
HEAVY = {"torch", "lightning", "transformers", "datasets", "numpy"}


def python(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(code):
    """Return the top-level modules that are loaded after running some code."""
    return set(python(f"{code}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})").split())


def test_importing_the_package_loads_nothing_heavy():
    assert not loaded_after("import lightning_rlhf; dir(lightning_rlhf)") & (ENGINES | HEAVY)


def test_worker_of_environments_loads_nothing_heavy():
    code = "import lightning_rlhf.environments.live, lightning_rlhf.extras.environments.tools; "
    assert not loaded_after(f"{code}from lightning_rlhf.environments import Reply, Tools") & (ENGINES | HEAVY)


@pytest.mark.slow
def test_importing_the_command_line_starts_no_engine():
    loaded = loaded_after("import lightning_rlhf.cli.main")
    assert "torch" in loaded
    assert not loaded & ENGINES


def test_version_is_printed_without_importing_torch():
    ask = "import sys; sys.argv = ['lightning-rlhf', '--version']; from lightning_rlhf.__main__ import main; main()"
    output, *names = python(f"{ask}\nprint(*sys.modules)").splitlines()
    assert output == f"lightning-rlhf {__version__}"
    assert not {name.split(".")[0] for name in names[0].split()} & (ENGINES | HEAVY)


def test_every_public_name_can_be_imported():
    named = {name: getattr(lightning_rlhf, name) for name in lightning_rlhf.__all__}
    assert named.pop("__version__") == __version__
    assert {name: value.__name__ for name, value in named.items()} == {name: name for name in named}
    assert len([name for name in named if not name.endswith("Module")]) <= 15  # an algorithm is a module, and is named


def test_unknown_public_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'lightning_rlhf' has no attribute 'GRPO2Module'"):
        lightning_rlhf.GRPO2Module  # noqa: B018
