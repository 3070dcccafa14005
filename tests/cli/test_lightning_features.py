"""The tables of docs/lightning.md: each feature works, or is rejected before the models are built."""

import csv
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.test_readme import ROOT

VAL = {"class_path": "lightning_rlhf.tasks.addition.Problems", "init_args": {"num_rows": 8, "seed": 3}}


def rows_below(title):
    """Return the cells of each row in the table of docs/lightning.md whose first column has this title."""
    _, _, rest = (ROOT / "docs/lightning.md").read_text().partition(f"\n| {title} |")
    table, _, _ = rest.partition("\n\n")
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


ROWS, REJECTED = rows_below("feature"), rows_below("rejected")


def settings_of(cell):
    """Return the trainer's settings and the callbacks in a table cell."""
    trainer, callbacks = {}, []
    for part in re.findall(r"`([^`]*)`", cell):
        name, _, value = part.partition(": ")
        if name == "callbacks":
            kind, _, arguments = value.rstrip(")").partition("(")
            path = f"lightning.pytorch.callbacks.{kind}"
            callbacks.append({"class_path": path, "init_args": yaml.safe_load(f"{{{arguments}}}")})
        else:
            trainer[name] = yaml.safe_load(value)
    return trainer, callbacks


@pytest.fixture
def with_feature(fit, config):
    """Run the configuration of a feature."""

    def with_feature(row, *arguments):
        config["data"]["init_args"] |= {"val": VAL, "val_batch_size": 4}
        trainer, callbacks = settings_of(row[1])
        config["trainer"] |= trainer
        config["trainer"]["callbacks"] = [*config["trainer"]["callbacks"][:1], *callbacks]
        return fit(config, *arguments)

    return with_feature


def row_of(feature):
    (row,) = [row for row in ROWS if row[0] == feature]
    return row


def metrics():
    with open("runs/tiny/metrics.csv") as file:
        return list(csv.DictReader(file))


def written():
    return {path.name for path in Path("runs/tiny").glob("*")}


def logged():
    events = EventAccumulator("runs/tiny/tensorboard")
    events.Reload()
    return events.Tags()["scalars"]


def exported():
    weights = load_file("runs/tiny/export/model.safetensors")
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("row", REJECTED, ids=lambda row: row[1])
def test_features_of_automatic_optimization_are_rejected_with_their_replacement(with_feature, row):
    replacements = re.findall("`(.*?)`", row[2])
    assert replacements or row[2].startswith("Remove it")
    result = with_feature(row)
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert all(replacement in line for replacement in replacements or ["remove it"])
    assert not Path("runs").exists()


def rewards():
    return [float(row["reward/mean"]) for row in metrics() if row["reward/mean"]]


def stopped_at_the_first_fall():
    """Return whether a run ended after the first epoch of 3 steps whose last reward is not above the earlier ones."""
    ends = rewards()[2::3]
    falls = [number for number in range(1, len(ends)) if ends[number] <= max(ends[:number])]
    return falls == [len(ends) - 1] and len(rewards()) == 3 * len(ends)


CHECKS = {
    "profiler": lambda result: "run_training_epoch" in result.out,
    "anomaly detection": lambda result: len(metrics()) >= 2,
    "one step to try a configuration": lambda result: written() == {"engine"},
    "part of the data": lambda result: [row["step"] for row in metrics() if row["reward/mean"]] == ["1", "2"],
    "part of the validation": lambda result: any(row["val/exact_greedy"] for row in metrics()),
    "overfit a few prompts": lambda result: [row["step"] for row in metrics() if row["reward/mean"]] == ["1", "2", "3"],
    "time limit": lambda result: "max_time was reached" in result.out and Path("runs/tiny/export").is_dir(),
    "sanity check": lambda result: metrics()[0]["step"] == "0" and not metrics()[0]["reward/mean"],
    "early stop": lambda result: stopped_at_the_first_fall() and Path("runs/tiny/export").is_dir(),
    "learning rates": lambda result: any("lr-" in name for name in metrics()[0]),
    "devices": lambda result: any("cpu_percent" in name for name in logged()),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("feature", CHECKS)
def test_feature_works(with_feature, config, feature):
    config["trainer"]["max_steps"] = 8 if feature == "early stop" else 2
    name, setting, behaviour = row_of(feature)
    result = with_feature((name, setting.replace("patience: 10", "patience: 0"), behaviour))
    assert (result.code, result.err, result.warned) == (0, "", [])
    assert CHECKS[feature](result)


@pytest.mark.slow
def test_last_checkpoint_of_the_lightning_callback_is_found(with_feature):
    row = row_of("best checkpoints")
    assert with_feature(row).code == 0
    assert not Path("runs/tiny/checkpoints").exists()
    (best,) = Path("runs/tiny").rglob("epoch=*.ckpt")
    assert int(re.search(r"step=(\d+)", best.name)[1]) == 1 + max(range(2), key=rewards().__getitem__)
    resumed = with_feature(row, "--ckpt_path", "last", "--trainer.max_steps", "3")
    assert (resumed.code, resumed.err) == (0, "")
    assert [row["step"] for row in metrics() if row["reward/mean"]] == ["1", "2", "3"]


@pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint"])
def test_mode_against_the_metric_is_rejected(fit, config, kind):
    path = f"lightning.pytorch.callbacks.{kind}"
    config["trainer"]["callbacks"].append({"class_path": path, "init_args": {"monitor": "reward/mean"}})
    result = fit(config)
    assert result.code == 2
    assert f"{kind} monitors reward/mean with mode: min, but the best value" in result.err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_averaged_weights_are_exported(with_feature, config):
    feature, setting, behaviour = row_of("average of weights")
    config["model"]["init_args"]["optimizer"] = {
        "class_path": "torch.optim.SGD",
        "init_args": {"lr": 0.5, "weight_decay": 0.01},  # rewards of a random model are equal
    }
    exports = []
    for decay in ("0.0", "0.5"):
        result = with_feature((feature, setting.replace("0.99", decay), behaviour))
        assert result.code == 0, result.err
        exports.append(exported())
    plain = with_feature((feature, "", behaviour))
    assert plain.code == 0
    assert torch.equal(exports[0], exported())  # an average without memory is the actor
    assert not torch.equal(exports[1], exported())


def test_every_row_has_a_test():
    tested = {*CHECKS, "best checkpoints", "average of weights"}
    assert {row[0] for row in ROWS} == tested
    assert len(REJECTED) == 7


def test_zero_batches_are_rejected(fit, config):
    config["trainer"]["limit_train_batches"] = 0
    result = fit(config)
    assert result.code == 2
    assert "trainer.limit_train_batches is 0, so nothing would be trained" in result.err
