"""Which rank a process is, from whatever launcher or scheduler started it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh import Home
from mesh.errors import PlaceError
from mesh.launch.job import Job, Plan
from mesh.launch.output import MAX_LINE, Lines
from mesh.launch.places import machines, rank_and_size
from mesh.store import StoreService
from tests.mesh import nodes


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ({"rank": "1", "world_size": "2"}, {}, (1, 2)),
        ({"rank": "1", "world_size": "2"}, {"RANK": "0", "WORLD_SIZE": "9"}, (1, 2)),
        ({}, {"RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (3, 4)),
        ({}, {"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, (5, 8)),
        ({}, {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3"}, (2, 3)),
        ({"world_size": "3"}, {"JOB_COMPLETION_INDEX": "2"}, (2, 3)),
        ({"rank": "-1", "world_size": "-1"}, {"RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
    ],
)
def test_rank_and_size(given, environment, expected) -> None:
    assert rank_and_size(given, environment) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "Start it with `mesh run`"),
        ({"rank": "0"}, "neither the program nor"),
        ({"rank": "x", "world_size": "1"}, "no number"),
        ({"rank": "2", "world_size": "2"}, "ranks are from 0 to 1"),
    ],
)
def test_places_that_cannot_be(given, words) -> None:
    with pytest.raises(PlaceError, match=words):
        rank_and_size(given, {})


def test_machines() -> None:
    assert machines({}) == (None, None)
    assert machines({"SLURM_NODEID": "1", "SLURM_NNODES": "2"}) == (1, 2)
    assert machines({"PET_NNODES": "4", "PET_NODE_RANK": "3"}) == (3, 4)
    assert machines({"PET_NNODES": "4"}) == (None, 4)


def test_a_plan_places_its_ranks() -> None:
    plan = Plan(("true",), "j", ranks=2, machines=3)
    place = plan.environment("mesh://t", 1, 1)
    assert (place["RANK"], place["WORLD_SIZE"], place["LOCAL_RANK"]) == ("3", "6", "1")
    assert (place["GROUP_RANK"], place["MESH_RENDEZVOUS"]) == ("1", "mesh://t")
    for wrong in ({"ranks": 0}, {"machines": 0}, {"machine": 1}):
        with pytest.raises(PlaceError):
            Plan(("true",), "j", **wrong)


@pytest.mark.anyio
async def test_c07_a_machine_too_many_is_told_so(tmp_path: Path) -> None:
    async with nodes.node() as keeper:
        StoreService(keeper.endpoint).hold("j")
        plan = Plan(("true",), "j", machines=2, ticket=keeper.ticket())
        places = []
        for number in range(3):
            async with nodes.node() as node:
                job = Job(Home(tmp_path / str(number)), plan, print)
                if number < 2:
                    places.append((await job._place(node))[2])
                    continue
                with pytest.raises(PlaceError, match="for 2 machines, and as many have come"):
                    await job._place(node)
        assert places == [0, 1]


def test_lines_are_whole_and_bounded() -> None:
    lines = Lines(b"[0] ")
    assert lines.feed(b"a") == b""
    assert lines.feed(b"b\nc\n\nd") == b"[0] ab\n[0] c\n[0] \n"
    assert lines.end() == b"[0] d\n"
    assert lines.end() == b""
    assert len(lines.feed(bytes(MAX_LINE))) > MAX_LINE
