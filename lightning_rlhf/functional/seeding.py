"""Seeds that are derived from the run's seed and a purpose, so that results do not depend on the order of draws."""

import hashlib
import os


def run_seed() -> int:
    """Return the seed of this run: the argument of ``seed_everything``, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def derive_seed(*parts: int | str) -> int:
    """Derive a seed in [0, 2**63) from all parts and their order; it is equal in every process and on every machine.

    Args:
        parts: integers or short words, for example ``derive_seed(run_seed(), "train", step, row)``.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
