"""``mesh bench`` between two machines."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tensor_bridge.lanes.shared.host import unavailable
from tests.e2e.machines import Machine
from tests.programs import Program

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

SHORT = ("--rounds", "1", "--calls", "5", "--seconds", "0.2")


def read_all(terminal: int) -> bytes:
    """Return what is written to a terminal until nobody has it open any more."""
    seen = b""
    try:
        while part := os.read(terminal, 1 << 16):
            seen += part
    except OSError:
        pass  # that is how Linux says it
    finally:
        os.close(terminal)
    return seen


def test_bench(tmp_path: Path) -> None:
    a, b = Machine(tmp_path / "a"), Machine(tmp_path / "b")
    with a.up() as first:
        b.run("join", first.ticket, "--name", "first")

        shown = b.run("bench", "first", "--sizes", "4K,64K", *SHORT).stdout
        assert f"lane {'quic' if unavailable() else 'shared-memory'}" in shown
        assert "64 B each way" in shown
        rows = [line.split() for line in shown.splitlines() if "MB/s" in line]
        assert [row[:3] for row in rows] == [
            [size, "KiB", way] for size in ("4.0", "64.0") for way in ("there", "back")
        ]
        assert "s/GB" in shown

        lines = b.run("bench", "first", "--json", "--sizes", "4K", *SHORT).stdout.splitlines()
        figures = [json.loads(line) for line in lines]
        assert [each["figure"] for each in figures] == ["link", "trips", "transfer", "transfer"]
        assert figures[2]["rate"] > 0

        # On a terminal it shows how far it is, which does not get into what is redirected.
        terminal, theirs = pty.openpty()
        command = [sys.executable, "-m", "mesh", "--home", str(b.home), "bench", "first", "--json"]
        with ThreadPoolExecutor(1) as reader:
            seen = reader.submit(read_all, terminal)
            done = subprocess.run(
                [*command, "--sizes", "4K", *SHORT],
                stdout=subprocess.PIPE,
                stderr=theirs,
                check=True,
            )
            os.close(theirs)
            assert b"looking at the load" in seen.result()
        assert len([json.loads(line) for line in done.stdout.splitlines()]) == 4

        assert "no size" in b.run("bench", "first", "--sizes", "4X", code=2).stderr
        b.run("bench", "nobody", code=3)
        stranger = Machine(tmp_path / "c")
        assert "invite" in stranger.run("bench", first.ticket, code=4).stderr

        # Interrupted, it says nothing more, and the peer keeps nothing of it.
        long = ["--sizes", "64M", "--rounds", "100", "--calls", "0", "--seconds", "100"]
        with Program([*command[1:], *long]) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert json.loads(process.stdout.readline())["figure"] == "link"
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
            assert "Traceback" not in process.stderr.read()
        tables = a.json("status")["tables"]
        assert (tables["tensors"], tables["tensor_bytes"]) == (0, 0)
    b.run("bench", "first", "--timeout", "1", code=3)
