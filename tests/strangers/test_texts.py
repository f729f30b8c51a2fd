"""Text from strangers is read within bounds, or refused with one sentence: no hang, no traceback, no full memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cleave import memory
from cleave.errors import InputError
from cleave.train import data, parquet
from cleave.train.data import open_corpus, read_documents
from cleave.train.tokens import ByteTokenizer


def _bomb(file: Path, *, length: int, rows: int) -> None:
    """Write one long text, repeated from a dictionary."""
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["a" * length]))
    table = pa.table({"text": repeated})
    pq.write_table(table, file, compression="brotli", store_schema=False, dictionary_pagesize_limit=1 << 30)


def _understated(file: Path) -> None:
    """Write a page whose size the footer understates, so that only the page's own header tells it."""
    _bomb(file, length=100_000_000, rows=1)
    claimed = pq.ParquetFile(file).metadata.row_group(0).column(0).total_uncompressed_size
    true, small = _varint(2 * claimed, 1), _varint(2000, len(_varint(2 * claimed, 1)))
    raw = file.read_bytes()
    assert true in raw
    file.write_bytes(raw.replace(true, small))
    assert pq.ParquetFile(file).metadata.row_group(0).column(0).total_uncompressed_size == 1000


def _varint(number: int, least: int) -> bytes:
    parts = bytearray()
    while number or len(parts) < least:
        parts.append(number & 127 | 128)
        number >>= 7
    parts[-1] &= 127
    return bytes(parts)


def _nulls(file: Path) -> None:
    pq.write_table(pa.table({"text": pa.nulls(70_000_000, pa.string())}), file)


def _broken_header(file: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * 100]}), file)
    raw = bytearray(file.read_bytes())
    raw[4:24] = b"\xff" * 20
    file.write_bytes(raw)


def _long_line(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(1 << 40)  # takes no space on the disk


HOSTILE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "repeated text": ("x.parquet", lambda file: _bomb(file, length=22_000_000, rows=256)),
    "one long text": ("x.parquet", lambda file: _bomb(file, length=100_000_000, rows=1)),
    "understated page": ("x.parquet", _understated),
    "endless nulls": ("x.parquet", _nulls),
    "broken page header": ("x.parquet", _broken_header),
    "cut short": ("x.parquet", lambda file: file.write_bytes(b"PAR1\x15\x00PAR1")),
    "one long line": ("x.jsonl", _long_line),
    "deep line": ("x.jsonl", lambda file: file.write_text('{"text":' + "[" * 100_000)),
    "number": ("x.jsonl", lambda file: file.write_text("1" * 10_000)),
    "sparse text": ("x.txt", lambda file: (file.write_text("a" * 70_000), os.truncate(file, 1 << 40))),
    "pipe": ("x.txt", os.mkfifo),
    "pipe named jsonl": ("x.jsonl", os.mkfifo),
    "pipe named parquet": ("x.parquet", os.mkfifo),
    "endless device": ("x.txt", lambda file: file.symlink_to("/dev/zero")),
    "endless lines": ("x.jsonl", lambda file: file.symlink_to("/dev/zero")),
    "link to itself": ("x.txt", lambda file: file.symlink_to(file)),
}


@pytest.mark.parametrize(("name", "make"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_text_is_refused_by_its_name(tmp_path: Path, name: str, make: Callable[[Path], object]) -> None:
    make(tmp_path / name)
    with pytest.raises(InputError, match=name) as caught:
        open_corpus(read_documents(tmp_path / name), ByteTokenizer())
    assert "\n" not in str(caught.value)


def test_a_path_with_a_nul_is_refused() -> None:
    with pytest.raises(InputError):
        list(read_documents(Path("a\0b")))


def test_a_directory_skips_pipes_sockets_devices_and_loops(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "b.txt").write_text("second")
    os.mkfifo(tmp_path / "pipe.txt")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(tmp_path)  # the name of a socket has at most 107 bytes
        listener.bind("socket.txt")
        assert list(read_documents(tmp_path)) == ["first", "second"]


def test_directories_nested_deeper_than_python_recurses_are_read(deep_directory: Path) -> None:
    assert list(read_documents(deep_directory)) == ["deep"]


def test_text_larger_than_the_memory_is_refused_before_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1_000_000)
    monkeypatch.setattr(data, "_CHECKED_BYTES", 100_000)
    with pytest.raises(InputError, match=r"GB of tokens .*; give less --data"):
        open_corpus(("text" * 10_000 for _ in iter(int, 1)), ByteTokenizer())


@pytest.fixture(autouse=True)
def _stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------------------------------- what must still be read


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "brotli"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_page_headers_of_every_writer_are_understood(
    tmp_path: Path, compression: str, version: str, dictionary: bool
) -> None:
    texts = [None if row % 7 == 0 else f"text {row % 100} " * (row % 40 + 1) for row in range(3000)]
    table = pa.table({"number": range(3000), "text": texts})
    file = tmp_path / "x.parquet"
    pq.write_table(
        table,
        file,
        compression=compression,
        data_page_version=version,
        use_dictionary=dictionary,
        data_page_size=4096,
        row_group_size=1000,
        write_page_checksum=True,
    )
    assert list(parquet.texts(file, ["text"])) == [text for text in texts if text is not None]
    with file.open("rb") as stream:
        metadata = pq.ParquetFile(file).metadata
        sizes = sum(parquet._page_sizes(stream, metadata, "text"))
    declared = sum(metadata.row_group(group).column(1).total_uncompressed_size for group in range(3))
    assert 0.7 * declared < sizes <= declared, "the declared size also counts the headers"


def test_a_small_file_of_much_repeated_text_is_still_read(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["the same line again\n" * 10] * 50_000}), file, compression="zstd")
    assert file.stat().st_size < 20_000
    corpus = open_corpus(read_documents(file), ByteTokenizer())
    assert len(corpus) == 50_000 * 200 + 49_999
    assert np.array_equal(corpus.tokens[:3], ByteTokenizer().encode("the"))


def test_a_parquet_bomb_takes_little_memory(tmp_path: Path) -> None:
    """Decoded in batches of 256 rows, this file of 300 bytes took 5.7 GB."""
    _bomb(tmp_path / "x.parquet", length=22_000_000, rows=256)
    assert (tmp_path / "x.parquet").stat().st_size < 523
    script = (
        "import resource, sys, pathlib, cleave.train.data as data, cleave.train.tokens as tokens\n"
        "import pyarrow.parquet\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    data.open_corpus(data.read_documents(pathlib.Path(sys.argv[1])), tokens.ByteTokenizer())\n"
        "except data.InputError:\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x.parquet")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert int(result.stdout) < 800_000, "grew by more than 800 MB"
