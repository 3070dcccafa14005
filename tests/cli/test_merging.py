"""The rule for values that several files and the command line set."""

import pytest

from lightning_rlhf.cli.merging import as_yaml, merge, merged_settings
from lightning_rlhf.expected_errors import UsageError

PAIRS = "lightning_rlhf.extras.algorithms.preference_losses"
FIRST = """
model:
  class_path: lightning_rlhf.DPOModule
  init_args:
    actor: {path: first, lora: {rank: 8, alpha: 16}, quantization: nf4}
    loss: {class_path: lightning_rlhf.extras.algorithms.preference_losses.DPOLoss, init_args: {beta: 0.3}}
    optimizer: {lr: 1e-3}
    sft_coef: 0.5
data:
  class_path: lightning_rlhf.PreferenceDataModule
  init_args: {train: a.jsonl, columns: {prompt: p, chosen: c}}
trainer:
  max_steps: 3
  callbacks:
    - class_path: lightning_rlhf.callbacks.RolloutLoop
      init_args:
        group_size: 4
        rewards: [{function: "a.py:style", weight: 0.25, arguments: {limit: 3}}]
    - lightning_rlhf.callbacks.Report
"""


@pytest.fixture
def settings(tmp_path):
    """Return the merged settings of FIRST, of a second file, and of options."""

    def merged(second="", *options):
        for name, text in (("first", FIRST), ("second", second or "{}")):
            (tmp_path / f"{name}.yaml").write_text(text)
        return merged_settings(
            ["--config", str(tmp_path / "first.yaml"), f"--config={tmp_path / 'second.yaml'}", *options]
        )

    return merged


def model(result):
    return result.values["model"]["init_args"]


def loop(result):
    return result.values["trainer"]["callbacks"][0]["init_args"]


def test_options_are_merged_by_name(settings):
    result = settings(
        "model: {init_args: {sft_coef: 0.1}}\ntrainer: {max_epochs: 1}", "--model.init_args.loss.beta=0.7"
    )
    assert (model(result)["sft_coef"], model(result)["optimizer"], model(result)["loss"]["init_args"]) == (
        0.1, {"lr": 1e-3}, {"beta": "0.7"},
    )  # fmt: skip
    assert (result.values["trainer"]["max_steps"], result.values["trainer"]["max_epochs"]) == (3, 1)
    assert result.dropped == []


@pytest.mark.parametrize("how", [f"model: {{init_args: {{loss: {{class_path: {PAIRS}.SimPOLoss}}}}}}", "SimPOLoss"])
def test_another_class_keeps_nothing_and_a_line_names_what_was_dropped(settings, how):
    result = settings(how) if ":" in how else settings("", f"--model.init_args.loss={how}")
    assert model(result)["loss"]["init_args"] == {}
    assert result.dropped == ["model.loss: SimPOLoss replaces DPOLoss and its beta"]


def test_the_same_class_keeps_its_options(settings):
    loss = f"{{class_path: {PAIRS}.DPOLoss, init_args: {{label_smoothing: 0.1}}}}"
    assert model(settings(f"model: {{init_args: {{loss: {loss}}}}}"))["loss"]["init_args"] == {
        "beta": 0.3,
        "label_smoothing": 0.1,
    }


def test_another_module_keeps_the_options_that_it_has(settings):
    result = settings("", "--model=SFTModule")
    assert sorted(model(result)) == ["actor", "optimizer"]
    assert result.values["model"]["class_path"] == "lightning_rlhf.modules.sft.SFTModule"
    assert result.dropped == ["model: SFTModule replaces DPOModule and its loss, sft_coef"]


@pytest.mark.parametrize("second", ["second", "{path: second}", "{class_path: Pretrained, init_args: {path: second}}"])
def test_path_of_a_model_keeps_its_other_options(settings, second):
    actor = model(settings(f"model: {{init_args: {{actor: {second}}}}}"))["actor"]
    assert actor == {"path": "second", "lora": {"rank": 8, "alpha": 16}, "quantization": "nf4"}
    assert model(settings("", f"--model.init_args.actor={second}"))["actor"] == actor


def test_list_is_replaced(settings):
    result = settings(
        "trainer: {callbacks: {init_args: {rewards: [{function: 'b.py:correct'}]}}}",
    )
    assert loop(result) == {"group_size": 4, "rewards": [{"function": "b.py:correct"}]}
    assert result.dropped == [
        "trainer.callbacks.rewards: the later value replaces the earlier one, without its a.py:style"
    ]
    result = settings("trainer: {callbacks: [{class_path: lightning_rlhf.callbacks.RolloutLoop}, Console]}")
    assert result.values["trainer"]["callbacks"][0] == {"class_path": "lightning_rlhf.callbacks.RolloutLoop"}


