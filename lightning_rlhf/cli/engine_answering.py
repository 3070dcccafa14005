"""An engine on this machine that answers prompts for ``generate``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig

from lightning_rlhf.cli.answering import Answer, Prompt, plain
from lightning_rlhf.data.columns import Fields
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.row import BadRow
from lightning_rlhf.data.rows import OnBadRow
from lightning_rlhf.models.loading import Dtype, Pretrained
from lightning_rlhf.models.positions import max_positions
from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.rollout.choose import choose_engine
from lightning_rlhf.rollout.engine import EngineSetup, RolloutEngine
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.types import SamplingParams

_NO_LIMIT = 1 << 30
_BEGINNING = 1 << 12  # bytes of a tensor


class EngineAnswerer:
    """A model on this machine.

    Args:
        model: directory or hub id.
        kind: ``vllm``, ``transformers`` or ``auto``.
        dtype: of the weights; None is bfloat16 with a GPU, else float32.
        sampling: how to draw; stop tokens are added.
        tensor_parallel_size: GPUs that share vLLM.
    """

    def __init__(
        self, model: str, kind: str, dtype: Dtype | None, sampling: SamplingParams, tensor_parallel_size: int = 1
    ) -> None:
        self._source = Pretrained(model, dtype=dtype or ("bfloat16" if torch.cuda.is_available() else "float32"))
        self._config = self._source.hf_config()
        self._sampling, self._engine = sampling, _engine(kind, self._config, tensor_parallel_size)

    def identity(self) -> dict[str, Any]:
        """See :class:`~lightning_rlhf.cli.answering.Answerer`."""
        found = {"model": self._source.path, "dtype": self._source.dtype, "engine": type(self._engine).__name__}
        return {**found, "weights": fingerprint(self._source.path)}

    def prompts(
        self, source: str, columns: dict[str, str], on_bad_row: OnBadRow, as_messages: bool = False
    ) -> list[Prompt]:
        """See :class:`~lightning_rlhf.cli.answering.Answerer`; a prompt without room for a response is a bad row."""
        room = max_positions(self._config) or _NO_LIMIT
        if room <= self._sampling.max_tokens:
            raise ValueError(
                f"max_tokens {self._sampling.max_tokens} leaves no room for a prompt: the model takes {room} tokens"
            )
        data = _PromptRows(
            source, self._source.path, columns=columns, max_tokens=room - self._sampling.max_tokens,
            on_bad_row=on_bad_row, as_messages=as_messages,
        )  # fmt: skip
        data.setup("fit")
        self._tokenizer = data.tokenizer
        print(replace(data.reports["train"], name="prompts"))
        return data.examples["train"]

    def start(self, longest: int, log: Path) -> str:
        """See :class:`~lightning_rlhf.cli.answering.Answerer`."""
        ends = _ends(self._source.path, self._tokenizer.eos_token_id)
        self._sampling = SamplingParams(**{**vars(self._sampling), "stop_token_ids": ends})
        self._engine.check(self._sampling)
        total = longest + self._sampling.max_tokens
        self._engine.start(EngineSetup(Path(self._source.path), self._source.dtype, total, log))
        described = self._engine.wait()
        if isinstance(self._engine, TransformersEngine):  # vLLM loads the directory itself
            lm = self._source.causal().lm
            self._engine.update_weights(whole_tensors(lm), 0)
        return described

    def answer(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Answer]:
        """See :class:`~lightning_rlhf.cli.answering.Answerer`."""
        completions = self._engine.generate([prompt.ids for prompt in prompts], self._sampling, seeds)
        texts = self._tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        parts = zip(texts, completions, strict=True)
        return [Answer(text, len(completion.token_ids), completion.finish_reason) for text, completion in parts]

    def close(self) -> None:
        """See :class:`~lightning_rlhf.cli.answering.Answerer`."""
        self._engine.close()


class _PromptRows(PromptDataModule):
    """Keeps the rows that prompts came in."""

    def fit(self, ids: list[int], what: str) -> list[int]:
        if len(ids) > self.max_tokens:
            said = f"{what} has {len(ids)} tokens, and beside --max-tokens the model has room for {self.max_tokens}"
            raise BadRow(said, f"{what} without room for --max-tokens")
        return ids

    def convert(self, fields: Fields) -> Any:
        text, ids, _, messages = super().convert(fields)
        return Prompt(plain(fields.row), text, ids, messages)

    def tokens(self, example: Any) -> int:
        return len(example.ids)


def _engine(kind: str, config: Any, tensor_parallel_size: int) -> RolloutEngine:
    if kind == "auto":
        chosen, reason = choose_engine(config)
        print(f"engine: {type(chosen).__name__}: {reason}")
        kind = "vllm" if isinstance(chosen, VLLMEngine) else "transformers"
    if kind == "transformers":
        return TransformersEngine()
    return VLLMEngine(0.9, tensor_parallel_size, arguments={"load_format": "safetensors"})


def fingerprint(model: str) -> str:
    """What tells a directory's weights from others, read from the beginning of each tensor; empty for a hub id.

    Raises:
        ValueError: a file is damaged, or only says where the weights are, as one of git-lfs does.
    """
    total = hashlib.blake2b(digest_size=16)
    files = sorted(Path(model).glob("*.safetensors"))
    for path in files:
        try:
            safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"the weights in {path} cannot be read, the file is damaged: {error}") from error
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            total.update(f"{path.name} {path.stat().st_size}".encode() + header)
            first = file.tell()
            for name, entry in json.loads(header).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    file.seek(first + begin)
                    total.update(file.read(min(_BEGINNING, end - begin)))
    return total.hexdigest() if files else ""


def _ends(model: str, end: int) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's, and those that chat models have beside it."""
    try:
        further = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # a model without settings of its own
        further = None
    listed = further if isinstance(further, list) else [] if further is None else [further]
    return tuple(dict.fromkeys([end, *listed]))
