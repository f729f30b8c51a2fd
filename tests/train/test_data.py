"""Laws of the path from text to batches: tokens round-trip, files give documents, an epoch visits each window once."""

from __future__ import annotations

import functools
import json
import re
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from cleave.errors import InputError
from cleave.train.data import (
    Batches,
    Corpus,
    evaluation_batches,
    library_documents,
    library_sources,
    open_corpus,
    read_documents,
    split,
)
from cleave.train.tokens import ByteTokenizer, ModelTokenizer, load_tokenizer

steady = settings(deadline=None, derandomize=True, max_examples=60)
sequences = st.integers(1, 9)


def counting(length: int) -> Corpus:
    """A corpus in which token i is i, so that a window shows where it starts."""
    return Corpus(tokens=np.arange(length, dtype=np.uint16))


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_parquet(path: Path, **columns: list[object] | arrow.Array) -> Path:
    parquet.write_table(arrow.table(columns), path)
    return path


def refused(*facts: str):
    """Expect one sentence with all the facts, in any order, and what to do about it after a semicolon."""
    return pytest.raises(
        InputError, match="^" + "".join(f"(?=.*{re.escape(fact)})" for fact in facts) + "[^\n]+; [^\n]+$"
    )


# Tokenizers


@steady
@given(st.text())
def test_byte_tokens_round_trip_a_text_without_its_nuls(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert np.all((tokens > 0) & (tokens < tokenizer.vocab_size))
    assert tokenizer.decode(tokens) == text.replace("\0", "")


def test_bytes_that_are_not_text_decode_to_replacement_characters() -> None:
    assert ByteTokenizer().decode(np.array([104, 105, 0xFF])) == "hi\ufffd"
    assert ByteTokenizer().decode(ByteTokenizer().encode("a\ud800b")) == "a?b"


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of a few hundred tokens, as `save_pretrained` leaves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=4)
    fast.save_pretrained(directory)
    return directory


def test_a_models_own_tokenizer_is_used_and_round_trips_a_text(model_directory: Path) -> None:
    tokenizer = load_tokenizer(model_directory)
    assert isinstance(tokenizer, ModelTokenizer)
    assert (tokenizer.vocab_size, tokenizer.separator) == (270, 1)
    for text in ("the quick", "Grüße \n\n 日本", "", "a </s> in a text is text"):
        tokens = tokenizer.encode(text)
        assert tokens.dtype == np.uint16
        assert not np.isin(tokens, (0, 1)).any()
        assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_a_long_text_is_tokenized_in_pieces_without_loss(model_directory: Path) -> None:
    tokenizer = load_tokenizer(model_directory)
    text = "the quick brown fox\n" * 30_000 + "no line end at all " * 80_000
    assert len(text) > 1.9 * 2**20
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_without_an_end_token_the_separator_is_the_begin_token_or_else_0(model_directory: Path, tmp_path: Path) -> None:
    config = json.loads((model_directory / "tokenizer_config.json").read_text())
    for removed, separator in ((("eos_token",), 0), (("bos_token",), 1), (("eos_token", "bos_token"), 0)):
        directory = tmp_path / "-".join(removed)
        write(directory / "tokenizer.json", (model_directory / "tokenizer.json").read_bytes())
        kept = {key: value for key, value in config.items() if key not in removed}
        write(directory / "tokenizer_config.json", json.dumps(kept))
        assert load_tokenizer(directory).separator == separator


def test_a_model_without_a_tokenizer_is_trained_on_bytes(tmp_path: Path) -> None:
    write(tmp_path / "config.json", '{"model_type": "gpt2"}')
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    assert isinstance(load_tokenizer(None), ByteTokenizer)


def test_a_tokenizer_that_does_not_load_is_refused(tmp_path: Path) -> None:
    with refused("model directory", str(tmp_path / "gone"), "--model"):
        load_tokenizer(tmp_path / "gone")
    broken = write(tmp_path / "broken" / "tokenizer.json", "{").parent
    with pytest.raises(InputError, match=r"tokenizer in .*broken: .+; .*files"):
        load_tokenizer(broken)
    hollow = write(tmp_path / "hollow" / "tokenizer_config.json", '{"tokenizer_class": "GPT2Tokenizer"}').parent
    with refused(str(hollow), "vocabulary"):
        load_tokenizer(hollow)


# Documents


