"""Files of every format, local and behind URLs, are read with the line number of each row."""

import gzip
import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler

import fsspec
import pytest
from huggingface_hub.errors import HTTPError

from lightning_rlhf.data.files import Files, expand
from lightning_rlhf.data.rows import ConcatenatedRows, HubDataset, InMemory, as_rows
from lightning_rlhf.expected_errors import UsageError
from tests.http_stand_in import HTTPStandIn

ROWS = [{"text": "a"}, {"text": "b\nc"}, {"text": "é"}]


def read(*paths):
    return list(Files(tuple(str(path) for path in paths)).rows())


def texts(source):
    return [row["text"] for _, row in as_rows(source).rows()]


def lines(path):
    return [int(where.removeprefix(f"{path}:")) for where, _ in read(path)]


def test_json_array_on_any_number_of_lines(tmp_path):
    path = tmp_path / "x.json"
    for text, expected in (
        (json.dumps(ROWS), [1, 1, 1]),
        (json.dumps(ROWS, indent=2), [2, 5, 8]),
        ("\n\n[\n" + ",\n\n".join(map(json.dumps, ROWS)) + "]\n\n", [4, 6, 8]),
        ("[]", []),
        ("", []),
    ):
        path.write_text(text)
        assert [row for _, row in read(path)] == ROWS[: len(expected)]
        assert lines(path) == expected


def test_json_file_may_hold_json_lines_and_only_broken_lines_are_bad(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{broken\n{"text": "a"}\n\n{"text": "b"}\n')
    assert lines(path) == [1, 2, 4]
    assert next(str(row) for _, row in read(path)).startswith("not JSON")


def test_consecutive_objects_over_several_lines(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("\n".join(json.dumps(row, indent=2) for row in ROWS))
    assert [row for _, row in read(path)] == ROWS
    assert lines(path) == [1, 4, 7]
    nested = [{"messages": [{"role": "user"}]}, {"text": "a"}]
    path.write_text('{\n "messages": [\n  {"role": "user"}\n ]\n}\n{\n "text": "a"\n}')
    assert [row for _, row in read(path)] == nested


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"text": "a"},\n{"text": }\n]', "in the row that begins at line 2: Expecting value; in a .jsonl file, only"),
        ('[{"text": "a"},\n{"text": "b"}', "the file does not end with the array"),
        ('[{"text": "a"}]\n[{"text": "b"}]', "the file does not end with the array"),
        ('[{"text": "a"}, {"te', "in the row that begins at line 1: Unterminated string"),
    ],
)
def test_broken_array_is_not_read_partially(tmp_path, text, reason):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"^cannot read '.*x.json': JSON parse error") as caught:
        read(tmp_path / "x.json")
    assert reason in str(caught.value)


def test_csv_cells_are_text_and_may_hold_newlines_quotes_and_commas(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes('\ufefftext, more\r\n007,1e3\r\n"a\n""b"", c",\r\n\r\né,"x"\n'.encode())
    assert read(path) == [
        (f"{path}:2", {"text": "007", "more": "1e3"}),
        (f"{path}:3", {"text": 'a\n"b", c', "more": ""}),
        (f"{path}:6", {"text": "é", "more": "x"}),
    ]


def test_unclosed_quote_makes_one_bad_row_of_a_csv_file(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('text,more\na,"b\nc,d\n"e",f\ng,"h\ni"\nj,"k\n')
    result = {where: dict(row) if isinstance(row, dict) else str(row) for where, row in read(path)}
    broken = "not CSV: a quote is not closed"
    assert list(result.items()) == [
        (f"{path}:2", broken),
        (f"{path}:3", {"text": "c", "more": "d"}),
        (f"{path}:4", {"text": "e", "more": "f"}),
        (f"{path}:5", {"text": "g", "more": "h\ni"}),
        (f"{path}:7", "not CSV: unexpected end of data"),
    ]


def test_cell_longer_than_the_default_limit_of_python_is_read(tmp_path):
    (tmp_path / "x.csv").write_text("text\n" + "a" * 200_000 + "\n")
    assert len(read(tmp_path / "x.csv")[0][1]["text"]) == 200_000


@pytest.mark.parametrize(
    ("header", "reason"),
    [('"text\na\n', "the header in line 1: not CSV"), ("text,text\na,b\n", "two columns have the same name")],
)
def test_broken_header_is_reported(tmp_path, header, reason):
    (tmp_path / "x.csv").write_text(header)
    with pytest.raises(ValueError, match=rf"^cannot read '.*x.csv': {reason}"):
        read(tmp_path / "x.csv")


def test_parquet_rows_are_numbered_over_all_batches_and_keep_their_types(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"text": f"{i}", "about": {"level": i, "tags": ["x"]}} for i in range(70_000)]
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    result = read(path)
    assert [row for _, row in result] == rows
    assert [result[i][0] for i in (0, 69_999)] == [f"{path}[0]", f"{path}[69999]"]
    path.write_bytes(b"PAR1 no parquet PAR1")
    with pytest.raises(ValueError, match=r"^cannot read '.*x.parquet': ") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_compressed_files_are_read(tmp_path):
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        file.write('{"text": "a"}\n')
    assert read(tmp_path / "x.jsonl.gz") == [(f"{tmp_path}/x.jsonl.gz:1", {"text": "a"})]


@pytest.fixture
def folder(tmp_path):
    """Three parts of a data set, and a file that does not belong to it."""
    for name, row in zip(("b.jsonl", "a.json", "c.csv"), ROWS, strict=True):
        (tmp_path / name).write_text("text\nd\n" if name.endswith("csv") else json.dumps(row))
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "x.jsonl").write_text('{"text": "deep"}')
    return tmp_path


