"""Small runs of SFT, reward model and PPO with the same results for any strategy and number of ranks.

A run is described by JSON values, so that it can be sent to other processes; see :func:`train`.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import bitsandbytes
import lightning as L
import torch
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_rlhf import (
    ConversationDataModule,
    DistillationModule,
    DPOModule,
    GRPOModule,
    KTOModule,
    MixtureModule,
    OnlineDPOModule,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    RewardModule,
    SFTModule,
    UnpairedDataModule,
)
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.environments import EnvironmentSettings
from lightning_rlhf.extras.algorithms.distillation import Divergence
from lightning_rlhf.extras.algorithms.mixture import RewardObjective, SupervisedObjective, TeacherObjective
from lightning_rlhf.extras.references.following import FollowingReference
from lightning_rlhf.extras.router_replay.replay import RouterReplay
from lightning_rlhf.models.loading import ModelSource, Pretrained
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.modules.optimizers import MatrixDecayAdamW, MuonAdamW
from lightning_rlhf.objectives.aggregation import SequenceMeanTokenMean
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.resampling import ScoreResampling
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.engine import EngineSetup, EngineTraits, RolloutEngine, finished
from lightning_rlhf.rollout.given_responses import GivenResponses
from lightning_rlhf.types import AllowedTokens, Completion, SamplingParams
from tests.environments.worlds import CountsLetters, DrawsSome
from tests.stand_ins import TinyModel, quiet_trainer
from tests.vision_models import drawing

STEPS = 3
TOKENIZER = CharacterTokenizer("abcdefg")
WORDS = ["a", "bc", "cabd", "ga", "ecafbad", "f", "gfedcba", "bb", "dg", "cccc", "a", "fe", "gag"]


class SeededEngine(RolloutEngine):
    """Samples each response from the request's seed alone, so that it is the same on every rank.

    Args:
        tokens: first token that is sampled, and the one after the last.
        names_tokens: whether completions have allowed tokens, which are random too.
        routing: numbers of experts, layers and choices of a mixture of experts, whose experts are random too.
    """

    traits = EngineTraits(ranks=4, reads_images=True)  # or fewer: what several ask, all of them get

    def __init__(
        self,
        tokens: tuple[int, int] = (3, 11),
        names_tokens: bool = False,
        routing: tuple[int, int, int] | None = None,
    ) -> None:
        self.tokens = tokens
        self.names_tokens = names_tokens
        self.routing = routing

    def return_experts(self) -> None:
        assert self.routing

    def start(self, setup: EngineSetup) -> None:
        self.version = -1

    def wait(self) -> str:
        return "seeds"

    def update_weights(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        for _ in parameters:  # every rank takes part in bringing them together
            pass
        self.version = version

    def request(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Future[Completion]]:
        return finished(map(self._drawn, prompts, sampling, seeds))

    def _drawn(self, prompt: Sequence[int], sampling: SamplingParams, seed: int) -> Completion:
        draw = torch.Generator().manual_seed(seed)
        length = int(torch.randint(1, sampling.max_tokens + 1, (), generator=draw))
        tokens = torch.randint(*self.tokens, (length,), generator=draw).tolist()
        logprobs = (-2 * torch.rand(length, generator=draw)).tolist()
        allowed = None
        if self.names_tokens:
            listed = torch.rand(length, self.tokens[1], generator=draw) < 0.5
            listed[range(length), tokens] = True
            allowed = AllowedTokens.of(listed.sum(dim=1), listed.nonzero()[:, 1])
        experts = None
        if self.routing:
            count, layers, choices = self.routing
            order = torch.rand(len(prompt) + length - 1, layers, count, generator=draw).argsort(dim=2)
            experts = order[..., :choices].short()
        reason = "stop" if length % 2 else "length"
        return Completion(tokens, logprobs, reason, self.version, allowed=allowed, experts=experts)

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        return None

    def close(self) -> None:
        pass


def environment_of(turns: int, images: bool) -> EnvironmentSettings:
    """Return an environment, which shows images to some conversations if prompts have some."""
    kind: Any = DrawsSome if images else CountsLetters
    limits = {"max_turns": turns, "max_turn_tokens": 5, "max_images": 3 if images else 0}
    return EnvironmentSettings(kind, bridge="plain", timeout_s=None, **limits)


def share_of_a(completions: list[str]) -> list[float]:
    """Return the fraction of the letter a in each text."""
    return [text.count("a") / max(len(text), 1) for text in completions]


def by_chance(completions: list[str]) -> list[float]:
    """Return random rewards that differ between processes, like those of a judge that samples."""
    draw = random.Random(os.getpid())
    return [draw.random() for _ in completions]


class Record(Callback):
    """Records every metric of every step, except for times and machine-dependent values."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.validations: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.steps.append(_comparable(trainer, lambda name: not name.startswith("val/")))

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.validations.append(_comparable(trainer, lambda name: name.startswith("val/")))


