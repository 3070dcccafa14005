"""The public names of ``lightning_rlhf.callbacks``, which are imported on first use (PEP 562)."""

from typing import TYPE_CHECKING

from lightning_rlhf.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_rlhf.callbacks.defaults import complete as complete
    from lightning_rlhf.callbacks.loop.rollout_loop import RolloutLoop as RolloutLoop
    from lightning_rlhf.callbacks.survival.checkpoint import RunCheckpoint as RunCheckpoint
    from lightning_rlhf.callbacks.survival.graceful_shutdown import GracefulShutdown as GracefulShutdown
    from lightning_rlhf.callbacks.survival.run_state import RunState as RunState
    from lightning_rlhf.extras.algorithms.entropy_control import EntropyControl as EntropyControl
    from lightning_rlhf.extras.algorithms.kl_control import KLControl as KLControl
    from lightning_rlhf.extras.algorithms.policy_check import PolicyCheck as PolicyCheck
    from lightning_rlhf.extras.console.console import Console as Console
    from lightning_rlhf.extras.console.console import StepProgressBar as StepProgressBar
    from lightning_rlhf.extras.console.rollout_log import RolloutLog as RolloutLog
    from lightning_rlhf.extras.export.hf_export import HFExport as HFExport
    from lightning_rlhf.extras.health.callback import HealthChecks as HealthChecks
    from lightning_rlhf.extras.late_ranks.callback import LateRanks as LateRanks
    from lightning_rlhf.extras.recorded_rollouts.recorder import RolloutRecorder as RolloutRecorder
    from lightning_rlhf.extras.records.metrics_csv import MetricsCSV as MetricsCSV
    from lightning_rlhf.extras.records.throughput import Throughput as Throughput
    from lightning_rlhf.extras.references.following import FollowingReference as FollowingReference
    from lightning_rlhf.extras.report.page_callback import ReportPage as ReportPage
    from lightning_rlhf.extras.report.summary import Report as Report
    from lightning_rlhf.extras.router_replay.replay import RouterReplay as RouterReplay
    from lightning_rlhf.rollout.dynamic_sampling import DynamicSampling as DynamicSampling

_HOME = {
    "Console": "lightning_rlhf.extras.console.console",
    "DynamicSampling": "lightning_rlhf.rollout.dynamic_sampling",
    "EntropyControl": "lightning_rlhf.extras.algorithms.entropy_control",
    "FollowingReference": "lightning_rlhf.extras.references.following",
    "GracefulShutdown": "lightning_rlhf.callbacks.survival.graceful_shutdown",
    "HFExport": "lightning_rlhf.extras.export.hf_export",
    "HealthChecks": "lightning_rlhf.extras.health.callback",
    "KLControl": "lightning_rlhf.extras.algorithms.kl_control",
    "LateRanks": "lightning_rlhf.extras.late_ranks.callback",
    "MetricsCSV": "lightning_rlhf.extras.records.metrics_csv",
    "PolicyCheck": "lightning_rlhf.extras.algorithms.policy_check",
    "Report": "lightning_rlhf.extras.report.summary",
    "ReportPage": "lightning_rlhf.extras.report.page_callback",
    "RolloutLog": "lightning_rlhf.extras.console.rollout_log",
    "RolloutLoop": "lightning_rlhf.callbacks.loop.rollout_loop",
    "RolloutRecorder": "lightning_rlhf.extras.recorded_rollouts.recorder",
    "RouterReplay": "lightning_rlhf.extras.router_replay.replay",
    "RunCheckpoint": "lightning_rlhf.callbacks.survival.checkpoint",
    "RunState": "lightning_rlhf.callbacks.survival.run_state",
    "StepProgressBar": "lightning_rlhf.extras.console.console",
    "Throughput": "lightning_rlhf.extras.records.throughput",
    "complete": "lightning_rlhf.callbacks.defaults",
}
__all__ = list(_HOME)
__getattr__, __dir__ = lazy_names("lightning_rlhf.callbacks", _HOME)
