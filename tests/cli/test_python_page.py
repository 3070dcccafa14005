"""The programs of the pages run: small models and few steps for docs/lightning.md and the README."""

import json
import re
import runpy
from pathlib import Path

import pytest

from lightning_rlhf.extras.records.metrics_csv import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/lightning.md").read_text()
README = (ROOT / "README.md").read_text()
SMALLER = {
    "max_steps=50": "max_steps=2",
    "val_check_interval=10": "val_check_interval=1",
    "minibatch_size=64": "minibatch_size=4",
    "batch_size=8": "batch_size=2",
    "group_size=8": "group_size=2, engine=TransformersEngine()",
    "max_response_tokens=64": "max_response_tokens=4",
    "import LoRA": "import LoRA\nfrom lightning_rlhf.rollout.transformers import TransformersEngine",
}


def test_documented_program_runs(tiny_export, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, callback = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    program = program.replace("\n\ndef right", f"\n\n{callback}\n\ndef right", 1)
    program = program.replace("complete([loop, ", "complete([loop, LongestResponse(), ")
    for text, smaller in SMALLER.items():
        assert text in program
        program = program.replace(text, smaller)
    Path("program.py").write_text(program.replace("models/x", str(tiny_export)))
    for name in ("train.jsonl", "val.jsonl"):
        rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    runpy.run_path("program.py", run_name="__main__")
    names = {path.name for path in Path("runs/grpo").iterdir()}
    assert {"metrics.csv", "report.html", "export", "checkpoints", "rollouts"} <= names
    assert "config.yaml" not in names
    rows = read_metrics(Path("runs/grpo/metrics.csv"))
    assert [float(row["own/longest"]) <= 4 for row in rows if row["own/longest"]] == [True, True]
    assert Path("runs/grpo/lightning_logs").is_dir()


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_program_of_the_readme_runs(tiny_export, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert sum(bool(line.strip()) for line in program.splitlines()) == 8
    smaller = {
        'Instruct"))': 'Instruct", batch_size=2))',
        "Qwen/Qwen2.5-0.5B-Instruct": str(tiny_export),
        "max_steps=100": "max_steps=2",
        "group_size=8": 'group_size=2, engine="transformers", max_response_tokens=4',
    }
    for text, other in smaller.items():
        assert text in program
        program = program.replace(text, other)
    Path("program.py").write_text(program)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runpy.run_path("program.py", run_name="__main__")
    assert len(read_metrics(Path("metrics.csv"))) == 2
    assert {"report.html", "export", "rollouts"} <= {path.name for path in Path().iterdir()}


def test_script_of_the_page_about_rows_writes_the_rows_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    page = (ROOT / "docs/rows_and_a_reward.md").read_text()
    Path("make_rows.py").write_text(re.search(r"```python\n(# make_rows.py\n.*?)```", page, re.DOTALL)[1])

    runpy.run_path("make_rows.py")

    shown = re.search(r"```jsonl\n(.*?)```", page, re.DOTALL)[1].splitlines()
    train, val = (Path(f"data/{name}.jsonl").read_text().splitlines() for name in ("train", "val"))
    assert train[:2] == shown
    assert (len(train), len(val), len({*train, *val})) == (512, 64, 576)
