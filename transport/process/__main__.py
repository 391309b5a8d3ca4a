"""``python -m transport.process``: the packets of endpoints elsewhere. Started by `spawn` alone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

import anyio

from transport.process.hub import Hub
from transport.process.memory import map_memory
from transport.process.said import pass_log_on
from transport.process.server import Server


def main(arguments: list[str]) -> None:
    """Serve until the program is gone whose process id and descriptors are given.

    The first argument says whether that is the one program, or the daemon that shares this process,
    the second how far it is to give way to those that compute.
    """
    # They come to everybody at a terminal, or of a service: the program decides what to do.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    what, (nice, program, *descriptors) = arguments[0], map(int, arguments[1:])
    os.nice(nice)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    watch = _watch(program)
    pass_log_on()
    control = socket.socket(fileno=descriptors[0])
    if what == "shared":
        hub = Hub(socket.socket(fileno=descriptors[1]), control)
        anyio.run(hub.run, watch)
    else:
        udp, *memory = descriptors[1:]
        shared = map_memory(memory[0]) if memory else memoryview(b"")
        anyio.run(Server(program, control, socket.socket(fileno=udp), shared).run, watch)
    os._exit(0)  # there is nothing to put in order, and interpreters take their time


def _watch(program: int) -> int | None:
    """Return a descriptor that can be read once the program is gone; None where there are none.

    The end of the socket to it tells the same, unless what the program has started holds that.
    """
    watch = None
    with contextlib.suppress(OSError, AttributeError):  # or Python was built where there were none
        watch = os.pidfd_open(program)
    if os.getppid() != program:  # gone before, and another may have its number
        sys.exit(0)
    return watch


if __name__ == "__main__":
    main(sys.argv[1:])