def test_a_text_file_is_one_document_whatever_its_name(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "c.py", "LICENSE"):
        assert list(read_documents(write(tmp_path / name, "Grüße\r\nzwei\n"))) == ["Grüße\r\nzwei\n"]
    assert list(read_documents(write(tmp_path / "marked.txt", b"\xef\xbb\xbftext"))) == ["text"]


def test_a_character_split_by_the_sniffing_limit_is_still_text(tmp_path: Path) -> None:
    text = "a" * (2**16 - 1) + "ü" * 10
    assert list(read_documents(write(tmp_path / "a.txt", text))) == [text]


def test_each_json_line_is_a_document(tmp_path: Path) -> None:
    lines = [
        '{"text": "one", "content": "x"}',
        '{"content": "two\\n"}',
        "",
        '"three"',
        '{"text": null, "content": "4"}',
    ]
    assert list(read_documents(write(tmp_path / "a.jsonl", "\n".join(lines)))) == ["one", "two\n", "three", "4"]


@pytest.mark.parametrize(
    ("line", "came"),
    [
        ('{"text": ', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"body": "a"}', " neither"),
        ("[1]", " list;"),
    ],
    ids=["cut", "deep", "keys", "list"],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: str, came: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"text": "good"}}\n\n{line}\n')
    documents = read_documents(path)
    assert next(documents) == "good"
    with refused(f"{path}, line 3: ", "'text'", "'content'", came):
        next(documents)


def test_each_parquet_row_is_a_document(tmp_path: Path) -> None:
    texts: list[object] = [f"row {i}" for i in range(600)]
    for column in ("text", "content"):
        path = write_parquet(tmp_path / f"{column}.parquet", author=["me"] * 600, **{column: texts})
        assert list(read_documents(path)) == texts
    only = write_parquet(tmp_path / "only.parquet", number=[1, 2, 3], story=["a", None, "b"])
    assert list(read_documents(only)) == ["a", "b"]
    coded = write_parquet(tmp_path / "coded.parquet", text=arrow.array(["a", "b", "a"]).dictionary_encode())
    assert list(read_documents(coded)) == ["a", "b", "a"]


def test_parquet_without_a_text_column_is_refused(tmp_path: Path) -> None:
    for columns, came in (({"a": ["x"], "b": ["y"]}, "a, b"), ({"text": [1]}, "none")):
        path = write_parquet(tmp_path / "a.parquet", **columns)
        with refused(str(path), "'text'", "'content'", f" {came};"):
            list(read_documents(path))


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path / "whole.parquet", text=["some text"] * 9).read_bytes()
    for damaged in (b"not parquet", whole[:-20], whole[:4] + b"\xff" * 40 + whole[44:]):
        path = write(tmp_path / "a.parquet", damaged)
        with refused(str(path), " parquet "):
            list(read_documents(path))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"a\.parquet needs pyarrow, .* install .*pyarrow"):
        list(read_documents(path))


def test_a_directory_gives_all_its_text_in_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "b" / "deep" / "a.md", "third")
    write(tmp_path / "a.jsonl", '{"text": "first"}\n{"text": "second"}\n')
    write_parquet(tmp_path / "c.parquet", text=["fourth"])
    write(tmp_path / "d", "fifth")
    for skipped in (".hidden", ".git/a.txt", "b/__pycache__/a.txt"):
        write(tmp_path / skipped, "never")
    write(tmp_path / "image.png", b"\x89PNG\0\0")
    write(tmp_path / "latin.txt", "Grüße".encode("latin-1"))
    write(tmp_path / "late.txt", b"a" * 2**17 + b"\xff")
    write(tmp_path / "blank.txt", " \n")
    (tmp_path / "b" / "circle").symlink_to(tmp_path)
    assert list(read_documents(tmp_path)) == ["first", "second", "third", "fourth", "fifth"]


