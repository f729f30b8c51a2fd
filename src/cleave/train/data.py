# pyright: standard
"""The input pipeline: files to documents to batches of tokens.

A batch is a pure function of its index, so the data position of a run is one number. Knows nothing of models, steps or
devices and needs no torch; `tokens.py` has the tokenizers, `parquet.py` reads parquet files.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cleave import memory
from cleave.disk import open_regular
from cleave.errors import InputError
from cleave.train import parquet
from cleave.train.tokens import Tokenizer, Tokens, token_type

Ints = NDArray[np.int64]

_TEXT_KEYS: Final = ("text", "content")
_SNIFFED_BYTES: Final = 1 << 16
_LONGEST_LINE: Final = 1 << 26
"""Bytes of a JSONL line. Nested lists take some twenty times as much memory."""
_CHECKED_BYTES: Final = 1 << 26
"""Growth of a corpus between looks at the memory that is left."""


def read_documents(path: Path) -> Iterator[str]:
    """Read the documents of a text, JSONL or parquet file, or of all such files in a directory, sorted by name.

    A text file is one document; so is each JSONL line or parquet row. In a directory, hidden and binary files, pipes,
    devices and __pycache__ are skipped.
    """
    if path.is_dir():
        documents = (text for file in _files_below(path) for text in _documents_of(file, skip_binary=True))
        return _non_blank(documents, f"{path} holds no text; give a directory with text, .jsonl or .parquet files")
    if not path.exists():
        if re.match(r"[a-z][a-z0-9+.-]*:/", str(path), re.IGNORECASE):
            raise InputError(f"--data takes local files, not a URL such as {_url(path)}; download it first")
        raise InputError(f"there is no file or directory {path}; correct --data")
    return _non_blank(_documents_of(path), f"{path} is empty; give a file with text")


def _url(path: Path) -> str:
    """Write a URL that became a path, and lost a slash, as it was."""
    return re.sub(r"^([^:]+):/+", r"\1://", str(path))


def library_sources() -> Path:
    """Directory of Python's standard library: text that every machine with Cleave has."""
    return Path(sysconfig.get_path("stdlib"))


def library_documents() -> Iterator[str]:
    """Read the top-level modules of the standard library, a few megabytes, without its packages."""
    directory = library_sources()
    documents = (text for file in sorted(directory.glob("*.py")) for text in _documents_of(file, skip_binary=True))
    return _non_blank(documents, f"this Python has no library sources in {directory} to train on; give --data")


def _non_blank(documents: Iterable[str], complaint: str) -> Iterator[str]:
    """Yield the documents that are not blank; raise InputError if there are none."""
    has_any = False
    for document in documents:
        if document and not document.isspace():
            has_any = True
            yield document
    if not has_any:
        raise InputError(complaint)


def _files_below(directory: Path) -> Iterator[Path]:
    waiting = [directory]
    while waiting:
        path = waiting.pop()
        try:
            if not path.is_dir():
                yield path
                continue
            entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
            kept = [entry for entry in entries if entry.name != "__pycache__" and _is_read(entry)]
        except OSError as fault:
            raise InputError(f"cannot read {path}: {fault.strerror}; make it readable or leave it out") from None
        waiting += sorted(kept, key=lambda entry: entry.name, reverse=True)


def _is_read(entry: Path) -> bool:
    return entry.is_file() or (entry.is_dir() and not entry.is_symlink())  # links to directories can form cycles


def _documents_of(file: Path, *, skip_binary: bool = False) -> Iterator[str]:
    try:
        match file.suffix.lower():
            case ".jsonl":
                yield from _jsonl(file)
            case ".parquet":
                yield from parquet.texts(file, _TEXT_KEYS)
            case _:
                text = _text(file)
                if text is not None:
                    yield text
                elif not skip_binary:
                    raise InputError(f"{file} is not UTF-8 text; give text, .jsonl, .parquet or a directory of them")
    except OSError as fault:
        raise InputError(f"cannot read {file}: {fault.strerror or fault}; make it readable or leave it out") from None


