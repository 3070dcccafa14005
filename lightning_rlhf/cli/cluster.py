"""Who launched this process, as Lightning sees it."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

# In Lightning's order.
_KINDS: tuple[type[ClusterEnvironment], ...] = (
    TorchElasticEnvironment,
    SLURMEnvironment,
    LSFEnvironment,
    MPIEnvironment,
)
_PLACES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "JOB_COMPLETION_INDEX", "JOBSET_NAME")


def cluster(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """The cluster environment that Lightning takes here.

    Args:
        environ: variables of this process.

    Returns:
        Name, finding and fault, the last empty where there is none.
    """
    kind = next((kind for kind in _KINDS if kind.detect()), LightningEnvironment)
    rows = [("launched by", _LAUNCHERS.get(kind, kind.__name__), "")]
    rows += [(name, environ[name], "") for name in _PLACES if name in environ]
    if kind is LightningEnvironment and "JOB_COMPLETION_INDEX" in environ and "NODE_RANK" not in environ:
        fault = (
            "this is a pod of an indexed job, but nothing says which node it is: set NODE_RANK to JOB_COMPLETION_INDEX "
            "and MASTER_ADDR to the first pod's host name, as in examples/cluster/jobset.yaml"
        )
        rows.append(("node", "unknown", fault))
    in_a_job = "SLURM_JOB_ID" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1
    if kind is LightningEnvironment and in_a_job:
        rows.append(
            ("SLURM", "not used", "SLURM gave this job several tasks, but this process was not started by srun")
        )
    return rows


_LAUNCHERS: dict[type[ClusterEnvironment], str] = {
    TorchElasticEnvironment: "torchrun",
    SLURMEnvironment: "srun",
    LightningEnvironment: "the command itself; Lightning starts the other processes of this machine",
}
