"""Run the blocks of a page as a reader would, in a copy of the clone.

All blocks of a page share a directory and the environment of one shell: `cd` and `export` last. The directory is a copy
of the clone, whose `.venv` is the one that runs the tests, with `my-texts/` (text, JSONL and parquet)
and, if a block mentions it, `my-model/` (a small Llama with a tokenizer, as `save_pretrained` writes them). HOME is
empty, so runs are in `~/.cleave` as the pages say. Hugging Face is offline.

Code is run as printed, with three exceptions. Port 7077 becomes a free one, as pages run side by side. `pip install`
only pretends: it builds the metadata and fails unless this environment has all requirements, also those of the extras.
`python3 -m venv` links to the environment that runs the tests.

A block without a directive must end with exit code 0. One that is interrupted must end in time without a traceback.
Processes are stopped by id.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import ROOT, Block, Page
from tests.support.commands import Pipe, piped_to

PATIENCE_S = 900.0
"""Deadline of every wait, far longer than a busy machine needs: only a failure waits this long."""
_POLL_S = 0.05
_THE_END = "its end"
_BUILT = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
_PORT = "7077"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")
_JOIN_COMMAND = re.compile(r"cleave join (\S*:\d+\S*(?: --token[ =]\S+)?)")
_TASKS = re.compile(r"(\d[\d,]*) tasks?\b")
_PRELUDE = """\
pip() {{
    if [ "$1" != install ]; then {python} -m pip "$@"; return; fi
    shift
    local said code=0
    said=$({python} -m pip install --dry-run --no-build-isolation --no-index "$@" 2>&1) || code=$?
    echo "$said"
    case "$said" in *"does not provide the extra"*) return 1 ;; esac
    return $code
}}
python3() {{
    if [ "$1 $2" != "-m venv" ]; then {python} "$@"; return; fi
    mkdir "$3" && ln -s {prefix}/* "$3"
}}
set -e -o pipefail
"""


@dataclass(slots=True)
class Running:
    """A block on its way, and all that it printed so far."""

    block: Block
    process: subprocess.Popen[bytes]
    output: Path
    pipe: Pipe
    started_s: float
    ended: bool = False
    """Whether it was found to have ended well."""

    @property
    def said(self) -> str:
        return _ANSI.sub("", self.output.read_text(encoding="utf-8", errors="replace"))


class Runner:
    """The directory, environment and background processes of one page."""

    def __init__(self, page: Page, directory: Path) -> None:
        self._page, self._directory = page, directory
        directory.mkdir(exist_ok=True)
        self.clone = directory / "clone"
        self._environment = directory / "environment.sh"
        self._prelude = directory / "prelude.sh"
        self._port = str(_free_port())
        self._running: list[Running] = []
        self._count = 0
        _copy_clone(self.clone)
        self._prepare()

    def run(self) -> list[str]:
        """Run every block; return what each printed. Whatever happens, nothing is left in the background."""
        try:
            blocks = self._page.blocks
            for index, block in enumerate(blocks):
                self._end_sections_before(block)
                if block.not_run or block.continued:
                    continue
                code = self._code(block)
                if block.language == "python":
                    code = _padded(code, block.line, "")
                following = index + 1
                while following < len(blocks) and blocks[following].continued:
                    code += _padded(self._code(blocks[following]), blocks[following].line, code)
                    following += 1
                self._run(block, code)
            self._end_sections_before(None)
            return [running.said for running in self._running]
        finally:
            for running in self._running:
                _kill(running.process)

    def _end_sections_before(self, block: Block | None) -> None:
        """Stop what is left of earlier sections, the newest first: a device before its server."""
        for running in reversed(self._running):
            if not running.ended and (block is None or running.block.section < block.section):
                self._interrupt(running)

    def _run(self, block: Block, code: str) -> None:
        server = self._newest_server() if block.join else None
        if server is not None:
            code = self._with_printed_command(code, server)
        running = self._start(block, code)
        if server is not None:
            self._wait(running, lambda: self._has_helped(running), "a step computed with the device's help")
            if running.process.poll() is not None:  # the server has finished and sent it home
                self._wait(server, lambda: False, _THE_END)
        elif block.until:
            self._wait(running, lambda: block.until in " ".join(running.said.split()), repr(block.until))
            if not block.background:
                self._interrupt(running)
        else:
            self._wait(running, lambda: False, _THE_END)

    # ----------------------------------------------------------------------------------------------- processes

    def _start(self, block: Block, code: str) -> Running:
        self._count += 1
        stays = not block.until and not block.join
        script = self._directory / f"block-{self._count}.{'py' if block.language == 'python' else 'sh'}"
        script.write_text(code)
        if block.language == "python":
            line = f"exec {shlex.quote(sys.executable)} {shlex.quote(str(script))}"
        else:
            after = f'export -p > {self._environment}; echo cd $(printf %q "$PWD") >> {self._environment}'
            line = f". {shlex.quote(str(script))}" + (f"; {after}" if stays else "")
        command = ["bash", "-c", f". {self._environment}; . {self._prelude}; {line}"]
        output = self._directory / f"block-{self._count}.out"
        with output.open("wb") as kept, piped_to(kept) as pipe:
            process = subprocess.Popen(
                command,
                cwd=self.clone,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=pipe.end,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that an interrupt reaches the whole group, as from a terminal
            )
        running = Running(block, process, output, pipe, time.time())
        self._running.append(running)
        return running

    def _wait(self, running: Running, condition: Callable[[], bool], awaited: str) -> None:
        """Wait until the condition holds, or a block that ends by itself has ended."""
        give_up = time.monotonic() + PATIENCE_S
        while not condition():
            self._require(time.monotonic() < give_up, running, f"timed out waiting for {awaited}")
            code = running.process.poll()
            if code is not None:
                running.pipe.drain()
                self._require(code == 0, running, f"ended with exit code {code}")
                is_awaited = running.block.join or awaited == _THE_END or condition()
                self._require(is_awaited, running, f"ended without {awaited}")
                return
            for other in self._running:
                failed = not other.ended and other.process.poll() not in (None, 0)
                self._require(not failed, other, "failed in the background")
            time.sleep(_POLL_S)

    def _interrupt(self, running: Running) -> None:
        """Stop a block as Ctrl-C does, and check that it ends well."""
        process = running.process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._require(False, running, "did not end after an interrupt")
            running.pipe.drain()
            self._require(_interrupted_well(running.said), running, "ended with a traceback after an interrupt")
        else:
            self._require(process.returncode == 0, running, f"ended with exit code {process.returncode}")
        if running.block.join:
            tasks = [int(number.replace(",", "")) for number in _TASKS.findall(running.said)]
            self._require(bool(tasks) and tasks[-1] > 0, running, "did no tasks")
        running.ended = True

    def _require(self, condition: bool, running: Running, problem: str) -> None:
        if condition:
            return
        others = [other for other in self._running if other is not running and other.process.poll() is None]
        told = "\n".join(f"--- line {each.block.line} ---\n{each.said[-4000:]}" for each in (running, *others))
        raise AssertionError(f"{self._page.name}, line {running.block.line}: the block {problem}\n{told}")

    # ------------------------------------------------------------------------------------------------- joining

    def _newest_server(self) -> Running:
        return [running for running in self._running if running.block.background][-1]

    def _with_printed_command(self, code: str, server: Running) -> str:
        """Put the address that the server printed into the block's join command."""
        self._wait(server, lambda: _JOIN_COMMAND.search(server.said) is not None, "a join command")
        address = _JOIN_COMMAND.findall(server.said)[-1]
        return _JOIN_COMMAND.sub(lambda _: f"cleave join {address}", code)

    def _has_helped(self, device: Running) -> bool:
        """Whether a step was computed since the device joined, as event logs tell; a script's fleet has no log."""
        logs = self._directory.rglob("events.jsonl")
        return any(_has_step_with_device(log, device.started_s) for log in logs)

    # ------------------------------------------------------------------------------------------- what pages assume

    def _code(self, block: Block) -> str:
        return block.code.replace(_PORT, self._port)

    def _prepare(self) -> None:
        home = self._directory / "home"
        home.mkdir()
        python, prefix = shlex.quote(sys.executable), shlex.quote(sys.prefix)
        self._prelude.write_text(_PRELUDE.format(python=python, prefix=prefix))
        _write_texts(self.clone / "my-texts")
        inherited = {
            name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR", "PYTHONPATH") if name in os.environ
        }
        variables = {
            **inherited,
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "HOME": str(home),
            "COLUMNS": "80",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "MPLBACKEND": "agg",
        }
        lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        self._environment.write_text("\n".join([*lines, f"cd {shlex.quote(str(self.clone))}", ""]))


@contextmanager
def prepared(page: Page, directory: Path, model: Callable[[], Path]) -> Iterator[Runner]:
    """Prepare the directory of a page; `model` returns a model's directory, and is called only if a block needs it."""
    runner = Runner(page, directory)
    if page.mentions("my-model"):
        shutil.copytree(model(), runner.clone / "my-model")
    yield runner


def save_small_model(directory: Path) -> Path:
    """Save a Llama of two layers and a byte-pair tokenizer, made here, as Hugging Face saves them."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([_text()], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=tokenizer.get_vocab_size(),
                hidden_size=64,
                intermediate_size=192,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=1024,
                bos_token_id=0,
                eos_token_id=1,
            )
        )
    model.save_pretrained(directory)
    return directory


def _text() -> str:
    """The log of what did not work: tens of kilobytes of English that every clone has."""
    return (ROOT / "docs" / "log.md").read_text(encoding="utf-8")


def _write_texts(directory: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    directory.mkdir()
    paragraphs = [paragraph for paragraph in _text().split("\n\n") if paragraph.strip()]
    third = len(paragraphs) // 3
    (directory / "letters.txt").write_text("\n\n".join(paragraphs[:third]))
    (directory / "posts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in paragraphs[third:-third])
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": paragraphs[-third:]}), directory / "articles.parquet")


def _copy_clone(target: Path) -> None:
    """Copy the clone without what was built in it, and make a `.venv` of the environment that runs the tests.

    make finds that environment up to date, as the copy's requirements are older.
    """
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*_BUILT))
    for name in ("pyproject.toml", "constraints.txt"):
        os.utime(target / name, (0, 0))
    environment = target / ".venv"
    environment.mkdir()
    for part in Path(sys.prefix).iterdir():
        if part.name != "ready":
            (environment / part.name).symlink_to(part)
    (environment / "ready").touch()


def _padded(code: str, line: int, before: str) -> str:
    """Put empty lines in front of code, so that tracebacks name lines of the page."""
    return "\n" * max(0, line - 1 - before.count("\n")) + code


def _has_step_with_device(log: Path, since_s: float) -> bool:
    """Whether a device joined since then, and a step began with it or had no other."""
    from cleave.events import DeviceJoined, StepDone, read_events

    joined_s = float("inf")
    for event in read_events(log):
        if isinstance(event, DeviceJoined) and event.time_s >= since_s:
            joined_s = min(joined_s, event.time_s)
        if isinstance(event, StepDone) and event.time_s > joined_s:
            began_s = event.time_s - event.seconds
            if event.devices == 1 or began_s >= joined_s:
                return True
    return False


def _interrupted_well(said: str) -> bool:
    """Whether no traceback was printed, other than that of a script's own KeyboardInterrupt."""
    last = said.rstrip().splitlines()[-1:] or [""]
    return "Traceback" not in said or last[0].startswith("KeyboardInterrupt")


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    """Find a free port below those the system gives to outgoing connections."""
    chosen = random.SystemRandom()
    while True:
        port = chosen.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
