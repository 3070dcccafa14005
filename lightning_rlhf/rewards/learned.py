"""A reward model from a directory or hub id, with its own tokenizer."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from lightning_rlhf.attention import checked_attention, expect_installed
from lightning_rlhf.batching.sequences import pad_right


class LearnedReward:
    """The score that a sequence classifier with one label gives to prompt and response.

    For reward models whose tokenizer or chat template is not the policy's: the text is put together and tokenised anew.
    One that shares the policy's tokenizer is the module's ``reward_model``, which the strategy spreads over devices.
    The model loads with the first call, once in each process. Safetensors only, no code from the hub.

    Args:
        path: directory that ``save_pretrained`` wrote, or hub id.
        revision: branch, tag or commit of the hub repository.
        dtype: of the parameters.
        device: ``auto`` is the process's GPU where there is one, else the CPU.
        batch_tokens: padded tokens that are scored at once.
        max_tokens: of a longer text the end is scored; None takes all.
    """

    dry_call = False

    def __init__(
        self,
        path: str,
        revision: str | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str = "auto",
        batch_tokens: int = 16384,
        max_tokens: int | None = None,
    ) -> None:
        for name, value in (("batch_tokens", batch_tokens), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.path, self.revision, self.dtype, self.device = path, revision, dtype, device
        self.batch_tokens, self.max_tokens = batch_tokens, max_tokens
        self._model: Any = None

    def __call__(self, prompts: list[Any], completions: list[Any]) -> list[float]:
        """The reward model's score of each completion.

        Args:
            prompts: text, or with ``messages: true`` chat messages, which go through the reward model's own template.
            completions: likewise.
        """
        self._load()
        rows = [self._ids(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        order, scores = sorted(range(len(rows)), key=lambda i: len(rows[i])), torch.zeros(len(rows))
        while order:
            size, longest = 1, len(rows[order[-1]])  # the longest first: where memory does not do, it is seen at once
            while size < len(order) and (size + 1) * longest <= self.batch_tokens:
                size += 1
            chosen = order[-size:]
            scores[chosen] = self._scores([rows[i] for i in chosen])
            del order[-size:]
        return scores.tolist()

    def close(self) -> None:
        """Give up the model; another call loads it again."""
        self._model = None

    @torch.no_grad()
    def _scores(self, rows: list[list[int]]) -> Tensor:
        """The classifier's output at the last token of each row."""
        if self._own_pad is None:  # transformers reads the last token that is not this one
            ends = {row[-1] for row in rows}
            self._model.config.pad_token_id = next(i for i in itertools.count() if i not in ends)
        ids, lengths = pad_right(rows, self._model.config.pad_token_id)
        mask = torch.arange(ids.shape[1]).unsqueeze(0) < lengths.unsqueeze(1)
        found = self._model(input_ids=ids.to(self._model.device), attention_mask=mask.long().to(self._model.device))
        return found.logits.squeeze(-1).float().cpu()

    def _ids(self, prompt: Any, response: Any) -> list[int]:
        if isinstance(prompt, str):
            ids = self._tokenizer(prompt + response)["input_ids"]
        elif self._tokenizer.chat_template is None:
            raise ValueError(f"{self.path} has no chat template: leave out messages: true, and it is given text")
        else:
            text = self._tokenizer.apply_chat_template([*prompt, *response], tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids if self.max_tokens is None else ids[-self.max_tokens :]

    def _load(self) -> None:
        if self._model is not None:
            return
        given = {"revision": self.revision, "trust_remote_code": False}
        config = checked_attention(AutoConfig.from_pretrained(self.path, **given))
        expect_installed(config)
        if config.num_labels != 1:
            raise ValueError(f"{self.path} has {config.num_labels} labels; a reward model has one (num_labels=1)")
        self._tokenizer = AutoTokenizer.from_pretrained(self.path, **given)
        self._own_pad = config.pad_token_id
        device = torch.device(self._chosen_device())
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        model, report = AutoModelForSequenceClassification.from_pretrained(
            self.path,
            config=config,
            dtype=getattr(torch, self.dtype),
            use_safetensors=True,
            output_loading_info=True,
            **given,
        )
        if shown:
            logging.enable_progress_bar()
        if report["missing_keys"]:
            raise ValueError(f"{self.path} is no trained reward model: it lacks {sorted(report['missing_keys'])[:3]}")
        self._model = model.eval().requires_grad_(False).to(device)

    def _chosen_device(self) -> str:
        if self.device != "auto":
            return self.device
        return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
