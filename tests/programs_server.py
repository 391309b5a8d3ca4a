"""The process behind `tests.programs`: loads what takes long, and forks.

For each order it forks a monitor, which forks the program and tells its end: exit codes go to the
parent, and the one who wants to know is not.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import types
from typing import Any

# The project itself is loaded by each program anew: it is what is tested.
SMALL = (
    "aioquic.quic.connection",
    "aioquic.quic.retry",
    "anyio._backends._asyncio",
    "anyio._backends._trio",
    "cbor2",
    "cryptography.x509",
    "psutil",
    "pydantic.type_adapter",  # which typer loads where it is installed
    "rich.console",
    "statistics",
    "trio",
    "typer",
)
WITH_TORCH = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "fastapi",
    "uvicorn",
)

_MAX_ORDER = 1 << 18


def main() -> None:
    """Fork programs as ordered, until nobody is left who could order."""
    for name in (*SMALL, *(WITH_TORCH if sys.argv[2] == "torch" else ())):
        with contextlib.suppress(ImportError):  # an optional one
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is never collected is not copied either
    orders = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: not for this process
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, _MAX_ORDER, 4)
        if not data:
            _reap()
            return
        if os.fork() == 0:
            orders.close()
            order = json.loads(data)
            _monitor(descriptors)
            break
        for descriptor in descriptors:
            os.close(descriptor)
        _reap()
    _become(order)


def _monitor(descriptors: list[int]) -> None:
    """Fork the program, in which this returns; in this process it never does."""
    status = socket.socket(fileno=descriptors.pop())
    pid = os.fork()
    if pid == 0:
        status.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        for descriptor in set(descriptors):
            if descriptor > 2:
                os.close(descriptor)
        return
    for descriptor in set(descriptors):
        os.close(descriptor)
    status.send(pid.to_bytes(8, "big"))
    _, code = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # nobody waits for it any more
        status.send(code.to_bytes(8, "big"))
    os._exit(0)


def _reap() -> None:
    """Let go of the monitors that have ended; their CPU time counts as this process's then."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(order: dict[str, Any]) -> None:
    """Be ``python`` with the arguments of an order."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["env"])
    flag, what, *arguments = order["arguments"]
    sys.argv = [flag, *arguments]
    # The globals have to be those of the module __main__: these outlive what runs at exit.
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    if flag == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]  # which ``python -m`` calls
    else:
        exec(compile(what, "<string>", "exec"), main_module.__dict__)


if __name__ == "__main__":
    main()
