"""Host memory of a node."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lightning_rlhf.extras.plan import memory
from lightning_rlhf.extras.plan.setup import Role, Run, Strategy

_FLOAT32_BYTES = 4
_BFLOAT16_BYTES = 2


@dataclass(frozen=True)
class NodeMemory:
    """Bytes of the first node's host memory, without programs and page cache.

    Args:
        training: pushed weights, copies for checkpoints and offloaded tensors of all GPUs of the node.
        loading: the largest role while it is loaded, before the terms of ``training`` exist.
        exporting: whole weights of the first trained role that rank 0 gathers for an export.
    """

    training: int
    loading: int
    exporting: int

    @property
    def peak(self) -> int:
        """Most bytes at one time."""
        return max(self.training + self.exporting, self.loading)


def node_memory(run: Run, host: Counter[str], gpus_per_node: int) -> NodeMemory:
    """Compute the host memory of the first node.

    Where ranks keep parts of the weights (FSDP, ZeRO-3), rank 0 loads a role whole and sends the others their parts;
    elsewhere every rank loads it. With ``rlhf_single`` and ``rlhf_ddp`` the first rank alone saves. Weights are
    exported in the dtype of the parameters.

    Args:
        run: run to plan.
        host: bytes of host memory for each GPU, by the terms of :mod:`.memory`.
        gpus_per_node: number of GPUs of a node.
    """
    training = host.total() * gpus_per_node
    if run.strategy.kind in ("single", "ddp"):  # `host` has the copy for checkpoints, and only rank 0 makes it
        training -= host[memory.SAVED] * (gpus_per_node - 1)
    largest = max(role.model.elements * _bytes_per_weight(role, run.strategy) for role in run.roles)
    trained = next(role for role in run.roles if role.trained)
    return NodeMemory(
        training=training,
        loading=largest * (1 if run.strategy.shards_weights else gpus_per_node),
        exporting=trained.model.elements * _bytes_per_weight(trained, run.strategy),
    )


def _bytes_per_weight(role: Role, strategy: Strategy) -> int:
    """Return the bytes of a weight of a role as it is loaded and exported.

    A trained role in bfloat16 is loaded in float32, its master weights, except under ZeRO, which makes them itself.
    """
    has_masters = role.has_master_weights and strategy.kind != "zero"
    return _FLOAT32_BYTES if role.dtype != "bfloat16" or has_masters else _BFLOAT16_BYTES
