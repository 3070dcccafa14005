"""Distillation: a student learns the token distributions of a teacher, on responses that it sampled itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.data.columns import source_of
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.algorithms.divergence import Distillation, DistilledScores, TeacherHead, TeacherOutputs
from lightning_rlhf.extras.algorithms.remote_teachers import RemoteTeacher, results
from lightning_rlhf.extras.algorithms.teacher_advantages import NoAdvantages
from lightning_rlhf.functional.logprobs import ActorScores, dtype_of_head
from lightning_rlhf.models.heads import Head
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.models.vocabulary import vocab_size
from lightning_rlhf.modules.evaluation import Evaluation
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.modules.rlhf import RLHFModule
from lightning_rlhf.objectives.aggregation import Aggregation, TokenMean
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from lightning_rlhf.ranges import check_range
from lightning_rlhf.rewards.shaping import ScoreShaping
from lightning_rlhf.types import Experience, PromptBatch, Rollout, StepRollout, TopTokens

Teacher = str | ModelSource | RemoteTeacher


@dataclass(frozen=True)
class Divergence:
    """How far the student's token distributions p are from the teacher's q: a generalized Jensen-Shannon divergence.

        m = beta q + (1 - beta) p
        D = beta KL(q || m) + (1 - beta) KL(p || m), nats
        beta = 0: KL(q || p)
        beta = 1: KL(p || q)

    Both distributions are taken at the sampling temperature.
    :func:`~lightning_rlhf.extras.algorithms.divergence.distillation_scores` computes the formula. See "On-Policy
    Distillation of Language Models", Agarwal et al. 2023, equation 1 and section 3.

    Args:
        beta: interpolation, in [0, 1]. With 0, the forward KL, the student covers every text that the teacher may
            write. With 1, the reverse KL, it avoids texts that the teacher would not write.
        top_k: how many of the teacher's most likely tokens are compared one by one, with all others as one event. None
            compares all tokens.
        memory_mb: memory of the logits and of their gradients at a time, MiB, at least 1. They are computed in chunks,
            so it does not depend on the length of the texts, even with 152,000 tokens in the vocabulary. More memory
            moves fewer bytes, because each chunk reads both heads. That was counted, not measured on a GPU.
    """

    beta: float = 1.0
    top_k: int | None = None
    memory_mb: int = 150

    def __post_init__(self) -> None:
        check_range("beta of a divergence", self.beta, "in [0, 1]")
        check_range("top_k of a divergence", self.top_k, "at least 1 or null")
        check_range("memory_mb of a divergence", self.memory_mb, "at least 1")


class TeacherModule(RLHFModule):
    """Base of modules that compare the student's token distributions with those of frozen teachers."""

    has_entropy_bonus = False
    accepts_given_responses = True
    needs_current_rollouts = False

    def set_teachers(self, by_source: Mapping[Any, Teacher], divergence: Divergence) -> None:
        """Set the teacher of each source, and the divergence from it.

        Args:
            by_source: teachers by the name of the source; None is the source of all prompts.
            divergence: divergence of the student's distributions from the teachers'.

        Raises:
            ValueError: the names of sources are too similar, or the divergence does not fit the teachers.
        """
        if len({role_name(name) for name in by_source}) < len(by_source):
            raise UsageError(
                f"the sources {sorted(by_source)} of the teachers differ only in characters other than letters and "
                f"digits: rename one"
            )
        # Role of the teacher of each source; None is the source of all prompts.
        self.teachers = {name: "actor" if each == "actor" else role_name(name) for name, each in by_source.items()}
        by_role = {role: by_source[name] for name, role in self.teachers.items()}
        self.servers = {role: each for role, each in by_role.items() if isinstance(each, RemoteTeacher)}
        if divergence.top_k is None and ("actor" in by_role or self.servers):
            which = "a TeacherServer returns the most likely tokens only"
            if "actor" in by_role:
                which = "teacher: actor is evaluated before the updates, and its whole distributions cannot be stored"
            raise UsageError(f"{which}: set divergence.top_k, for example to 20")
        others = {"actor", *self.servers}
        frozen: dict[str, Any] = {role: each for role, each in by_role.items() if role not in others}
        self.set_sources(**self.sources, **frozen)
        self.divergence = divergence
        self.uses_frozen_in_updates = divergence.top_k is None and any(role in self.sources for role in frozen)
        self._heads: dict[str, Head] = {}  # full weights of the heads of the teachers, during a step

    def setup(self, stage: str) -> None:
        """Validate the divergence against the vocabularies, and that a student has another prompt as its teacher."""
        super().setup(stage)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        loops = [callback for callback in callbacks if hasattr(callback, "teacher_prompt")]
        if "actor" in self.teachers.values() and loops and all(loop.teacher_prompt is None for loop in loops):
            raise UsageError(
                "teacher: actor with the same prompt has nothing to teach: set teacher_prompt of RolloutLoop, or name "
                "another teacher"
            )
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        self._check_images_of_servers(data)
        for server in self.servers.values():
            server.check(getattr(data, "tokenizer", None), next((loop.temperature for loop in loops), 1.0))
        tokens = self._common_tokens
        if self.divergence.top_k is not None and self.divergence.top_k > tokens:
            raise UsageError(
                f"top_k of the divergence is {self.divergence.top_k}, but student and teacher have only {tokens} "
                f"tokens in common: set top_k to at most {tokens}, or to null to compare all tokens"
            )
        self.check_sources()

    def _check_images_of_servers(self, data: Any) -> None:
        """Raise if a prompt with images has a teacher behind a server."""
        if not self.servers or getattr(data, "image_store", None) is None:
            return
        with_images = {source_of(row.columns) for rows in data.examples.values() for row in rows if row.images}
        for source in with_images:
            if self.teachers.get(source, self.teachers.get(None)) in self.servers:
                raise UsageError(
                    "a TeacherServer reads texts only, and prompts have images: use a model as the teacher, which this "
                    "run loads, or prompts without images"
                )

    @property
    def source_names(self) -> list[str]:
        """Names of the sources of the data, in the order of their numbers."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        names: list[str] = getattr(data, "source_names", [])
        return names

    def check_sources(self) -> None:
        """Raise for prompts whose source has no teacher."""
        if None in self.teachers:
            return
        names = self.source_names
        missing = [name for name in names if name not in self.teachers]
        if missing or not names:
            which = "a teacher for each source, but no sources"
            if missing:
                which = f"no teacher for the source {missing[0]!r}"
            raise UsageError(
                f"{type(self).__name__} has {which}: the rows have {names[:8]} in the column source or data_source, "
                f"the teachers are for {sorted(self.teachers)}"
            )

    @property
    def _common_tokens(self) -> int:
        """Number of tokens of both models; one may have more padding tokens after those of the tokenizer."""
        return min(vocab_size(source) for source in self.sources.values())

    @property
    def _memory_bytes(self) -> int:
        """Memory of logits and their gradients at a time."""
        return self.divergence.memory_mb << 20

    @property
    @override
    def teacher_sources(self) -> list[ModelSource]:
        """Servers check the length of a text themselves."""
        roles = [role for role in self.teachers.values() if role not in self.servers]
        return [self.sources[role if role in self.sources else "actor"] for role in roles]

    # -- the step ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, received: StepRollout) -> Evaluation:
        """Add the teacher's top tokens to the evaluation of a rollout, or get its head for the updates. All ranks."""
        pending = self._requested(received.rollout)
        evaluation = super().evaluate(received)
        self._get_heads()
        if self.divergence.top_k is None or not self.teachers:
            return evaluation
        experience = evaluation.experience
        tokens = self._top_tokens(experience.rollout, pending)
        return replace(evaluation, experience=replace(experience, teacher=tokens))

    def _requested(self, rollout: Rollout) -> dict[str, list[Future[TopTokens]]]:
        """Request the top tokens of the rows of each server, on the first of the ranks with the same data."""
        if self.divergence.top_k is None or not self.role_strategy.is_group_leader:
            return {}
        return {
            role: server.request(
                rollout[self.rows_of(role, rollout)].of_teacher().to("cpu"), self.divergence.top_k, self._vocabulary
            )
            for role, server in self.servers.items()
        }

    @property
    def _vocabulary(self) -> int:
        """Number of tokens of the actor."""
        actor: Any = self.actor
        size: int = actor.lm.config.get_text_config().vocab_size
        return size

    def _get_heads(self) -> None:
        """Set the heads from which whole distributions are computed. All ranks."""
        if self.divergence.top_k is None:
            roles = {role: role if role in self.sources else "actor" for role in self.teachers.values()}
            self._heads = {role: self.role_strategy.full_head(name) for role, name in roles.items()}

    def rows_of(self, role: str, rollout: Rollout) -> Tensor:
        """Return (B,) bool, the rows whose teacher a role is.

        Raises:
            ValueError: the rows have no source, but each source has a separate teacher.
        """
        if None in self.teachers:
            return torch.ones_like(rollout.included)
        if rollout.source is None:
            raise UsageError(f"{type(self).__name__} has a teacher for each source, but the rollout has no sources")
        numbers = [number for number, name in enumerate(self.source_names) if self.teachers.get(name) == role]
        return torch.isin(rollout.source, torch.tensor(numbers, device=rollout.source.device))

    def _top_tokens(self, rollout: Rollout, pending: dict[str, list[Future[TopTokens]]]) -> TopTokens:
        """Return the (B, T, K) top tokens of the teachers, 0 for rows without one. All ranks.

        A rank without rows of a teacher evaluates its first row, because a sharded forward pass needs all ranks.

        Args:
            rollout: rows of this rank.
            pending: requests to the servers of these rows.
        """
        count, width = self.divergence.top_k, rollout.response_ids.shape[1]
        assert count is not None
        outputs = TeacherOutputs(count, self._common_tokens, self._memory_bytes)
        total: list[Tensor] = []
        for role in dict.fromkeys(self.teachers.values()):

            def tokens(rows: Rollout, role: str = role) -> tuple[Tensor, Tensor, Tensor]:
                top: TopTokens = self.call_language_model(role, rows.of_teacher(), of_targets=outputs)
                return top.ids, top.logprobs, top.rest

            has_teacher = self.rows_of(role, rollout)
            rows = _or_first(has_teacher)
            if role in self.servers:
                wait = partial(results, pending.get(role, []), width, count)
                answer = self.role_strategy.run_on_group_leader(wait).to(rollout.prompt_ids.device)
                parts = [answer.ids, answer.logprobs, answer.rest]
            else:
                parts = self.micro_batches.map(tokens, rollout[rows])
            total = total or [part.new_zeros(len(rollout), *part.shape[1:]) for part in parts]
            taught = has_teacher[rows]
            pairs = zip(total, parts, strict=True)
            total = [values.index_copy(0, rows[taught], part[taught]) for values, part in pairs]
        return TopTokens(*total)

    def update_scores(self, rows: Experience) -> ActorScores:
        """Return the student's scores with their divergence from the teacher, with gradient. All ranks."""
        return self.compared(rows.rollout, rows.mask, rows.teacher)

    def compared(
        self, rollout: Rollout, mask: Tensor, tokens: TopTokens | None, token_weights: Tensor | None = None
    ) -> DistilledScores:
        """Return the student's scores of some rows with their divergence from the teacher. All ranks.

        Args:
            rollout: rows.
            mask: (B, T) bool, the tokens that are compared.
            tokens: (B, T, K) top tokens of the teacher; None for whole distributions.
            token_weights: (B, T) factor of each token's divergence in the loss; None for that of the aggregation.
        """
        teachers: list[tuple[TeacherHead | TopTokens, Tensor]]
        if tokens is None:
            teachers = self._distributions(rollout, mask)
        else:
            teachers = [(tokens.map(lambda values: values[mask]), mask)]
        distillation = Distillation(
            teachers=teachers,
            token_weights=self.aggregation.weights(mask) if token_weights is None else token_weights,
            beta=self.divergence.beta,
            memory_bytes=self._memory_bytes,
        )
        scores: DistilledScores = self.call_language_model("actor", rollout, of_targets=distillation)
        return scores

    @torch.no_grad()
    def _distributions(self, rollout: Rollout, mask: Tensor) -> list[tuple[TeacherHead | TopTokens, Tensor]]:
        """Return the whole distributions of each teacher, and the (B, T) mask of its tokens. All ranks."""
        outputs = TeacherOutputs(None, self._common_tokens)
        distributions: list[tuple[TeacherHead | TopTokens, Tensor]] = []
        for role, head in self._heads.items():
            has_teacher = self.rows_of(role, rollout)
            of_role = mask & has_teacher.unsqueeze(1)
            rows = _or_first(has_teacher)
            part = rollout[rows]
            states = self.call_language_model(role, part.of_teacher(), of_role[rows], of_targets=outputs)
            scale = head.scale / rollout.temperature
            source = self.sources.get(role, self.sources["actor"])
            rounds_to = None if source.float32_logits else dtype_of_head(states)
            teacher = TeacherHead(states, head.weight, head.bias, scale, softcap=head.softcap, rounds_to=rounds_to)
            distributions.append((teacher, of_role))
        return distributions

    def policy_objective(self, rows: Experience, scores: ActorScores, means: MeanAccumulator) -> Tensor:
        """Return the summed divergence of some rows."""
        assert isinstance(scores, DistilledScores)
        means.add("loss/distillation", scores.divergence, rows.mask)
        means.add("policy/entropy", scores.entropy, rows.mask)
        return scores.loss

    def rollout_metrics(self, experience: Experience, roles: set[str]) -> dict[str, float]:
        """Return the metrics of a rollout without those of advantages. All ranks."""
        metrics = super().rollout_metrics(experience, roles)
        return {name: value for name, value in metrics.items() if not name.startswith(("advantage/", "return/"))}

    @torch.no_grad()
    def validation_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Tensor]:
        """Log the divergence on the responses to held-out prompts, the mean over tokens."""
        rollout, means = self.pop_rollout().rollout, MeanAccumulator()
        if not self.teachers:
            return {}
        self._get_heads()
        has_teacher = torch.stack([self.rows_of(role, rollout) for role in set(self.teachers.values())]).any(dim=0)
        mask = rollout.response_mask & has_teacher.unsqueeze(1)

        def divergence(rows: Rollout) -> tuple[Tensor]:
            tokens = None if self.divergence.top_k is None else self._top_tokens(rows, self._requested(rows))
            return (self.compared(rows, rows.response_mask, tokens).divergence,)

        means.add("val/divergence", self.micro_batches.map(divergence, rollout)[0], mask)
        self.log_validation(means, mask.sum(), bar="val/divergence")
        return {}