def test_names_with_values_are_replaced_and_an_option_changes_one(settings):
    result = settings("data: {init_args: {columns: {chosen: d}}}")
    assert result.values["data"]["init_args"]["columns"] == {"chosen": "d"}
    assert result.dropped == ["data.columns: the later value replaces the earlier one, without its prompt"]
    result = settings("", "--data.init_args.columns.chosen=d")
    assert result.values["data"]["init_args"]["columns"] == {"prompt": "p", "chosen": "d"}


def test_option_of_a_callback_is_that_of_the_last_one_that_has_it(settings):
    result = settings("", "--trainer.callbacks.group_size", "8", "--trainer.callbacks+=EarlyStopping")
    assert loop(result)["group_size"] == "8"
    assert result.values["trainer"]["callbacks"][1:] == ["lightning_rlhf.callbacks.Report", "EarlyStopping"]


OWN = "trainer: {callbacks: [{class_path: own.Loop}, lightning_rlhf.callbacks.Report]}"


def test_option_of_the_rollout_is_that_of_the_loop_wherever_it_is(settings):
    result = settings("", "--rollout.group_size", "8", "--rollout.dynamic_sampling.max_batches=3")
    assert (loop(result)["group_size"], loop(result)["dynamic_sampling"]) == ("8", {"max_batches": "3"})
    assert loop(result)["rewards"][0]["weight"] == 0.25
    assert result.values["trainer"]["callbacks"][1] == "lightning_rlhf.callbacks.Report"
    assert loop(settings("", "--rollout.every_n_steps", "8"))["every_n_steps"] == "8"  # the parser rejects it by name
    assert len(loop(settings("", "--rollout.rewards+=b.py:brief"))["rewards"]) == 2
    single = settings("trainer: {callbacks: lightning_rlhf.callbacks.RolloutLoop}", "--rollout.temperature=0.5")
    assert loop(single) == {"temperature": "0.5"}
    assert loop(settings(OWN, "--rollout.group_size=8")) == {"group_size": "8"}


@pytest.mark.parametrize("callbacks", ["[lightning_rlhf.callbacks.Report]", "[]", "null"])
def test_option_of_the_rollout_without_a_loop_is_an_error(settings, callbacks):
    with pytest.raises(
        UsageError, match=r"--rollout\.group_size is an option of RolloutLoop, and trainer\.callbacks has"
    ):
        settings(f"trainer: {{callbacks: {callbacks}}}", "--rollout.group_size=8")


def test_later_arguments_override_earlier_ones(settings, tmp_path):
    result = settings("", "--trainer.max_steps=5", "--config", str(tmp_path / "first.yaml"), "--ckpt_path", "x")
    assert (result.values["trainer"]["max_steps"], result.values["ckpt_path"]) == (3, "x")
    assert result.arguments == ["--ckpt_path", "x"]


def test_option_without_a_value_is_an_error(settings):
    with pytest.raises(UsageError, match="max_steps needs a value"):
        settings("", "--trainer.max_steps", "--print_config")


@pytest.mark.parametrize(
    ("text", "line"),
    [("a: 1\nb: 2\na: 3\n", 3), ("model:\n  b: {c: 1, d: 2, c: 3}\n", 2), ("trainer: {}\ntrainer: {}", 2)],
)
def test_a_key_that_a_file_has_twice_is_an_error_with_its_line(tmp_path, text, line):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UsageError, match=f"x.yaml, line {line}: '.*' was set in line"):
        merged_settings(["--config", str(tmp_path / "x.yaml")])


def test_merge_keys_of_yaml_are_no_repetition(tmp_path):
    (tmp_path / "x.yaml").write_text("trainer:\n  <<: &a {max_steps: 1}\n  max_steps: 2\ndata: {<<: *a}\n")
    values = merged_settings(["--config", str(tmp_path / "x.yaml")]).values
    assert values == {"trainer": {"max_steps": 2}, "data": {"max_steps": 1}}


