"""Record the advantages of tinker-cookbook's on-policy distillation. README.md has the command."""

import asyncio
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import tinker
import torch
from make_golden import write
from tinker_cookbook.distillation.train_on_policy import incorporate_kl_penalty

SEED = 20261127
LENGTHS = (6, 4, 1)  # tokens of the responses, after prompts of two tokens
COEFFICIENTS = (1.0, 0.5)
generator = torch.Generator().manual_seed(SEED)


def logprobs(length: int) -> torch.Tensor:
    """Return log-probabilities of three decimals, which the file stores exactly; eighths are exact in float32, too."""
    return (-torch.randn(length, generator=generator, dtype=torch.float64).abs() * 16).round() / 8


def teacher(values: torch.Tensor) -> Any:
    """Return a stand-in for a teacher's client: log-probabilities of a text, whose first token has none."""

    async def compute() -> list[float | None]:
        return [None, 0.0, *values.tolist()][: 2 + len(values)]

    def compute_logprobs(text: Any) -> Any:
        return SimpleNamespace(coroutine=compute)

    return SimpleNamespace(compute_logprobs=compute_logprobs)


def record(coefficient: float, policy: list[torch.Tensor], teachers: list[torch.Tensor]) -> dict[str, Any]:
    """Return the advantages of each response."""
    data = []
    for values in policy:
        tokens = 1 + len(values)  # each token of the text but the first is a target; the first target is the prompt's
        fields = {
            "target_tokens": torch.arange(tokens),
            "logprobs": torch.cat([torch.zeros(1), values.float()]),
            "mask": torch.cat([torch.zeros(1), torch.ones(len(values))]),
            "advantages": torch.zeros(tokens),
        }
        inputs = {name: tinker.TensorData.from_torch(value) for name, value in fields.items()}
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(list(range(tokens))), loss_fn_inputs=inputs))
    clients = [teacher(values) for values in teachers]
    asyncio.run(incorporate_kl_penalty(data, clients, list(range(len(data))), coefficient, 0.0))
    advantages = [datum.loss_fn_inputs["advantages"].to_torch()[1:] for datum in data]
    return {"coefficient": coefficient, "advantages": advantages}


def main() -> None:
    """Write teacher_advantages.json next to this file."""
    policy, teachers = ([logprobs(length) for length in LENGTHS] for _ in range(2))
    source = {
        "package": "tinker-cookbook",
        "version": importlib.metadata.version("tinker-cookbook"),
        "command": "python tests/golden/make_teacher_advantages.py",
        "seed": SEED,
    }
    cases = [record(coefficient, policy, teachers) for coefficient in COEFFICIENTS]
    write("teacher_advantages", {"source": source, "logprobs": policy, "teacher": teachers, "cases": cases})


if __name__ == "__main__":
    main()
