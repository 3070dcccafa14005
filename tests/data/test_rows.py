"""Errors for unusable data: the file, the line, the reason, and the number of such rows."""

import json

import pytest

from lightning_rlhf.data.columns import text_of
from lightning_rlhf.data.files import Files
from lightning_rlhf.data.row import BadRow, RowSource
from lightning_rlhf.data.rows import HubDataset, RowReport, as_rows, use_rows


def texts(source, on_bad_row="error"):
    return use_rows(source, "train data", lambda row: text_of(row, "text"), on_bad_row)


def write(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines))
    return str(path)


@pytest.fixture
def bad_file(tmp_path):
    """Ten lines, of which the first, the fourth (empty) and the last are valid."""
    return write(
        tmp_path / "bad.jsonl",
        '{"text": "good"}',
        '{"txt": "elsewhere", "id": 7}',
        '{"text": null}',
        "",
        '{"text": ["no", "text"]}',
        '{"text": "  \\n"}',
        '{"text"',
        '["text", "in", "a", "list"]',
        b'{"text": "caf\xe9"}\n',
        '{"text": "good too"}',
    )


def test_every_kind_of_bad_row_is_reported_with_file_line_and_reason(bad_file):
    with pytest.raises(ValueError, match=r"train data: 7 of 9 rows cannot be used \(set on_bad_row: skip") as caught:
        texts(bad_file)
    heading, *lines = str(caught.value).split("\n")
    assert heading.endswith("(set on_bad_row: skip to skip them):")
    assert lines == [
        f"  {bad_file}:2: no column 'text', only ['id', 'txt']; did you mean 'txt'?",
        f"  {bad_file}:3: column 'text' holds null, expected text",
        f"  {bad_file}:5: column 'text' holds list, expected text",
        f"  {bad_file}:6: column 'text' is empty",
        f"  {bad_file}:7: not JSON: Expecting ':' delimiter at column 8",
        # after the first five, the first of each further kind
        f"  {bad_file}:8: a JSON list, expected an object",
        f"  {bad_file}:9: column 'text' is not valid UTF-8 text",
    ]


def test_skip_keeps_good_rows_and_counts_bad_ones_by_reason(bad_file):
    saved, report = texts(bad_file, "skip")
    assert saved == ["good", "good too"]
    assert report.used == 2
    assert report.dropped == {
        "no column 'text'": 1,
        "column 'text' holds null, expected text": 1,
        "column 'text' holds list, expected text": 1,
        "column 'text' is empty": 1,
        "not JSON": 1,
        "not an object": 1,
        "column 'text' is not valid UTF-8 text": 1,
    }
    assert str(report).startswith("train data: 9 rows read, 2 kept; dropped 1: ")


def test_only_the_first_five_of_many_bad_rows_are_stored_and_shown(tmp_path):
    path = write(tmp_path / "x.jsonl", *(json.dumps({"other": "y" * 1000}) for _ in range(1000)))
    with pytest.raises(ValueError, match="1000 of 1000 rows") as caught:
        texts(path)
    assert "\n  ... and 995 more" in str(caught.value)
    assert len(str(caught.value)) < 5000


def test_no_usable_row_is_an_error_even_if_bad_rows_are_skipped(tmp_path):
    with pytest.raises(ValueError, match="train data: 1 row read, 0 kept; dropped 1: no column 'text': no row"):
        texts(write(tmp_path / "x.jsonl", "{}"), "skip")
    with pytest.raises(ValueError, match="train data: 0 rows read, 0 kept: no row can be used"):
        texts(write(tmp_path / "empty.jsonl"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "\\ud800"}', "is not valid UTF-8 text"),
        ("7", "a JSON int, expected an object"),
        ("null", "a JSON NoneType, expected an object"),
        ('{"text": ' + "9" * 5000 + "}", "not readable JSON"),
        ("[" * 100_000, "not readable JSON"),
        ('{"text": "a"} {"text": "b"}', "not JSON: Extra data at column 15"),
    ],
    ids=["half a surrogate pair", "number", "null", "huge number", "deep nesting", "two objects"],
)
def test_lines_that_are_not_rows_are_reported(tmp_path, line, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        texts(write(tmp_path / "x.jsonl", line))
    assert f"{tmp_path}/x.jsonl:1: " in str(caught.value)


def test_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path):
    path = write(tmp_path / "x.jsonl", b'\xef\xbb\xbf{"text": "caf\xc3\xa9"}\r\n', b'{"text": "b"}')
    assert texts(path)[0] == ["café", "b"]


@pytest.mark.parametrize("path", ["data/nothing.jsonl", "nothing.csv", "./nothing", "/no/where", "~/x", "a/b/c"])
def test_missing_file_raises_a_one_line_error(path):
    with pytest.raises(FileNotFoundError, match=r"no data at .* expected an existing .jsonl, .json"):
        as_rows(path)


def test_directory_and_file_of_unknown_type_are_rejected(tmp_path):
    write(tmp_path / "notes.txt", "text")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(FileNotFoundError, match=r"expected an existing .jsonl"):
            as_rows(str(path))


@pytest.mark.parametrize("name", ["Anthropic/hh-rlhf", "some-one/data-v1.5", "gsm8k"])
def test_text_that_is_not_a_path_is_a_hub_id(name):
    assert as_rows(name) == HubDataset(name)


def test_row_source_is_returned_unchanged():
    class Two:
        def rows(self):
            yield "first", {"text": "a"}
            yield "second", {}

    assert isinstance(Two(), RowSource)
    with pytest.raises(ValueError, match=r"\n  second: no column 'text', only \[\]"):
        texts(Two())


def test_error_in_a_converter_is_not_reported_as_a_bad_row(tmp_path):
    def convert(row):
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        use_rows(write(tmp_path / "x.jsonl", "{}"), "train data", convert, "skip")


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """An environment without network and with an empty cache."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("name", "content", "line"),
    [("x.json", '[{"text": "a"}, {"text": "b"}]', 1), ("x.csv", "text\na\nb\n", 2)],
)
def test_json_and_csv_files_are_read_with_line_numbers(tmp_path, name, content, line):
    path = write(tmp_path / name, content)
    assert texts(path)[0] == ["a", "b"]
    with pytest.raises(ValueError, match=rf"x\.\w+:{line}: no column 'other', only \['text'\]"):
        use_rows(path, "train data", lambda row: text_of(row, "other"), "error")


@pytest.mark.usefixtures("no_hub")
def test_broken_file_raises_a_one_line_error(tmp_path):
    with pytest.raises(ValueError, match=r"^cannot read '.*x\.json': JSON parse error") as caught:
        texts(write(tmp_path / "x.json", "{nonsense"))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_hub")
def test_unreachable_hub_id_raises_a_one_line_error():
    with pytest.raises(
        ValueError, match=r"^cannot read .missing/data., split .test., as a dataset of the hub: "
    ) as caught:
        list(HubDataset("missing/data", split="test").rows())
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None  # the command line prints the traceback of a cause


def test_reason_with_details_is_counted_under_its_kind():
    report = RowReport("data", 1)
    for length in (7, 8):
        report.dropped[BadRow(f"{length} tokens", "too long").kind] += 1
    assert str(report) == "data: 3 rows read, 1 kept; dropped 2: too long"


def test_line_numbers_count_empty_lines(tmp_path):
    source = Files((write(tmp_path / "x.jsonl", "", "", '{"text": "a"}'),))
    assert [where for where, _ in source.rows()] == [f"{tmp_path}/x.jsonl:3"]
