"""The language model in the roles of actor and reference: token ids in, log-probabilities out."""

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rlhf.functional.logprobs import TokenScores, chunked_token_scores
from lightning_rlhf.models.lora import adapters_off, own_weights


class CausalLM(nn.Module):
    """A transformers causal language model that answers with log-probabilities of given tokens.

    Only the hidden states that predict a wanted token meet the head, a chunk at a time: neither padding, nor prompts,
    nor the whole (B, T, V) of logits cost anything. Texts are padded on the right, so causal attention alone keeps
    real tokens from seeing padding and no attention mask is passed.

    Args:
        lm: the model, for example ``Qwen2ForCausalLM``.

    Raises:
        ValueError: the model has no head to speak of.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        if lm.get_output_embeddings() is None or lm.base_model is lm:
            raise ValueError(f"{type(lm).__name__} is no causal language model: it has no output head over a backbone")
        self.lm = lm

    def forward(
        self,
        input_ids: Tensor,
        index: Tensor,
        targets: Tensor,
        mask: Tensor,
        temperature: float = 1.0,
        squares: bool = False,
        adapters: bool = True,
    ) -> TokenScores:
        """Log-probability of each target token and entropy of the distribution it was drawn from.

        Args:
            input_ids: (B, L) int64, right-padded.
            index: (B, T) int64, position in [0, L) whose hidden state predicts the target.
            targets: (B, T) int64.
            mask: (B, T) bool, which targets to score.
            temperature: divides the logits, positive.
            squares: whether to compute ``sum_pi_squared`` too.
            adapters: False asks the model as it was before LoRA adapters were added. An argument, because whoever
                spreads the model over devices acts on calls.

        Returns:
            (B, T) each, 0 where the mask is False.
        """
        with nullcontext() if adapters else adapters_off(self.lm):
            hidden = self.lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        rows = torch.arange(len(index), device=index.device).unsqueeze(1).expand_as(index)
        head = self.lm.get_output_embeddings()
        config = self.lm.config.get_text_config()
        scores = chunked_token_scores(
            hidden[rows[mask], index[mask]],
            head.weight,
            head.bias,
            targets[mask],
            scale=_logit_scale(config) / temperature,
            softcap=getattr(config, "final_logit_softcapping", None),
            squares=squares,
        )
        zeros = torch.zeros(mask.shape, device=mask.device)
        placed = (None if values is None else zeros.masked_scatter(mask, values) for values in scores)
        return TokenScores(*placed)  # type: ignore[arg-type]

    def save_pretrained(self, directory: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write safetensors and config that ``transformers`` and vLLM load.

        Args:
            directory: where to.
            weights: the whole parameters by name, where this process has only parts of them; None takes its own.
                Adapters are merged into them.
        """
        self.lm.save_pretrained(directory, state_dict=weights or own_weights(self.lm))


def _logit_scale(config: object) -> float:
    """Constant that the architecture multiplies its logits by (Cohere) or the inverse of its divisor (Granite)."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
