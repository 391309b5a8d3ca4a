"""``mesh run``: places, output, exit codes, signals; nothing of it outlives its launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from auth import Ticket
from tests.e2e.machines import Machine
from tests.programs import Program

pytestmark = pytest.mark.e2e

STARTED = "import os, sys, time; rank = int(os.environ['RANK']); print('up', os.getpid()); "


def start(home: Path, *arguments: str) -> Program:
    command = ["-m", "mesh", "--home", str(home), "run", "--bind", "127.0.0.1:0", *arguments]
    names = ("RANK", "WORLD_SIZE", "SLURM_NNODES", "SLURM_JOB_ID", "PET_NNODES")
    env = {name: text for name, text in os.environ.items() if name not in names}
    return Program(command, env=env, torch=False)


@contextlib.contextmanager
def running(tmp_path: Path, code: str, *options: str, ranks: int = 2) -> Iterator[Program]:
    script = tmp_path / "program.py"
    script.write_text(STARTED + code)
    count = f"--nproc-per-node={ranks}"
    with start(tmp_path / "home", count, *options, str(script), "--x", "a b") as program:
        try:
            yield program
        finally:
            program.kill()


def pids(program: Program, count: int) -> list[int]:
    """Return the processes that have said they are up."""
    found = []
    assert program.stdout is not None
    while len(found) < count:
        line = program.stdout.readline()
        assert line, "it ended"
        if " up " in line or line.startswith("up "):
            found.append(int(line.split()[-1]))
    return found


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def gone(processes: list[int], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, processes))


def test_ranks_know_their_place_and_print_with_it(tmp_path: Path) -> None:
    code = (
        "print(os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE'], sys.argv[1:], "
        "os.environ['MESH_RENDEZVOUS'][:12], os.environ['OMP_NUM_THREADS']); "
        "print('no newline at the end', end='', file=sys.stderr)"
    )
    with running(tmp_path, code) as program:
        out, errors = program.communicate(timeout=30)
    assert program.returncode == 0, errors
    for rank in (0, 1):
        assert f"[{rank}] {rank} 2 ['--x', 'a b'] mesh://mesh1 1\n" in out
        assert f"[{rank}] no newline at the end\n" in errors


def test_one_rank_has_no_prefix_and_modules_run(tmp_path: Path) -> None:
    with start(tmp_path / "home", "-m", "this") as program:
        out, errors = program.communicate(timeout=30)
    assert (program.returncode, errors) == (0, "")
    assert out.startswith("The Zen of Python")


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        ("sys.exit(7)", 7, "rank 1 ended with exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 ended with signal SIGKILL"),
        pytest.param(
            *("os.kill(os.getpid(), 40)", 168, "rank 1 ended with signal 40"),
            marks=pytest.mark.skipif(sys.platform != "linux", reason="real-time signals"),
        ),
    ],
)
def test_the_first_failure_ends_all_and_is_the_exit_code(
    tmp_path: Path, failure: str, code: int, words: str
) -> None:
    began = time.monotonic()
    with running(tmp_path, f"{failure} if rank == 1 else time.sleep(60)") as program:
        out, errors = program.communicate(timeout=30)
    assert program.returncode == code
    assert words in errors
    assert time.monotonic() - began < 20
    assert gone([int(line.split()[-1]) for line in out.splitlines()])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_go_to_all_ranks(tmp_path: Path, number: int) -> None:
    code = (
        "import signal; signal.signal(signal.SIGTERM, lambda *a: sys.exit('terminated'))\n"
        "try: time.sleep(60)\nexcept KeyboardInterrupt: print('interrupted')"
    )
    with running(tmp_path, code) as program:
        ranks = pids(program, 2)
        time.sleep(0.1)  # for the line after
        program.send_signal(number)
        out, errors = program.communicate(timeout=30)
    assert program.returncode == 128 + number
    if number == signal.SIGINT:
        assert out.count("interrupted") == 2
    else:
        assert errors.count("terminated") == 2
    assert gone(ranks)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no such signals")
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_c08_a_notice_is_passed_on_and_ends_nothing_by_itself(tmp_path: Path, name: str) -> None:
    code = (
        f"import signal; signal.signal(signal.{name}, lambda *_: (print('saved'), sys.exit(0)))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    with running(tmp_path, code) as program:
        assert program.stdout is not None
        ready = 0
        while ready < 2:
            line = program.stdout.readline()
            assert line, "it ended"
            ready += "ready" in line
        program.send_signal(getattr(signal, name))
        out, errors = program.communicate(timeout=30)
    assert program.returncode == 0, errors
    assert out.count("saved") == 2


@pytest.mark.slow  # for they have their five seconds
def test_ranks_that_will_not_end_are_killed(tmp_path: Path) -> None:
    code = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True)\n" + (
        "while True: time.sleep(1)"
    )
    with running(tmp_path, code, ranks=1) as program:
        ranks = pids(program, 1)
        assert program.stdout is not None
        assert program.stdout.readline() == "deaf\n"
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=30)
    assert program.returncode == 128 + signal.SIGTERM
    assert gone(ranks)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs the kernel's word, on Linux")
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with running(tmp_path, "time.sleep(60)") as program:
        ranks = pids(program, 2)
        program.kill()
        assert gone(ranks)


def test_what_ranks_leave_behind_ends_with_them(tmp_path: Path) -> None:
    code = (
        "import subprocess; child = subprocess.Popen(['sleep', '60']); print('up', child.pid); "
        "sys.stdout.flush(); os._exit(0)"
    )
    with running(tmp_path, code, ranks=1) as program:
        left = pids(program, 2)
        program.communicate(timeout=30)
    assert program.returncode == 0
    assert gone(left)


def test_machines_meet_by_ticket(tmp_path: Path) -> None:
    """Two launchers of one home stand for two machines that have joined each other."""
    script = tmp_path / "program.py"
    script.write_text(
        "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    )
    two = ("--nnodes", "2", "--nproc-per-node", "2")
    with start(tmp_path / "home", *two, str(script)) as first:
        assert first.stderr is not None
        hint = next(line for line in first.stderr if "mesh run --ticket" in line).split()
        given = hint[2 : hint.index("--nnodes")]
        with start(tmp_path / "home", *two, *given, str(script)) as second:
            outs = [program.communicate(timeout=30)[0] for program in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert sorted(outs[0].splitlines()) == ["[0] rank 0 of 4", "[1] rank 1 of 4"]
    assert sorted(outs[1].splitlines()) == ["[2] rank 2 of 4", "[3] rank 3 of 4"]


@pytest.mark.timeout(120)
def test_a_ticket_with_an_invite_lets_a_new_machine_in(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import os; print('rank', os.environ['RANK'], os.environ['MESH_RENDEZVOUS'])")
    host = Machine(tmp_path / "host")
    with host.up() as daemon:
        asked = ("--ticket", daemon.ticket, "--job", "j", "--nproc-per-node", "2", str(script))
        for turn in range(2):  # the second time it is known, and the invite is spent
            with start(tmp_path / "guest", *asked) as program:
                out, errors = program.communicate(timeout=60)
            assert program.returncode == 0, errors
            lines = sorted(out.splitlines())
            assert [line.split()[:3] for line in lines] == [
                ["[0]", "rank", "0"],
                ["[1]", "rank", "1"],
            ]
            url = lines[0].split()[-1]
            invited = Ticket.decode(url.removeprefix("mesh://").partition("?")[0])
            assert not invited.invite, turn
        stranger = start(tmp_path / "stranger", *asked)
        with stranger as program:
            _, errors = program.communicate(timeout=60)
        assert program.returncode == 4
        assert "invite" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ticket", "mesh1abc", "x.py"), "--ticket needs --job"),
        (("--ticket", "mesh1abc", "--job", "j", "x.py"), "ticket"),
        (("--node-rank", "3", "--nnodes", "2", "x.py"), "machines are from 0 to 1"),
        (("--bind", "nowhere", "x.py"), "nowhere"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    command = ["-m", "mesh", "--home", str(tmp_path / "home"), "run", *arguments]
    with Program(command, torch=False) as program:
        _, errors = program.communicate(timeout=30)
    assert program.returncode == 2
    assert words in errors
