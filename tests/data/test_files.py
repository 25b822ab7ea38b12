"""Every way in which a file can be wrong is one message with file and line."""

import json

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from penstock.data import files
from penstock.data.files import read_file
from penstock.errors import DataError

ROWS = [{"prompt": "a", "completion": "é 😀"}, {"prompt": "b\nc", "completion": 'quote " and, comma'}]


def read(path):
    return list(read_file(path))


def error(path):
    with pytest.raises(DataError) as caught:
        read(path)
    return caught.value


def test_jsonl_rows_carry_their_line_and_blank_lines_are_fine(write):
    path = write('\n{"text": "one"}\n\n  \n{"text": "two"}\r\n')
    assert [(r.fields["text"], r.line) for r in read(path)] == [("one", 2), ("two", 5)]
    assert read(path)[1].where == f"{path}:5"


def test_json_array_rows_carry_the_line_they_begin_on(write):
    path = write(json.dumps(ROWS, indent=2), "my.json")
    assert [(r.fields, r.line) for r in read(path)] == [(ROWS[0], 2), (ROWS[1], 6)]


def test_json_array_on_one_line(write):
    path = write(json.dumps(ROWS), "my.json")
    assert [r.fields for r in read(path)] == ROWS
    assert [r.where for r in read(path)] == [f"{path}:1", f"{path}, row 2"], "a line that all rows share says nothing"
    mixed = write('[{"a": 1},\n {"a": 2}, {"a": 3},\n\n{"a": 4}]', "mixed.json")
    assert [r.where.removeprefix(str(mixed)) for r in read(mixed)] == [":1", ":2", ", row 3", ":4"]
    assert error(write('[{"a": 1}, {"a": 2}, 3]', "bad.json")).where.endswith("bad.json, row 3")