def test_a_path_without_text_is_refused(tmp_path: Path) -> None:
    with refused(str(tmp_path / "gone.txt"), "no file or directory", "--data"):
        read_documents(tmp_path / "gone.txt")
    with pytest.raises(InputError, match="not a URL"):
        read_documents(Path("https://example.org/text.txt"))
    chat = write(tmp_path / "chat.jsonl", '{"messages": [{"role": "user", "content": "hello"}]}\n')
    with pytest.raises(InputError, match=r"chat\.jsonl, line 1: .*apply_chat_template"):
        list(read_documents(chat))
    chat.unlink()
    with refused(f"{tmp_path} ", "no text", ".jsonl", ".parquet"):
        list(read_documents(tmp_path))
    for name in ("empty.txt", "empty.jsonl"):
        path = write(tmp_path / name, "\n")
        with refused(f"{path} ", " empty"):
            list(read_documents(path))
    image = write(tmp_path / "image.png", b"\x89PNG\0\0")
    with refused(f"{image} ", "UTF-8", ".jsonl", ".parquet"):
        list(read_documents(image))


def test_the_library_is_its_modules_sorted_and_without_packages() -> None:
    names = sorted(path.name for path in library_sources().iterdir() if path.suffix == ".py")
    documents = list(library_documents())
    assert documents[0].strip() == (library_sources() / names[0]).read_text(encoding="utf-8").strip()
    assert 0.9 * len(names) < len(documents) <= len(names)
    assert 10**6 < sum(map(len, documents)) < 10**7


# Corpus


@steady
@given(st.lists(st.text(max_size=8), min_size=1).filter(lambda texts: any(text.strip("\0") for text in texts)))
def test_a_corpus_is_the_documents_with_a_separator_between(texts: list[str]) -> None:
    corpus = open_corpus(texts, ByteTokenizer())
    kept = [text.replace("\0", "") for text in texts]
    assert ByteTokenizer().decode(corpus.tokens) == "\0".join(text for text in kept if text)
    assert corpus.tokens.dtype == np.uint16
    assert not corpus.tokens.flags.writeable


class WideTokenizer(ByteTokenizer):
    """Byte tokens at the top of a vocabulary too large for two bytes per token."""

    def __init__(self) -> None:
        self.vocab_size = 65_537
        self.separator = 65_536


def test_a_vocabulary_above_65536_takes_four_bytes_per_token() -> None:
    corpus = open_corpus(["a", "b"], WideTokenizer())
    assert corpus.tokens.dtype == np.uint32
    assert corpus.tokens.tolist() == [97, 65_536, 98]


def test_documents_without_tokens_are_refused() -> None:
    with refused("no tokens", "--data"):
        open_corpus(["", "\0"], ByteTokenizer())


@steady
@given(st.integers(2, 400), sequences, st.floats(0.001, 0.9), st.integers(1, 8))
def test_a_split_divides_the_corpus_without_overlap(length: int, sequence: int, share: float, most: int) -> None:
    length = max(length, sequence + 1)
    training, evaluation = split(counting(length), sequence, share, most)
    assert np.array_equal(np.concatenate([training.tokens, evaluation.tokens]), np.arange(length))
    assert len(training) >= sequence + 1
    windows, over = divmod(max(0, len(evaluation) - 1), sequence)
    assert over == 0
    assert windows <= most
    assert windows <= max(1, share * length / sequence)
    if length >= 2 * (sequence + 1):
        assert windows >= 1


def test_a_split_takes_its_share_up_to_a_maximum() -> None:
    assert [len(part) for part in split(counting(10_001), 10)] == [9_500, 501]
    assert [len(part) for part in split(counting(60_000), 10)] == [59_359, 641]
    assert [len(part) for part in split(counting(1_000), 10, share=0)] == [1_000, 0]


def test_a_text_shorter_than_one_sequence_plus_a_token_is_refused() -> None:
    facts = (" 120 tokens", " 257", "--sequence")
    with refused(*facts):
        split(counting(120), 256)
    with refused(*facts):
        Batches(counting(120), 256, 1, 0)


def test_numbers_out_of_range_are_refused() -> None:
    corpus = counting(20)
    with refused("share", "at least 0", "below 1", " 1.5;"):
        split(corpus, 4, share=1.5)
    with refused("sequence ", "at least 1 token", " 0;", "--sequence"):
        Batches(corpus, 0, 1, 0)
    with refused("batch ", "at least 1 sequence", " 0;", "--batch"):
        Batches(corpus, 4, 0, 0)
    with refused("seed ", "at least 0", "below 2^64", " -1;", "--seed"):
        Batches(corpus, 4, 1, -1)


# Batches


