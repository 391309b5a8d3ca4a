"""The benchmarks run and print what they should; how fast anything is, no test says."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import __main__ as command
from tests.benchmarks import (
    collectives,
    delay,
    device,
    harness,
    host,
    memory,
    namespaces,
    report,
    rpc,
    train,
)
from tests.benchmarks.compare import Options, Row, Shown, compare, ratio, ready, take_turns
from tests.benchmarks.harness import LOOPBACK, Pipe, Site, Turn, obey, session
from tests.benchmarks.loopback import Bulk, Small
from tests.lab.wireguard import missing_wireguard
from tests.programs_server import SMALL

pytestmark = pytest.mark.timeout(180)

PRELOADED = [*SMALL, "torch.distributed.rpc", "pytest", "tests.benchmarks.__main__"]

TINY = ["--rounds", "1", "--calls", "3", "--json"]


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert command.main([*arguments, *TINY]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def contenders(figures: list[dict[str, Any]]) -> set[str]:
    return {each["contender"] for each in figures if "contender" in each}


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the contenders from a process that has loaded what they use: not all of it each."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(harness, "START_METHOD", "forkserver")


class Sleeper:
    """A contender that does nothing, at its leisure."""

    most = 1000.0

    def __init__(self, why: str | None = None, *, spins: bool = False) -> None:
        self._why = why
        self.spins = spins

    def missing(self) -> str | None:
        return self._why

    def serve(self, pipe: Pipe, site: Site) -> None:
        pipe.send("here")
        time.sleep(1e6)

    def dial(self, pipe: Pipe, site: Site, where: Any) -> None:
        assert where == "here"
        obey(pipe, lambda count: [0.001] * count, lambda nbytes: 0.5)


class Breaks(Sleeper):
    def serve(self, pipe: Pipe, site: Site) -> None:
        raise SystemExit(0)


class Counted:
    """Stands in for a session: takes one second longer with each turn."""

    def __init__(self) -> None:
        self.turns = 0

    def bulk(self, nbytes: int) -> Turn:
        self.turns += 1
        return Turn(float(self.turns), nbytes, 0.5, 0.25, machine=4.0, others=1.0)


@pytest.mark.usefixtures("forked")
def test_round_trips(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["quicmesh call", "quicmesh, poll loop", "qh3", "stock aioquic", "TCP"]
    figures = lines(capsys, "small", "--only", *names)
    assert contenders(figures) == set(names)
    assert all(each["median"] > 0 for each in figures if "contender" in each)
    assert all(each["p99"] >= each["median"] for each in figures if "contender" in each)
    assert any(
        each["what"].endswith("quicmesh call / stock aioquic") and each["ratio"] > 0
        for each in figures
        if "what" in each
    )


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "only",
    [
        ("quicmesh at 1452*", "stock aioquic", "qh3 at 1452", "TLS*"),
        ("gloo*", "TensorPipe*"),
    ],
)
def test_bulk(capsys: pytest.CaptureFixture[str], tmp_path: Path, only: tuple[str, ...]) -> None:
    picture = tmp_path / "bulk.png"
    pytest.importorskip("matplotlib")
    figures = lines(capsys, "bulk", "--mib", "1", "2", "--only", *only, "--plot", str(picture))
    rows = [each for each in figures if "contender" in each]
    assert len({each["figure"] for each in rows}) == 2
    assert len(contenders(figures)) >= 3
    for row in rows:
        assert row["nbytes"] in (1 << 20, 2 << 20)
        assert row["send_cpu"] > 0
        assert row["receive_cpu"] > 0
        assert 0 <= row["others"] <= 1
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(host.missing() is not None, reason=str(host.missing()))
def test_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["quicmesh put", "quicmesh get", "quicmesh get over QUIC", host.GLOO]
    figures = lines(capsys, "host", "--scale", "0.02", "--only", *names)
    assert contenders(figures) == set(names)
    assert all(each["nbytes"] > 1 << 20 for each in figures if "nbytes" in each)
    goals = [each for each in figures if each.get("goal") is not None]
    assert [each["goal"] for each in goals] == [2.5, 2.5]
    assert all(each["ratio"] > 0 for each in goals)


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(host.missing() is not None, reason=str(host.missing()))
def test_wakes(capsys: pytest.CaptureFixture[str]) -> None:
    names = [host.WAKE, host.BARE_WAKE]
    figures = lines(capsys, "host", "--only", *names)
    assert contenders(figures) == set(names)
    assert [each["goal"] for each in figures if "goal" in each and each["ratio"]] == [1.0, None]


@pytest.mark.slow  # four processes that load torch, two of them twice
@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(device.missing() is not None, reason=str(device.missing()))
def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    figures = lines(capsys, "device", "--scale", "0.05")
    assert contenders(figures) >= {"here", "quicmesh", "quicmesh, captured"}
    assert all(each["median"] > 0 for each in figures if "contender" in each)
    assert {each["goal"] for each in figures if "what" in each} >= {1.0, 1.7, 1.3}


@pytest.mark.slow  # seven processes that load torch
@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(train.missing() is not None, reason=str(train.missing()))
def test_training(capsys: pytest.CaptureFixture[str]) -> None:
    figures = lines(capsys, "train", "--scale", "0.1")
    rows = [each for each in figures if "contender" in each]
    assert contenders(figures) > {train.OURS, train.TORCH}
    assert len(rows) == 7
    assert all(each["median"] > 0 for each in rows)
    assert [each["goal"] for each in figures if "what" in each] == [1.3]


@pytest.mark.slow  # four processes that load torch, and calls nested 80 deep
@pytest.mark.usefixtures("forked")
def test_remote_calls(capsys: pytest.CaptureFixture[str]) -> None:
    figures = lines(capsys, "rpc", "--scale", "0.02")
    assert contenders(figures) == {rpc.OURS, rpc.TENSORPIPE}
    goals = [each["goal"] for each in figures if "what" in each]
    assert goals == [1.0, 1.0, 1.5, 1.0, 0.25]
    assert all(each["ratio"] > 0 for each in figures if "what" in each)


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(collectives.missing() is not None, reason=str(collectives.missing()))
def test_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    figures = lines(capsys, "collectives", "--scale", "0.02", "--only", "quicmesh")
    rows = [each for each in figures if "contender" in each]
    assert len({each["figure"] for each in rows}) == len(collectives.GOALS)
    assert {each["contender"] for each in rows} == {"quicmesh"}
    assert all(each["median"] > 0 for each in rows)
    goals = [each["goal"] for each in figures if "what" in each]
    assert goals == list(collectives.GOALS.values())


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))
def test_two_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    figures = lines(
        capsys, "namespaces", "--scale", "0.02", "--only", "quicmesh", "gloo over WireGuard"
    )
    expected = {"quicmesh"} | (set() if missing_wireguard() else {"gloo over WireGuard"})
    assert contenders(figures) == expected
    assert sum("what" in each and each["goal"] == 2.0 for each in figures) == 5


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(delay.missing() is not None, reason=str(delay.missing()))
def test_a_long_way(capsys: pytest.CaptureFixture[str]) -> None:
    figures = lines(
        capsys, "delay", "--scale", "0.002", "--loss", "0", "0.01", "--only", "quicmesh", "TCP bbr"
    )
    assert len({each["figure"] for each in figures if "figure" in each}) == 2
    assert contenders(figures) >= {"quicmesh"}


@pytest.mark.skipif(memory.missing() is not None, reason=str(memory.missing()))
def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    # Large enough that what waits in sockets, some megabytes on a busy machine, is little of it.
    figures = lines(capsys, "memory", "--scale", "0.08")
    assert {each["unit"] for each in figures if "unit" in each} == {"MiB", "MB/s"}
    goals = [each for each in figures if "goal" in each]
    assert all(each["holds"] for each in goals), goals  # sizes, not times: they are to hold


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["smal"])
    assert ended.value.code == 2
    assert "there are small, bulk" in capsys.readouterr().err


@pytest.mark.usefixtures("forked")
def test_who_can_not_take_part_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    named = {"a": Sleeper(), "b": Sleeper("it is not installed"), "c": Breaks(), "d": Sleeper()}
    options = Options(only=("a", "b", "c"))
    with ready(named, options) as sessions:
        assert list(sessions) == ["a"]
    assert options.failed == ["c"]
    told = capsys.readouterr().err
    assert "left out: b: it is not installed" in told
    assert "left out: c: " in told


@pytest.mark.usefixtures("forked")
def test_a_turn_is_no_longer_than_a_contender_bears() -> None:
    with session(Sleeper()) as it:
        turn = it.bulk(1 << 20)
        assert (turn.nbytes, turn.seconds) == (1000, 0.5)
        assert it.small(3).trips == (0.001,) * 3


@pytest.mark.usefixtures("forked")
def test_what_spins_is_stopped_between_its_turns() -> None:
    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    with session(Sleeper(spins=True)) as it:
        assert it.small(1).trips
        deadline = time.monotonic() + 10
        # One that runs just then stops a moment later.
        while [state(pid) for pid in (*it.sender, *it.receiver)] != ["T", "T"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with session(Sleeper()) as it:  # positive control
        assert it.small(1).trips
        assert "T" not in [state(pid) for pid in (*it.sender, *it.receiver)]


def test_nothing_is_left_running() -> None:
    with session(Sleeper(spins=True)) as it:
        pids = (*it.sender, *it.receiver)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIG_DFL)


def test_the_first_turn_is_not_counted() -> None:
    contender = Counted()
    options = Options(rounds=3)
    turns = take_turns({"it": contender}, options, lambda it: it.bulk(6_000_000))  # type: ignore[dict-item]
    assert [turn.seconds for turn in turns["it"]] == [2, 3, 4]
    (row,) = compare("part", "figure", {"it": Counted()}, options, lambda it: it.bulk(6_000_000))  # type: ignore[dict-item]
    assert (row.median, row.least, row.most, row.unit) == (2, 1.5, 3, "MB/s")
    assert row.send_cpu == pytest.approx(1.5 / 0.018)
    assert row.receive_cpu == pytest.approx(0.75 / 0.018)
    assert row.others == 0.25


def test_one_that_breaks_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Counted):
        def bulk(self, nbytes: int) -> Turn:
            if self.turns:
                raise EOFError
            return super().bulk(nbytes)

    options = Options(rounds=2)
    both = {"broken": Broken(), "whole": Counted()}
    rows = compare("part", "figure", both, options, lambda it: it.bulk(1))  # type: ignore[arg-type]
    assert [row.contender for row in rows] == ["whole"]
    assert options.failed == ["broken"]
    assert "failed: broken: EOFError" in capsys.readouterr().err


def test_ratios_and_goals() -> None:
    rows = [
        Row("p", figure, name, "MB/s", value, value, value, 1)
        for figure, name, value in (("f", "a", 6.0), ("f", "b", 3.0), ("g", "a", 1.0))
    ]
    assert ratio(rows, "a", "b", "f") == 2
    assert ratio(rows, "a", "nobody", "f") is None
    assert Shown("p", "w", 2.0, 2.0).holds is True
    assert Shown("p", "w", 1.9, 2.0).holds is False
    assert Shown("p", "w", 1.9, 2.0, at_most=True).holds is True
    assert Shown("p", "w", None, 2.0).holds is None
    assert Shown("p", "w", 1.0).holds is None


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("bulk", "one way", "quicmesh", "MB/s", 812.3, 9.99, 1234.0, 5, send_cpu=1.5)
    report.show([row], [Shown("bulk", "quicmesh / TLS", 0.5, 1.0), Shown("bulk", "none", None)])
    shown = capsys.readouterr().out
    assert "812 MB/s" in shown
    assert "quicmesh / TLS: 0.50  (at least 1: NO)" in shown
    assert "none" not in shown


def test_each_contender_has_its_like() -> None:
    # Ratios name contenders: one that was renamed would silently have none.
    for part in (Small(), Bulk()):
        assert part.missing() is None
        assert len(part.contenders) > 10
    assert LOOPBACK.namespace is None
