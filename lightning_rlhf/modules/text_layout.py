"""Layout of the texts of a forward pass: padded rows, or one packed row in which responses share their prompt."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rlhf.batching.micro import shared_prompt_batches, token_budget_batches
from lightning_rlhf.batching.packing import Packing, pack_responses, pack_texts, pack_turns, pad_parts
from lightning_rlhf.batching.sequences import join
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.images import ImageStore, TextImages, reader
from lightning_rlhf.models import packed_attention
from lightning_rlhf.models.causal import CausalLM
from lightning_rlhf.models.classes import backbone_of
from lightning_rlhf.models.heads import ShortTextLogprobs, check_head
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.models.positions import rotary_length
from lightning_rlhf.strategies.roles import RoleStrategy
from lightning_rlhf.types import Rollout, RolloutImages, TensorBatch

log = logging.getLogger(__name__)
CPU_TOKENS = 2048
_GPU_TOKENS = 2048, 16384  # fewest and most
_BYTES_PER_TOKEN = 70 << 16  # of a GPU: 16,384 tokens from 70 GiB on
_TEST_TOKENS = 12


def tokens_for(gpu_bytes: int) -> int:
    """Return the default of ``micro_batch_tokens`` on a GPU: the power of two that its memory suggests."""
    fewest, most = _GPU_TOKENS
    return min(most, max(fewest, 1 << (gpu_bytes // _BYTES_PER_TOKEN).bit_length() - 1))


class ModelsModule(Protocol):
    """Module with the models that evaluate texts: a RoleModule."""

    sources: dict[str, ModelSource]
    trained_roles: tuple[str, ...]
    frozen_roles: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        """Device of the models."""

    @property
    def trainer(self) -> Trainer:
        """Trainer of the run."""

    @property
    def role_strategy(self) -> RoleStrategy:
        """Strategy that runs the models."""

    @property
    def data_ranks(self) -> DataRanks:
        """The ranks that have different data."""


class TextLayout:
    """Splits the rows of a module's batches into micro-batches, and lays out the texts of each.

    Args:
        module: module that evaluates the texts.
        micro_batch_tokens: most tokens in one forward pass; None is 2,048 on a CPU, and on a GPU
            a power of two by its memory: 4,096 for 24 GiB, 16,384 for 80 GiB.
        packed: whether the texts of a forward pass are laid out in one row without padding.
    """

    def __init__(self, module: ModelsModule, micro_batch_tokens: int | None, packed: bool) -> None:
        self.module = module
        self.micro_batch_tokens = micro_batch_tokens
        self.packed = packed

    @property
    def token_budget(self) -> int:
        """Most tokens in one forward pass; small on a CPU, whose caches are small."""
        device = self.module.device
        if self.micro_batch_tokens is None and device.type == "cuda":
            return tokens_for(torch.cuda.get_device_properties(device).total_memory)
        return self.micro_batch_tokens or CPU_TOKENS

    @property
    def shares_prompts(self) -> bool:
        """Whether responses in one forward pass share their prompt: in packed rows with this package's attention."""
        models = [model.lm for model in self._models]
        return self.packed and all(map(packed_attention.has_packed_attention, models))

    @property
    def divides_rows(self) -> bool:
        """Whether several processes divide the tokens of a row, whose texts must then be without padding in between."""
        return any(model.sequence_ranks is not None for model in self._models)

    @property
    def _models(self) -> list[Any]:
        return [getattr(self.module, name) for name in (*self.module.trained_roles, *self.module.frozen_roles)]

    @cached_property
    def rotary_lengths(self) -> list[int]:
        """Lengths from which on texts have other rotary frequencies in a role; see :func:`rotary_length`."""
        lengths = {rotary_length(source.hf_config(), "longrope") for source in self.module.sources.values()}
        return sorted(length for length in lengths if length is not None)

    def split(self, batch: TensorBatch) -> list[Tensor]:
        """Return the row numbers of each micro-batch, whose texts fit into the token budget.

        Texts with different rotary frequencies are in different micro-batches, longer ones first.

        Raises:
            ValueError: a row of several texts is so long that their rotary frequencies may differ.
        """
        if not self.rotary_lengths:
            return self._split(batch)
        if breaks_of(batch) and int(batch.total_lengths.max()) > self.rotary_lengths[0]:
            raise UsageError(
                f"a conversation with several branches exceeds {self.rotary_lengths[0]} tokens, where the "
                f"model changes its rotary frequencies (longrope): lower max_response_tokens"
            )
        kinds = torch.bucketize(batch.total_lengths.cpu(), torch.tensor(self.rotary_lengths))
        micro_batches = []
        for kind in kinds.unique().flip(0):
            rows = (kinds == kind).nonzero().squeeze(1)
            micro_batches += [rows[part] for part in self._split(batch[rows])]
        return micro_batches

    def _split(self, batch: TensorBatch) -> list[Tensor]:
        prompts = batch.prompt_numbers() if self.shares_prompts else None
        if prompts is not None:
            numbers, prompt_lengths, response_lengths = prompts.tolist()
            return shared_prompt_batches(prompt_lengths, response_lengths, numbers, self.token_budget)
        lengths = batch.real_lengths if self.packed else batch.total_lengths
        return token_budget_batches(lengths, self.token_budget, self.packed)

    def lay_out(self, rollout: Rollout) -> tuple[Tensor, Tensor, Packing | None]:
        """Return prompts with responses, (B, L), the (B, T) index of :func:`join`, and their layout in one row.

        Padded rows are as wide as the longest text. Packed ones leave padding out of the computation, so that the host
        need not wait for the longest length.
        """
        widest = rollout.prompt_ids.shape[1] + rollout.response_ids.shape[1]
        input_ids, index = join(rollout, widest if self.packed else None)
        return input_ids, index, self.pack(rollout, input_ids.shape[1])

    def pack(self, batch: TensorBatch, width: int) -> Packing | None:
        """Return the layout of the texts of a micro-batch in one row, with each prompt once; None if they are padded.

        Rows of several texts are split into them, also if they are padded; rows that processes divide are never padded.

        Args:
            batch: rows of the micro-batch.
            width: width of the padded texts.
        """
        device, breaks = self.module.device, breaks_of(batch)
        if not self.packed and not breaks:
            return None
        if not self.packed and not self.divides_rows:
            return pad_parts(batch.total_lengths.tolist(), breaks, width, device)
        prompts = batch.prompt_numbers() if self.shares_prompts else None
        shared = getattr(batch, "shared", None)
        if breaks and shared is not None and self.shares_prompts:
            return pack_turns(batch.total_lengths.tolist(), breaks, shared.tolist(), width, device)
        if prompts is None:
            return pack_texts(batch.total_lengths.tolist(), width, device, breaks)
        numbers, prompt_lengths, response_lengths = prompts.tolist()
        return pack_responses(prompt_lengths, response_lengths, numbers, width, device=device, breaks=breaks)

    def images_of(self, batch: TensorBatch) -> TextImages | None:
        """Return the images of the texts of a micro-batch; None if no text has one.

        Strategies with sharded weights gather those of the image encoder on all ranks, and all ranks add the gradients
        of one that is trained: a rank whose texts have no image encodes one too, which no text refers to.

        Args:
            batch: rows of the micro-batch.
        """
        images = getattr(batch, "images", None)
        if images is None:
            return None
        numbers, written = (images.numbers, images.written) if isinstance(images, RolloutImages) else (images, {})
        store: ImageStore = self.module.trainer.datamodule.image_store  # type: ignore[attr-defined]
        is_trained = any(self.module.sources[name].train_vision for name in self.module.trained_roles)
        together = is_trained or not self.module.role_strategy.keeps_whole_weights
        distinct = numbers[numbers >= 0].unique()
        if not len(distinct):
            if not together:
                return None
            stand_in = next(iter(store.images.values()), None) or reader().blank_image()
            distinct, written = distinct.new_tensor([stand_in.number]), {stand_in.number: stand_in}
        shown = [written.get(number) or store.images[number] for number in distinct.tolist()]
        tensors = [store.processor.tensors(image) for image in shown]
        renumbered = torch.searchsorted(distinct, numbers).masked_fill(numbers < 0, -1)
        passes = len(reader().images_alike(tensors))
        if together:
            passes = int(self.module.data_ranks.max(torch.tensor(float(passes), device=self.module.device)))
        result: TextImages = reader().TextImages(tensors, renumbered, keys=distinct.tolist(), passes=passes)
        return result.to(self.module.device)

    @torch.no_grad()
    def check(self) -> None:
        """Pad rows from now on if a model does not separate packed texts. All ranks.

        Raises:
            ValueError: a role's log-probs are not those of its model's own logits.
        """
        for name in (*self.module.trained_roles, *self.module.frozen_roles):
            is_exact = self.module.trainer.precision == "32-true" and self.module.sources[name].dtype != "bfloat16"
            if isinstance(getattr(self.module, name), CausalLM):
                self._check_head(name, is_exact)
            if not self.packed:
                continue
            lm = getattr(self.module, name).lm
            fault = packing_fault(lm, partial(self._outputs, name), is_exact, self.module.device)
            # Rounding differs between GPUs, and ranks with different layouts would make different collective calls.
            faults = self.module.data_ranks.sum(torch.tensor(float(fault is not None), device=self.module.device))
            if faults > 0:
                log.warning("The %s is evaluated with padding: %s", name, fault or "texts differ on another rank")
                self.packed = False

    def _check_head(self, name: str, is_exact: bool) -> None:
        """Compare the log-probs of a role with those of its model's own logits. All ranks."""
        lm = getattr(self.module, name).lm
        ids, other = _texts(lm, 2, self.module.device)
        ours, again = (self._outputs(name, ids, None) for _ in range(2))
        half = _TEST_TOKENS // 2
        changed = self._outputs(name, torch.cat([ids[:, :half], other[:, half:]], dim=1), None)
        continued = torch.cat([changed[:, :half], ours[:, half:]], dim=1)
        models = self._outputs(name, ids, None, own_logits=True)
        logprobs = ShortTextLogprobs(ours, again, continued, models)
        check_head(f"the {name}'s {type(lm).__name__}", logprobs, is_exact)

    def _outputs(self, name: str, input_ids: Tensor, packing: Packing | None, **options: bool) -> Tensor:
        """Return the (B, L) outputs of a role at each position of some texts. All ranks."""
        role = self.module.role_strategy.role(name)
        index = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        with self.module.trainer.precision_plugin.forward_context():
            if isinstance(getattr(self.module, name), CausalLM):
                marked = torch.ones_like(input_ids, dtype=torch.bool)
                logprobs: Tensor = role(input_ids, index, input_ids, marked, packing=packing, **options).logprobs
                return logprobs
            scores: Tensor = role(input_ids, index, packing=packing)
            return scores


