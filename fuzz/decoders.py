"""Coverage-guided fuzzing of everything that reads untrusted bytes: `make fuzz`, or one target by hand:

    python fuzz/decoders.py header|frames|stream|device [CORPUS] [-max_total_time=60] [other flags of libFuzzer]

A target must not raise; bad input should end in a ProtocolError or a closed connection. A crashing input is written to
a file, which reproduces the crash when given in place of the corpus. Without a corpus, fuzzing starts from
tests/vectors, in build/fuzz. The laws themselves are in tests/protocol/test_fuzz.py.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

with atheris.instrument_imports(include=["cleave", "tests.support"]):
    from tests.support import connection, mutations, obedient

    from cleave.errors import ProtocolError
    from cleave.protocol import messages
    from cleave.protocol.frames import PAYLOAD_BYTES, Assembler


def header(data: bytes) -> None:
    """Decode one header."""
    try:
        message = messages.decode(data)
    except ProtocolError:
        return
    messages.decode(messages.encode(message))


def frames(data: bytes) -> None:
    """Assemble the byte strings of one channel, each preceded by its length in two bytes."""
    assembler = Assembler()
    try:
        for string in _strings(data):
            whole = assembler.feed(string)
            assert whole is None or len(whole[1]) == whole[0].payload <= PAYLOAD_BYTES
    except ProtocolError:
        pass


def device(data: bytes) -> None:
    """Give the same byte strings to a device, which obeys them."""
    obedient.Device().obey(_strings(data))


def _strings(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 2 <= len(data):
        end = at + 2 + int.from_bytes(data[at : at + 2], "big")
        yield data[at + 2 : end]
        at = end


def stream(data: bytes) -> None:
    """Read a socket's bytes after the handshake; the first byte sets the step size."""

    async def read() -> None:
        connection.through(data[1:], step=1 + (data[0] if data else 0))

    _loop.run_until_complete(read())


_loop = asyncio.new_event_loop()
TARGETS: dict[str, Callable[[bytes], None]] = {
    "header": header,
    "frames": frames,
    "stream": stream,
    "device": device,
}


def _seeds(target: str) -> list[bytes]:
    rng, golden = random.Random(0), mutations.golden()
    match target:
        case "header":
            return [head for head, _ in golden]
        case "frames":
            return [_joined([frame]) for frame in golden]
        case "device":
            return [_joined(conversation) for conversation in mutations.conversations()]
        case _:
            return [
                b"\x20" + b"".join(mutations.websocket(data, rng, fragments=1 + number % 3) for data in frame)
                for number, frame in enumerate(golden)
            ]


def _joined(frames: list[tuple[bytes, bytes]]) -> bytes:
    """Inverse of `_strings`."""
    return b"".join(len(data).to_bytes(2, "big") + data for frame in frames for data in frame if data)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(__doc__)
    name, *arguments = sys.argv[1:]
    if not any(not argument.startswith("-") for argument in arguments):
        corpus = ROOT / "build" / "fuzz" / name
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(_seeds(name)):
            (corpus / f"golden-{number}").write_bytes(seed)
        arguments += [str(corpus), f"-artifact_prefix={corpus.parent}/crash-{name}-"]
    atheris.Setup([sys.argv[0], *arguments], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
