"""Options of TRL, peft and verl are rejected with a message that gives the corresponding option of this library."""

import pytest

from lightning_rlhf.cli.signatures import find_class
from lightning_rlhf.extras.schema.option_names import OPTION_NAMES

MODEL, LOOP = "model.init_args", "trainer.callbacks.0.init_args"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (f"{MODEL}.beta", 0.04, "model (PPOModule): unknown option 'beta'; here it is kl_loss.coef (a penalty in the"),
        (
            f"{MODEL}.learning_rate",
            1e-6,
            "model (PPOModule): unknown option 'learning_rate'; here it is model.init_args",
        ),
        (f"{MODEL}.r", 16, "model (PPOModule): unknown option 'r'; here it is lora.rank of model.init_args.actor"),
        (
            "top_p",
            0.9,
            "unknown option 'top_p'; here it is top_p of RolloutLoop under trainer.callbacks",
        ),
        (f"{LOOP}.num_generations", 8, "trainer.callbacks (RolloutLoop): unknown option 'num_generations'; here it is"),
        ("learning_rate", 1e-6, "unknown option 'learning_rate'; here it is model.init_args.optimizer"),
    ],
)
def test_corresponding_option_is_suggested(fit, config, path, value, message):
    *parents, last = path.split(".")
    position = config
    for key in parents:
        position = position[int(key) if key.isdigit() else key]
    position[last] = value
    result = fit(config)
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert line.startswith(f"lightning-rlhf: {message}")


def test_corresponding_command_line_option_is_suggested(fit, config):
    assert "'learning_rate'; here it is model.init_args" in fit(config, "--learning_rate", "1e-6").err


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("group_size", "rollout.group_size"),
        ("max_steps", "trainer.max_steps"),
        ("minibatch_size", "model.init_args.minibatch_size"),
        ("batch_size", "data.init_args.batch_size"),
    ],
)
def test_option_without_its_section_is_named_with_it(fit, config, name, option):
    assert fit(config, f"--{name}", "1").err == f"lightning-rlhf: unknown option {name!r}; write --{option}\n"


def test_suggested_options_exist():
    classes = ("GRPOModule", "Pretrained", "PromptDataModule", "callbacks.RolloutLoop", "callbacks.RunCheckpoint")
    known = {name for item in classes for name in find_class(f"lightning_rlhf.{item}").options}
    for name in ("kl_loss", "kl_reward", "policy_loss", "update_epochs", "minibatch_size", "aggregation", "lora",
                 "micro_batch_tokens", "batch_size", "max_tokens", "group_size", "max_response_tokens", "rewards",
                 "every_n_steps", "optimizer", "lr_scheduler", "advantages"):  # fmt: skip
        assert name in known, name
        assert any(name in text for text in OPTION_NAMES.values()), name
    assert "minibatch_size" not in OPTION_NAMES