def breaks_of(batch: TensorBatch) -> list[list[int]]:
    """Return the positions in each row at which a further text begins; an empty list if all rows are single texts."""
    starts = getattr(batch, "text_starts", None)
    if starts is None or not starts.any():
        return []
    breaks: list[list[int]] = [[] for _ in range(len(starts))]
    for row, token in starts.nonzero().tolist():
        breaks[row].append(token)
    # In rollouts, the places are those behind the prompt.
    prompts = getattr(batch, "prompt_lengths", None)  # of rollouts, whose places are those behind the prompt
    if prompts is None:
        return breaks
    return [[prompt + token for token in offsets] for prompt, offsets in zip(prompts.tolist(), breaks, strict=True)]


@torch.no_grad()
def packing_fault(
    lm: Any, evaluate: Callable[[Tensor, Packing | None], Tensor], is_exact: bool, device: torch.device
) -> str | None:
    """Return why texts of a packed row would influence each other, else None. All ranks.

    Architectures that tests have compared with padded texts are accepted. With others, a text is evaluated alone, and
    packed after each of two other texts. Its outputs must not depend on the other text, nor on packing itself, which
    would mean that positions do not restart. Attention passes, because transformers derives its mask from the
    positions; a state that is carried along the row, as in Mamba, does not.

    Args:
        lm: model of a role.
        evaluate: function of (B, L) token ids and their layout that returns the role's (B, L) outputs.
        is_exact: whether the model computes in float32.
        device: device that the model computes on; idle weights may be elsewhere.
    """
    kind = lm.config.model_type
    is_compared = kind in packed_attention.ARCHITECTURES
    if kind in packed_attention.VISION_ARCHITECTURES:
        is_compared = packed_attention.has_packed_attention(lm)
    if is_compared:
        return None
    name = f"{type(lm).__name__} with attention {lm.config._attn_implementation!r}"
    if "position_ids" not in inspect.signature(backbone_of(lm).forward).parameters:
        return f"{name} does not take positions, which separate packed texts"
    one, other, ids = _texts(lm, 3, device)
    packing = pack_texts([_TEST_TOKENS - 5, _TEST_TOKENS], _TEST_TOKENS, ids.device)
    alone = evaluate(ids, None)[-1]
    after_one = evaluate(torch.cat([one, ids]), packing)[-1]
    after_other = evaluate(torch.cat([other, ids]), packing)[-1]
    by_neighbour = float((after_one - after_other).abs().max())
    by_packing = float((after_one - alone).abs().max())
    # Another batch shape changes the rounding; another neighbour changes no bit, except in mixtures of experts.
    rounding = 1e-4 if is_exact else 1e-2
    if by_neighbour <= rounding and by_packing <= 10 * rounding:
        return None
    return (
        f"{name} does not separate packed texts: the outputs of a text change by up to {by_neighbour:.1g} with its "
        f"neighbour, and by {by_packing:.1g} by packing"
    )


def _texts(lm: Any, count: int, device: torch.device) -> Tensor:
    """Return (count, 1, T) random token ids of short texts, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = lm.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (count, 1, _TEST_TOKENS), generator=generator).to(device)
