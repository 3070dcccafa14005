"""The model of the roles critic and reward model, which computes one number per position."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rlhf.batching.packing import Packing
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.images import FeatureCache, TextImages
from lightning_rlhf.models.causal import flat_index, hidden_states
from lightning_rlhf.models.classes import backbone_of
from lightning_rlhf.models.lora import merged_weights
from lightning_rlhf.models.master_weights import in_bfloat16_if_chosen
from lightning_rlhf.models.packed_attention import keep_masks
from lightning_rlhf.models.score_heads import LayeredScore, name_layered_class
from lightning_rlhf.models.sequence_parallel import SequenceRanks, layout_of


class ScalarModel(nn.Module):
    """A transformers sequence classifier with one label, evaluated at every position.

    Its head is a linear layer, or two with ReLU between, which transformers' own classifiers do not have.

    Scores are normalised by a mean and standard deviation, so that reward model and critic start on the same scale. A
    reward-model run measures them on samples of the policy and saves them in the model's ``config.json``.

    Args:
        lm: classifier, for example ``Qwen2ForSequenceClassification`` with ``num_labels=1``.

    Raises:
        ValueError: the model's head does not have one output, or the model has no backbone.
    """

    score_mean: Tensor
    score_std: Tensor

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        score: Any = getattr(lm, "score", None)
        head = score[-1] if isinstance(score, nn.Sequential) else score
        if not isinstance(head, nn.Linear) or head.out_features != 1:
            head_shape = "no linear head named 'score'"
            if isinstance(head, nn.Linear):
                head_shape = f"{head.out_features} outputs"
            raise UsageError(
                f"{type(lm).__name__} has {head_shape}; a critic or reward model needs one output (num_labels=1)"
            )
        if backbone_of(lm) is None:
            raise UsageError(f"{type(lm).__name__} has no backbone under its head: use another model for this role")
        keep_masks(lm)
        self.lm: Any = lm
        self.image_features: FeatureCache | None = None  # of a frozen image encoder
        self.computes_in_bfloat16 = False  # with float32 weights, by use_master_weights
        self.sequence_ranks: SequenceRanks | None = None  # processes that divide the tokens of each packed row
        self.register_buffer("score_mean", torch.tensor(float(getattr(lm.config, "score_mean", 0.0))))
        self.register_buffer("score_std", torch.tensor(float(getattr(lm.config, "score_std", 1.0))))

    @in_bfloat16_if_chosen
    def forward(
        self, input_ids: Tensor, index: Tensor, packing: Packing | None = None, images: TextImages | None = None
    ) -> Tensor:
        """Compute the normalised score at each position of ``index``.

        Args:
            input_ids: (B, L) int64, right-padded.
            index: (B, T) int64 positions in [0, L).
            packing: layout of the texts in one row without padding; None computes padded rows.
            images: images of the texts; None for texts without images.

        Returns:
            (B, T) float32 scores, in deviations of the scores on which :meth:`fit_normalization` was called.
        """
        ranks = self.sequence_ranks
        packing = layout_of(input_ids, packing, ranks)
        hidden = hidden_states(self.lm, input_ids, packing, images=images, cache=self.image_features, ranks=ranks)
        of_row = self.lm.score(hidden.to(self.lm.score.weight.dtype)).squeeze(-1).float()
        in_row = flat_index(input_ids, index, packing)
        if ranks is None:
            scores = of_row[in_row]
        else:
            scores = ranks.sum(of_row[in_row % len(of_row)] * ranks.is_local(in_row, len(of_row)))
        return (scores - self.score_mean) / self.score_std

    @torch.no_grad()
    def fit_normalization(self, scores: Tensor) -> None:
        """Set mean and standard deviation so that the texts of these scores get mean 0 and standard deviation 1.

        Args:
            scores: (N,) scores of this model, normalised with the current mean and deviation; N is at least 2.
        """
        self.score_mean += scores.mean() * self.score_std  # with the deviation before its change
        self.score_std *= scores.std().clamp(min=1e-6)

    @property
    def adapter_metadata(self) -> dict[str, str]:
        """Texts to store with adapters: mean and standard deviation of the scores."""
        return {"score_mean": repr(self.score_mean.item()), "score_std": repr(self.score_std.item())}

    def save_pretrained(self, directory: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write safetensors and config that ``AutoModelForSequenceClassification`` loads.

        Args:
            directory: output directory.
            weights: full parameters by name with adapters merged, for a sharded model; None uses the model's parameters
                and merges its adapters.
        """
        self.lm.config.score_mean, self.lm.config.score_std = self.score_mean.item(), self.score_std.item()
        self.lm.save_pretrained(directory, state_dict=weights or merged_weights(self.lm))
        if isinstance(self.lm.score, LayeredScore):
            name_layered_class(Path(directory))
