"""Files as people have them are read, or one sentence says why not."""

import bz2
import gzip
import json

import pytest

from lightning_rlhf.data.files import _MAX_LINE_CHARACTERS
from lightning_rlhf.data.rows import as_rows
from lightning_rlhf.expected_errors import UsageError

ROWS = [{"prompt": "a", "calls": [{"x": 1}]}, {"prompt": "b", "calls": [{"y": 2}]}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def rows_of(path):
    return [row for _, row in as_rows(str(path)).rows()]


def zst(text):
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.compress(text.encode(), codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.ndjson", str.encode),
        ("x.jsonl.gz", lambda text: gzip.compress(text.encode())),
        ("x.jsonl.bz2", lambda text: bz2.compress(text.encode())),
        ("x.ndjson.zst", zst),
    ],
)
def test_lines_of_json_are_read_under_all_their_names(tmp_path, name, write):
    (tmp_path / name).write_bytes(write(LINES))
    assert rows_of(tmp_path / name) == ROWS
    assert rows_of(tmp_path) == ROWS


def test_cells_can_be_separated_by_tabs(tmp_path):
    (tmp_path / "x.tsv").write_text('prompt\tanswer\n"a\tb"\tc, d\n')
    assert rows_of(tmp_path / "x.tsv") == [{"prompt": "a\tb", "answer": "c, d"}]


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_files_and_streams_are_read_without_the_keys_of_other_rows(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    table, path = pyarrow.Table.from_pylist(ROWS), tmp_path / "x.arrow"
    new = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
    with new(path, table.schema) as writer:
        writer.write_table(table)
    assert rows_of(path) == ROWS
    path.write_bytes(b"rubbish")
    with pytest.raises(UsageError, match=r"cannot read '.*x\.arrow': "):
        rows_of(path)


def test_saved_data_sets_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "two")
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "two/train") == ROWS
    with pytest.raises(UsageError, match=r"has the splits test, train: name one, such as .*two/train$"):
        rows_of(tmp_path / "two")


def test_the_training_files_of_a_clone_are_read(tmp_path, caplog):
    (tmp_path / "README.md").write_text("a data set")
    (tmp_path / "data").mkdir()
    for name in ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"):
        (tmp_path / "data" / name).write_text(LINES if "train" in name else "{}")
    with caplog.at_level("INFO"):
        assert rows_of(tmp_path) == ROWS
    assert "the training files of data/ are read, and not test-00000-of-00001.jsonl" in caplog.text


def test_hidden_files_and_descriptions_of_data_sets_are_not_rows(tmp_path):
    (tmp_path / "x.jsonl").write_text(LINES)
    for name in ("._x.jsonl", "dataset_info.json", ".hidden.json"):
        (tmp_path / name).write_text('{"no": "row"}')
    assert rows_of(tmp_path) == rows_of(tmp_path / "*.json*") == ROWS
    assert rows_of(tmp_path / "dataset_info.json") == rows_of(tmp_path / "*info.json") == [{"no": "row"}]


def test_a_line_that_fills_the_memory_ends_with_a_sentence(tmp_path):
    with gzip.open(tmp_path / "x.jsonl.gz", "wt", compresslevel=1) as file:
        file.write(LINES)
        for _ in range(_MAX_LINE_CHARACTERS >> 20):
            file.write("x" * (1 << 20))
    with pytest.raises(UsageError, match=r"line 3 has 67,108,864 characters or more"):
        rows_of(tmp_path / "x.jsonl.gz")
