"""The data of a run of TRL: rows, columns, lengths, and the sizes of batches."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.migration.parts import rows_of
from lightning_rlhf.extras.migration.trl_model import NO_MODEL
from lightning_rlhf.extras.migration.trl_options import TRLOptions

NO_ROWS = "set the rows of training"
_ANY_LENGTH = 32_768  # longest text of a run without a limit
_PROMPT = 512  # longest prompt of a run without a limit


def data_section(options: TRLOptions) -> dict[str, Any]:
    """Return the options of the data module."""
    tokenizer = options.carry("tokenizer_name_or_path") or options.carry("model_name_or_path", NO_MODEL)
    data: dict[str, Any] = {"tokenizer": tokenizer, "train": _rows_of_training(options), **_validation(options)}
    data |= {"batch_size": _batch_size(options), **_lengths(options)}
    if columns := _columns(options):
        data["columns"] = columns
    if not _shuffles(options):
        data["shuffle"] = False
    if kwargs := options.carry("chat_template_kwargs"):
        data["chat_template_kwargs"] = kwargs
    return data


def _group_size(options: TRLOptions) -> int:
    return int(options.carry("num_generations")) if options.is_online else 1


def _batch_size(options: TRLOptions) -> int:
    """Return the prompts, or rows, of a step."""
    texts, group = options.texts_of_step(), _group_size(options)
    if texts % group:
        options.note(f"per_device_train_batch_size: {texts} responses of a step are no multiple of {group}")
    return max(1, texts // group)


def _validation(options: TRLOptions) -> dict[str, Any]:
    """Return the rows of validation and the size of their batches; empty without any."""
    rows = _rows_of_validation(options)
    if rows is None:
        return {}
    if not options.is_set("per_device_eval_batch_size"):
        return {"val": rows}
    texts = int(options.carry("per_device_eval_batch_size")) * options.devices
    group = int(options.carry("num_generations_eval", _group_size(options)))
    return {"val": rows, "val_batch_size": max(1, texts // group)}


def _columns(options: TRLOptions) -> dict[str, str]:
    """Return the columns of the data that have other names than the fields that they are read for."""
    columns = {"prompt": str(options.carry("dataset_prompt_column"))}
    if options.trainer == "sft":
        columns["text"] = str(options.carry("dataset_text_field"))
    return {field: column for field, column in columns.items() if column != field}


def _rows_of_training(options: TRLOptions) -> Any:
    mixture = [rows for entry in options.carry("datasets", []) for rows in _rows_of_entry(options, entry)]
    if mixture:
        return mixture if len(mixture) > 1 else mixture[0]
    rows = _rows_of_split(options, "train")
    if rows is None:
        options.note("dataset_name: the file names no data; write your rows to run.yaml, under train")
    return rows or NO_ROWS


def _rows_of_validation(options: TRLOptions) -> Any:
    """Return the rows of validation; None if TRL does not validate, or the file names none."""
    if options.eval_strategy() == "no":
        for unread in ("eval_steps", "dataset_test_split", "per_device_eval_batch_size"):
            options.leave(unread, "eval_strategy is no: nothing is validated, as in TRL")
        return None
    rows = None if options.carry("datasets") else _rows_of_split(options, "test")
    if rows is None:
        options.note("eval_strategy: the file names no rows of validation: write them to run.yaml, under val")
    return rows


def _rows_of_split(options: TRLOptions, split: str) -> Any:
    """Return the rows of a split of the file's one data set, ``train`` or ``test``; None if it names none."""
    name, config, files = map(options.carry, ("dataset_name", "dataset_config", "data_files"))
    theirs = options.carry(f"dataset_{split}_split")
    return _source_of_rows(options, name or "json", theirs, config, files) if name or files else None


def _rows_of_entry(options: TRLOptions, entry: Any) -> list[Any]:
    """Return the sources of an entry of a mixture of data sets."""
    if not isinstance(entry, dict) or not entry.get("path"):
        raise UsageError(f"datasets: each entry needs its path, got {entry!r:.80}")
    further = {name: value for name, value in entry.items() if name not in ("path", "split", "name", "data_files")}
    if further:
        options.note(f"datasets: {further!r:.80} of {entry['path']} (a part has all of its rows and columns)")
    split = entry.get("split") or "train"
    rows = _source_of_rows(options, entry["path"], split, entry.get("name"), entry.get("data_files"))
    if rows is None:
        raise UsageError(f"datasets: data_files of {entry['path']} has no files for its split {split!r}")
    return rows if isinstance(rows, list) else [rows]


def _source_of_rows(options: TRLOptions, path: str, split: str, config: str | None, files: Any) -> Any:
    if files and "[" in split:
        options.note(f"{split}: a split of files has all of their rows")
    return rows_of(path, split, config, files)


def _shuffles(options: TRLOptions) -> bool:
    """Return whether rows are shuffled, which ``shuffle_dataset`` decides where TRL does not sample at random."""
    if options.is_online:
        return bool(options.carry("shuffle_dataset"))
    sampling = options.carry("train_sampling_strategy")
    if sampling == "sequential":  # in the order of the set, which TRL may have shuffled
        return bool(options.carry("shuffle_dataset"))
    if sampling == "group_by_length":
        options.leave("train_sampling_strategy")
    options.settle("shuffle_dataset")
    return True


def _lengths(options: TRLOptions) -> dict[str, Any]:
    """Return the options of the data for texts that are too long."""
    if options.is_online:
        if not options.is_set("max_prompt_length"):
            options.note(
                f"max_tokens of the data is {_PROMPT}: added, because TRL has no limit; a longer prompt is a bad row"
            )
        return {"max_tokens": int(options.carry("max_prompt_length", _PROMPT))}
    if "max_length" in options.nulls:
        options.note(f"max_length: null: a text beyond {_ANY_LENGTH} tokens, max_tokens here, is a bad row")
        return {"max_tokens": _ANY_LENGTH, "too_long": "bad_row"}
    length = options.carry("max_length")
    if "max_length" not in options.given and options.trainer == "sft":  # the name of earlier releases
        length = options.carry("max_seq_length", length)
    if options.trainer == "reward":
        return {"max_tokens": int(length), "too_long": "drop"}  # TRL leaves out such pairs
    cut = "cut_start" if options.carry("truncation_mode") == "keep_end" else "cut_end"
    return {"max_tokens": int(length), "too_long": cut}