def test_json_file_with_one_object_a_line(write):
    assert [(r.fields, r.line) for r in read(write(ROWS, "my.json"))] == [(ROWS[0], 1), (ROWS[1], 2)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_json_array_is_the_same_however_it_is_cut_into_pieces(write, monkeypatch, chunk):
    rows = [{"a": -12.5e3, "b": True, "c": None, "d": [{"e": '\\ " \u00e9 😀'}]}, {"x": "y" * 50}, {}]
    path = write("\n" + json.dumps(rows, indent=1, ensure_ascii=chunk % 2 == 0), "my.json")
    monkeypatch.setattr(files, "_CHUNK_BYTES", chunk)
    assert [r.fields for r in read(path)] == rows


def test_json_array_is_not_held_as_a_whole(write, monkeypatch):
    path = write(json.dumps([{"text": "x" * 1000}] * 200), "my.json")
    monkeypatch.setattr(files, "_CHUNK_BYTES", 4096)
    with path.open("rb") as file:
        window = files._Window(file, str(path))
        window.peek()
        for _ in files._array(window):
            assert len(window.text) < 3 * 4096


def test_a_bom_is_fine(write):
    for name in ("my.jsonl", "my.json"):
        assert read(write(b"\xef\xbb\xbf" + b'{"text": "a"}\n', name))[0].fields == {"text": "a"}
    assert read(write(b"\xef\xbb\xbf" + b'[{"text": "a"}]', "b.json"))[0].fields == {"text": "a"}
    assert read(write(b"\xef\xbb\xbf" + b"text\na\n", "my.csv"))[0].fields == {"text": "a"}


def test_csv(write):
    path = write('prompt,completion\na,"b, ""c""\nd"\n\ne,f\n', "my.csv")
    assert [(r.fields, r.line) for r in read(path)] == [
        ({"prompt": "a", "completion": 'b, "c"\nd'}, 2),
        ({"prompt": "e", "completion": "f"}, 5),
    ]


def test_blank_lines_of_a_csv_are_fine(write):
    path = write("\na,b\n\n1,2\n", "my.csv")
    assert [(row.fields, row.line) for row in read_file(path)] == [({"a": "1", "b": "2"}, 4)]


def test_csv_cell_over_the_default_limit(write):
    long = "x" * 200_000
    assert read(write(f"text\n{long}\n", "my.csv"))[0].fields["text"] == long


def test_parquet(tmp_path):
    path = tmp_path / "my.parquet"
    rows = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    got = read(path)
    assert [r.fields for r in got] == rows
    assert (got[0].line, got[2999].line) == (1, 3000)


@pytest.mark.parametrize("make", [pa.ipc.new_stream, pa.ipc.new_file])
def test_both_kinds_of_arrow(tmp_path, make):
    """`datasets` writes streams; Feather and Polars write files, with another beginning and end."""
    path = tmp_path / "my.arrow"
    rows = [{"text": f"row {i}"} for i in range(2500)]
    table = pa.Table.from_pylist(rows, pa.schema({"text": pa.string_view()}))
    with make(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=1200)
    got = read(path)
    assert [row.fields for row in got] == rows
    assert got[-1].line == 2500
    path.write_bytes(path.read_bytes()[:-100])
    assert "not a readable .arrow file" in error(path).what


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ('{"text": "a"}\n{"text": }\n', 2, "malformed JSON: Expecting value at column 10"),
        ('{"text": "a",\n', 1, "column 14"),
        ('{"text": "a"\r\n', 1, "column 13"),
        ('{"text": "a"}\n{"text": "b"\n', 2, "malformed JSON: Expecting ',' delimiter"),
        ('{"text": "a"} {"text": "b"}\n', 1, "malformed JSON: Extra data"),
        ('{"text": "a"}\n["b"]\n', 2, "the row is an array, not an object"),
        ('{"text": "a"}\n"b"\n', 2, "the row is text, not an object"),
        ('{"text": "a"}\nnull\n', 2, "the row is null, not an object"),
        ('{"text": "a"}\n3\n', 2, "the row is a number, not an object"),
        ('{"text": "a"}\n{"text": "b", "text": "c"}\n', 2, "the key 'text' occurs twice"),
        ('{"text": "a"}\n{"m": [{"role": "a", "role": "b"}]}\n', 2, "the key 'role' occurs twice"),
        ('{"text": "a"}\n{"text": NaN}\n', 2, "NaN is not JSON"),
        ('{"text": "a"}\n{"text": -Infinity}\n', 2, "-Infinity is not JSON"),
        ('{"text": "a"}\n{"text": "\\ud83d"}\n', 2, "half of a surrogate pair"),
        ('{"text": "a"}\n{"text": ' + "[" * 100_000 + "}\n", 2, "nested too deeply"),
        ('{"text": "a"}\n{"n": ' + "9" * 5000 + "}\n", 2, "Exceeds the limit"),
    ],
)
@pytest.mark.parametrize("extension", ["jsonl", "json"])
def test_bad_line(write, content, line, says, extension):
    path = write(content, f"my.{extension}")
    caught = error(path)
    assert caught.where == f"{path}:{line}"
    assert says in caught.what


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ('[\n{"text": "a"},\n{"text": }\n]', 3, "Expecting value at column 10"),
        ('[\n{"text": "a"}\n{"text": "b"}]', 3, "Expecting ',' or ']' after a row"),
        ('[\n{"text": "a"},\n]', 3, "Expecting value"),
        ('[{"text": "a"}, ]', 1, "Expecting value at column 17"),
        ('[\n{"text": "a"}\n', 3, "the array is not closed"),
        ('[\n{"text": "a', 2, "Unterminated string"),
        ('[\n{"text": "a"}]\n\n{', 4, "Extra data after the array"),
        ('[{"text": "a"},\n"b"]', 2, "the row is text, not an object"),
        ('[{"text": "a"},\n{"text": "b", "text": "c"}]', 2, "the key 'text' occurs twice"),
        ('[{"text": "a"},\n{"text": Infinity}]', 2, "Infinity is not JSON"),
        ('[{"text": "a"},\n{"text": "\\uD83D"}]', 2, "half of a surrogate pair"),
    ],
)
def test_bad_array(write, monkeypatch, content, line, says, chunk):
    monkeypatch.setattr(files, "_CHUNK_BYTES", chunk)
    path = write(content, "my.json")
    caught = error(path)
    assert caught.where == f"{path}:{line}"
    assert says in caught.what
    assert "remove the line" not in caught.remedy, "an array may stand on one line"


