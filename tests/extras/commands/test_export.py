"""Export of a checkpoint: equal to the export that the run itself writes at that step."""

import copy
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lightning_rlhf.extras.commands import export as command
from lightning_rlhf.extras.commands import generate
from lightning_rlhf.rollout.vllm.availability import vllm_installed

CHECKPOINTS = {"class_path": "lightning_rlhf.callbacks.RunCheckpoint", "init_args": {"every_n_steps": 1}}
EXPORTS = {"class_path": "lightning_rlhf.callbacks.HFExport", "init_args": {"every_n_steps": 1}}
PLAIN = {"class_path": "lightning.pytorch.strategies.SingleDeviceStrategy", "init_args": {"device": "cpu"}}
LORA = {"class_path": "lightning_rlhf.models.lora.LoRA", "init_args": {"rank": 2, "alpha": 4}}


def varied(completions):
    """Return rewards that vary between responses, so that every step has a gradient."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


@pytest.fixture
def trained(fit, config):
    """Train two steps with checkpoints and exports, and return the run directory."""
    sys.modules["tests.extras.commands.test_export"] = sys.modules[__name__]
    config["trainer"]["callbacks"][0]["init_args"]["rewards"] = [
        {"function": "tests.extras.commands.test_export.varied"}
    ]

    def trained(strategy=None, lora=False):
        inputs = copy.deepcopy(config)
        inputs["trainer"]["callbacks"] += [copy.deepcopy(CHECKPOINTS), copy.deepcopy(EXPORTS)]
        if strategy:
            inputs["trainer"]["strategy"] = strategy
        if lora:
            inputs["model"]["init_args"]["actor"]["init_args"]["lora"] = LORA
        result = fit(inputs)
        assert result.code == 0, result.err
        return Path("runs/tiny")

    return trained


@pytest.fixture
def export(capsys):
    def export(*arguments):
        capsys.readouterr()
        try:
            code = command.run(list(arguments))
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().err

    return export


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [None, PLAIN], ids=["folder", "single file"])
def test_export_is_byte_identical_to_that_of_the_run(trained, export, strategy):
    run = trained(strategy)
    assert (run / "checkpoints/last.ckpt").is_dir() == (strategy is None)
    assert export("--config", str(run / "config.yaml"), "--to", "out") == (0, "")
    assert files_of(Path("out")) == files_of(run / "export")
    assert files_of(Path("out"))["model.safetensors"] != files_of(run / "export-1")["model.safetensors"]


@pytest.mark.slow
def test_metrics_of_an_earlier_validation_are_not_reported_for_the_checkpoint(trained, export, config):
    data = config["data"]["init_args"]
    data["val"] = data["train"]
    config["trainer"]["val_check_interval"] = 1
    run = trained()
    assert export("--config", str(run / "config.yaml"), "--to", "out") == (0, "")
    ours, theirs = (json.loads((folder / "metrics.json").read_text()) for folder in (Path("out"), run / "export"))
    assert {name for name in theirs if name.startswith("val/")}
    assert ours == {name: value for name, value in theirs.items() if not name.startswith("val/")}
    assert "val/" not in Path("out/README.md").read_text()


@pytest.mark.slow
def test_moved_run_is_found_and_takes_precedence_over_configured_paths(trained, export):
    run = trained()
    shutil.move(run, "elsewhere")
    assert export("--config", "elsewhere/config.yaml", "--to", "out") == (0, "")
    assert files_of(Path("out")) == files_of(Path("elsewhere/export"))


@pytest.mark.slow
def test_adapters_are_merged_or_written_separately(trained, export):
    pytest.importorskip("peft", reason="needs peft", exc_type=ModuleNotFoundError)
    run = trained(lora=True)
    assert export("--config", str(run / "config.yaml"), "--to", "merged") == (0, "")
    assert files_of(Path("merged")) == files_of(run / "export")
    assert export("--config", str(run / "config.yaml"), "--to", "alone", "--adapter") == (0, "")
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= files_of(Path("alone")).keys()
    assert "model.safetensors" not in files_of(Path("alone"))
    for name, library, message in (
        ("alone", "peft", "alone, to be added to the base model"),
        ("merged", "transformers", "merged into the weights"),
    ):
        card = Path(name, "README.md").read_text()
        assert f'library_name: "{library}"' in card
        assert f"| LoRA | rank 2, alpha 4, {message} |" in card


@pytest.mark.slow
def test_failed_or_killed_export_leaves_no_partial_files_and_keeps_others(trained, export, monkeypatch):
    run = trained()
    neighbour, killed = Path("out.new"), Path(".out.partial")
    for folder in (neighbour, killed):
        folder.mkdir()
        (folder / "file").write_text("mine")
    arguments = ("--config", str(run / "config.yaml"), "--to", "out")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))  # as a disk that is full
    try:
        code, output = export(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    assert output.startswith(f"lightning-rlhf: cannot write {Path('out').absolute()}: ")
    assert "File too large" in output
    assert not Path("out").exists()
    assert not killed.exists()
    assert export(*arguments) == (0, "")
    assert files_of(Path("out")) == files_of(run / "export")
    assert (neighbour / "file").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
@pytest.mark.parametrize("lora", [False, True])
def test_vllm_and_transformers_generate_the_same_from_the_export(trained, export, capsys, lora):
    run = trained(lora=lora)
    assert export("--config", str(run / "config.yaml"), "--to", "out") == (0, "")
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i + 3}="}) + "\n" for i in range(20)))
    for engine in ("vllm", "transformers"):
        inputs = ["--model", "out", "--engine", engine, "--temperature", "0", "--max-tokens", "8"]
        assert generate.run([*inputs, "--prompts", "prompts.jsonl", "--to", f"{engine}.jsonl"]) == 0, (
            capsys.readouterr()
        )
    assert Path("vllm.jsonl").read_bytes() == Path("transformers.jsonl").read_bytes()


@pytest.mark.slow
def test_other_roles_are_exported_as_classifiers_with_one_label(trained, export):
    run = trained()
    arguments = ("--config", str(run / "config.yaml"), "--checkpoint", str(run / "checkpoints/last.ckpt"))
    assert export(*arguments, "--to", "critic", "--role", "critic") == (0, "")
    critic = AutoModelForSequenceClassification.from_pretrained("critic", use_safetensors=True)
    assert critic.config.num_labels == 1
    assert critic.score.weight.abs().max() > 0  # it began as zeros
    assert json.loads(Path("critic/metrics.json").read_text())["step"] == 2


@pytest.mark.slow
def test_model_card_describes_the_origin_of_the_model(trained, export):
    run = trained()
    export("--config", str(run / "config.yaml"), "--to", "out")
    head, body = Path("out/README.md").read_text().removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(head) == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["lightning-rlhf", "ppo"],
    }  # fmt: skip
    assert "| base model | random weights, llama |" in body
    assert "| algorithm | PPO, its actor, after 2 steps |" in body
    assert "Problems(num_rows=12" in body
    assert "| configuration | SHA-256 " in body
    assert "| `reward/mean` | " in body


@pytest.mark.slow
def test_exported_model_generates_until_the_end_token_of_its_tokenizer(trained, export):
    run = trained()
    export("--config", str(run / "config.yaml"), "--to", "out")
    model = AutoModelForCausalLM.from_pretrained("out", use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained("out")
    ends = model.generation_config.eos_token_id
    assert tokenizer.eos_token_id in (ends if isinstance(ends, list) else [ends])
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).shape[1] <= 5


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "runs"], "runs exists already: choose another directory, or remove it"),
        (["--to", "."], ". exists already: choose another directory, or remove it"),
        (["--to", "out", "--role", "ref"], "the run does not train 'ref': set --role to one of actor, critic"),
        (["--to", "out", "--adapter"], "--adapter exports only LoRA adapters, but this run exports its actor,"),
        (
            ["--to", "out", "--checkpoint", "best"],
            "no checkpoint at runs/tiny/checkpoints/best.ckpt: the run has --checkpoint last",
        ),
        (["--to", "out", "--checkpoint", "nowhere"], "no checkpoint at nowhere"),
        (["--to", "out", "--model.init_args.minibatch_sise", "3"], "model (PPOModule): unknown option"),
    ],
)
def test_invalid_exports_give_one_line_and_code_2(trained, export, arguments, message):
    run = trained()
    code, output = export("--config", str(run / "config.yaml"), *arguments)
    assert code == 2
    assert output.splitlines()[-1].startswith(f"lightning-rlhf: {message}"), output
    assert not Path("out").exists()


def test_mistakes_are_found_without_importing_torch():
    Path("run.yaml").write_text("model: {class_path: lightning_rlhf.PPOModule}\n")
    code = (
        "import sys; from lightning_rlhf.extras.commands import export; export.run(sys.argv[1:]); "
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "--config", "run.yaml", "--to", "out"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
    assert result.stderr == "lightning-rlhf: no checkpoint at runs/default/checkpoints/last.ckpt\n"


@pytest.mark.slow
def test_damaged_checkpoint_is_reported(trained, export):
    run = trained()
    (shard,) = (run / "checkpoints/last.ckpt").glob("v*/actor/shard-*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    code, output = export("--config", str(run / "config.yaml"), "--to", "out")
    assert code == 2
    assert "is damaged" in output
    assert "actor/shard-" in output


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [None, PLAIN], ids=["folder", "single file"])
def test_checkpoint_of_another_model_is_rejected(trained, export, strategy):
    run = trained(strategy)
    text = (run / "config.yaml").read_text()
    Path("other.yaml").write_text(text.replace("intermediate_size: 48", "intermediate_size: 64"))
    code, output = export("--config", "other.yaml", "--to", "out")
    assert code == 2
    assert output.startswith("lightning-rlhf: the ")
    assert "actor" in output
    assert "mlp" in output
