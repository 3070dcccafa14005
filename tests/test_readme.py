"""Every command of the README is run by a test, and every file it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def own_task():
    """The commands of one section, which a test follows from first to last."""
    section = re.search(r"^## Your own task\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)[1]
    return re.search(r"```bash\n(.*?)\n```", section, re.DOTALL)[1].splitlines()


# command: where it is run
RUN_BY = {
    "pip install 'lightning-rlhf[vllm]'": "nobody: it needs a GPU; tests/test_packaging.py runs those for a CPU",
    "lightning-rlhf new my_task": "tests/cli/test_new.py",
    "make quickstart": "tests/learning/test_quickstart.py runs the three commands of the Makefile's recipe",
    ".venv/bin/lightning-rlhf fit --config configs/quickstart/ppo.yaml --ckpt_path last": (
        "tests/learning/test_quickstart.py"
    ),
    ".venv/bin/lightning-rlhf plan --config configs/quickstart/ppo.yaml --gpus 8": "tests/cli/test_plan.py",
    ".venv/bin/lightning-rlhf inspect runs/quickstart/ppo": "tests/inspect/test_inspector.py, with other runs",
    **dict.fromkeys(own_task(), "tests/learning/test_own_task.py"),
}


def test_every_command_is_run_by_a_test():
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    commands = {line.strip() for block in blocks for line in block.splitlines() if line.strip()}
    assert commands == set(RUN_BY)


def test_the_quickstart_recipe_is_the_three_runs_that_are_tested():
    recipe = re.search(r"^quickstart:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert re.findall(r"fit --config (\S+)", recipe) == [
        f"configs/quickstart/{s}.yaml" for s in ("sft", "reward", "ppo")
    ]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_every_file_that_documents_name_exists():
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "configs/README.md", *ROOT.glob("docs/**/*.md")]
    assert len(documents) > 3
    for document in documents:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"


def test_one_step_is_read_in_few_files():
    section = (ROOT / "docs/ideas.md").read_text().partition("## A step in the code")[2].partition("\n## ")[0]
    files = re.findall(r"^\d+\. \[`([^`]+)`\]", section, re.MULTILINE)
    assert 5 < len(files) <= 12
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 2500