def _comparable(trainer: Trainer, wanted: Any) -> dict[str, float]:
    result = {name: float(value) for name, value in trainer.callback_metrics.items() if wanted(name)}
    return {
        name: value for name, value in result.items() if not name.startswith(("time/", "perf/")) and name[-2:] != "_s"
    }


def parts(kind: str, **options: Any) -> tuple[Any, Any, list[Callback]]:
    """Return module, data and callbacks of a run.

    Args:
        kind: ``sft``, ``rm``, ``ppo``, ``grpo``, ``dpo``, ``kto``, ``online_dpo`` or ``distillation``.
        options: ``tied`` weights, ``heads`` of attention, ``lora`` for all that is trained, ``dtype``, ``lr``, ``rows``
            of a batch, ``max_staleness`` of rollouts, ``updates`` per step, ``turns`` of conversations with an
            environment, ``limits`` of the sampling, whether the engine ``names_tokens``, its ``routing``, arguments
            with which the reference ``follows`` the actor, further fields of the ``architecture``, directory of a
            ``checkpoint`` for all models or one for each seed, ``quantization`` of its weights, ``images`` in the rows
            (then the checkpoint has a processor) and ``train_vision``, further arguments of the module.
    """
    tied, rows = options.pop("tied", False), options.pop("rows", 7)
    max_staleness = options.pop("max_staleness", 0)
    turns, limits = options.pop("turns", None), options.pop("limits", {})
    names_tokens, routing = options.pop("names_tokens", False), options.pop("routing", None)
    further: list[Callback] = [FollowingReference(*follows)] if (follows := options.pop("follows", None)) else []
    further += [RouterReplay()] if routing else []
    if updates := options.pop("updates", None):
        options |= {"update_epochs": 1, "minibatch_size": 2 * rows // updates, "kl_reward": KLTerm()}
    if max_staleness:
        options["correction"] = RolloutCorrection(level="token")
    if options.pop("resampling", False):
        options["resampling"] = ScoreResampling()
    reward = by_chance if options.pop("by_chance", False) else share_of_a
    heads = {"num_attention_heads": options.pop("heads", 1)}
    fields, checkpoint = options.pop("architecture", {}), options.pop("checkpoint", None)
    adapters = LoRA(rank=4, alpha=8) if options.pop("lora", False) else None
    quantization = options.pop("quantization", None)
    images, train_vision = options.pop("images", False), options.pop("train_vision", False)

    def model(seed: int, lora: LoRA | None = adapters) -> ModelSource:
        if checkpoint is not None:
            path = checkpoint if isinstance(checkpoint, str) else checkpoint[str(seed)]
            dtype = options.get("dtype", "float32")
            return Pretrained(path, dtype=dtype, lora=lora, quantization=quantization, train_vision=train_vision)
        architecture = {**TinyModel().architecture, "tie_word_embeddings": tied, **heads}
        architecture |= {"num_key_value_heads": heads["num_attention_heads"], **fields}
        return TinyModel(architecture, seed=seed, dtype=options.get("dtype", "float32"), lora=lora)

    # With the default eps of 1e-8, Adam would scale up the rounding noise of gradients that are almost 0.
    decay = options.pop("matrix_decay", None)
    kind_of_adamw = torch.optim.AdamW if decay is None else MatrixDecayAdamW
    adamw = partial(kind_of_adamw, lr=options.pop("lr", 1e-3), weight_decay=decay or 0.01, eps=1e-5)
    if options.pop("muon", False):
        adamw = partial(MuonAdamW, lr=1e-3)
    if options.pop("eight_bits", False):
        adamw = partial(bitsandbytes.optim.AdamW8bit, lr=1e-3, min_8bit_size=1)
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.8)
    inputs: dict[str, Any] = {"micro_batch_tokens": 24, "max_grad_norm": 0.5}
    inputs |= {name: value for name, value in options.items() if name != "dtype"}
    texts = {"tokenizer": TOKENIZER, "batch_size": rows, "val_batch_size": 5, "max_tokens": 16}
    if images:
        inputs["micro_batch_tokens"] = options.get("micro_batch_tokens", 120)
        texts |= {"tokenizer": checkpoint, "max_tokens": 110}
    if kind in ("ppo", "grpo", "online_dpo", "distillation", "mixture"):
        items = [{"prompt": word} for word in WORDS]
        if kind == "distillation":
            items = [{"prompt": word, "source": "ab"[len(word) % 2], "longer": "fg" + word} for word in WORDS]
        responses = None
        if kind == "mixture":
            items = [
                {"prompt": word, "source": ("math", "chat", "shown")[number % 3], "completion": word[::-1][:5]}
                for number, word in enumerate(WORDS)
            ]
            responses = GivenResponses(on_policy={"shown": 0.0, "chat": 0.5})
        if images:
            items = with_pictures(items)
        data: Any = PromptDataModule(InMemory(items), val=InMemory(items[:6]), **texts)
        inputs |= {"optimizer": adamw, "lr_scheduler": schedule}
        ref = None if adapters else model(2)  # with adapters, the actor without them
        loop = RolloutLoop(
            [RewardFunction(reward)],
            SeededEngine((71, 79) if images else (3, 11), names_tokens, routing),
            group_size=2,
            max_response_tokens=(30 if images else 6) * (turns or 1),
            environment=turns and environment_of(turns, images),
            check_rows=0,
            val_metric=reward.__name__,
            validate_at_ends=False,
            max_staleness=max_staleness,
            teacher_prompt="longer" if kind == "distillation" else None,
            given_responses=responses,
            **limits,
        )
        if kind == "mixture":
            mixture = {
                "math": RewardObjective(weight=0.7),
                "chat": TeacherObjective(model(3, lora=None), weight=2.0, aggregation=SequenceMeanTokenMean()),
                "shown": SupervisedObjective(weight=0.3),
            }
            divergence = Divergence(0.5, inputs.pop("top_k"))
            inputs |= {"minibatch_size": rows, "kl_loss": KLTerm(0.05, "k3"), "ref": ref}
            return MixtureModule(model(0), mixture, divergence=divergence, **inputs), data, [loop]
        if kind == "distillation":
            teachers = {"a": model(2, lora=None), "b": model(3, lora=None)}
            teacher = {"frozen": teachers["a"], "by source": teachers, "itself": "actor"}[inputs.pop("teacher")]
            divergence = Divergence(0.5, inputs.pop("top_k"))
            inputs |= {"minibatch_size": rows, "update_epochs": 2}
            return DistillationModule(model(0), teacher, divergence, **inputs), data, [loop]
        if kind == "online_dpo":
            return OnlineDPOModule(model(0), ref=ref, minibatch_size=2 * rows, **inputs), data, [loop]
        if kind == "grpo":
            return GRPOModule(model(0), ref=ref, minibatch_size=rows, update_epochs=2, **inputs), data, [loop]
        inputs = {
            "critic_optimizer": adamw,
            "minibatch_size": rows,
            "update_epochs": 2,
            "kl_reward": KLTerm(0.1),
            "kl_loss": KLTerm(0.05, "k3"),
        } | inputs
        module = PPOModule(model(0), critic=model(1), ref=ref, reward_model=model(3, lora=None), **inputs)
        return module, data, [loop, *further]
    if kind == "sft":
        items = [{"prompt": word, "completion": word[::-1] + "a"} for word in WORDS]
        items = with_pictures(items) if images else items
        data = ConversationDataModule(InMemory(items), val=InMemory(items[:6]), **texts)
        return SFTModule(model(0), optimizer=adamw, lr_scheduler=schedule, **inputs), data, []
    if kind == "kto":
        items = [{"prompt": word, "completion": word[::-1], "label": len(word) % 2 == 0} for word in WORDS]
        items = with_pictures(items) if images else items
        # Held-out batches of 5 and 4: a last one of fewer rows than data ranks would be joined to the one before, and
        # its KL be of more texts.
        data = UnpairedDataModule(InMemory(items), val=InMemory(items[:9]), **texts)
        inputs["ref"] = None if adapters else model(2)
        return KTOModule(model(0), optimizer=adamw, lr_scheduler=schedule, **inputs), data, []
    items = [{"prompt": word, "chosen": word + "a", "rejected": "ba"[: 1 + len(word) % 2]} for word in WORDS]
    items = with_pictures(items) if images else items
    data = PreferenceDataModule(InMemory(items), val=InMemory(items[:6]), **texts)
    if kind == "dpo":
        inputs = {"ref": None if adapters else model(2), **inputs}
        return DPOModule(model(0), optimizer=adamw, lr_scheduler=schedule, **inputs), data, []
    return RewardModule(model(3), optimizer=adamw, lr_scheduler=schedule, **inputs), data, []


