"""A process that makes plans: planning is pure Python and numpy, and would hold the GIL that the event loop needs.

`python -m cleave.server.plan_process` is that process: it reads calls of our own functions from standard input and
writes their results to standard output until its input ends. A plain subprocess rather than `multiprocessing`, which
would rerun a user's training script that has no `__main__` guard.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO, ParamSpec, TypeVar, cast

from cleave.errors import CleaveError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_END_S = 2.0


class PlanProcess:
    """A subprocess started by the first call and ended by `close`; calls from several threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def call(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Call a module-level function in the subprocess, or in this process if that fails."""
        outcome = self._ask((function, args, kwargs))
        if outcome is None:
            return function(*args, **kwargs)
        result, fault = outcome
        if fault is not None:
            raise fault
        return cast("_Result", result)

    def ask(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result | None:
        """The same, in the subprocess or not at all: None if it failed."""
        outcome = self._ask((function, args, kwargs))
        return None if outcome is None or outcome[1] is not None else cast("_Result", outcome[0])

    def close(self) -> None:
        self._is_closed = True
        process = self._process
        if process is not None:
            assert process.stdin is not None
            process.kill()
            process.wait(_END_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _ask(self, call: object) -> tuple[object, Exception | None] | None:
        with self._lock:
            return None if self._is_closed else self._exchange(call)

    def _exchange(self, call: object) -> tuple[object, Exception | None] | None:
        try:
            process = self._process
            if process is None or process.poll() is not None:
                command = [sys.executable, "-m", "cleave.server.plan_process"]
                process = self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert process.stdin is not None
            assert process.stdout is not None
            pickle.dump(call, process.stdin)
            process.stdin.flush()
            return cast("tuple[object, Exception | None]", pickle.load(process.stdout))
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):  # killed, or its pipes are gone
            return None


def _serve(calls: BinaryIO, answers: BinaryIO) -> None:
    while True:
        try:
            function, args, kwargs = pickle.load(calls)
        except EOFError:
            return
        result: object = None
        fault: Exception | None = None
        try:
            result = function(*args, **kwargs)
        except CleaveError as expected:
            fault = expected
        except Exception as ours:
            fault = CleaveError(f"planning failed: {ours!r}; please report this")
        pickle.dump((result, fault), answers)
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # printed text must not mix with answers
    _serve(sys.stdin.buffer, answers)
