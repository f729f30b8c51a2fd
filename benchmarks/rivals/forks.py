# pyright: standard
"""Fork the rivals' processes from one that has imported their libraries, each into the namespace of its device.

`python -m benchmarks.rivals.forks MODULE ...` imports the modules, then reads a JSON object per line: the module whose
`main` to run, the namespace, the control group, the host's name, and what to give to `main`. It
answers each with the process id. On two shared cores, importing torch once instead of once per device is what makes
many short runs possible.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.rivals.shape import Work
from benchmarks.rivals.work import build

_NETWORK_NAMESPACE = 0x40000000
_HOST_NAMESPACE = 0x04000000


def enter_place(namespace: str, host: str) -> None:
    """Move this process into a named network namespace, and give it a host name of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open("rb") as opened:
        if libc.setns(opened.fileno(), _NETWORK_NAMESPACE) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    if libc.unshare(_HOST_NAMESPACE) != 0:
        raise OSError(ctypes.get_errno(), "cannot have a host name of its own")
    socket.sethostname(host)


def serve(order: dict[str, Any]) -> None:
    """Run a module's `main` in its place, and never return."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        if order["group"]:
            Path(order["group"]).write_text(str(os.getpid()), encoding="utf-8")
        enter_place(order["namespace"], order["host"])
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, sys.stdin.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        import_module(order["module"]).main(order["given"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked processes here
    for name in sys.argv[1:]:
        import_module(name)
    build(Work(model="demo", lora=True))  # imports what building imports
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            serve(order)
        print(json.dumps({"pid": child}), flush=True)


if __name__ == "__main__":
    main()