def test_text_of_a_configuration_is_read_as_it_was(tmp_path):
    text = "trainer: {a: '1e-3', b: 1e-3, c: 'null', d: null, e: [1, 'x: y'], f: .inf, g: 2020-01-01, h: true}\n"
    (tmp_path / "x.yaml").write_text(text)
    values = merged_settings(["--config", str(tmp_path / "x.yaml")]).values
    (tmp_path / "y.yaml").write_text(as_yaml(values))
    assert merged_settings(["--config", str(tmp_path / "y.yaml")]).values == values
    assert (values["trainer"]["a"], values["trainer"]["b"], values["trainer"]["g"]) == ("1e-3", 1e-3, "2020-01-01")


def test_sections_in_files_of_their_own_are_merged(tmp_path):
    (tmp_path / "model.yaml").write_text("{class_path: lightning_rlhf.SFTModule, init_args: {actor: a}}")
    (tmp_path / "run.yaml").write_text("model: model.yaml\n")
    result = merged_settings(["--config", str(tmp_path / "run.yaml"), "--model.init_args.packing=false"])
    assert result.values["model"]["init_args"] == {"actor": "a", "packing": "false"}


def test_merge_changes_neither_of_its_arguments():
    first, second = {"trainer": {"callbacks": [{"init_args": {"a": 1}}]}}, {"trainer": {"callbacks": {"a": 2}}}
    merge(first, second)
    assert first == {"trainer": {"callbacks": [{"init_args": {"a": 1}}]}}


def test_options_of_an_optimizer_without_a_class_are_merged_by_name(settings):
    result = settings("model: {init_args: {optimizer: {weight_decay: 0.5}}}", "--model.init_args.optimizer.eps=1e-9")
    assert model(result)["optimizer"]["init_args"] == {"lr": 1e-3, "weight_decay": 0.5, "eps": "1e-9"}
    assert result.dropped == []


@pytest.mark.parametrize("name", ["GRPOO", "torch.optim.Lion", "my_stuff.made_dynamically", "lightning_rlhf.GSPOLoss"])
@pytest.mark.parametrize("option", ["loss", "optimizer"])
def test_a_class_that_only_the_parser_finds_is_not_replaced_by_the_default(settings, option, name):
    key = f"--model.init_args.{option}"
    result = settings("", f"{key}={name}", f"{key}.lr=0.1")
    assert model(result)[option] == {"class_path": name, "init_args": {"lr": "0.1"}}


def test_options_of_a_reference_are_an_error(settings):
    with pytest.raises(UsageError, match=r"model.loss is 'a.py:f', whose options .* \(beta\): give class_path"):
        settings("", "--model.init_args.loss=a.py:f", "--model.init_args.loss.beta=0.1")


def test_names_with_values_are_merged_by_name_from_the_command_line(settings):
    result = settings(
        "model: {class_path: lightning_rlhf.MixtureModule, init_args: {mixture: {math: {weight: 0.5}}}}",
        *("--model.init_args.mixture.math.weight=0.25", "--trainer.callbacks.rewards.arguments.limit=6"),
    )
    assert model(result)["mixture"] == {"math": {"weight": "0.25"}}
    assert loop(result)["rewards"][0]["init_args"]["arguments"] == {"limit": "6"}
    architecture = "{class_path: lightning_rlhf.FromConfig, init_args: {architecture: {model_type: llama}}}"
    result = settings(
        f"model: {{init_args: {{actor: {architecture}}}}}", "--model.init_args.actor.architecture.hidden_size=64"
    )
    assert model(result)["actor"]["init_args"]["architecture"] == {"model_type": "llama", "hidden_size": "64"}


def test_values_of_the_command_line_are_those_of_a_file(settings):
    rewards = "[{function: f, arguments: {scale: {tolerance: 1e-3, day: 2026-11-28}}}]"
    result = settings("", f"--trainer.callbacks.rewards={rewards}")
    assert loop(result)["rewards"] == [
        {"function": "f", "arguments": {"scale": {"tolerance": 1e-3, "day": "2026-11-28"}}}
    ]


@pytest.mark.parametrize("text", ["Assistant:", "a: b", "[/INST]"])
def test_a_text_stays_a_text(settings, text):
    assert settings("", f"--data.init_args.split_after={text}").values["data"]["init_args"]["split_after"] == text


def test_a_file_beside_the_file_that_names_it_is_found(settings, tmp_path, monkeypatch):
    (tmp_path / "loss.yaml").write_text("class_path: SimPOLoss\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = settings("model: {init_args: {loss: loss.yaml, own: none.yaml}}")
    assert (model(result)["loss"], model(result)["own"]) == (str(tmp_path / "loss.yaml"), "none.yaml")
