"""Rows broken in twenty ways, many of each: every bad row is reported with its position, and every good one is used."""

import csv
import io
import json
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.data.columns import AmbiguousColumns
from lightning_rlhf.data.conversations import ConversationDataModule
from lightning_rlhf.data.files import Files
from lightning_rlhf.data.preferences import PreferenceDataModule
from lightning_rlhf.data.row import BadRow
from tests.data.rows_given import Letters
from tests.helpers import properties

LIMIT = 40

# -- rows that parse but cannot be used: the row, and a part of its error message ---------------------------------

PROMPT = {"prompt": "who?", "completion": " me"}
NO_TEXT = "expected text"
NO_MESSAGE = "needs 'role' and text or parts in 'content'"
BROKEN = {
    "number for a row": (7, "a JSON int, expected an object"),
    "text for a row": ("who?", "a JSON str, expected an object"),
    "null for a row": (None, "a JSON NoneType, expected an object"),
    "list for a row": ([PROMPT], "a JSON list, expected an object"),
    "empty row": ({}, "no column 'completion', only []"),
    "no prompt": ({"completion": "me"}, "no column 'prompt'"),
    "no completion": ({"prompt": "who?"}, "no column 'completion'"),
    "capital column": ({"Prompt": "who?", "completion": "me"}, "no column 'prompt', only ['Prompt', 'completion']"),
    "null prompt": ({**PROMPT, "prompt": None}, "column 'prompt' holds null"),
    "null completion": ({**PROMPT, "completion": None}, "column 'completion' holds null"),
    "number for a prompt": ({**PROMPT, "prompt": 3}, "column 'prompt' holds int, " + NO_TEXT),
    "NaN for a prompt": ({**PROMPT, "prompt": float("nan")}, "column 'prompt' holds float, " + NO_TEXT),
    "bool for a completion": ({**PROMPT, "completion": True}, "column 'completion' holds bool, " + NO_TEXT),
    "empty prompt": ({**PROMPT, "prompt": ""}, "column 'prompt' is empty"),
    "blank completion": ({**PROMPT, "completion": " \n\t"}, "column 'completion' is empty"),
    "half a surrogate pair": ({**PROMPT, "prompt": "a\ud800"}, "column 'prompt' is not valid UTF-8"),
    "too long": ({**PROMPT, "prompt": "a" * 99}, "the text has 103 tokens, the limit is 40"),
    "no messages": ({"messages": []}, NO_MESSAGE),
    "text for messages": ({"messages": "who?"}, NO_MESSAGE),
    "texts for messages": ({"messages": ["who?", "me"]}, NO_MESSAGE),
    "message without content": ({"messages": [{"role": "user"}]}, NO_MESSAGE),
    "message without role": ({"messages": [{"content": "who?"}]}, NO_MESSAGE),
    "null content": ({"messages": [{"role": "user", "content": None}]}, NO_MESSAGE),
    "unknown speaker": ({"conversations": [{"from": "cat", "value": "miaow"}]}, "a message is from 'cat'"),
    "no assistant message": ({"messages": [{"role": "user", "content": "who?"}]}, "has no assistant message"),
    "rejected by the template": (
        {"messages": [{"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}]},
        "the chat template rejects the conversation: no system message, please",
    ),
    "messages without prompt": ({"completion": [{"role": "assistant", "content": "me"}]}, "no column 'prompt'"),
}
WHOLE = json.dumps(PROMPT)
BROKEN_LINES = {name: (json.dumps(row).encode(), reason) for name, (row, reason) in BROKEN.items()} | {
    "cut off": (WHOLE[:-3].encode(), "not JSON"),
    "Python for JSON": (repr(PROMPT).encode(), "not JSON: Expecting property name"),
    "two rows": (f"{WHOLE} {WHOLE}".encode(), "not JSON: Extra data"),
    "no quotes": (b"{prompt: who?, completion: me}", "not JSON"),
    "trailing comma": (WHOLE[:-1].encode() + b",}", "not JSON"),
    "huge number": (b'{"prompt": ' + b"9" * 5000 + b"}", "not readable JSON"),
    "deep nesting": (b"[" * 5000, "not readable JSON"),
    "Latin-1": (b'{"prompt": "caf\xe9", "completion": "me"}', "column 'prompt' is not valid UTF-8"),
    "no JSON at all": (b"Dear all,", "not JSON"),
    "binary": (b"\x00\x01\xff\xfe", "not JSON"),
}

PAIR = {"prompt": "who?", "chosen": " me", "rejected": " you", "margin": 1.0}
TEXTS = ("prompt", "chosen", "rejected")
BROKEN_PAIRS = {"the same": ({**PAIR, "rejected": " me"}, "chosen and rejected are the same text")}
NULLS = {}
for column in TEXTS:
    for blank in ("", " ", "\u00a0"):
        BROKEN_PAIRS[f"{blank!r} for {column}"] = ({**PAIR, column: blank}, f"column {column!r} is empty")
    BROKEN_PAIRS[f"{column} too long"] = ({**PAIR, column: "a" * 99}, "tokens, the limit is 40")
    NULLS[f"null {column}"] = ({**PAIR, column: None}, f"{column}' holds null")
for value in (float("nan"), float("inf"), -float("inf")):
    BROKEN_PAIRS[f"margin {value}"] = ({**PAIR, "margin": value}, "expected a finite number")


def cells(*values):
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(values)
    return line.getvalue().encode()


BROKEN_CSV = {name: (cells(*row.values()), reason) for name, (row, reason) in BROKEN_PAIRS.items()} | {
    "a cell too few": (b"who?,me,you", "3 cells, the header has 4"),
    "a cell too many": (b"who?,me,you,1,2", "5 cells, the header has 4"),
    "one cell": (b"Dear all", "1 cells, the header has 4"),
    "a quote never closed": (b'"who?,me,you,1', "not CSV: a quote is not closed"),
    "a quote never closed at the end": (b'who?,me,you,"1', "not CSV: a quote is not closed"),
    "text after a quote": (b'"who?" she asked,me,you,1', "not CSV: ',' expected after '\"'"),
    "a word for a number": (b"who?,me,you,much", "margin holds 'much', expected a number"),
    "no number": (b"who?,me,you,", "margin holds '', expected a number"),
    "a decimal comma": (b'who?,me,you,"1,5"', "margin holds '1,5', expected a number"),
    "Latin-1": (b"caf\xe9?,me,you,1", "column 'prompt' is not valid UTF-8"),
    "Latin-1 answer": (b"who?,caf\xe9,you,1", "column 'chosen' is not valid UTF-8"),
    "UTF-16": (b"\xff\xfewho?,me,you,1", "column 'prompt' is not valid UTF-8"),
}


SHOWN = 5  # bad rows in the message
GOOD = None  # the kind of a good row; that of a broken one is its name


def mixed(broken, times):
    """Return kinds of rows: each kind of broken row ``times`` times in turn, with good rows among them."""
    kinds = []
    for _ in range(times):
        for number, name in enumerate(broken):
            kinds.append(name)
            if number % 6 == 2:
                kinds.append(GOOD)
    return kinds


@pytest.fixture(params=[100, pytest.param(1000, marks=pytest.mark.slow)])
def times(request):
    """The number of rows of each kind in the file."""
    return request.param


def check(kind, path, tmp_path, rows, position, broken):
    """Check that the report has every broken row with its position and reason, and that all good rows are used.

    Args:
        kind: class of the data module.
        path: file with the rows.
        tmp_path: directory for the report.
        rows: kind of each row.
        position: function that returns the end of a row's location from its number.
        broken: content and reason of each kind of broken row.
    """
    file = tmp_path / "bad.jsonl"
    data = kind(str(path), Letters(chat=True), max_tokens=LIMIT, on_bad_row="skip", bad_rows=str(file))
    data.setup("fit")
    report = data.reports["train"]
    bad_rows = [(f"{path}{position(number)}", name) for number, name in enumerate(rows) if name is not GOOD]
    check_file([json.loads(line) for line in file.read_text().splitlines()], bad_rows, broken)
    assert report.dropped.total() == report.bad == len(bad_rows)
    assert len(data.examples["train"]) == report.used == rows.count(GOOD)
    assert all(example == data.examples["train"][0] for example in data.examples["train"])
    message = report.error_message()  # with on_bad_row="error"
    assert f"{len(bad_rows)} of {len(rows)} rows cannot be used" in message
    assert all(f"\n  {where}: " in message for where, _ in bad_rows[:SHOWN])


def check_file(written, bad_rows, broken):
    """Check that the file of bad rows has their locations and reasons."""
    assert [bad["where"] for bad in written] == [where for where, _ in bad_rows]
    for bad, (_, name) in zip(written, bad_rows, strict=True):
        assert broken[name][1] in bad["why"], name


@pytest.mark.parametrize("broken", [BROKEN_LINES, BROKEN_CSV], ids=["lines", "csv"])
def test_kinds_of_broken_rows_are_numerous(broken):
    assert len(broken) >= 20


def test_every_broken_line_of_a_jsonl_file_is_reported(tmp_path, times):
    rows, path = mixed(BROKEN_LINES, times), tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(WHOLE.encode() if name is None else BROKEN_LINES[name][0] for name in rows))
    check(ConversationDataModule, path, tmp_path, rows, lambda number: f":{number + 1}", BROKEN_LINES)


def test_every_broken_row_of_a_json_array_is_reported_with_its_line(tmp_path, times):
    rows, path = mixed(BROKEN, times), tmp_path / "x.json"
    lines = ",\n".join(WHOLE if name is None else json.dumps(BROKEN[name][0]) for name in rows)
    path.write_text(f"[\n{lines}\n]\n")
    check(ConversationDataModule, path, tmp_path, rows, lambda number: f":{number + 2}", BROKEN)


def test_every_broken_line_of_a_csv_file_is_reported(tmp_path, times):
    rows, path = mixed(BROKEN_CSV, times), tmp_path / "x.csv"
    good = cells(*PAIR.values())
    lines = [good if name is None else BROKEN_CSV[name][0] for name in rows]
    path.write_bytes(b"\n".join([b"prompt,chosen,rejected,margin", *lines]))
    check(PreferenceDataModule, path, tmp_path, rows, lambda number: f":{number + 2}", BROKEN_CSV)


def test_every_broken_row_of_a_parquet_file_is_reported(tmp_path, times):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    broken = BROKEN_PAIRS | NULLS
    rows, path = mixed(broken, times), tmp_path / "x.parquet"
    table = pyarrow.Table.from_pylist([PAIR if name is None else broken[name][0] for name in rows])
    parquet.write_table(table, path)
    check(PreferenceDataModule, path, tmp_path, rows, lambda number: f"[{number}]", broken)


names = st.sampled_from(
    ["prompt", "completion", "messages", "conversations", "role", "content", "from", "value", "tools", "label"]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
rows_of_junk = st.lists(st.dictionaries(names, json_values, max_size=4), max_size=4)


@properties
@given(rows_of_junk)
def test_random_rows_are_used_or_reported_as_bad(rows):
    data = ConversationDataModule("unread", Letters(chat=True), on_bad_row="skip")
    data.tokenizer = Letters(chat=True).load()
    for row in rows:
        try:
            result = data.convert(data.columns.find(row))
        except (BadRow, AmbiguousColumns):
            continue
        assert len(result.ids) == len(result.loss_mask) > 1
        assert any(result.loss_mask)
        assert not result.loss_mask[0]


@properties
@given(st.lists(st.binary(max_size=30), max_size=8), st.sampled_from(["x.jsonl", "x.csv"]))
def test_random_bytes_raise_no_other_error_and_no_line_is_reported_twice(lines, name):
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/{name}"
        with open(path, "wb") as file:
            file.write(b"text,more\n" + b"\n".join(lines))
        result = list(Files((path,)).rows())
    positions = [int(where.rpartition(":")[2]) for where, _ in result]
    assert positions == sorted(set(positions))


def test_array_in_a_file_of_lines_is_read(tmp_path):
    (tmp_path / "rows.jsonl").write_text('[\n{"prompt": "a"},\n{"prompt": "b"}\n]\n')
    assert [row for _, row in Files((str(tmp_path / "rows.jsonl"),)).rows()] == [{"prompt": "a"}, {"prompt": "b"}]


def test_dict_of_python_has_a_remedy(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{'prompt': 'a'}\n")
    ((_, row),) = Files((str(tmp_path / "rows.jsonl"),)).rows()
    assert str(row).endswith(", as in a dict of Python: write rows with json.dumps")