def with_pictures(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows whose prompts are messages, two of three with one or two pictures."""
    result = []
    for number, item in enumerate(items):
        pictures = [drawing(number % 5), drawing(number % 3, 20, 40)][: number % 3]
        parts = [{"type": "image", "image": picture.data} for picture in pictures]
        content = [*parts, {"type": "text", "text": item["prompt"]}]
        result.append({**item, "prompt": [{"role": "user", "content": content}]})
    return result


def strategy_of(description: Any) -> Any:
    """Return a registered name, or the instance for ``["module:Class", {arguments}]``."""
    if isinstance(description, str):
        return description
    position, arguments = description
    module, _, name = position.partition(":")
    return getattr(import_module(module), name)(**arguments)


def train(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train the runs in order.

    Args:
        runs: each ``kind``, ``strategy`` (see :func:`strategy_of`), and optionally ``weights`` (file for the trained
            ones), ``module`` and ``trainer`` (options), ``ckpt`` (to resume from), ``save`` (checkpoint to write),
            ``save_at`` (step after which it is written; None is the last), ``export`` (directory of the model).

    Returns:
        For each run: ``steps`` and ``validations`` (metrics), ``frozen`` (whether frozen roles are unchanged),
        ``bytes`` (of all roles' weights in this process, those that are shared once).
    """
    return [_train(**run) for run in runs]


def _train(
    kind: str,
    strategy: Any,
    weights: str | None = None,
    module: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    ckpt: str | None = None,
    save: str | None = None,
    save_at: int | None = None,
    export: str | None = None,
) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    torch.use_deterministic_algorithms(True)
    made, data, callbacks = parts(kind, **(module or {}))
    record = Record()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "devices": ranks, "default_root_dir": folder}
        options |= {"val_check_interval": 1, "use_distributed_sampler": False, "callbacks": [*callbacks, record]}
        fitting = quiet_trainer(strategy=strategy_of(strategy), **(options | (trainer or {})))
        fitting.callbacks.append(Keep(weights, save, save_at))
        fitting.fit(made, datamodule=data, ckpt_path=ckpt)
        if export:
            made.export(Path(export), fitting.is_global_zero)
        keep = fitting.callbacks[-1]
    return {"steps": record.steps, "validations": record.validations, "frozen": keep.frozen, "bytes": keep.bytes}


