"""The schema in the wheel is that of the signatures, and accepts every valid file."""

import re
from pathlib import Path

import pytest

from lightning_rlhf.cli.config_files import read_text, read_yaml
from lightning_rlhf.extras.commands import new
from lightning_rlhf.extras.schema.generate import as_text
from lightning_rlhf.extras.schema.known import SCHEMA, find, schema

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed; vLLM brings it")
ROOT = Path(__file__).resolve().parents[3]
LOOP = {"class_path": "lightning_rlhf.callbacks.RolloutLoop"}


def errors(config):
    """Return the positions of the mistakes that an editor would underline."""
    validator = jsonschema.Draft202012Validator(schema())
    return [".".join(map(str, error.absolute_path)) for error in validator.iter_errors(config)]


def model(**options):
    return {"model": {"class_path": "lightning_rlhf.GRPOModule", "init_args": options}}


def test_file_is_that_of_the_signatures():
    assert SCHEMA.read_text() == as_text(), "run python -m lightning_rlhf.extras.schema"


@pytest.mark.slow
def test_schema_is_valid():
    jsonschema.Draft202012Validator.check_schema(schema())


def test_file_is_small_enough_to_load_in_milliseconds():
    assert SCHEMA.stat().st_size < 700_000
    assert find("GRPOModule").path == find("lightning_rlhf.GRPOModule").path
    assert find("lightning_rlhf.callbacks.RolloutLoop").options["group_size"]["default"] == 1


def test_no_shipped_file_is_underlined():
    files = [path for folder in ("configs", "examples") for path in sorted((ROOT / folder).rglob("*.yaml"))]
    configs = {str(path): read_yaml(path) for path in files if "jobset" not in path.name}
    assert len(configs) > 70
    assert {name: found for name, config in configs.items() if (found := errors(config))} == {}


def test_no_snippet_of_the_documentation_is_underlined():
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    texts = [(page.name, text) for page in pages for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)]
    snippets = [(name, read_text(text)) for name, text in texts if "..." not in text]
    whole = [each for each in snippets if isinstance(each[1], dict) and each[1].keys() <= schema()["properties"].keys()]
    assert len(whole) > 30
    assert [(name, found) for name, config in whole if (found := errors(config))] == []


@pytest.mark.parametrize("kind", new.KINDS)
def test_new_writes_files_that_name_the_schema_and_are_not_underlined(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    new.run(["project", "--kind", kind])
    files = list(Path("project").glob("*.yaml"))
    for path in files:
        line = path.read_text().partition("\n")[0]
        assert line == f"# yaml-language-server: $schema={SCHEMA.as_uri()}"
        assert errors(read_yaml(path)) == []
    assert files


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model": "model.yaml", "data": None} | {"data": "data.yaml"},
        {"model": "GRPOModule", "trainer": "trainer.yaml"},
        {"model": {"init_args": {"of_a_class_in_an_earlier_file": 3}}},
        {"model": {"class_path": "my.Module", "init_args": {"anything": [3]}}},
        {"seed_everything": True, "ckpt_path": None},
        model(actor="owner/model", ref={"path": "x", "lora": {"rank": 8}}, kl_loss={"coef": 0.1}),
        model(optimizer={"lr": 2e-4}, lr_scheduler=None, policy_loss="losses.py:mine"),
        model(policy_loss={"clip_range": 0.1}, advantages={"class_path": "GRPO", "init_args": {}}),
        model(policy_loss="ReinforceLoss", minibatch_size="8", max_grad_norm="1e-3", kl_loss="term.yaml"),
        {"trainer": {"callbacks": LOOP, "strategy": "rlhf_fsdp", "devices": "auto", "logger": False}},
        {"trainer": {"callbacks": [LOOP, "lightning_rlhf.callbacks.Report", "EarlyStopping"], "max_time": {"days": 1}}},
        {"trainer": {"callbacks": [{**LOOP, "init_args": {"rewards": [{"function": "reward.py:right"}]}}]}},
        {"trainer": {"callbacks": [{**LOOP, "init_args": None}], "plugins": None}},
    ],
    ids=str,
)
def test_short_forms_are_not_underlined(config):
    assert errors(config) == []


@pytest.mark.parametrize(
    ("config", "position"),
    [
        ({"modle": 3}, ""),
        ({"trainer": {"max_step": 3}}, "trainer"),
        ({"trainer": {"max_steps": "many"}}, "trainer"),
        (model(minibatch=3), "model"),
        (model(minibatch_size="many"), "model"),
        (model(kl_loss=0.1), "model"),
        ({"trainer": {"callbacks": [{**LOOP, "init_args": {"groupsize": 4}}]}}, "trainer"),
    ],
)
def test_mistakes_are_underlined(config, position):
    assert errors(config) == [position]
