"""Record the losses of TRL for pairs and for single labels. README.md has the command."""

import datetime
import importlib.metadata
import json
import platform
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DPOTrainer, KTOTrainer

SEED = 20261123
COMMAND = "python tests/golden/make_preferences.py"
PAIRS, TOKENS = 5, 6
# TRL's name of the loss, label smoothing.
LOSSES = (("sigmoid", 0.0), ("robust", 0.1), ("robust", 0.3), ("hinge", 0.0), ("ipo", 0.0), ("sigmoid_norm", 0.0))
generator = torch.Generator().manual_seed(SEED)


def normal(scale: float, *shape: int) -> Tensor:
    """Return random numbers of three decimals, which the file stores exactly."""
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).round(decimals=3)


def lengths(rows: int) -> Tensor:
    """Return the number of tokens of each answer, in [1, TOKENS]."""
    return torch.randint(1, TOKENS + 1, (rows,), generator=generator)


def masked(logprobs: Tensor, counts: Tensor) -> Tensor:
    """Set log-probabilities after the last token of each answer to zero, as TRL's models return them."""
    return logprobs * (torch.arange(logprobs.shape[1]) < counts.unsqueeze(1))


def trainer(**options: Any) -> SimpleNamespace:
    """Return an object with only the attributes that the method uses."""
    accelerator = SimpleNamespace(device="cpu", gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor)
    return SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=accelerator, aux_loss_enabled=False,
        precompute_ref_logps=True, _metrics={"eval": defaultdict(list)}, _total_train_tokens=0, **options,
    )  # fmt: skip


def answer_of(logprobs: Tensor) -> Any:
    """Return a model output with only the attributes that the method uses."""
    zeros = torch.zeros_like(logprobs)
    return SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def inputs_of(counts: Tensor, rows: int) -> dict[str, Tensor]:
    """Return token ids of one prompt token followed by the answer."""
    ids = torch.ones(rows, TOKENS + 1, dtype=torch.long)
    position = torch.arange(TOKENS + 1)
    marked = ((position >= 1) & (position <= counts.unsqueeze(1))).long()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": marked}


def pair_loss(logprobs: Tensor, ref: Tensor, counts: Tensor, kind: str, beta: float, smoothing: float) -> Any:
    """Return the mean loss and the metrics of DPOTrainer._compute_loss."""
    made = trainer(
        ld_alpha=None, f_divergence_type="reverse_kl", beta=beta, label_smoothing=smoothing, use_weighting=False,
        loss_types=[kind], loss_weights=[1.0],
    )  # fmt: skip
    chosen, rejected = ref.sum(dim=1).chunk(2)
    inputs = {**inputs_of(counts, len(ref)), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss = DPOTrainer._compute_loss(made, lambda **_: answer_of(logprobs), inputs, False)
    return loss, {name: values[0] for name, values in made._metrics["eval"].items()}


def record_pairs() -> list[dict[str, Any]]:
    """Return the mean loss of some pairs, its gradient, and the loss of each pair."""
    records = []
    for kind, smoothing in LOSSES:
        for beta in (0.1, 0.7):
            counts = lengths(2 * PAIRS)
            logprobs, ref = (masked(-normal(2.0, 2 * PAIRS, TOKENS).abs(), counts) for _ in range(2))
            logprobs.requires_grad_()
            mean, metrics = pair_loss(logprobs, ref, counts, kind, beta, smoothing)
            (gradient,) = torch.autograd.grad(mean, [logprobs])
            both = [torch.tensor([i, i + PAIRS]) for i in range(PAIRS)]
            losses = [pair_loss(logprobs.detach()[i], ref[i], counts[i], kind, beta, smoothing)[0].item() for i in both]
            inputs = {"kind": kind, "beta": beta, "label_smoothing": smoothing, "logprobs": logprobs, "ref": ref,
                      "lengths": counts}  # fmt: skip
            outputs = {"losses": losses, "mean": mean, "gradient": gradient}
            wanted = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
                      "logps/rejected")  # fmt: skip
            records.append({"inputs": inputs, "outputs": outputs | {name: metrics[name] for name in wanted}})
    return records


def record_judgements() -> list[dict[str, Any]]:
    """Return results of KTOTrainer._compute_loss: answers of both kinds, of one kind, and a negative KL."""
    records = []
    for labels, weights, shift in (
        ([1, 0, 1, 1, 0], (1.0, 1.0), 1.0),
        ([1, 0, 1, 1, 0], (0.7, 1.3), 1.0),
        ([0, 1, 0, 0, 1], (1.0, 2.0), -3.0),
        ([1, 1, 1, 1, 1], (1.0, 1.0), 1.0),
        ([0, 0, 0, 0, 0], (1.0, 1.5), 1.0),
    ):
        counts = lengths(len(labels))
        logprobs, ref = (masked(-normal(2.0, len(labels), TOKENS).abs(), counts) for _ in range(2))
        other, other_ref = (-normal(2.0, len(labels), TOKENS).abs() for _ in range(2))
        other = (other + shift / 2).round(decimals=3)
        logprobs.requires_grad_()
        made = trainer(
            beta=0.3, desirable_weight=weights[0], undesirable_weight=weights[1], loss_type="kto", calculate_KL=True,
            _compute_kl_logps=lambda model, batch, kl=other: kl.sum(dim=1),
        )  # fmt: skip
        inputs = {**inputs_of(counts, len(labels)), "label": torch.tensor(labels), "ref_logps": ref.sum(dim=1),
                  "ref_KL_logps": other_ref.sum(dim=1)}  # fmt: skip
        output = answer_of(logprobs)
        mean = KTOTrainer._compute_loss(made, lambda output=output, **_: output, inputs, False)
        (gradient,) = torch.autograd.grad(mean, [logprobs])
        arguments = {"beta": 0.3, "weights": weights, "labels": labels, "logprobs": logprobs, "ref": ref,
                 "mismatched": other, "mismatched_ref": other_ref}  # fmt: skip
        metrics = {name: values[0] for name, values in made._metrics["eval"].items()}
        wanted = {name: value for name, value in metrics.items() if re.match("kl|rewards|logps", name)}
        records.append({"inputs": arguments, "outputs": {"mean": mean, "gradient": gradient, **wanted}})
    return records


def main() -> None:
    """Write preferences.json next to this file."""
    source = {"package": "trl", "version": importlib.metadata.version("trl"), "python": platform.python_version(),
              "torch": torch.__version__, "command": COMMAND, "seed": SEED,
              "date": datetime.date.today().isoformat()}  # fmt: skip
    record = {"source": source, "pairs": record_pairs(), "judgements": record_judgements()}
    text = json.dumps(record, indent=1, default=lambda tensor: tensor.tolist())
    rows = re.sub(r"\[\s+([^\[\]{}]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text)
    Path(__file__).with_name("preferences.json").write_text(rows + "\n")


if __name__ == "__main__":
    main()