def test_directories_patterns_and_lists_are_read_in_order(folder, monkeypatch):
    assert texts(str(folder)) == ["b\nc", "a", "d"]
    assert texts(f"{folder}/*.json*") == ["b\nc", "a"]
    assert texts(f"{folder}/**/*.jsonl") == ["a", "deep"]
    assert texts([f"{folder}/c.csv", f"{folder}/a.json", InMemory([{"text": "z"}])]) == ["d", "b\nc", "z"]
    monkeypatch.chdir(folder)
    assert [where for where, _ in as_rows("deeper").rows()] == ["deeper/x.jsonl:1"]
    monkeypatch.setenv("HOME", str(folder))
    assert texts("~/c.csv") == ["d"]


def test_directory_with_different_splits_is_rejected(folder):
    (folder / "train-00000-of-00001.jsonl").write_text('{"text": "a"}')
    (folder / "contest.jsonl").write_text('{"text": "a"}')
    assert len(texts(str(folder))) == 5
    (folder / "test-00000-of-00001.jsonl").write_text('{"text": "b"}')
    with pytest.raises(ValueError, match=r"has files of several splits, 'train-.*' and 'test-.*': list the files"):
        as_rows(str(folder))
    assert texts(f"{folder}/train*") == ["a"]


def test_empty_list_is_rejected():
    with pytest.raises(ValueError, match="the list of data is empty"):
        as_rows([])


def test_list_may_hold_hub_ids_and_files(folder):
    sources = as_rows(["some/hub-id", f"{folder}/c.csv"])
    assert isinstance(sources, ConcatenatedRows)
    assert sources.sources == [HubDataset("some/hub-id"), Files((f"{folder}/c.csv",))]


def test_urls_of_fsspec_are_read(folder):
    memory = fsspec.filesystem("memory")
    for name in ("a.json", "b.jsonl"):
        memory.pipe(f"/data/{name}", (folder / name).read_bytes())
    assert texts("memory://data/b.jsonl") == ["a"]
    assert texts("memory://data") == texts("memory://data/*") == ["b\nc", "a"]
    assert expand("memory://data/*.jsonl") == ["memory:///data/b.jsonl"]
    with pytest.raises(FileNotFoundError, match=r"no data at 'memory://data/none.jsonl'"):
        as_rows("memory://data/none.jsonl")


@pytest.mark.parametrize("failure", [HTTPError("no such host"), OSError("no such host")])
def test_address_that_does_not_answer_is_one_line_without_a_traceback(monkeypatch, failure):
    def fail(_):
        raise failure

    monkeypatch.setattr(fsspec, "url_to_fs", fail)
    with pytest.raises(UsageError) as error:
        expand("hf://datasets/owner/name/file.parquet")
    assert str(error.value) == "cannot read 'hf://datasets/owner/name/file.parquet': no such host"
    assert error.value.__cause__ is None  # the command line prints the traceback of a cause


class SilentHandler(SimpleHTTPRequestHandler):
    """Serves files without writing a log."""

    def log_message(self, *output):
        pass


@pytest.mark.parametrize("behind", ["", "?download=true", "?signed=a*b[c]"])
def test_web_address_may_have_a_query_string(folder, monkeypatch, behind):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with HTTPStandIn(("127.0.0.1", 0), partial(SilentHandler, directory=folder)) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            assert texts(f"http://127.0.0.1:{server.server_port}/b.jsonl{behind}") == ["a"]
        finally:
            server.shutdown()
            serving.join()


def test_url_of_an_unknown_scheme_raises_a_one_line_error():
    with pytest.raises(ValueError, match=r"^cannot read 'nowhere://x/y.jsonl': ") as caught:
        as_rows("nowhere://x/y.jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl.gz", b'{"a": 1}\n', "Not a gzipped file"),
        (
            "x.csv.gz",
            gzip.compress(b"a,b\n" * 99, mtime=0)[:-9],
            "Compressed file ended before the end-of-stream marker",
        ),
        ("x.jsonl", gzip.compress(b'{"a": 1}\n', mtime=0), "it is compressed by gzip: rename it to 'x.jsonl.gz'"),
        ("x.csv", "a,b\n1,2\n".encode("utf-16"), "it is encoded as UTF-16: save it as UTF-8"),
        ("x.jsonl", '{"a": 1}'.encode("utf-16"), "it is encoded as UTF-16: save it as UTF-8"),
        ("x.csv", b"question;answer\nq;a\n", "its header 'question;answer' is one cell; separate cells by comm"),
        ("x.csv", b"question\tanswer\nq\ta\n", "not by '\\t'"),
    ],
)
def test_file_with_a_wrong_extension_raises_one_error_instead_of_one_per_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^cannot read '{tmp_path}/{name}': ") as caught:
        list(as_rows(str(tmp_path / name)).rows())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_csv_of_one_column_is_read(tmp_path):
    (tmp_path / "x.csv").write_bytes("\ufeffprompt\r\nwhy; or not?\r\n".encode())
    ((_, row),) = as_rows(str(tmp_path / "x.csv")).rows()
    assert row == {"prompt": "why; or not?"}


def test_small_gzip_with_countless_blank_lines_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_rlhf.data.files._MAX_BLANK_LINES", 100)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n' + b"\n" * 100 + b'{"prompt": "b"}\n' + b"\n" * 200))
    rows = Files((str(path),)).rows()
    assert [next(rows)[1]["prompt"] for _ in range(2)] == ["a", "b"]
    with pytest.raises(ValueError, match=r"rows.jsonl.gz': 100 lines before line 203 are blank"):
        next(rows)