class DistillationModule(TeacherModule):
    """Trains a student policy to match a frozen teacher's token distributions on the student's own responses.

    Use it if you already have a model that does the task. Rewards are only measured. See "On-Policy Distillation of
    Language Models: Learning from Self-Generated Mistakes", Agarwal et al. 2023.

    The run ends with a sentence if the tokenizers differ (except for padding tokens at the end of a vocabulary), if a
    source has no teacher, or if the teacher's prompt is too long with a response. FSDP gathers a copy of the teacher's
    head on every rank in each step.

    Args:
        actor: student to train: directory, hub id or ``FromConfig``.
        teacher: frozen teacher with the same tokenizer. With ``actor``, the student before the updates of a step is the
            teacher and reads another prompt (``teacher_prompt`` of RolloutLoop). You can also pass a
            :class:`RemoteTeacher` such as :class:`~lightning_rlhf.extras.judges.teacher_server.TeacherServer`. Both
            need ``top_k`` of the divergence. For a teacher per source, pass a dictionary from each value of the column
            ``source`` or ``data_source`` to one of these.
        divergence: divergence of the student's distributions from the teacher's.
        aggregation: how the divergences of tokens become one loss, exact over micro-batches and ranks.
        optimizer: factory that makes the student's optimizer from its parameters.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.rlhf.RLHFModule` about the updates.
    """

    def __init__(
        self,
        actor: str | ModelSource,
        teacher: Teacher | dict[str, Teacher],
        divergence: Divergence = Divergence(),
        aggregation: Aggregation = TokenMean(),
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-5, weight_decay=0.01),
        **kwargs: Any,
    ) -> None:
        super().__init__(
            actor,
            ref=None,
            reward_model=None,
            advantages=NoAdvantages(),
            policy_loss=ClippedPolicyLoss(),
            aggregation=aggregation,
            correction=None,
            optimizer=optimizer,
            kl_reward=KLTerm(),
            kl_loss=KLTerm(estimator="k3"),
            score_shaping=ScoreShaping(),
            ent_coef=0.0,
            target_kl=None,
            **kwargs,
        )
        if teacher == {}:
            raise UsageError("teacher must be a model, or one for each source of the prompts, got an empty dictionary")
        self.set_teachers(dict(teacher) if isinstance(teacher, dict) else {None: teacher}, divergence)


def role_name(source: str | None) -> str:
    """Return the name of the role that teaches the prompts of a source; None for all prompts."""
    if source is None:
        return "teacher"
    return "teacher_" + re.sub(r"\W", "_", source)


def _or_first(rows: Tensor) -> Tensor:
    """Return the indices of the rows of a (B,) mask, or the first index if it has none."""
    if not rows.any():
        return torch.zeros(1, dtype=torch.long, device=rows.device)
    return rows.nonzero().squeeze(1)
