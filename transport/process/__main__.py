"""``python -m transport.process``: one endpoint's packets. Started by `spawn` alone."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

import anyio

from transport.process.memory import map_memory
from transport.process.server import Server

NICE = 5
"""A program that computes goes first where processors are few: beside a transfer at full rate on
two of them a training step keeps three quarters of its speed and more, without this a half."""


class _ToProgram(logging.Handler):
    """Passes records on to the program, whose log they are part of."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._server.say_log(record.name, record.levelno, self.format(record))
        except Exception:
            self.handleError(record)


def main(arguments: list[str]) -> None:
    """Serve the program whose process id and descriptors are given, until it is gone."""
    # They come to everybody at a terminal, or of a service: the program decides what to do.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    program, control, udp, *memory = map(int, arguments)
    for descriptor in (control, udp, *memory):
        os.set_inheritable(descriptor, False)
    parent = _watch(program)
    shared = map_memory(memory[0]) if memory else memoryview(b"")
    server = Server(program, socket.socket(fileno=control), udp, shared)
    log = logging.getLogger("quicmesh")
    log.addHandler(_ToProgram(server))
    log.propagate = False
    anyio.run(server.run, parent)
    os._exit(0)  # there is nothing to put in order, and interpreters take their time


def _watch(program: int) -> int | None:
    """Return a descriptor that can be read once the program is gone."""
    try:
        watch = os.pidfd_open(program)
    except OSError:
        return None
    if os.getppid() != program:  # gone before, and another may have its number
        sys.exit(0)
    return watch


if __name__ == "__main__":
    main(sys.argv[1:])
