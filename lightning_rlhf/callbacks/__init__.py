"""Makes the top-level ``callbacks/`` folder importable; a wheel has that folder here instead."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "callbacks")]

from lightning_rlhf.rollout.dynamic_sampling import DynamicSampling

from .checkpoint import RunCheckpoint
from .console import Console, StepProgressBar
from .defaults import complete
from .entropy_control import EntropyControl
from .graceful_shutdown import GracefulShutdown
from .health import HealthChecks
from .hf_export import HFExport
from .kl_control import KLControl
from .metrics_csv import MetricsCSV
from .policy_check import PolicyCheck
from .report import Report
from .report_page import ReportPage
from .rollout_log import RolloutLog
from .rollout_loop import RolloutLoop
from .run_state import RunState
from .throughput import Throughput

__all__ = [
    "Console",
    "DynamicSampling",
    "EntropyControl",
    "GracefulShutdown",
    "HFExport",
    "HealthChecks",
    "KLControl",
    "MetricsCSV",
    "PolicyCheck",
    "Report",
    "ReportPage",
    "RolloutLog",
    "RolloutLoop",
    "RunCheckpoint",
    "RunState",
    "StepProgressBar",
    "Throughput",
    "complete",
]
