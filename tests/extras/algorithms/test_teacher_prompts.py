"""Prompts of a teacher: from a column or a function, for each response, in training and validation."""

from functools import partial

import pytest
import torch

from lightning_rlhf import DistillationModule, GRPOModule, PromptDataModule
from lightning_rlhf.callbacks import DynamicSampling, RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.algorithms.distillation import Divergence
from lightning_rlhf.rewards.function import RewardFunction
from tests.callbacks.conftest import exact
from tests.stand_ins import TINY_LLAMA, ScriptedEngine, TinyModel, quiet_trainer

LETTERS = CharacterTokenizer("abcdefg")
ROWS = [
    {"prompt": prompt, "answer": answer, "with_answer": answer + prompt}
    for prompt, answer in zip(["a", "bb", "ccc", "d"], "abcd", strict=True)
]


def with_response(prompts, completions, answer):
    return [f"{right}{text}{prompt}" for prompt, text, right in zip(prompts, completions, answer, strict=True)]


def distil(directory, teacher_prompt, kind=DistillationModule, rewards=True, val=False, **loop):
    """Return module and trainer after a run of two steps."""
    engine = ScriptedEngine(["a", "b"], LETTERS.load())
    loop = RolloutLoop(
        rewards=[RewardFunction(exact)] if rewards else [],
        engine=engine,
        max_response_tokens=4,
        check_rows=0,
        teacher_prompt=teacher_prompt,
        **loop,
    )
    options = {"optimizer": partial(torch.optim.SGD, lr=0.1), "minibatch_size": 2}
    if kind is DistillationModule:
        options |= {"teacher": "actor", "divergence": Divergence(top_k=3)}
    module = kind(TinyModel(), **options)
    rows = {"train": InMemory(ROWS), **({"val": InMemory(ROWS)} if val else {})}
    data = PromptDataModule(tokenizer=LETTERS, batch_size=2, max_tokens=8, **rows)
    trainer = quiet_trainer(default_root_dir=directory, callbacks=[loop])
    trainer.fit(module, datamodule=data)
    return module, trainer


def prompts_of(module):
    """Return prompts, responses and prompts of the teacher of the last step as texts."""
    rollout, tokenizer = module.last_step.experience.rollout, LETTERS.load()
    parts = (
        (rollout.prompt_ids, rollout.prompt_lengths),
        (rollout.response_ids, rollout.response_lengths),
        (rollout.teacher.ids, rollout.teacher.lengths),
    )
    texts = ([row[:size] for row, size in zip(ids, lengths, strict=True)] for ids, lengths in parts)
    return list(zip(*(tokenizer.batch_decode(each, skip_special_tokens=True) for each in texts), strict=True))


def test_column_is_the_prompt_of_the_teacher(tmp_path):
    module, _ = distil(tmp_path, "with_answer")
    answers = {row["prompt"]: row["with_answer"] for row in ROWS}
    assert all(teacher == answers[prompt] for prompt, _, teacher in prompts_of(module))


@pytest.mark.parametrize("samples", [1, 2])
def test_function_makes_a_prompt_from_each_response(tmp_path, samples):
    module, _ = distil(tmp_path, with_response, group_size=samples)
    answers = {row["prompt"]: row["answer"] for row in ROWS}
    rows = prompts_of(module)
    assert len(rows) == 2 * samples
    assert all(teacher == answers[prompt] + response + prompt for prompt, response, teacher in rows)


def test_teacher_reads_its_prompts_in_validation_too(tmp_path):
    _, trainer = distil(tmp_path, "with_answer", val=True)
    assert trainer.callback_metrics["val/divergence"] > 1e-4


def test_run_needs_no_reward(tmp_path):
    module, trainer = distil(tmp_path, with_response, rewards=False, val=True)
    assert module.last_step.actor_updates == 1
    assert not [name for name in trainer.callback_metrics if name.startswith("reward/")]