def _text(file: Path) -> str | None:
    """Read a text file; None if it is binary, judged by its first bytes so that a large one is not read."""
    with open_regular(file) as stream:
        raw = stream.read(_SNIFFED_BYTES)
        if b"\0" in raw:
            return None
        _check_memory(3 * os.fstat(stream.fileno()).st_size, f"the text of {file}")
        try:
            codecs.getincrementaldecoder("utf-8")().decode(raw)
            return (raw + stream.read()).decode("utf-8-sig")
        except UnicodeDecodeError:
            return None


def _jsonl(file: Path) -> Iterator[str]:
    with open_regular(file) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_LONGEST_LINE + 1), b""), start=1):
            if len(line) > _LONGEST_LINE:
                raise InputError(
                    f"{file}, line {number}: expected at most {_LONGEST_LINE:,} bytes in a line, but there are more; "
                    "split that document"
                )
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError):
                problem = "it is not JSON"
            else:
                fields = [value.get(key) for key in _TEXT_KEYS] if isinstance(value, dict) else [value]
                text = next((field for field in fields if isinstance(field, str)), None)
                if text is not None:
                    yield text
                    continue
                if isinstance(value, dict) and isinstance(value.get("messages"), list):
                    raise InputError(
                        f"{file}, line {number}: this is a chat (messages), and cleave train reads plain text; write "
                        "each conversation as one string under 'text', for example what "
                        "tokenizer.apply_chat_template(messages, tokenize=False) returns"
                    )
                problem = "the object has neither" if isinstance(value, dict) else f"it is a {type(value).__name__}"
            raise InputError(
                f"{file}, line {number}: expected a string, or an object with a string under 'text' or 'content', "
                f"but {problem}; correct or remove that line"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """A text as one read-only array of tokens."""

    tokens: Tokens

    def __post_init__(self) -> None:
        tokens = self.tokens.view()
        tokens.flags.writeable = False
        object.__setattr__(self, "tokens", tokens)

    def __len__(self) -> int:
        return len(self.tokens)


def open_corpus(documents: Iterable[str], tokenizer: Tokenizer) -> Corpus:
    """Tokenize and join documents, with separators; 2 bytes per token up to a vocabulary of 65,536, else 4.

    One buffer grows in place, so memory holds the tokens once, plus one document. Raise InputError before it is full.
    """
    kind = token_type(tokenizer.vocab_size)
    separator = kind(tokenizer.separator).tobytes()
    joined = bytearray()
    checked = 0
    for document in documents:
        tokens = tokenizer.encode(document)
        if tokens.size:
            if joined:
                joined += separator
            joined += tokens.astype(kind, copy=False).tobytes()
        if len(joined) - checked > _CHECKED_BYTES:
            checked = len(joined)
            _check_memory(checked // 8 + 2 * _CHECKED_BYTES, f"more text after {checked / 1e9:.3g} GB of tokens")
    if not joined:
        raise InputError("the text has no tokens; give another --data")
    return Corpus(tokens=np.frombuffer(joined, dtype=kind))


def _check_memory(needed_bytes: int, purpose: str) -> None:
    free = memory.available_bytes()
    if needed_bytes > free:
        raise InputError(
            f"{purpose} needs {needed_bytes / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free; give less --data"
        )


def split(corpus: Corpus, sequence: int, share: float = 0.05, at_most_sequences: int = 64) -> tuple[Corpus, Corpus]:
    """Split into the part to train on and the tail to evaluate on, as disjoint views of the corpus.

    The tail is a whole number of sequences plus one token: `share` of the corpus, but at least one sequence if training
    keeps one too. It is empty if the corpus holds only one sequence or `share` is 0.
    """
    _check_sequence(corpus, sequence)
    if not 0 <= share < 1:
        raise InputError(f"the share of text to evaluate on must be at least 0 and below 1, but is {share}; change it")
    wanted = max(1, int(share * len(corpus)) // sequence) if share > 0 else 0
    room = (len(corpus) - (sequence + 1) - 1) // sequence
    sequences = max(0, min(wanted, room, at_most_sequences))
    boundary = len(corpus) - (sequences * sequence + 1 if sequences else 0)
    return Corpus(tokens=corpus.tokens[:boundary]), Corpus(tokens=corpus.tokens[boundary:])


class Batches:
    """Endless batches over a corpus. `batch(index)` is a pure function of its index; the only state is a cache.

    An epoch cuts the corpus into windows of sequence + 1 tokens at stride `sequence`, from a random phase, and visits
    each window once in shuffled order; no token is predicted twice in an epoch. All epochs have the same number of
    windows, so that an index determines its epoch; up to two sequences at the ends stay unread, different ones each
    epoch. Phase and order come from raw Philox numbers, which, unlike `Generator.permutation`, are the same in every
    version of numpy, so a run resumed elsewhere continues with the same data.
    """

    def __init__(self, corpus: Corpus, sequence: int, batch: int, seed: int) -> None:
        _check_sequence(corpus, sequence)
        if batch < 1:
            raise InputError(f"a batch needs at least 1 sequence, but has {batch}; raise --batch")
        if not 0 <= seed < 1 << 64:
            raise InputError(f"a seed must be at least 0 and below 2^64, but is {seed}; change --seed")
        self._corpus, self._sequence, self._batch, self._seed = corpus, sequence, batch, seed
        self.windows_per_epoch: Final = max(1, len(corpus) // sequence - 1)
        self._epoch: tuple[int, Ints] = (0, self._starts_of(0))

    def batch(self, index: int) -> Ints:
        """Return batch `index`, counted from 0, of shape [batch, sequence + 1]; batches may span epochs."""
        assert index >= 0
        parts: list[Ints] = []
        window, stop = index * self._batch, (index + 1) * self._batch
        while window < stop:
            epoch, offset = divmod(window, self.windows_per_epoch)
            if self._epoch[0] != epoch:
                self._epoch = (epoch, self._starts_of(epoch))
            parts.append(self._epoch[1][offset : offset + stop - window])
            window += len(parts[-1])
        return _windows(self._corpus, np.concatenate(parts), self._sequence)

    def _starts_of(self, epoch: int) -> Ints:
        """Start positions of an epoch's windows, in visiting order."""
        key = np.array([self._seed, epoch], dtype=np.uint64)
        raw = np.random.Philox(key=key).random_raw(1 + self.windows_per_epoch)
        spare = len(self._corpus) - 1 - self.windows_per_epoch * self._sequence
        phase = int(raw[0]) % (spare + 1)
        return phase + self._sequence * np.argsort(raw[1:], kind="stable")


def evaluation_batches(corpus: Corpus, sequence: int, batch: int) -> Iterator[Ints]:
    """Yield the windows in order, `batch` at a time; the last batch may be smaller, an empty corpus has none."""
    starts = np.arange(0, len(corpus) - sequence, sequence, dtype=np.int64)
    for first in range(0, len(starts), batch):
        yield _windows(corpus, starts[first : first + batch], sequence)


def _windows(corpus: Corpus, starts: Ints, sequence: int) -> Ints:
    return corpus.tokens[starts[:, None] + np.arange(sequence + 1)].astype(np.int64)


def _check_sequence(corpus: Corpus, sequence: int) -> None:
    if sequence < 1:
        raise InputError(f"a sequence needs at least 1 token, but has {sequence}; raise --sequence")
    if len(corpus) < sequence + 1:
        raise InputError(
            f"the text has {len(corpus)} tokens, but one sequence needs {sequence + 1}; give more text or a smaller "
            "--sequence"
        )
