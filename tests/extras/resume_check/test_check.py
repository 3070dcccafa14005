"""A checkpoint that does not fit the run is told before the engine starts and the models load."""

import pytest

from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.rollout.transformers import TransformersEngine

LORA = {"rank": 4, "alpha": 8}
SAVE = {"class_path": "lightning_rlhf.callbacks.RunCheckpoint", "init_args": {"every_n_steps": 1}}


@pytest.fixture
def resume(fit, config, monkeypatch):
    """Train two steps with the actor's adapters given, then resume with options; nothing large may start."""

    def resume(lora, *options, actor=None):
        model = config["model"]["init_args"]
        model["actor"]["init_args"]["lora"] = lora
        config["trainer"]["callbacks"].append(SAVE)
        assert fit(config).code == 0
        if actor is not None:
            model["actor"]["init_args"] |= actor
        with monkeypatch.context() as patched:
            for kind, method in ((TransformersEngine, "start"), (FromConfig, "_build")):
                patched.setattr(kind, method, _started)
            return fit(config, "--ckpt_path", "last", "--trainer.max_steps", "3", *options)

    return resume


def _started(*_, **__):
    raise AssertionError("something large was started")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--data.batch_size", "2", "--model.minibatch_size", "2"), "batch_size is 2, was 4: the checkpoint's"),
        (("--seed_everything", "4"), "seed_everything is 4, was 3: the checkpoint's position"),
        (("--data.train.num_rows", "16"), "training rows is 16 with SHA-256 "),
        (
            ("--model.optimizer", "{class_path: torch.optim.SGD, init_args: {lr: 0.1}}"),
            "the actor was optimized by AdamW when the checkpoint was written",
        ),
    ],
)
def test_setting_that_does_not_fit_is_told_before_anything_large_starts(resume, options, line):
    result = resume(None, *options)
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith(f"lightning-rlhf: {line}")


@pytest.mark.parametrize(
    ("lora", "now", "line"),
    [
        (LORA, {"rank": 8, "alpha": 8}, "the actor's adapters have rank 4 in the checkpoint, and this run sets rank 8"),
        (LORA, None, "the actor's adapters have rank 4 in the checkpoint, and this run has none"),
        (None, LORA, "the checkpoint has all weights of the actor and no adapters, and this run sets lora"),
    ],
)
def test_adapters_of_another_rank_are_told_before_anything_large_starts(resume, lora, now, line):
    result = resume(lora, actor={"lora": now})
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith(f"lightning-rlhf: {line}")


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
def test_checkpoint_that_fits_goes_on_to_the_engine(resume, lora):
    with pytest.raises(AssertionError, match="something large was started"):
        resume(lora)
