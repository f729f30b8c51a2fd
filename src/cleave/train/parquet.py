# pyright: standard
"""Texts of a parquet file, whose few bytes may claim to be gigabytes.

Pages are compressed and repeat texts from a dictionary, so a file of 300 bytes can fill any memory. Before pyarrow
decodes anything, the headers of all pages are read here: they state how large a page gets, and pyarrow believes them.
pyarrow is imported only when a file needs it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cleave.disk import open_regular
from cleave.errors import InputError
from cleave.extras import install_command

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import FileMetaData

_MOST_EXPANSION: Final = 100
"""Bytes of text per byte of a file; real text is compressed three- to tenfold."""
_ALWAYS_ALLOWED: Final = 1 << 26
"""Bytes of text that any file may hold, however small it is."""
_BATCH_ROWS: Final = 256
_BATCH_BYTES: Final = 1 << 26
_LONGEST_HEADER: Final = 1 << 20


def texts(file: Path, names: Sequence[str]) -> Iterator[str]:
    """Read the string column of the first of these names that exists, else the only string column."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        advice = install_command("train", "pyarrow")
        raise InputError(f"{file} needs pyarrow, which is not installed; run {advice}") from None
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        most = max(_ALWAYS_ALLOWED, _MOST_EXPANSION * size)
        expanded = InputError(
            f"{file} has {size:,} bytes and would expand to more than {most:,} bytes of text; leave it out, or write "
            "it again as .jsonl"
        )
        try:
            table = parquet.ParquetFile(stream)
            column = _text_column(table.schema_arrow, names, file)
            longest = max(_page_sizes(stream, table.metadata, column), default=0)
            if max(longest, table.metadata.num_rows) > most:
                raise expanded
            # A row of a dictionary repeats a text of up to a page.
            rows_at_once = min(_BATCH_ROWS, max(1, _BATCH_BYTES // max(1, longest)))
            for rows in table.iter_batches(batch_size=rows_at_once, columns=[column]):
                for text in rows.column(0).to_pylist():
                    most -= 1 + len(text or "")
                    if most < 0:
                        raise expanded
                    if text is not None:
                        yield text
        except (arrow.ArrowException, OSError, ValueError, OverflowError, RecursionError):
            raise InputError(f"{file} is not a valid parquet file; write it again or leave it out") from None


def _text_column(schema: pyarrow.Schema, names: Sequence[str], file: Path) -> str:
    from pyarrow import types

    found: list[str] = []
    for field in schema:
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        if types.is_string(kind) or types.is_large_string(kind):
            found.append(field.name)
    choices = [name for name in names if name in found] or (found if len(found) == 1 else [])
    if not choices:
        raise InputError(
            f"{file}: expected a string column {' or '.join(map(repr, names))}, or only one string column, but the "
            f"string columns are {', '.join(found) or 'none'}; rename the one to train on"
        )
    return choices[0]


# --------------------------------------------------------------------------------------------------- page headers


def _page_sizes(stream: BufferedReader, metadata: FileMetaData, column: str) -> Iterator[int]:
    """Yield the uncompressed size of each page of a column, as its header states it."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.path_in_schema == column:
                starts = (chunk.dictionary_page_offset, chunk.data_page_offset)
                position = min(start for start in starts if start)
                end = position + chunk.total_compressed_size
                while position < end:
                    stream.seek(position)
                    header = _Compact(stream)
                    fields = header.page_header()
                    yield fields[2]
                    position += header.length + fields[3]


class _Compact:
    """A reader of Thrift's compact encoding, as far as page headers need it; raises ValueError where it is broken."""

    def __init__(self, stream: BufferedReader) -> None:
        self._stream = stream
        self.length = 0
        """Bytes read so far."""

    def page_header(self) -> dict[int, int]:
        """Read a page header; return its sizes by field: 2 uncompressed, 3 compressed."""
        sizes: dict[int, int] = {}
        for field, kind in self._fields():
            if field in (2, 3) and kind in (4, 5, 6):
                number = self._varint()
                sizes[field] = max(sizes.get(field, 0), (number >> 1) ^ -(number & 1))
            else:
                self._skip(kind, in_list=False)
        if not sizes.keys() >= {2, 3}:
            raise ValueError("a page header without sizes")
        return sizes

    def _fields(self) -> Iterator[tuple[int, int]]:
        field = 0
        while first := self._byte():
            field = field + (first >> 4) if first >> 4 else self._varint() >> 1
            yield field, first & 15

    def _skip(self, kind: int, *, in_list: bool) -> None:
        match kind:
            case 1 | 2:  # booleans: in the kind itself, except in lists
                self._take(1 if in_list else 0)
            case 3:
                self._take(1)
            case 4 | 5 | 6:
                self._varint()
            case 7:
                self._take(8)
            case 8:
                self._take(self._varint())
            case 9 | 10:
                first = self._byte()
                for _ in range(first >> 4 if first >> 4 < 15 else self._varint()):
                    self._skip(first & 15, in_list=True)
            case 12:
                for _, inner in self._fields():
                    self._skip(inner, in_list=False)
            case _:  # page headers have no maps
                raise ValueError(f"an unknown kind {kind}")

    def _byte(self) -> int:
        return self._take(1)[0]

    def _varint(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    def _take(self, count: int) -> bytes:
        self.length += count
        if self.length > _LONGEST_HEADER:
            raise ValueError("a page header that does not end")
        data = self._stream.read(count)
        if len(data) < count:
            raise ValueError("a page header cut short")
        return data
