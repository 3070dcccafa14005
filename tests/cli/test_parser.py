# ruff: noqa: E501  (the sentences are to be read whole)
"""Every mistake in a configuration gives one line on stderr and exit code 2."""

from pathlib import Path

import pytest

import lightning_rlhf
from lightning_rlhf.cli.parser import condense

MODEL, DATA, LOOP = "model.init_args", "data.init_args", "trainer.callbacks.0.init_args"


def put(config, path, value):
    *parents, last = path.split(".")
    for key in parents:
        config = config[int(key) if key.isdigit() else key]
    config[last] = value


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            f"{MODEL}.minibatch_sise",
            4,
            "model (PPOModule): unknown option 'minibatch_sise'; did you mean 'minibatch_size'?",
        ),
        (f"{MODEL}.vf_coeff", 4, "model (PPOModule): unknown option 'vf_coeff'; did you mean 'vf_coef'?"),
        (
            f"{MODEL}.kl_reward",
            {"coeff": 0.1},
            "model.kl_reward (KLTerm): unknown option 'coeff'; did you mean 'coef'?",
        ),
        (f"{DATA}.batchsize", 4, "data (PromptDataModule): unknown option 'batchsize'; did you mean 'batch_size'?"),
        (
            f"{LOOP}.groupsize",
            4,
            "trainer.callbacks (RolloutLoop): unknown option 'groupsize'; did you mean 'group_size'?",
        ),
        ("trainer.max_step", 4, "unknown option 'trainer.max_step'; did you mean 'max_steps'?"),
        (
            f"{MODEL}.group_size",
            4,
            "model (PPOModule): unknown option 'group_size'; it is an option of trainer.callbacks (RolloutLoop)",
        ),
        (
            f"{LOOP}.max_steps",
            4,
            "trainer.callbacks (RolloutLoop): unknown option 'max_steps'; it is an option of trainer",
        ),
        ("modle", 4, "unknown option 'modle'; did you mean 'model'?"),
    ],
)
def test_unknown_key_is_reported_with_a_suggestion(fit, config, path, value, message):
    put(config, path, value)
    assert error_of(fit(config)) == message


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.class_path", "lightning_rlhf.PPOModul", ["model: 'PPOModul' was not found in lightning_rlhf; did you mean 'PPOModule'?"]),
        ("model.class_path", "my.py:Mine", ["model: class_path must be module.Class, got 'my.py:Mine': use 'my.Mine', with my.py in the working directory"]),
        ("model.class_path", "a/my.py:Mine", ["model: class_path must be module.Class, got 'a/my.py:Mine': use 'my.Mine', with a in PYTHONPATH"]),
        ("model.class_path", "lightning_rlhv.PPOModule", ["model", "No module named 'lightning_rlhv'"]),
        ("model.class_path", "PPOModul", ["model: class_path must be package.Class, got 'PPOModul'; did you mean 'PPOModule'?"]),
        (f"{LOOP}.engine", "vlm", ["trainer.callbacks.engine: no class has the name 'vlm'; did you mean 'vllm'?"]),
        (
            f"{LOOP}.rewards",
            [{"function": "lightning_rlhf.tasks.addition.exactt"}],
            ["reward function 'lightning_rlhf.tasks.addition.exactt': 'exactt' was not found in "
             "lightning_rlhf.tasks.addition; did you mean 'exact'?"],
        ),
    ],
)  # fmt: skip
def test_unknown_class_or_function_is_reported(fit, config, path, value, message):
    put(config, path, value)
    line = error_of(fit(config))
    assert [part for part in message if part not in line] == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            f"{MODEL}.minibatch_size",
            "many",
            ["model (PPOModule): minibatch_size must be an integer or null, got 'many'"],
        ),
        (f"{MODEL}.kl_reward", {"coef": "x"}, ["model.kl_reward (KLTerm): coef must be a number, got 'x'"]),
        (
            f"{MODEL}.kl_reward",
            {"estimator": "k7"},
            [
                "model.kl_reward (KLTerm): estimator must be one of 'k1', 'k2', 'k3', 'abs', 'k1+', 'k3+', 'abs+', got 'k7'"
            ],
        ),
        (f"{DATA}.batch_size", 1.5, ["data (PromptDataModule): batch_size must be an integer, got 1.5"]),
        ("trainer.max_steps", "x", ["trainer.max_steps must be an integer, got 'x'"]),
        ("seed_everything", "x", ["seed_everything must be an integer, true or false, got 'x'"]),
        ("model.init_args", {"minibatch_size": 1}, ["model (PPOModule): actor is missing"]),
        ("model", None, ["the section 'model' is missing: it has class_path and init_args"]),
    ],
)
def test_value_of_the_wrong_type_is_reported(fit, config, path, value, message):
    put(config, path, value)
    line = error_of(fit(config))
    assert [part for part in message if part not in line] == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--trainer.max_step", "unknown option 'trainer.max_step'; did you mean 'max_steps'?"),
        ("--conf", "unknown option 'conf'; did you mean 'config'?"),
        ("--modle", "unknown option 'modle'; did you mean 'model'?"),
    ],
)
def test_misspelt_or_abbreviated_option_is_reported(fit, config, option, message):
    assert error_of(fit(config, option, "3")) == message


