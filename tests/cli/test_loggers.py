"""The loggers of docs/loggers.md with their libraries: metrics, configuration, tables, and one run after a resume."""

import csv
import json
import sqlite3
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_rlhf.loggers import RUN_IDS, log_table, with_run_ids
from tests.test_readme import ROOT

CALLBACKS = [
    "lightning_rlhf.callbacks.RunCheckpoint",
    {"class_path": "lightning_rlhf.callbacks.RolloutLog", "init_args": {"table_every_n_steps": 1}},
    "tests.cli.test_loggers.FarFromReference",
]
HELD_OUT = ["1+2=", "3+4=", "4+5="]
HOSTILE = "<script>alert(1)</script>|`*a*`\n# x"


class FarFromReference(Callback):
    """Replaces the KL of each step by a value far above the bound of HealthChecks, which then reports it."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("kl/ref", 1e6)


def documented(name):
    """Return the logger configuration of a section of the document."""
    text = (ROOT / "docs/loggers.md").read_text().partition(f"\n## {name}\n")[2]
    return yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])["trainer"]["logger"]


@pytest.fixture
def fit_and_resume(fit, config):
    """Fit two steps with the logger of a section, resume for a third, and return the logger's identifiers."""

    def fit_and_resume(name, between=lambda: None):
        config["trainer"]["logger"] = json.loads(json.dumps(documented(name)).replace("runs/x", "runs/tiny"))
        config["trainer"]["callbacks"] += CALLBACKS
        config["trainer"]["val_check_interval"] = 1
        rows = [{"prompt": prompt, "ground_truth": "1"} for prompt in HELD_OUT]
        Path("held_out.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        config["data"]["init_args"]["val"] = "held_out.jsonl"
        first = fit(config)
        assert first.code == 0, first.err
        path = Path("runs/tiny", RUN_IDS)
        ids = path.read_text() if path.is_file() else ""
        between()
        resumed = fit(config, "--ckpt_path", "last", "--trainer.max_steps", "3")
        assert resumed.code == 0, resumed.err
        if not ids:
            assert not path.exists()
            return {}
        assert path.read_text() == ids  # the resumed run keeps the identifiers
        known = json.loads(ids)
        configuration = Path("runs/tiny/config.yaml").read_text()
        assert not any(identifier in configuration for identifier in known.values())
        return known

    return fit_and_resume


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


@pytest.mark.slow
def test_tensorboard(fit_and_resume):
    assert fit_and_resume("TensorBoard") == {}
    events = EventAccumulator("runs/tiny/tensorboard")
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3]
    assert {"rollouts/text_summary", "health/text_summary", "validation/text_summary"} <= set(events.Tags()["tensors"])
    validations = events.Tensors("validation/text_summary")
    assert [event.step for event in validations] == [
        0,
        1,
        2,
        2,
        3,
    ]  # both parts of the run validate first
    heading, _, *samples = validations[-1].tensor_proto.string_val[0].decode().splitlines()
    assert heading.startswith("| prompt | response | ")
    assert len(samples) == len(HELD_OUT)
    (table,) = events.Tensors("health/text_summary")[0].tensor_proto.string_val
    assert b"| 1 | KL to the reference | kl/ref is" in table


@pytest.mark.slow
def test_csv(fit_and_resume):
    assert fit_and_resume("CSV") == {}
    tables = sorted(Path("runs/tiny/lightning_logs").glob("version_*/metrics.csv"))
    rows_of_tables = [list(csv.DictReader(path.read_text().splitlines())) for path in tables]
    steps = [[row["step"] for row in rows if row["reward/mean"]] for rows in rows_of_tables]
    assert steps == [["1", "2"], ["3"]]


