"""``lightning-rlhf new``: each project passes its test and check-data, and trains."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from lightning_rlhf.extras.commands import check_data, new

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # which Python does not show outside of tests

WITH_MODEL = [kind for kind in new.KINDS if kind != "quickstart"]
ENGINE = "lightning_rlhf.rollout.transformers.TransformersEngine"


@pytest.fixture
def project(tiny_export, tmp_path, monkeypatch, capsys):
    """Write a project for the tiny model and change to its directory."""

    def project(kind):
        assert new.run([str(tmp_path / "p"), "--kind", kind, "--model", str(tiny_export)]) == 0
        monkeypatch.chdir(tmp_path / "p")
        monkeypatch.syspath_prepend(str(tmp_path / "p"))
        return capsys.readouterr().out

    return project


def small(path):
    """Return the configuration of a project with one step, for a model with 256 positions."""
    config = yaml.safe_load(Path(path).read_text())
    config["data"]["init_args"] |= {"max_tokens": 2048, "batch_size": 4}
    config["trainer"] |= {"max_steps": 1, "accelerator": "cpu"}
    if "minibatch_size" in config["model"]["init_args"]:
        config["model"]["init_args"]["minibatch_size"] = 4
    for callback in config["trainer"].get("callbacks", []):
        if isinstance(callback, dict) and callback["class_path"].endswith("RolloutLoop"):
            callback["init_args"] |= {"max_response_tokens": 8, "engine": ENGINE}
    return config


def test_beginners_page_lists_the_files_of_the_project(project):
    project("grpo")
    page = (Path(__file__).resolve().parents[3] / "docs/index.md").read_text()
    section = page.partition("\n## Your project")[2].partition("\n## ")[0]
    named = re.findall(r"[\w/]+\.(?:yaml|py)", section)
    assert {"run.yaml", "reward.py"} <= set(named)
    assert all(Path(name).is_file() for name in named)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_MODEL)
def test_test_and_data_check_of_the_project_pass(project, kind, capsys):
    printed = project(kind)
    commands = [line.strip() for line in printed.splitlines() if line.startswith("  ")]
    assert commands == Path("README.md").read_text().partition("```bash\n")[2].partition("```")[0].splitlines()
    assert new.KINDS[kind][1:] in Path("README.md").read_text()
    has_tests = any(command.startswith("python -m pytest") for command in commands)
    if has_tests:
        subprocess.run([sys.executable, "-m", "pytest", "-q"], check=True)
    assert has_tests == (kind in ("grpo", "environment"))
    for name in sorted(path.name for path in Path().glob("*.yaml")):
        if (kind, name) == ("ppo", "run.yaml"):
            continue  # its reward model does not exist yet
        assert f"lightning-rlhf check-data --config {name}" in commands
        Path("small.yaml").write_text(yaml.safe_dump(small(name)))
        assert (check_data.run(["--config", "small.yaml"]), capsys.readouterr().err) == (0, ""), name
        Path("small.yaml").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_MODEL)
@pytest.mark.parametrize("parameters", [1e6, 1e8], ids=["all weights", "adapters"])
def test_project_trains(project, kind, parameters, fit, monkeypatch):
    monkeypatch.setattr(new, "_parameters_in", lambda file: parameters)
    project(kind)
    for name in sorted(path.name for path in Path().glob("*.yaml")):
        result = fit(small(name))
        assert result.code == 0, result.err
        assert "step 1: " in result.out


def test_quickstart_project_needs_no_model(tmp_path, monkeypatch, capsys):
    assert new.run([str(tmp_path / "p"), "--kind", "quickstart", "--model", "x"]) == 2
    assert "the quickstart makes its own model: remove --model" in capsys.readouterr().err
    assert new.run([str(tmp_path / "p"), "--kind", "quickstart"]) == 0
    names = ["sft.yaml", "reward.yaml", "ppo.yaml"]
    commands = [f"lightning-rlhf fit --config {name}" for name in names]
    assert [line.strip() for line in capsys.readouterr().out.splitlines() if " fit " in line] == commands
    configs = Path(__file__).resolve().parents[3] / "configs/quickstart"
    for name in names:
        assert (tmp_path / "p" / name).read_text().partition("\n")[2] == (configs / name).read_text()
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == sorted([*names, "README.md"])


def test_directory_with_files_is_not_changed(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("mine")
    assert new.run([str(tmp_path)]) == 2
    assert "exists already and is not empty: choose another directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert new.run([str(tmp_path / "a.txt")]) == 2


def test_hub_model_is_written_unchanged(tmp_path):
    assert new.run([str(tmp_path / "p"), "--model", "some/model"]) == 0
    settings = yaml.safe_load((tmp_path / "p/run.yaml").read_text())
    assert settings["model"]["init_args"]["actor"]["init_args"]["path"] == "some/model"
    assert settings["data"]["init_args"]["tokenizer"] == "some/model"


@pytest.mark.parametrize(
    ("model", "parameters", "origin"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 135e6, "135 million parameters (from its name)"),
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.5e9, "500 million parameters (from its name)"),
        ("Qwen/Qwen3-30B-A3B", 30e9, "30 billion parameters (from its name)"),
        ("some/model", 0.5e9, "500 million parameters (assumed, because its name has no number)"),
        ("my4bit", 0.5e9, "(assumed, because its name has no number)"),
    ],
)
def test_size_of_a_hub_model_is_read_from_its_name(model, parameters, origin):
    size = new.model_size(model)
    assert size.parameters == parameters
    assert size.origin.endswith(origin)


def test_size_of_a_local_model_is_that_of_its_files(tiny_export, tmp_path, capsys):
    size = new.model_size(str(tiny_export))
    model = AutoModelForCausalLM.from_pretrained(tiny_export)
    assert (size.parameters, size.positions) == (sum(parameter.numel() for parameter in model.parameters()), 256)
    settings = new.template_values(str(tiny_export), size)
    assert (settings["prompt_tokens"], settings["response_tokens"], settings["text_tokens"]) == ("128", "128", "256")
    assert new.run([str(tmp_path / "p"), "--model", str(tmp_path)]) == 2
    assert "is not the directory of a model: " in capsys.readouterr().err


def test_model_without_a_chat_template_is_named(tiny_export, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(tiny_export, folder)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    assert new.run([str(tmp_path / "one"), "--model", str(folder)]) == 0
    assert "the tokenizer has no chat template, and the rows are lists of messages" in capsys.readouterr().out
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert new.run([str(tmp_path / "two"), "--model", str(folder)]) == 0
    assert "no chat template" not in capsys.readouterr().out


def test_learning_rates_and_lora_depend_on_the_model_size():
    small, usual, large = (new.template_values("m", new.ModelSize(size, 4096, "")) for size in (1.35e8, 5e8, 7e10))
    assert [item["rl_lr"] for item in (small, usual, large)] == ["2.0e-4", "5.0e-5", "1.0e-5"]
    assert [item["sft_lr"] for item in (small, usual, large)] == ["5.0e-4", "2.0e-4", "1.0e-4"]
    assert [item["response_tokens"] for item in (small, usual, large)] == ["128", "256", "256"]
    assert "remove this line to train all weights, with lr 1.0e-5" in small["rl_source"]
    assert small["summary"] == "LoRA, lr 0.0002 for RL, responses of at most 128 tokens"
    page = (Path(__file__).resolve().parents[3] / "docs/hyperparameters.md").read_text()
    assert "| 0.02 B to 0.3 B | 1e-5 | 2e-4 |" in page
    assert "| 0.3 B to 10 B | 1e-6 to 3e-6 | 1e-5 to 1e-4 |" in page
    for row in new._RATES:
        cells = [[item[kind] for item in (row.full, row.lora) if item] for kind in ("sft", "reward", "dpo")]
        texts = (
            " / ".join(f"{rate:g}".replace("e-0", "e-").replace("0.001", "1e-3") for rate in cell) for cell in cells
        )
        texts = [text.replace("0.0005", "5e-4").replace("0.0002", "2e-4").replace("0.0001", "1e-4") for text in texts]
        assert f"| {' | '.join(texts)} |" in page


@pytest.mark.parametrize(
    "config",
    ["[]", "3", '{"text_config": 3}', '{"n_positions": "many"}', '{"max_position_embeddings": 1}', "[" * 9000],
)  # fmt: skip
def test_damaged_model_configuration_gives_a_one_line_error(tmp_path, config, capsys):
    (tmp_path / "config.json").write_text(config)
    assert new.run([str(tmp_path / "task"), "--model", str(tmp_path)]) == 2
    assert f"{tmp_path} is not the directory of a model: " in capsys.readouterr().err
    assert not (tmp_path / "task").exists()


def test_model_path_may_have_any_characters(tmp_path, tiny_export):
    odd = tmp_path / "a model: #1 'x' \\"
    odd.symlink_to(tiny_export)
    assert new.run([str(tmp_path / "task"), "--model", str(odd)]) == 0
    config = yaml.safe_load((tmp_path / "task/run.yaml").read_text())
    assert config["data"]["init_args"]["tokenizer"] == str(odd)
    assert config["model"]["init_args"]["actor"] == str(odd)
