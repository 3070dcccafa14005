"""The scoreboard for a machine with a GPU, in its small form on a CPU, and its page."""

import json
import string
import subprocess
import sys

import pytest
import yaml

from benchmarks import scoreboard
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.loading import FromConfig
from tests.rollout.engines import ARCHITECTURE

QUESTION = {"question": "How many?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}


@pytest.fixture
def data(tmp_path):
    """A folder in GSM8K's form."""
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text((json.dumps(QUESTION) + "\n") * 12)
    return folder


def test_rows_get_the_instruction_and_the_number(data, tmp_path):
    scoreboard.write_rows(data, tmp_path, scoreboard.SMALL)
    rows = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()]
    assert rows[0] == {"prompt": f"How many? {scoreboard.INSTRUCTION}", "ground_truth": "2"}
    assert len(rows) == scoreboard.SMALL.val_rows


def test_missing_file_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scoreboard", "--data", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        scoreboard.main()
    assert "has no train.jsonl" in capsys.readouterr().err


def test_page_has_intervals_over_seeds_published_figures_and_what_did_not_end():
    model = scoreboard.MODELS[0]
    figures = [
        {"strict_before": 0.3, "lenient_before": 0.4, "strict": 0.5 + 0.02 * seed, "lenient": 0.6} for seed in (1, 2)
    ]
    runs = [
        {"model": model, "algorithm": "ppo", "seed": seed, "ended": seed == 1, "figures": row}
        for seed, row in enumerate(figures, 1)
    ]
    page = scoreboard.page({"device": "X", "small": False, "versions": {"torch": "2"}, "runs": runs})
    assert "| before PPO | 2 | 0.300 ± 0.000 | 0.400 ± 0.000 | - | - | - | - |" in page
    assert "| PPO | 2 | 0.530 ± 0.127 | 0.600 ± 0.000 | - | - | - | - |" in page  # 12.706 x 0.01414 / 1.414
    assert "| verl, PPO, published | - | 0.567 | - | - | - | - | - |" in page
    assert f"Did not end: {model} ppo seed 2." in page
    assert "GRPO | 2" not in page


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_small_form_trains_resumes_and_reports(data, tmp_path):
    pytest.importorskip("vllm")
    model = tmp_path / "model"
    tokenizer = CharacterTokenizer(string.printable).load()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    tokenizer.save_pretrained(model)
    sizes = ARCHITECTURE | {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    FromConfig(sizes, seed=0).causal().save_pretrained(model)
    command = [sys.executable, "-m", "benchmarks.scoreboard", "--data", str(data), "--models", str(model)]
    command += ["--small", "--seeds", "1", "--results", str(tmp_path / "results")]
    for _ in range(2):  # the second call finds that both runs have ended
        done = subprocess.run(command, cwd=scoreboard.ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "ended with" not in done.stdout
    other = subprocess.run([*command, "--steps", "1"], cwd=scoreboard.ROOT, capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert "is of a run with other settings: choose another --results" in other.stderr
    scores = json.loads((tmp_path / "results/scoreboard.json").read_text())
    assert [run["algorithm"] for run in scores["runs"]] == ["grpo", "ppo"]
    for run in scores["runs"]:
        assert run["ended"]
        assert {"strict", "lenient_before", "tokens_per_s", "memory_gib", "hours"} <= run["figures"].keys()
    assert "A small try" in (tmp_path / "results/scoreboard.md").read_text()
    (config,) = (tmp_path / "results").glob("*-ppo-1.yaml")
    assert yaml.safe_load(config.read_text())["model"]["class_path"] == "lightning_rlhf.PPOModule"