@pytest.mark.parametrize("option", ["group_size", "init_args.group_size"])
def test_option_of_a_callback_is_that_of_the_last_one_that_has_it(fit, config, option):
    config["trainer"]["callbacks"].append("lightning_rlhf.callbacks.Report")
    assert error_of(fit(config, f"--trainer.callbacks.{option}", "0")) == "group_size must be at least 1, got 0"


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (f"{MODEL}.update_epochs", 0, "update_epochs must be at least 1, got 0"),
        (f"{MODEL}.policy_loss", {"clip_range": 3.0}, "clip_range must lie in (0, 1), got 3.0"),
        (f"{DATA}.batch_size", 0, "batch_size must be at least 1, got 0"),
        (f"{DATA}.tokenizer.init_args.characters", "aa", "characters must be non-empty and unique, got 'aa'"),
        (f"{LOOP}.group_size", 0, "group_size must be at least 1, got 0"),
    ],
)
def test_error_of_a_constructor_is_shown_unchanged(fit, config, path, value, message):
    put(config, path, value)
    assert error_of(fit(config)) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: [b",
            ["not valid YAML: did not find expected ',' or ']', line 2, column 1", "indentation, brackets and quotes"],
        ),
        (
            "model: x\n  y: 3",
            ["not valid YAML: mapping values are not allowed in this context, line 2, column 4"],
        ),
        (
            "a:\n  b: 1\n\tc: 2",
            ["not valid YAML: found a tab character that violates indentation, line 3, column 1"],
        ),
        ("- 1\n- 2", ["must contain keys such as 'model:' and 'trainer:'", "[1, 2]"]),
        ("", ["must contain keys such as 'model:' and 'trainer:'", "got nothing"]),
    ],
)
def test_file_that_is_not_a_configuration_is_reported(fit, text, message):
    line = error_of(fit(text))
    assert [part for part in message if part not in line] == []


ADAM = {"class_path": "torch.optim.AdamW", "init_args": {"lr": "small"}}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            f"{MODEL}.optimizer",
            ADAM,
            ["model.optimizer: lr must be a number, got 'small'"],
        ),
        (
            f"{MODEL}.optimizer",
            {"class_path": "torch.optim.Adamw"},
            ["optimizer", "'torch.optim' has no attribute 'Adamw'", "did you mean 'AdamW'?"],
        ),
        (
            f"{LOOP}.rewards",
            "reward.py:right",
            ["rewards must have {function: ...} for each reward: write {function: reward.py:right}"],
        ),
        (
            f"{LOOP}.rewards",
            {"function": "a.b"},
            ["trainer.callbacks (RolloutLoop): rewards must be a list or null, got {'function': 'a.b'}"],
        ),
        (
            f"{MODEL}.actor.init_args.architecture.hiden_size",
            64,
            ["the architecture 'llama' has no field 'hiden_size'; did you mean 'hidden_size'?"],
        ),
        (
            f"{MODEL}.actor.init_args.architecture.num_attention_heads",
            3,
            [
                "transformers rejects the architecture 'llama': The hidden size (32) is not a multiple of the number of attention heads (3)."
            ],
        ),
    ],
)
def test_nested_values_of_the_wrong_type_are_reported(fit, config, path, value, message):
    config["trainer"]["callbacks"][0]["init_args"]["max_response_tokens"] = 40  # long enough for the answers
    put(config, path, value)
    line = error_of(fit(config))
    assert [part for part in message if part not in line] == []


def test_missing_section_and_misspelt_init_args_are_reported(fit, config):
    data = config.pop("data")
    assert error_of(fit(config)) == "the section 'data' is missing: it has class_path and init_args"
    config["data"] = {"class_path": data["class_path"], "init_arg": data["init_args"]}
    message = fit(config).err
    assert "data (PromptDataModule): unknown option 'init_arg'; did you mean 'init_args'?" in message
    assert "data (PromptDataModule): train, tokenizer are missing" in message


