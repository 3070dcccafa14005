"""Makes ``examples/tasks/`` importable; a wheel has that folder here instead."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "examples" / "tasks")]
