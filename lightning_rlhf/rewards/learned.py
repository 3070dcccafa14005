"""A reward from a sequence classifier with its own tokenizer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.data.image_parts import text_messages
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.attention import check_attention_package, set_attention
from lightning_rlhf.paths import READ_ERRORS


@dataclass(eq=False)
class LearnedReward:
    """Score of prompt and response by a sequence classifier with one label.

    For reward models whose tokenizer or chat template differs from the policy's: the text is tokenised again. Use the
    module's ``reward_model``, which the strategy distributes, for a model that shares the policy's tokenizer. The model
    is loaded at the first call, once per process, from safetensors only and without code from the hub. It reads texts:
    ``<image>`` stands for each image of a prompt.

    Args:
        path: directory written by ``save_pretrained``, or hub id.
        revision: branch, tag or commit of the hub repository.
        dtype: dtype of the parameters.
        device: device name; ``auto`` is the process's GPU if there is one, else the CPU.
        batch_tokens: number of padded tokens per batch.
        max_tokens: largest number of tokens to score; only the last tokens of a longer text are scored. None: no limit.
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

    def __call__(self, prompts: list[Any], completions: list[Any]) -> list[float]:
        """Score each completion with the reward model.

        Args:
            prompts: texts, or with ``messages: true`` chat messages, formatted by the reward model's own template.
            completions: responses in the same form.
        """
        self._load()
        rows = [self._ids(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
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
        """Compute the classifier's output at the last token of each row."""
        if self._pad_token_id is None:  # transformers scores the last token that is not padding
            ends = {row[-1] for row in rows}
            self._model.config.pad_token_id = next(i for i in itertools.count() if i not in ends)
        ids, lengths = pad_right(rows, self._model.config.pad_token_id)
        mask = torch.arange(ids.shape[1]).unsqueeze(0) < lengths.unsqueeze(1)
        device = self._model.device
        output = self._model(input_ids=ids.to(device), attention_mask=mask.long().to(device))
        return output.logits.squeeze(-1).float().cpu()

    def _ids(self, prompt: Any, response: Any) -> list[int]:
        if isinstance(prompt, str):
            ids = self._tokenizer(prompt + response)["input_ids"]
        elif self._tokenizer.chat_template is None:
            raise UsageError(f"{self.path} has no chat template: remove messages: true, so that it receives text")
        else:
            try:
                text = self._tokenizer.apply_chat_template(text_messages([*prompt, *response]), tokenize=False)
            except (TemplateError, RecursionError, *READ_ERRORS) as error:  # a template is a program
                raise UsageError(f"the chat template of {self.path} rejects a conversation: {error}") from error
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.max_tokens is None:
            return ids
        return ids[-self.max_tokens :]

    def _load(self) -> None:
        if self._model is not None:
            return
        options = {"revision": self.revision, "trust_remote_code": False}
        config = set_attention(AutoConfig.from_pretrained(self.path, **options))
        check_attention_package(config)
        if config.num_labels != 1:
            raise UsageError(f"{self.path} has {config.num_labels} labels; a reward model needs one (num_labels=1)")
        self._tokenizer = AutoTokenizer.from_pretrained(self.path, **options)
        self._pad_token_id = config.pad_token_id
        device = torch.device(self._device_name())
        progress_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        model, report = AutoModelForSequenceClassification.from_pretrained(
            self.path,
            config=config,
            dtype=getattr(torch, self.dtype),
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
        if progress_bar:
            logging.enable_progress_bar()
        if report["missing_keys"]:
            raise UsageError(f"{self.path} is not a trained reward model: missing {sorted(report['missing_keys'])[:3]}")
        self._model = model.eval().requires_grad_(False).to(device)

    def _device_name(self) -> str:
        if self.device != "auto":
            return self.device
        if torch.cuda.is_available():
            return f"cuda:{torch.cuda.current_device()}"
        return "cpu"
