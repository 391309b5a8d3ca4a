"""Python programs of tests, as processes that begin with what others wrote already loaded.

PyTorch takes two seconds of CPU time to load and the rest half a second, hundreds of times a
session. A process that has done so once forks whenever a program is to run; what runs is a process
of its own all the same, from its first line to the interpreter's end, and loads the project itself.
Where the start itself is tested, `subprocess` has to do it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

__all__ = ["Program", "run"]

ROOT = Path(__file__).parents[1]
_CAN_FORK = sys.platform == "linux" and hasattr(socket, "send_fds")


class Program:
    """``python`` with arguments (``-m module ...`` or ``-c code``), as much of `subprocess.Popen`
    as tests need. Its output is text, through pipes.

    Args:
        arguments: what follows ``python``.
        env: in place of this process's environment.
        stderr: whether it goes to its own pipe; otherwise it goes where standard output goes.
        stdin: whether there is one to write to.
        torch: whether it begins with PyTorch loaded as well. Without, it is forked from a small
            process, and ends sooner.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stderr: bool = True,
        stdin: bool = False,
        torch: bool = True,
    ) -> None:
        self.args = [sys.executable, *arguments]
        self.returncode: int | None = None
        self.stdin: IO[str] | None
        self.stdout: IO[str] | None
        self.stderr: IO[str] | None
        self._popen: subprocess.Popen[str] | None = None
        if not _CAN_FORK:
            self._popen = subprocess.Popen(
                self.args,
                stdin=subprocess.PIPE if stdin else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if stderr else subprocess.STDOUT,
                text=True,
                env=env,
                cwd=ROOT,
            )
            self.pid = self._popen.pid
            self.stdin = self._popen.stdin
            self.stdout = self._popen.stdout
            self.stderr = self._popen.stderr
            return
        self._status, theirs = socket.socketpair()
        stdin_read, stdin_write = os.pipe() if stdin else (os.open(os.devnull, os.O_RDONLY), None)
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe() if stderr else (None, out_write)
        order = {"arguments": list(arguments), "env": dict(os.environ if env is None else env)}
        given = (stdin_read, out_write, err_write, theirs.fileno())
        try:
            socket.send_fds(_server(torch), [json.dumps(order).encode()], given)
        finally:
            theirs.close()
            for each in {stdin_read, out_write, err_write}:
                os.close(each)
        self.stdin = None if stdin_write is None else os.fdopen(stdin_write, "w")
        self.stdout = os.fdopen(out_read)
        self.stderr = None if err_read is None else os.fdopen(err_read)
        self.pid = int.from_bytes(self._status.recv(8), "big")

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code: minus the signal that killed it, if one did.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        if self._popen is not None:
            self.returncode = self._popen.wait(timeout)
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            status = int.from_bytes(self._status.recv(8), "big")
            self.returncode = os.waitstatus_to_exitcode(status)
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Write `text`, read all the output, wait for the end."""
        if self.stdin is not None and not self.stdin.closed:
            self.stdin.write(text)
            self.stdin.close()
        found = {"out": "", "err": ""}

        def read(name: str, pipe: IO[str]) -> None:
            found[name] = pipe.read()

        pipes = (("out", self.stdout), ("err", self.stderr))
        readers = [
            threading.Thread(target=read, args=(name, pipe), daemon=True)
            for name, pipe in pipes
            if pipe is not None and not pipe.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        self._close()
        return found["out"], found["err"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.stdin is not None:
            self.stdin.close()
        self.wait()
        self._close()

    def _close(self) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def run(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 40.0,
    torch: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its output, as `subprocess.run` does.

    Raises:
        subprocess.TimeoutExpired: it had to be killed after `timeout` seconds.
    """
    with Program(arguments, env=env, torch=torch) as program:
        try:
            out, err = program.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            program.kill()
            raise
    return subprocess.CompletedProcess(program.args, program.wait(), out, err)


@functools.cache
def _server(torch: bool) -> socket.socket:
    """Start a process that forks, and return the way to it: it ends when that is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.programs_server"),
            *(str(theirs.fileno()), "torch" if torch else "small"),
        ],
        pass_fds=[theirs.fileno()],
        cwd=ROOT,
    )
    theirs.close()

    def stop() -> None:
        ours.close()
        process.wait(10)

    atexit.register(stop)
    return ours