@steady
@given(st.integers(2, 200), sequences, st.integers(1, 5), st.integers(0, 2**64 - 1))
def test_every_window_of_an_epoch_is_visited_exactly_once(length: int, sequence: int, batch: int, seed: int) -> None:
    length = max(length, sequence + 1)
    batches = Batches(counting(length), sequence, batch, seed)
    windows, epochs = batches.windows_per_epoch, 3
    rows = np.concatenate([batches.batch(index) for index in range(-(-epochs * windows // batch))])
    assert np.array_equal(rows, rows[:, :1] + np.arange(sequence + 1))
    for epoch in range(epochs):
        starts = np.sort(rows[epoch * windows : (epoch + 1) * windows, 0])
        assert np.array_equal(starts, starts[0] + sequence * np.arange(windows))
        assert starts[-1] + sequence < length
        assert length - windows * sequence < 2 * sequence + (windows == 1)


@steady
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(1, 7))
def test_a_batch_depends_only_on_its_index(indices: list[int], batch: int) -> None:
    wandering = Batches(counting(70), 8, batch, 5)
    for index in indices:
        fresh = Batches(counting(70), 8, batch, 5).batch(index)
        assert fresh.shape == (batch, 9)
        assert fresh.dtype == np.int64
        assert np.array_equal(wandering.batch(index), fresh)


def test_the_batch_size_only_groups_the_same_order_of_windows() -> None:
    ones, threes = (Batches(counting(100), 8, batch, 1) for batch in (1, 3))
    for index in range(20):
        assert np.array_equal(threes.batch(index), np.concatenate([ones.batch(3 * index + i) for i in range(3)]))


def test_order_and_phase_differ_between_epochs_and_seeds() -> None:
    first, other = (Batches(counting(1_000), 8, 124, seed) for seed in (1, 2))
    assert first.windows_per_epoch == 124
    starts = [batches.batch(epoch)[:, 0] for batches in (first, other) for epoch in range(6)]
    for a, b in pairwise(starts):
        assert not np.array_equal(np.argsort(a), np.argsort(b))
    assert len({int(row.min()) for row in starts}) > 4


def test_over_many_epochs_every_token_and_every_window_offset_occurs() -> None:
    batches = Batches(counting(60), 8, 6, 3)
    rows = np.concatenate([batches.batch(index) for index in range(60)])
    assert set(rows.ravel().tolist()) == set(range(60))
    assert set((rows[:, 0] % 8).tolist()) == set(range(8))


def test_the_order_is_the_same_in_every_version() -> None:
    """A run resumed under another numpy or Cleave must continue where it stopped, so these numbers may never change."""
    assert Batches(counting(60), 8, 8, 3).batch(2)[:, 0].tolist() == [46, 38, 40, 24, 32, 16, 48, 8]


@steady
@given(st.integers(0, 200), sequences, st.integers(1, 5))
def test_evaluation_reads_each_window_in_order(length: int, sequence: int, batch: int) -> None:
    batches = list(evaluation_batches(counting(length), sequence, batch))
    starts = np.concatenate([rows[:, 0] for rows in batches]) if batches else np.empty(0)
    assert np.array_equal(starts, sequence * np.arange(max(0, length - 1) // sequence))
    assert all(len(rows) == batch for rows in batches[:-1])
    for rows in batches:
        assert rows.dtype == np.int64
        assert 1 <= len(rows) <= batch
        assert np.array_equal(rows, rows[:, :1] + np.arange(sequence + 1))


@given(text=st.text())
@settings(max_examples=30)
def test_a_saved_byte_tokenizer_gives_the_same_tokens_in_transformers(text: str) -> None:
    saved = _saved_byte_tokenizer()
    ours = ByteTokenizer()
    tokens = ours.encode(text)
    assert saved.encode(text.replace("\0", "").encode("utf-8", "replace").decode()) == tokens.tolist()
    assert saved.decode(tokens.tolist()) == ours.decode(tokens)


def test_a_saved_byte_tokenizer_loads_as_the_models_own_with_the_same_separator(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert not isinstance(loaded, ByteTokenizer)
    assert (loaded.vocab_size, loaded.separator) == (256, 0)
    text = "\u0100boltiņš, naïve \u20ac  two  spaces\n\ttab"
    assert loaded.encode(text).tolist() == ByteTokenizer().encode(text).tolist()
    assert loaded.decode(loaded.encode(text)) == text


@functools.cache
def _saved_byte_tokenizer() -> Any:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as directory:
        ByteTokenizer().save(Path(directory))
        return AutoTokenizer.from_pretrained(directory)
