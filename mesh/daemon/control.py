"""How the command reaches the daemon of its machine: as any program would, over QUIC.

There is no second channel with rules of its own. The command is a program with a fresh key that the
machine's key lets act as ``admin`` for a minute, and it dials the address in the run file.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from auth import ADMIN, DEFAULT_SCOPES, deny_all
from mesh.errors import NotRunning
from mesh.home import Home
from mesh.runfile import RunFile
from transport import Connection, Endpoint, EndpointConfig, PeerAddress

__all__ = ["control", "control_at"]

LIFETIME = 60.0
"""Seconds for which the command may act: its calls are done sooner."""

CONNECT_TIMEOUT = 5.0
"""On loopback a daemon that has not answered by then is stopped or stuck."""


@asynccontextmanager
async def control(home: Home, *, what: str = "asking the daemon") -> AsyncIterator[Connection]:
    """Connect to the daemon of `home` for the duration of the block.

    Raises:
        NotRunning: there is none.
        Unreachable, ConnectTimeout: there is one, and it does not answer.
        HomeError, KeyFileError: the home or its key can't be used.
    """
    running = home.running()
    if running is None:
        raise NotRunning(what, why=f"no daemon runs in {home.path}", fix="Start one: mesh up")
    async with control_at(home, running, timeout=CONNECT_TIMEOUT) as connection:
        yield connection


@asynccontextmanager
async def control_at(home: Home, running: RunFile, *, timeout: float) -> AsyncIterator[Connection]:
    """Connect to the daemon that wrote `running`, if it is there and has this home's key.

    Raises:
        Unreachable, ConnectTimeout: it does not answer, or has another key.
        HomeError, KeyFileError: the home or its key can't be used.
    """
    key, delegation = home.program((ADMIN, *DEFAULT_SCOPES), LIFETIME)
    config = EndpointConfig(listen=False)
    async with Endpoint(key, deny_all(), config, delegation=delegation) as endpoint:
        where = PeerAddress(running.node_id, running.control)
        yield await endpoint.connect(where, timeout=timeout)