def test_a_fault_in_a_large_array_is_found_without_reading_on(write, monkeypatch):
    path = write('[\n{"text" "a"},\n' + json.dumps({"text": "x" * 100}) * 10_000, "my.json")
    monkeypatch.setattr(files, "_CHUNK_BYTES", 4096)
    with path.open("rb") as file:
        window = files._Window(file, str(path))
        window.peek()
        with pytest.raises(DataError, match="Expecting ':' delimiter"):
            list(files._array(window))
        assert file.tell() <= 2 * 4096


def test_an_array_in_a_jsonl_file_names_the_extension(write):
    for text in ('[\n{"text": "a"}\n]', '[{"text": "a"}]'):
        assert "the extension .json" in error(write(text)).remedy
    assert "the extension" not in error(write('[[{"text": "a"}]]', "my.json")).remedy


@pytest.mark.parametrize("name", ["my.jsonl", "my.json", "array.json", "my.csv"])
def test_not_utf8_names_the_offset(write, name):
    head = {"my.csv": "text\né\n", "array.json": '[\n{"text": "é"},'}.get(name, '{"text": "é"}\n').encode()
    path = write(head + b'{"text": "\xe9"}\n', name)
    caught = error(path)
    line = 3 if name == "my.csv" else 2
    assert caught.where == f"{path}:{line}"
    assert f"byte 0xe9 at offset {len(head) + 10} of the file" in caught.what


def test_not_utf8_at_the_very_end(write):
    assert "offset 11" in error(write(b'[{"text":"a\xc3', "my.json")).what


def test_offset_counts_the_bom(write):
    assert "offset 13" in error(write(b'\xef\xbb\xbf{"text": "\xe9"}')).what
    assert "offset 14" in error(write(b'\xef\xbb\xbf[{"text": "\xe9"}]', "my.json")).what


@pytest.mark.parametrize("name", ["my.jsonl", "my.json", "my.csv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf16_is_named(write, name, encoding):
    bom = b"" if encoding == "utf-16" else b"\xfe\xff"
    caught = error(write(bom + '{"text": "a"}'.encode(encoding), name))
    assert "UTF-16" in caught.what
    assert "iconv" in caught.remedy


@pytest.mark.parametrize("name", ["my.jsonl", "my.json", "my.csv", "my.parquet"])
def test_empty_file(write, name):
    assert error(write(b"", name)).what == "the file is empty"


@pytest.mark.parametrize(
    ("content", "name"), [("\n \n", "my.jsonl"), ("[ ]", "my.json"), ("  ", "a.json"), ("a,b\n", "my.csv")]
)
def test_no_rows(write, content, name):
    caught = error(write(content, name))
    assert caught.what == "no rows in the file"
    assert caught.where.endswith(name)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (pa.array([0, None, 2_932_897, 2_932_898], pa.date32()), "date value out of range"),  # 9999 ends a day before
        (pa.array([0, 0, 2**62, 0], pa.timestamp("ms")), "too large"),
    ],
)
def test_a_date_that_python_does_not_have_names_row_and_column(tmp_path, values, says):
    path = tmp_path / "my.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c", "d"], "until": values}), path)
    caught = error(path)
    assert caught.where == f"{path}:3"
    assert "the column 'until' cannot be read" in caught.what
    assert says in caught.what
    assert "year 9999" in caught.remedy


def test_parquet_without_rows(tmp_path):
    path = tmp_path / "my.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert error(path).what == "no rows in the file"


def test_damaged_parquet(write):
    assert "not a readable Parquet file" in error(write(b"PAR1 nonsense", "my.parquet")).what


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ("a,b\n1,2\n3\n", 3, "1 cells, but the header has 2 columns"),
        ("a,b\n1,2\n3,4,5\n", 3, "3 cells, but the header has 2 columns"),
        ('a,b\n"x\ny",2\n3\n', 4, "1 cells, but"),
        ('a,b\n1,"2\n3,4\n', 2, "malformed CSV"),
        ("a,a\n1,2\n", 1, "the column 'a' occurs twice"),
        ("a;b\n1;2\n", 1, "the header is one column, with semicolons in it"),
        ("a\tb\n1\t2\n", 1, "the header is one column, with tabs in it"),
    ],
)
def test_bad_csv(write, content, line, says):
    path = write(content, "my.csv")
    caught = error(path)
    assert caught.where == f"{path}:{line}"
    assert says in caught.what
