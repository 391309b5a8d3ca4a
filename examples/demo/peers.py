"""Peer daemons as separate processes, driven by the ``mesh`` command like any user's."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STOP_SECONDS = 10.0


class PeerProcess:
    """A daemon with a state directory, and so a key, of its own."""

    def __init__(self, name: str, home: Path) -> None:
        self.name = name
        self.home = home

    def run(self, *words: str) -> str:
        """Run one ``mesh`` command in this peer's home; return what it printed."""
        done = subprocess.run(
            [*self._command(), *words], capture_output=True, text=True, timeout=90, check=False
        )
        if done.returncode:
            raise SystemExit(f"mesh {' '.join(words)}: {done.stderr or done.stdout}")
        return done.stdout

    def ask(self, *words: str) -> Any:
        """Run a reading command; return its JSON."""
        return json.loads(self.run(*words, "--json"))

    def invite(self, name: str) -> str:
        """Return a ticket with a one-time invite for `name`."""
        return str(self.ask("invite", "--for", name)["ticket"])

    def sent(self) -> dict[str, int]:
        """Return the bytes of UDP payload sent so far, by the receiver's node id."""
        return {peer["node_id"]: peer["bytes_sent"] or 0 for peer in self.ask("status")["peers"]}

    @functools.cached_property
    def ids(self) -> dict[str, str]:
        """The peer's node id, whole and short."""
        return dict(self.ask("id"))

    def start(self) -> None:
        """Start the daemon; return when it can be reached."""
        self.run("up", "--detach", "--bind", "127.0.0.1:0")

    def stop(self) -> None:
        """Stop the daemon; return when it is gone."""
        self.run("down")

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "mesh", "--home", str(self.home)]


@contextlib.contextmanager
def running(*peers: PeerProcess) -> Iterator[None]:
    """Keep the daemons of all `peers` running for the duration of the block."""
    with ThreadPoolExecutor() as threads:
        try:
            list(threads.map(PeerProcess.start, peers))
            yield
        finally:
            list(threads.map(PeerProcess.stop, peers))


@contextlib.contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program of the examples for the duration of the block, reading its output."""
    child = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_SECONDS)
            child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
