"""Record the log-likelihoods of rankings and of their pairs under choix. README.md has the command."""

import datetime
import importlib.metadata
import itertools
import json
import platform
from pathlib import Path
from typing import Any

import choix
import numpy as np

SEED = 20261201
COMMAND = "python tests/golden/make_rankings.py"
SIZES = (2, 3, 4, 7)


def case(generator: np.random.Generator, size: int) -> dict[str, Any]:
    """Return scores of three decimals, the order of the answers from best to worst, and what choix computes of them."""
    scores = (2 * generator.standard_normal(size)).round(3)
    order = generator.permutation(size).tolist()
    pairs = list(itertools.combinations(order, 2))
    return {
        "inputs": {"scores": scores.tolist(), "best_to_worst": order},
        "outputs": {
            "log_likelihood_rankings": float(choix.log_likelihood_rankings([order], scores)),
            "log_likelihood_pairwise": float(choix.log_likelihood_pairwise(pairs, scores)),
            "pairs": len(pairs),
        },
    }


def main() -> None:
    """Write rankings.json."""
    generator = np.random.default_rng(SEED)
    record = {
        "command": COMMAND,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("choix", "numpy", "scipy")},
        "cases": [case(generator, size) for size in SIZES for _ in range(3)],
    }
    path = Path(__file__).parent / "rankings.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
