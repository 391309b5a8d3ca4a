"""Starts the endpoint process, knows when it has ended and why, and ends it.

It is in a process group of its own, so that what a terminal or a supervisor sends to the program's
does not end it before the program has said goodbye. Nothing of it has a name: it inherits its
socket to the program, the endpoint's own socket and the shared memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import anyio

from transport.errors import EndpointLost

__all__ = ["WITHOUT", "Child", "spawn", "spawn_shared"]

WITHOUT = 'EndpointConfig(placement="loop") does without.'
"""What to do where there can't be one."""

_BEGIN = """
import sys
end = sys.argv.index("--")
given = sys.argv[1:end]
sys.path[:] = given + [each for each in sys.path if each not in given]
from transport.process.__main__ import main
main(sys.argv[end + 1:])
"""
"""``python -m transport.process``, of this very installation, finding what the program finds."""

NICE = 10
"""A program that computes goes first where processors are few. Beside a transfer at full rate, on
two of them, a training step keeps 58 % of its speed at 0, 73 at 5, 80 to 87 at 10 and 94 at 15; the
transfer 77, 85, 80 and 72 % of what it has beside an idle program. Where others compute on every
processor, a ping takes 2 ms at 0, 5 and 10, and 9 at 15; of calls one in a hundred 11, 14, 29, and
180 ms, of a bound of liveness of 3 s."""

POLL_SECONDS = 0.01
"""How often to look whether it has ended, where the system can't tell."""


class Child:
    """A running endpoint process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self._watch: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._watch = os.pidfd_open(process.pid)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    @property
    def is_well(self) -> bool:
        """Whether it has ended, and as it should."""
        return self._process.poll() == 0

    async def ended(self) -> None:
        """Wait until it has ended."""
        if self._watch is not None:
            await anyio.wait_readable(self._watch)
        while not self.has_ended:  # noqa: ASYNC110 - the system may have no event for it
            await anyio.sleep(POLL_SECONDS)

    def cause(self) -> str:
        """How it has ended, for an error."""
        code = self._process.poll()
        if code is None:
            return "it says nothing any more"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"it was killed by {signal.Signals(-code).name}"
            return f"it was killed by signal {-code}"
        if code == 0:  # what is also said of a child whose end somebody else was told of
            return "it has ended, by itself or killed while the program waited for any child"
        return f"it has ended by itself, with exit status {code}"

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def reap(self) -> None:
        """Leave nothing of it behind. It must have ended, or been killed."""
        self._process.wait()
        if self._watch is not None:
            os.close(self._watch)
            self._watch = None

    def forget(self) -> None:
        """In a process that was forked from its parent: it is nobody's child here."""
        self._process.returncode = 0
        if self._watch is not None:
            os.close(self._watch)
            self._watch = None


def spawn(endpoint: socket.socket, memory: int | None) -> tuple[Child, socket.socket]:
    """Start an endpoint process of this program's own; return it and the socket to it.

    Args:
        endpoint: the bound UDP socket.
        memory: a descriptor of the shared memory, if there is any.

    Raises:
        EndpointLost: it can't be started here.
    """
    return _start("own", endpoint.fileno(), *([] if memory is None else [memory]))


def spawn_shared(listener: socket.socket) -> tuple[Child, socket.socket]:
    """Start one that serves the programs which come to `listener`.

    Return it, and a socket whose end, which is also that of this process, ends it.

    Raises:
        EndpointLost: it can't be started here.
    """
    return _start("shared", listener.fileno())


def _start(what: str, *given: int) -> tuple[Child, socket.socket]:
    if sys.platform != "linux":
        raise _not_started("this system has not what it takes", WITHOUT)
    if not sys.executable:
        raise _not_started("this interpreter does not know its own path", WITHOUT)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    passed = [theirs.fileno(), *given]
    flags = ["-P", "-E"] if sys.flags.ignore_environment else ["-P"]
    numbers = map(str, (NICE, os.getpid(), *passed))
    try:
        process = subprocess.Popen(  # noqa: S603 - of our own making
            [sys.executable, *flags, "-c", _BEGIN, *_path(), "--", what, *numbers],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=passed,
            process_group=0,
        )
    except OSError as error:
        ours.close()
        raise _not_started(
            str(error), f"Is the interpreter still where it was? {WITHOUT}"
        ) from error
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return Child(process), ours


def _path() -> list[str]:
    """Return where modules are looked for: the interpreter's library, here, where the program does.

    Whatever else has the names of these packages is behind them.
    """
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    library |= {f"{each}/lib-dynload" for each in library}
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    listed: list[object] = [*sys.path]
    known = [each for each in listed if isinstance(each, str) and each.startswith("/")]
    first = [each for each in known if each in library or Path(each).name == zipped]
    return [*first, str(Path(__file__).parents[2]), *(each for each in known if each not in first)]


def _not_started(why: str, fix: str) -> EndpointLost:
    return EndpointLost("starting the endpoint process", why=why, fix=fix)
