# ruff: noqa: E501  (the sentences are to be read whole)
"""Whatever is wrong with a configuration is one sentence on stderr and exit code 2."""

import pytest

from lightning_rlhf.cli.parser import explain

MODEL, DATA, LOOP = "model.init_args", "data.init_args", "trainer.callbacks.0.init_args"


def put(config, path, value):
    *parents, last = path.split(".")
    for key in parents:
        config = config[int(key) if key.isdigit() else key]
    config[last] = value


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (
            f"{MODEL}.minibatch_sise",
            4,
            "model (PPOModule): unknown option 'minibatch_sise'; did you mean 'minibatch_size'?",
        ),
        (f"{MODEL}.vf_coeff", 4, "model (PPOModule): unknown option 'vf_coeff'; did you mean 'vf_coef'?"),
        (f"{MODEL}.kl_reward", {"coeff": 0.1}, "model (PPOModule): unknown option 'coeff'; did you mean 'coef'?"),
        (f"{DATA}.batchsize", 4, "data (PromptDataModule): unknown option 'batchsize'; did you mean 'batch_size'?"),
        (
            f"{LOOP}.groupsize",
            4,
            "trainer.callbacks (RolloutLoop): unknown option 'groupsize'; did you mean 'group_size'?",
        ),
        ("trainer.max_step", 4, "unknown option 'trainer.max_step'; did you mean 'max_steps'?"),
        ("modle", 4, "unknown option 'modle'; did you mean 'model'?"),
    ],
)
def test_an_unknown_key_comes_with_what_was_meant(fit, config, path, value, told):
    put(config, path, value)
    assert refused(fit(config)) == told


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("model.class_path", "lightning_rlhf.PPOModul", "model (PPOModul): there is no 'PPOModul' in lightning_rlhf; did you mean 'PPOModule'?"),
        ("model.class_path", "lightning_rlhv.PPOModule", "model (PPOModule): No module named 'lightning_rlhv'"),
        ("model.class_path", "PPOModul", "model: expected the dotted path of a class, got 'PPOModul'"),
        (f"{LOOP}.engine", "vlm", "trainer.callbacks.engine (RolloutLoop): expected the dotted path of a class, got 'vlm'"),
        (
            f"{LOOP}.rewards",
            [{"function": "lightning_rlhf.data.addition.exactt"}],
            "reward function 'lightning_rlhf.data.addition.exactt': there is no 'exactt' in "
            "lightning_rlhf.data.addition; did you mean 'exact'?",
        ),
    ],
)  # fmt: skip
def test_an_unknown_class_or_function_is_named(fit, config, path, value, told):
    put(config, path, value)
    assert refused(fit(config)) == told


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (f"{MODEL}.minibatch_size", "many", "model.minibatch_size (PPOModule): expected int, got 'many'"),
        (f"{MODEL}.kl_reward", {"coef": "x"}, "model.kl_reward.coef (PPOModule): expected float, got 'x'"),
        (
            f"{MODEL}.kl_reward",
            {"estimator": "k7"},
            "model.kl_reward.estimator (PPOModule): expected one of 'k1', 'k2', 'k3', 'abs', 'k1+', 'k3+', 'abs+', got 'k7'",
        ),
        (f"{DATA}.batch_size", 1.5, "data.batch_size (PromptDataModule): expected int, got '1.5'"),
        ("trainer.max_steps", "x", "trainer.max_steps: expected int, got 'x'"),
        ("seed_everything", "x", "seed_everything: expected bool or int, got 'x'"),
        ("model.init_args", {}, "model (PPOModule): the following arguments are required: actor"),
        ("model", None, "the following arguments are required: fit.model"),
    ],
)
def test_a_wrong_type_is_told_with_the_value(fit, config, path, value, told):
    put(config, path, value)
    assert refused(fit(config)) == told


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--trainer.max_step", "unknown option '--trainer.max_step'; did you mean 'max_steps'?"),
        ("--conf", "unknown option '--conf'; did you mean 'config'?"),
        ("--nonsense", "unknown option '--nonsense'"),
    ],
)
def test_a_misspelt_or_shortened_option_is_named(fit, config, option, told):
    assert refused(fit(config, option, "3")) == told


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (f"{MODEL}.update_epochs", 0, "update_epochs must be at least 1, got 0"),
        (f"{MODEL}.policy_loss", {"clip_range": 3.0}, "clip_range must lie in (0, 1), got 3.0"),
        (f"{DATA}.batch_size", 0, "batch_size must be at least 1, got 0"),
        (f"{DATA}.tokenizer.init_args.characters", "aa", "characters must be some, each once, got 'aa'"),
        (f"{LOOP}.group_size", 0, "group_size must be at least 1, got 0"),
    ],
)
def test_a_constructors_refusal_is_its_own_sentence(fit, config, path, value, told):
    put(config, path, value)
    assert refused(fit(config)) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [b", "the configuration is no YAML: while parsing a flow sequence, line 1, column 4"),
        (
            "model: x\n  y: 3",
            "the configuration is no YAML: mapping values are not allowed in this context, line 2, column 4",
        ),
        ("- 1\n- 2", "a configuration consists of keys such as 'model:' and 'trainer:', got '- 1'"),
        ("", "a configuration consists of keys such as 'model:' and 'trainer:', got ''"),
    ],
)
def test_a_file_that_is_no_configuration(fit, text, told):
    assert refused(fit(text)) == told


def test_a_file_that_is_not_there(cli):
    assert "File does not exist" in refused(cli("fit", "--config", "none.yaml"))


@pytest.mark.parametrize("arguments", [[], ["fti"], ["fit"], ["fit", "--config"], ["fit", "--trainer.max_step", "3"]])
def test_a_command_that_is_none(cli, arguments):
    assert refused(cli(*arguments))


def test_a_message_without_a_known_shape_is_left_as_it_is():
    assert explain("out of cheese") == "out of cheese"
    assert (
        explain("Does not validate against any of the Union subtypes")
        == "Does not validate against any of the Union subtypes"
    )


def refused(result):
    """The one sentence."""
    assert result.code == 2
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert line.startswith("lightning-rlhf: ")
    return line.removeprefix("lightning-rlhf: ")