def test_dynamic_sampling_keeps_the_prompts_of_each_response(tmp_path):
    sampling = DynamicSampling(prompts_per_step=1)
    module, _ = distil(tmp_path, with_response, group_size=2, dynamic_sampling=sampling)
    answers = {row["prompt"]: row["answer"] for row in ROWS}
    assert all(teacher == answers[prompt] + response + prompt for prompt, response, teacher in prompts_of(module))


@pytest.mark.parametrize(
    ("prompt", "kind", "error", "message"),
    [
        ("answers", DistillationModule, ValueError, "teacher_prompt must be a column of the data or a function"),
        ("answer", GRPOModule, ValueError, "teacher_prompt is set, but GRPOModule has no teacher"),
        (lambda prompts: prompts[:1], DistillationModule, RuntimeError, "returned 1 prompts for 2 responses"),
        (
            lambda prompts: [None, "a"],
            DistillationModule,
            RuntimeError,
            "response 0 must be a text or messages, got None",
        ),
        (lambda prompts: ["a", ""], DistillationModule, RuntimeError, "response 1 must be a text or messages, got ''"),
        (
            lambda prompts: ["a" * 63] * 2,
            DistillationModule,
            RuntimeError,
            "response 0 has 63 tokens and the response 2",
        ),
    ],
)
def test_prompts_that_do_not_fit_raise(tmp_path, prompt, kind, error, message):
    options = {"group_size": 2} if kind is GRPOModule else {}
    with pytest.raises(error, match=message):
        distil(tmp_path, prompt, kind, **options)


def needs_more(prompts, hints):
    return prompts


def fails(prompts):
    raise KeyError("no example")


def interrupted(prompts):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (needs_more, ValueError, "teacher_prompt: needs_more needs 'hints', but only prompts, completions"),
        ("no_such.py:make", ValueError, "file not found: no_such.py"),
        (fails, RuntimeError, "teacher_prompt failed: KeyError: 'no example'"),
        (interrupted, (KeyboardInterrupt, SystemExit), None),
    ],
)
def test_functions_that_do_not_work_raise(tmp_path, prompt, error, message):
    with pytest.raises(error, match=message):
        distil(tmp_path, prompt)


@pytest.mark.parametrize("prompt", [needs_more, "no_such.py:make", "answers"])
def test_wrong_functions_and_columns_are_found_before_the_engine_starts(tmp_path, prompt):
    engine = ScriptedEngine(["a"], LETTERS.load())
    loop = RolloutLoop([], engine, max_response_tokens=4, check_rows=0, teacher_prompt=prompt)
    module = DistillationModule(TinyModel(), "actor", Divergence(top_k=3), minibatch_size=2)
    data = PromptDataModule(tokenizer=LETTERS, batch_size=2, max_tokens=8, train=InMemory(ROWS))
    with pytest.raises(ValueError):  # noqa: PT011 (the messages are tested above)
        quiet_trainer(default_root_dir=tmp_path, callbacks=[loop]).fit(module, datamodule=data)
    assert "start" not in engine.calls


def test_teacher_with_more_positions_than_the_student_may_read_longer_prompts(tmp_path):
    engine = ScriptedEngine(["a", "b"], LETTERS.load())
    loop = RolloutLoop([], engine, max_response_tokens=4, check_rows=0, teacher_prompt=lambda prompts: ["a" * 90] * 2)
    teacher = TinyModel({**TINY_LLAMA, "max_position_embeddings": 128}, seed=1)
    module = DistillationModule(TinyModel(), teacher, minibatch_size=2)
    data = PromptDataModule(tokenizer=LETTERS, batch_size=2, max_tokens=8, train=InMemory(ROWS[:2]))
    quiet_trainer(default_root_dir=tmp_path, callbacks=[loop]).fit(module, datamodule=data)
    assert module.last_step.experience.rollout.teacher.lengths.tolist() == [90, 90]