@needs("wandb")
def test_wandb(fit_and_resume, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    ids = fit_and_resume("wandb", between=wandb.finish)  # as the end of the first process does
    wandb.finish()
    runs = sorted(Path("runs/tiny/wandb").glob("offline-run-*"))
    assert [path.name.rpartition("-")[2] for path in runs] == [ids["WandbLogger"]] * 2
    tables = {path.name.split("_")[0] for run in runs for path in run.glob("files/media/table/**/*.json")}
    assert {"rollouts", "health", "validation"} <= tables


@needs("mlflow")
def test_mlflow(fit_and_resume):
    ids = fit_and_resume("mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient("sqlite:///runs/tiny/mlflow.db")
    (experiment,) = [entry for entry in client.search_experiments() if entry.name == "lightning-rlhf"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == ids["MLFlowLogger"]
    assert run.info.status == "FINISHED"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "reward/mean")] == [1, 2, 3]
    assert run.data.params["data/init_args/batch_size"] == "4"
    assert run.data.params["trainer/max_steps"] == "2"
    with open(client.download_artifacts(run.info.run_id, "config.json")) as file:
        assert json.load(file)["trainer"]["max_steps"] == 3
    tables = [artifact.path for artifact in client.list_artifacts(run.info.run_id, "rollouts")]
    assert tables == [f"rollouts/step-{step:06d}.json" for step in (1, 2, 3)]
    assert client.list_artifacts(run.info.run_id, "health")
    with open(client.download_artifacts(run.info.run_id, "validation/step-000003.json")) as file:
        table = json.load(file)
    prompt = table["columns"].index("prompt")
    assert [row[prompt] for row in table["data"]] == HELD_OUT


@needs("trackio")
def test_trackio(fit_and_resume):
    import trackio.utils

    ids = fit_and_resume("trackio")
    with sqlite3.connect(trackio.utils.TRACKIO_DIR / "lightning-rlhf.db") as database:
        command = "select step, metrics from metrics where run_name = ?"
        rows = [(step, json.loads(metrics)) for step, metrics in database.execute(command, [ids["TrackioLogger"]])]
        (configuration,) = database.execute("select config from configs where run_name = ?", [ids["TrackioLogger"]])
    assert [step for step, metrics in rows if "reward/mean" in metrics] == [1, 2, 3]
    assert [step for step, metrics in rows if "rollouts" in metrics] == [1, 2, 3]
    (last,) = [metrics["validation"]["_value"] for step, metrics in rows if step == 3 and "validation" in metrics]
    assert [sample["prompt"] for sample in last] == HELD_OUT
    checks = {
        step: [check["check"] for check in metrics["health"]["_value"]] for step, metrics in rows if "health" in metrics
    }
    assert checks[1] == ["KL to the reference"]
    assert all(check.count("KL to the reference") == 1 for check in checks.values())  # not repeated after the resume
    assert json.loads(configuration[0])["data"]["init_args"]["batch_size"] == 4


def test_missing_package_is_reported(fit, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    config["trainer"]["logger"] = documented("trackio")
    result = fit(config)
    assert result.code == 2
    assert "TrackioLogger needs the package trackio: run pip install 'lightning-rlhf[trackio]'" in result.err


@pytest.mark.slow
def test_damaged_identifiers_raise_before_the_run(fit, config):
    config["trainer"]["callbacks"].append("lightning_rlhf.callbacks.RunCheckpoint")
    assert fit(config).code == 0
    Path("runs/tiny", RUN_IDS).write_text("{")
    resumed = fit(config, "--ckpt_path", "last")
    assert resumed.code == 2
    assert "loggers.json is damaged (" in resumed.err
    assert "remove it, and the loggers begin new runs" in resumed.err


def test_configured_identifiers_are_kept(tmp_path):
    from jsonargparse import Namespace

    (tmp_path / RUN_IDS).write_text(json.dumps({"WandbLogger": "old", "MLFlowLogger": "older"}))
    entries = [
        Namespace(class_path="lightning.pytorch.loggers.WandbLogger", init_args=Namespace(id="mine")),
        Namespace(class_path="lightning.pytorch.loggers.MLFlowLogger", init_args=Namespace(run_id=None)),
        Namespace(class_path="lightning.pytorch.loggers.CSVLogger", init_args=Namespace()),
    ]
    wandb_entry, mlflow_entry, csv_entry = with_run_ids(entries, tmp_path)
    assert (wandb_entry.init_args.id, mlflow_entry.init_args.run_id) == ("mine", "older")
    assert vars(csv_entry.init_args) == {}
    assert entries[1].init_args.run_id is None
    for plain in (None, True, False):
        assert with_run_ids(plain, tmp_path) is plain


def test_generated_text_is_not_rendered_as_markup_in_tensorboard(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="a")
    log_table(logger, "rollouts", ("response", "reward"), [(HOSTILE, 0.5)], 1)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "a"))
    events.Reload()
    (text,) = events.Tensors("rollouts/text_summary")[0].tensor_proto.string_val
    lines = text.decode().splitlines()
    assert lines[:2] == ["| response | reward |", "| --- | --- |"]
    assert lines[2:] == [r"| &lt;script&gt;alert(1)&lt;/script&gt;\|\`\*a\*\`<br># x | 0.5 |"]
