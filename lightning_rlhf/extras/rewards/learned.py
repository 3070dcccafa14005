"""A reward from a sequence classifier with its own tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.rewards.scored_text import scored_ids
from lightning_rlhf.models.attention import check_attention_package, set_attention
from lightning_rlhf.models.classes import scalar_model_class
from lightning_rlhf.models.loading import Pretrained, quiet_transformers


@dataclass(eq=False)
class LearnedReward:
    """Scores prompt and response with a sequence classifier with one label.

    Use it if your reward model's tokenizer or chat template differs from the policy's. The text is tokenised again, as
    :class:`~lightning_rlhf.RewardModule` does, with the end token after a finished response. If the model shares the
    policy's tokenizer, use the module's ``reward_model`` instead, because the strategy distributes it.

    The model is loaded at the first call, once per process, from safetensors only and without code from the hub. It
    reads texts, with ``<image>`` for each image of a prompt. A response that the length limit cut gets no end token.

    The score is normalised with the mean and deviation in the model's ``config.json``, so you get the same score as
    from a module's ``reward_model`` for the same tokens. In plain transformers, the logit of an export is the score
    before that. The head may have any of the names that other libraries store: ``score``, OpenRLHF's ``value_head``
    with ``mean`` and ``std`` (used with ``normalize_reward: true``), TRL's ``v_head.summary``, LLaMA-Factory's
    ``value_head.safetensors``, or the two layers of Qwen2.5-Math-RM. Models with several outputs, such as ArmoRM, are
    refused with the names of their tensors.

    Args:
        path: directory written by ``save_pretrained``, or hub id.
        revision: branch, tag or commit of the hub repository.
        dtype: dtype of the parameters.
        device: device name. ``auto`` is the process's GPU if there is one, else the CPU.
        batch_tokens: padded tokens per batch.
        max_tokens: most tokens to score. Of a longer text, only the last tokens are scored. None: no limit.
    """

    path: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    batch_tokens: int = 16384
    max_tokens: int | None = None

    dry_call: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, value in (("batch_tokens", self.batch_tokens), ("max_tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        self._model: Any = None

    def __call__(self, prompts: list[Any], completions: list[Any], finished: list[bool] | None = None) -> list[float]:
        """Score each completion with the reward model.

        Args:
            prompts: texts, or with ``messages: true`` chat messages, formatted by the reward model's own template.
            completions: responses in the same form.
            finished: False for a completion that the length limit cut, and which has no end token; None: all ended.
        """
        self._load()
        ended = finished or [True] * len(completions)
        rows = [self._ids(*row) for row in zip(prompts, completions, ended, strict=True)]
        scores = torch.zeros(len(rows))
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        while order:
            longest = len(rows[order[-1]])  # longest rows first, so that too little memory fails at once
            size = 1
            while size < len(order) and (size + 1) * longest <= self.batch_tokens:
                size += 1
            batch = order[-size:]
            scores[batch] = self._scores([rows[i] for i in batch])
            del order[-size:]
        return scores.tolist()

    def close(self) -> None:
        """Release the model; another call loads it again."""
        self._model = None

    @torch.no_grad()
    def _scores(self, rows: list[list[int]]) -> Tensor:
        """Compute the score of each text: of an encoder that of the whole text, else that at its last token."""
        ids, lengths = pad_right(rows, self._pad)
        ids, lengths = ids.to(self._device), lengths.to(self._device)
        if not self._is_encoder:
            scores: Tensor = self._model(ids, (lengths - 1).unsqueeze(1)).squeeze(1).cpu()
            return scores
        mask = torch.arange(ids.shape[1], device=self._device).unsqueeze(0) < lengths.unsqueeze(1)
        logits: Tensor = self._model(input_ids=ids, attention_mask=mask.long()).logits
        return logits.squeeze(-1).float().cpu()

    def _ids(self, prompt: Any, response: Any, finished: bool) -> list[int]:
        ids = scored_ids(self._tokenizer, prompt, response, finished, self.path)
        if self.max_tokens is None:
            return ids
        return ids[-self.max_tokens :]

    def _load(self) -> None:
        if self._model is not None:
            return
        source = Pretrained(self.path, self.revision, self.dtype)
        config = source.hf_config()
        check_attention_package(config)
        self._tokenizer = AutoTokenizer.from_pretrained(self.path, revision=self.revision, trust_remote_code=False)
        self._device = torch.device(self._device_name())
        self._pad = config.get_text_config().pad_token_id or 0
        self._is_encoder = not has_score(config)
        if not self._is_encoder:
            source.expect_head()
        model = self._encoder() if self._is_encoder else source.scalar()
        self._model = model.eval().requires_grad_(False).to(self._device)

    def _encoder(self) -> Any:
        """Load a classifier of whole texts, such as DeBERTa."""
        options = {"revision": self.revision, "trust_remote_code": False}
        config = set_attention(AutoConfig.from_pretrained(self.path, **options))
        if config.num_labels != 1:
            raise UsageError(f"{self.path} has {config.num_labels} labels; a reward model needs one (num_labels=1)")
        with quiet_transformers():
            model, report = AutoModelForSequenceClassification.from_pretrained(
                self.path,
                config=config,
                dtype=getattr(torch, self.dtype),
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
        if report["missing_keys"]:
            raise UsageError(f"{self.path} is not a trained reward model: missing {sorted(report['missing_keys'])[:3]}")
        return model

    def _device_name(self) -> str:
        if self.device != "auto":
            return self.device
        if torch.cuda.is_available():
            return f"cuda:{torch.cuda.current_device()}"
        return "cpu"


def has_score(config: PretrainedConfig) -> bool:
    """Return whether the classifier of an architecture scores single tokens, and not whole texts as encoders do.

    Args:
        config: configuration of the model.
    """
    with torch.device("meta"):
        return hasattr(scalar_model_class(config).from_config(config, trust_remote_code=False), "score")
