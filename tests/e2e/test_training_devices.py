"""Machines offer their hardware by the command, and the example trains over all of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.e2e.machines import Machine

SCOPES = "device,tensor,collective,node"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, list[str]]]:
    """Return the first of two machines, and the tickets of both."""
    pytest.importorskip("sklearn")
    first, second = (Machine(tmp_path_factory.mktemp(name)) for name in ("one", "two"))
    for each in (first, second):
        each.run("init")
    for here, there in ((first, second), (second, first)):
        there.run("allow", here.json("id")["node_id"], "friend", "--scopes", SCOPES)
    with (
        first.up("--device", "cpu", "--device", "cpu") as one,
        second.up("--device", "cpu") as two,
    ):
        yield first, [one.ticket, two.ticket]


@pytest.mark.e2e
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("more", "least"), [((), 75.0), (("--sharded",), 60.0)], ids=["cnn", "transformer"]
)
def test_the_example_trains_over_every_device_of_two_machines(
    more: tuple[str, ...], least: float, machines: tuple[Machine, list[str]], tmp_path: Path
) -> None:
    machine, tickets = machines
    command = ["-m", "examples.train_devices", *more, "--directory", str(tmp_path)]
    env = os.environ | {"MESH_HOME": str(machine.home), "OMP_NUM_THREADS": "1"}
    done = programs.run([*command, "--epochs", "2", *tickets], env=env, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(re.findall(r"mesh:\d is cpu of", done.stdout)) == 3
    (last,) = re.findall(r"epoch 1: loss \S+, (\S+) % right", done.stdout)
    assert float(last) > least
    assert {each.name for each in tmp_path.iterdir()} == {
        *("checkpoint.mesh", "metrics.csv", "metrics.svg")
    }


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_the_same_script_trains_here(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    env = os.environ | {"MESH_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = programs.run(["-m", "examples.train_devices"], env=env, timeout=90)
    assert done.returncode == 0, done.stderr
    (last,) = re.findall(r"epoch 2: loss \S+, (\S+) % right", done.stdout)
    assert float(last) > 85
