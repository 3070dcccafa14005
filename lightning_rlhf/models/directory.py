"""Checks of directories with models and adapters before their files are read."""

from __future__ import annotations

from pathlib import Path

from lightning_rlhf.expected_errors import MissingFileError, UsageError
from lightning_rlhf.paths import describe_missing_path, names_a_path

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED_ADAPTER = "adapter_model.bin"


def expect_model_directory(path: str, needs_weights: bool = True) -> None:
    """Raise unless a model's path is a directory with a model, or can be a hub id.

    Args:
        path: directory or hub id.
        needs_weights: False accepts a ``config.json`` alone, which is enough to plan a run.

    Raises:
        FileNotFoundError: the directory does not exist, or has no model.
        ValueError: its weights are pickled, or in a GGUF file.
    """
    if not names_a_path(path) and "/" in path:
        return
    expected = (
        f"no model at {path!r}: expected a directory with config.json and safetensors "
        f"(an earlier run's export, for example) or a hub id such as 'Qwen/Qwen2.5-0.5B-Instruct'"
    )
    gguf = sorted([Path(path)] if path.endswith(".gguf") else Path(path).glob("*.gguf"))
    if gguf and not any(Path(path).glob("*.safetensors")):
        raise UsageError(
            f"no model at {path!r}: {gguf[0].name} is a GGUF file, which is not read: use the directory or hub id with "
            f"safetensors that it was made from"
        )
    if not Path(path).is_dir():
        raise MissingFileError(f"{expected}; {describe_missing_path(path)}")
    _check_not_pickled(Path(path))
    has_weights = any(Path(path).glob("*.safetensors")) or not needs_weights
    if not (Path(path, "config.json").is_file() and has_weights):
        names = sorted(entry.name for entry in Path(path).iterdir())[:5]
        hint = ""
        if Path(path, "export", "config.json").is_file():
            hint = f"; did you mean {str(Path(path, 'export'))!r}?"
        raise MissingFileError(f"{expected}; {Path(path).absolute()} contains {', '.join(names) or 'nothing'}{hint}")


def expect_adapter_directory(path: str) -> None:
    """Raise unless an adapter's path is a directory with its two files, or can be a hub id.

    Args:
        path: directory or hub id.

    Raises:
        FileNotFoundError: the directory or a file does not exist.
        ValueError: the weights are pickled.
    """
    if not names_a_path(path) and "/" in path and not Path(path).is_dir():
        return
    if Path(path, PICKLED_ADAPTER).is_file() and not Path(path, ADAPTER_WEIGHTS).is_file():
        raise UsageError(
            f"no adapter at {path!r}: {PICKLED_ADAPTER} is a pickled file, which can run code and is not read: write "
            f"its tensors to {ADAPTER_WEIGHTS}, as save_pretrained of peft does"
        )
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not Path(path, name).is_file()]
    if missing:
        raise MissingFileError(
            f"no adapter at {path!r}: {missing[0]} is missing; expected a directory in peft's format, such as an "
            f"export of HFExport(adapter=True); {_present(Path(path))}"
        )


def _present(directory: Path) -> str:
    if not directory.is_dir():
        return describe_missing_path(str(directory))
    names = sorted(entry.name for entry in directory.iterdir())[:5]
    if "config.json" in names:
        return "it contains a whole model: set it as path, not as adapter"
    return f"it contains {', '.join(names) or 'nothing'}"


def _check_not_pickled(directory: Path) -> None:
    """Validate that a directory does not have only pickled weights.

    Raises:
        ValueError: it does; the message names the first file.
    """
    pickled = sorted([*directory.glob("*.bin.index.json"), *directory.glob("*.bin"), *directory.glob("*.pt*")])
    if pickled and not any(directory.glob("*.safetensors")):
        raise UsageError(
            f"no model at {str(directory)!r}: expected safetensors, but {pickled[0].name} has pickled weights, which "
            f"can run code and are not read: convert them with save_pretrained, or use a revision with safetensors"
        )