def test_errors_of_several_constructors_are_reported_together(fit, config):
    put(config, f"{MODEL}.update_epochs", 0)
    put(config, f"{DATA}.batch_size", 0)
    put(config, f"{LOOP}.group_size", 0)
    result = fit(config)
    assert result.code == 2
    assert result.err.splitlines() == [
        "lightning-rlhf: 3 mistakes in the configuration:",
        "  update_epochs must be at least 1, got 0",
        "  batch_size must be at least 1, got 0",
        "  group_size must be at least 1, got 0",
    ]


def test_settings_that_an_optimizer_rejects_give_a_one_line_error_after_the_traceback(fit, config):
    put(config, f"{MODEL}.optimizer", {**ADAM, "init_args": {"lr": -1.0}})
    result = fit(config)
    assert result.code == 2
    last = "lightning-rlhf: the optimizer's settings are invalid: Invalid learning rate: -1.0"
    assert result.err.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("module", "data", "wanted"),
    [
        ("SFTModule", "PromptDataModule", "Conversation"),
        ("GRPOModule", "ConversationDataModule", "Prompt"),
        ("OnlineDPOModule", "PreferenceDataModule", "Prompt"),
        ("RewardModule", "ConversationDataModule", "Preference"),
        ("DPOModule", "UnpairedDataModule", "Preference"),
        ("KTOModule", "PreferenceDataModule", "Unpaired"),
    ],
)
def test_data_of_the_wrong_kind_for_the_module_are_rejected(module, data, wanted):
    with pytest.raises(
        ValueError, match=f"{module} cannot train on the rows of {data}: use {wanted}DataModule as data module"
    ):
        getattr(lightning_rlhf, module).check_reads(object.__new__(getattr(lightning_rlhf, data)))
    getattr(lightning_rlhf, module).check_reads(object.__new__(getattr(lightning_rlhf, f"{wanted}DataModule")))
    getattr(lightning_rlhf, module).check_reads(object())  # somebody's own


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            f"{MODEL}.optimizer",
            {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "beta": [0.9, 0.95]}},
            "torch.optim.AdamW: unknown option 'beta'; did you mean 'betas'?",
        ),
        (
            "trainer.callbacks",
            [{"class_path": "EarlyStopping"}],
            "lightning.pytorch.callbacks.EarlyStopping: set monitor, which it needs",
        ),
        (f"{MODEL}.kl_reward", 0.04, "got 0.04: write kl_reward: {coef: 0.04}"),
        ("trainer.accelerator", "gpu", "trainer.accelerator is 'gpu', but this machine has no NVIDIA GPU"),
    ],
)
def test_mistake_in_a_class_of_another_package_is_one_line(fit, config, monkeypatch, path, value, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    put(config, path, value)
    (line,) = [line for line in fit(config).err.splitlines() if line.startswith("lightning-rlhf: ")]
    assert message in line


def test_missing_file_is_reported(cli):
    Path("a_directory").mkdir()
    assert "a_directory; it is a directory: name the file in it" in error_of(cli("fit", "--config", "a_directory"))
    Path("runs.yaml").touch()
    message = error_of(cli("fit", "--config", "run.yaml"))
    assert message.startswith("configuration file not found: run.yaml; did you mean 'runs.yaml'? (working directory: ")
    assert error_of(cli("fit", "--trainer.max_steps", "3")) == "fit needs a configuration: add --config FILE"


def test_help_of_a_class_needs_no_configuration(cli):
    result = cli("fit", "--trainer.callbacks.help", "RolloutLoop")
    assert (result.code, result.err) == (0, "")
    assert "--trainer.callbacks.group_size" in result.out


@pytest.mark.parametrize("arguments", [[], ["fti"], ["fit"], ["fit", "--config"], ["fit", "--trainer.max_step", "3"]])
def test_unknown_command_is_rejected(cli, arguments):
    assert error_of(cli(*arguments))


def test_message_of_unknown_form_is_not_changed():
    assert condense("out of cheese") == "out of cheese"
    assert (
        condense("Does not validate against any of the Union subtypes")
        == "Does not validate against any of the Union subtypes"
    )


def error_of(result):
    """Return the one-line error message of a failed command."""
    assert result.code == 2
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert line.startswith("lightning-rlhf: ")
    return line.removeprefix("lightning-rlhf: ")