class Keep(Callback):
    """Writes the unsharded trained roles at the end of a run, and checks that the frozen ones have not changed."""

    def __init__(self, weights: str | None, save: str | None, save_at: int | None = None) -> None:
        self.weights, self.save, self.save_at = weights, save, save_at
        self.before: dict[str, Tensor] = {}
        self.frozen = True
        self.bytes = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.before = whole(pl_module, pl_module.frozen_roles)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.bytes = weight_bytes(pl_module)
        after = whole(pl_module, pl_module.frozen_roles)
        self.frozen = all(torch.equal(after[name], before) for name, before in self.before.items())
        trained = whole(pl_module, pl_module.trained_roles)
        if self.weights and trainer.is_global_zero:
            save_file(trained, self.weights)
        if self.save and self.save_at is None:
            trainer.save_checkpoint(self.save)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.save and trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.save)


def weight_bytes(module: Any) -> int:
    """Return the bytes of the weights of all roles in this process; shared memory counts once."""
    sizes = {}
    for role in (*module.trained_roles, *module.frozen_roles):
        for parameter in getattr(module, role).parameters():
            local = getattr(parameter, "ds_tensor", parameter.detach())
            local = getattr(local, "_local_tensor", local)
            sizes[local.data_ptr()] = local.nbytes
    return sum(sizes.values())


def whole(module: Any, roles: Sequence[str]) -> dict[str, Tensor]:
    """Return every unsharded weight of some roles under ``role.name``; called on all ranks."""
    return {
        f"{role}.{name}": tensor.float().cpu().clone()
        for role in roles
        for name, tensor in module.role_strategy.iter_full_params(role)
    }


def largest_differences(one: str | Path, other: str | Path) -> dict[str, float]:
    """Return the largest difference of any weight in two files, by role."""
    ours, theirs = load_file(one), load_file(other)
    assert ours.keys() == theirs.keys()
    result: dict[str, float] = {}
    for name, tensor in ours.items():
        role = name.partition(".")[0]
        result[role] = max(result.get(role, 0.0), float((tensor - theirs[name]).abs().max()))
    return result


def start_deepspeed() -> None:
    """Open a process group with DeepSpeed, as a strategy does."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.distributed.destroy_process_group()
