# pyright: standard
"""Text to token numbers and back: the model's own tokenizer, or plain bytes.

Knows nothing of files of text, batches or models, and never touches the network; transformers is imported only if a
tokenizer needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from cleave.errors import InputError
from cleave.train.causes import cause_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = NDArray[np.uint16 | np.uint32]

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PIECE_CHARACTERS: Final = 1 << 20


class Tokenizer(Protocol):
    """Text to token numbers below `vocab_size` and back; `separator` goes between documents."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def separator(self) -> int: ...
    def encode(self, text: str) -> Tokens: ...
    def decode(self, tokens: NDArray[np.integer]) -> str: ...
    def save(self, directory: Path) -> None:
        """Write it for `AutoTokenizer.from_pretrained`."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte; byte 0 separates documents, so NULs in a text are dropped."""

    def __init__(self) -> None:
        self.vocab_size: Final = 256
        self.separator: Final = 0

    def encode(self, text: str) -> Tokens:
        raw = text.replace("\0", "").encode("utf-8", errors="replace")
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: NDArray[np.integer]) -> str:
        return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, directory: Path) -> None:
        """Write an equivalent Hugging Face tokenizer: byte-level BPE without merges, whose token numbers are bytes."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        spelling = _byte_spelling()
        fast = Tokenizer(models.BPE(vocab={spelling[byte]: byte for byte in range(256)}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        # It names no special tokens: they would be found in texts, too.
        saved = PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False)
        saved.save_pretrained(str(directory))


class ModelTokenizer:
    """A Hugging Face tokenizer. It adds no special tokens, and treats one spelled out in a text as plain text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Token numbers may have gaps, so the largest can exceed the count.
        self.vocab_size: Final = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))
        ends = (tokenizer.eos_token_id, tokenizer.bos_token_id)
        self.separator: Final = next((end for end in ends if isinstance(end, int)), 0)

    def encode(self, text: str) -> Tokens:
        tokens: list[int] = []
        for piece in _pieces(text):
            piece = piece.encode("utf-8", errors="replace").decode("utf-8")  # replaces lone surrogates
            tokens += self._tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return np.array(tokens, dtype=token_type(self.vocab_size))

    def decode(self, tokens: NDArray[np.integer]) -> str:
        text = self._tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def save(self, directory: Path) -> None:
        self._tokenizer.save_pretrained(str(directory))


def load_tokenizer(model_directory: Path | None) -> Tokenizer:
    """Load the model's own tokenizer if its directory has one, else use bytes. Never touches the network."""
    if model_directory is None:
        return ByteTokenizer()
    if not model_directory.is_dir():
        raise InputError(f"there is no model directory {model_directory}; correct --model")
    if not any((model_directory / name).is_file() for name in _TOKENIZER_FILES):
        return ByteTokenizer()
    from transformers import AutoTokenizer

    advice = "complete its files, or remove them to train on bytes"
    try:
        loaded = AutoTokenizer.from_pretrained(str(model_directory), local_files_only=True, trust_remote_code=False)
        tokenizer = ModelTokenizer(loaded)
        is_empty = tokenizer.encode("text").size == 0
    except KeyboardInterrupt:
        raise
    except BaseException as fault:  # parsers on a stranger's files raise anything, those in Rust no Exception
        cause = "it brings its own code, which Cleave never runs" if _is_foreign(fault) else cause_of(fault)
        raise InputError(f"cannot load the tokenizer in {model_directory}: {cause}; {advice}") from fault
    if is_empty:
        raise InputError(f"the tokenizer in {model_directory} has no vocabulary; {advice}")
    return tokenizer


def _is_foreign(fault: BaseException) -> bool:
    """Whether transformers refused because it was not allowed to run the tokenizer's own code."""
    return "trust_remote_code" in str(fault)


def _pieces(text: str) -> Iterator[str]:
    """Cut a text at line ends, as a tokenizer needs a hundred bytes of working memory per byte of text."""
    start = 0
    while start < len(text):
        stop = start + _PIECE_CHARACTERS
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def _byte_spelling() -> list[str]:
    """Return the character by which byte-level tokenizers write each byte: itself if visible, else one from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def token_type(vocab_size: int) -> type[np.uint16 | np.uint32]:
    """Return the smallest type that holds every token number."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
