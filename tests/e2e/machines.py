"""The command in real processes, each machine with a temporary home."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests import programs
from tests.programs import Program

__all__ = ["Daemon", "Machine"]

_LOAD_TORCH = ("up", "bench")
"""The commands that load PyTorch into their own process."""

START_SECONDS = 40.0
"""Most of a start is PyTorch, and the machine's cores are shared."""


class Daemon:
    """A running ``mesh up``, line by line."""

    def __init__(self, process: subprocess.Popen[str] | Program) -> None:
        self.process = process
        self.lines: list[str] = []
        self._new: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str, seconds: float = START_SECONDS) -> re.Match[str]:
        """Return the first match of `pattern` in a line, past or to come."""
        for line in self.lines:
            if match := re.search(pattern, line):
                return match
        deadline = time.monotonic() + seconds
        while True:
            line = self._next(pattern, deadline - time.monotonic())
            if match := re.search(pattern, line):
                return match

    @property
    def ticket(self) -> str:
        return self.wait_for(r"^  mesh join (mesh1\w+)$")[1]

    @property
    def python_lines(self) -> str:
        """What it prints for Python, as it stands there."""
        line = self.wait_for(r"^with mesh\.blocking\..*$")[0]
        return "\n".join(self.lines[self.lines.index("import mesh") : self.lines.index(line) + 1])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 20.0) -> int:
        """Wait for the end; return the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def _next(self, pattern: str, seconds: float) -> str:
        try:
            line = self._new.get(timeout=max(0.0, seconds))
        except queue.Empty:
            line = None
        if line is None:
            raise AssertionError(f"no line matched {pattern!r} in:\n" + "\n".join(self.lines))
        return line

    def _read(self) -> None:
        assert self.process.stdout is not None
        with suppress(ValueError):  # closed meanwhile, by whoever is done with it
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))
                self._new.put(self.lines[-1])
        self._new.put(None)


class Machine:
    """A home, and the command in it."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def start(self, *arguments: str, bind: str | None = "127.0.0.1:0") -> subprocess.Popen[str]:
        """Run ``mesh up`` from the very beginning."""
        return subprocess.Popen(
            [sys.executable, *self._up(*arguments, bind=bind)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @contextmanager
    def up(
        self, *arguments: str, bind: str | None = "127.0.0.1:0", fresh: bool = False
    ) -> Iterator[Daemon]:
        """Run ``mesh up`` during the block, which begins when it is reachable.

        `fresh` starts an interpreter for it, as a shell would.
        """
        started: subprocess.Popen[str] | Program
        if fresh:
            started = self.start(*arguments, bind=bind)
        else:
            started = Program(self._up(*arguments, bind=bind), stderr=False)
        with started as process:
            daemon = Daemon(process)
            try:
                daemon.wait_for("Ctrl.C to leave")
                yield daemon
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGCONT)
                    process.kill()

    def run(
        self,
        *arguments: str,
        code: int | None = 0,
        seconds: float = 40.0,
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run the command, expect an exit code and no traceback.

        `fresh` starts an interpreter for it, as a shell would.
        """
        command = [*self._command, *arguments]
        if fresh:
            done = subprocess.run(
                [sys.executable, *command],
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        else:
            torch = arguments[0] in _LOAD_TORCH and "--detach" not in arguments
            done = programs.run(command, timeout=seconds, torch=torch)
        told = f"rc {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert code is None or done.returncode == code, told
        assert "Traceback" not in told, told
        return done

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def python(self, code: str, *, seconds: float = 40.0) -> subprocess.CompletedProcess[str]:
        """Run a program on this machine."""
        return programs.run(
            ["-c", code], env=os.environ | {"MESH_HOME": str(self.home)}, timeout=seconds
        )

    def _up(self, *arguments: str, bind: str | None) -> list[str]:
        where = () if bind is None else ("--bind", bind)
        return [*self._command, "up", *where, *arguments]

    @property
    def _command(self) -> list[str]:
        return ["-m", "mesh", "--home", str(self.home)]
