"""Every command of the README is run by a test, and every file that it mentions exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def own_task():
    """Return the commands of the section on a custom task, which a test runs from first to last."""
    section = re.search(r"^## Your own task\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)[1]
    return re.search(r"```bash\n(.*?)\n```", section, re.DOTALL)[1].splitlines()


# command: where it is run
RUN_BY = {
    "pip install 'lightning-rlhf[vllm]'": "not run: it needs a GPU; tests/test_packaging.py runs those for a CPU",
    "lightning-rlhf new my_task": "tests/extras/commands/test_new.py",
    "make quickstart": "tests/learning/test_quickstart.py runs the three commands of the Makefile's recipe",
    ".venv/bin/lightning-rlhf fit --config configs/quickstart/ppo.yaml --ckpt_path last": (
        "tests/learning/test_quickstart.py"
    ),
    ".venv/bin/lightning-rlhf plan --config configs/quickstart/ppo.yaml --gpus 8": "tests/extras/plan/test_plan.py",
    ".venv/bin/lightning-rlhf inspect runs/quickstart/ppo": "tests/extras/report/test_inspector.py, with other runs",
    **dict.fromkeys(own_task(), "tests/learning/test_own_task.py"),
}


def test_every_command_is_run_by_a_test():
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    commands = {line.strip() for block in blocks for line in block.splitlines() if line.strip()}
    assert commands == set(RUN_BY)


def test_quickstart_recipe_consists_of_the_three_tested_runs():
    recipe = re.search(r"^quickstart:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert re.findall(r"fit --config (\S+)", recipe) == [
        f"configs/quickstart/{s}.yaml" for s in ("sft", "reward", "ppo")
    ]


def test_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_files_in_documents_exist():
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "configs/README.md", *ROOT.glob("docs/**/*.md")]
    assert len(documents) > 3
    for document in documents:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"


def lines_of(file, names):
    """Return the number of lines of the named functions and classes of a file, or of the whole file without names."""
    text = (ROOT / file).read_text()
    if not file.endswith(".py"):
        return len(text.splitlines())
    kinds = (ast.ClassDef, ast.FunctionDef)
    named = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds) and node.name in names]
    spans = [set(range(node.lineno, node.end_lineno + 1)) for node in named]
    return len(set().union(*spans)) if spans else len(text.splitlines())


def test_one_step_can_be_read_in_few_files():
    section = (ROOT / "docs/ideas.md").read_text().partition("## A step in the code")[2].partition("\n## ")[0]
    items = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    files = [re.match(r"\[`([^`]+)`\]", item)[1] for item in items]
    assert 5 < len(files) <= 12
    assert sum(lines_of(file, re.findall(r"`(\w+)`", item)) for file, item in zip(files, items, strict=True)) <= 1500
