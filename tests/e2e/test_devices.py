"""A machine offers its hardware by the command, and the example computes there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import programs
from tests.e2e.machines import Machine
from tests.mesh.device.peer import peer


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_a_cnn_learns_on_a_device_of_a_machine(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    machine = Machine(tmp_path / "home")
    with machine.up("--device", "cpu") as daemon:
        command = ["-m", "examples.remote_device", daemon.ticket, "--epochs", "1"]
        env = os.environ | {"MESH_HOME": str(machine.home)}
        done = programs.run(command, env=env, timeout=90)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert "mesh:0 is cpu of" in done.stdout
        (last,) = re.findall(r"epoch 0: loss \S+, (\S+) % right", done.stdout)
        assert float(last) > 50
        stranger = os.environ | {"MESH_HOME": str(tmp_path / "nobody")}
        refused = programs.run(command, env=stranger, timeout=60)
        assert refused.returncode == 1
        assert len(refused.stderr.splitlines()) == 1


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_a_transformer_over_two_peers_and_a_look_around(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    env = os.environ | {"MESH_HOME": str(tmp_path / "nobody")}
    with peer(devices=1) as one, peer(devices=1) as other:
        tickets = [each.ticket.encode() for each in (one, other)]
        command = ["-m", "examples.split_transformer", *tickets, "--epochs", "2"]
        done = programs.run(command, env=env, timeout=90)
        assert (done.returncode, done.stderr) == (0, "")
        (last,) = re.findall(r"epoch 1: loss \S+, (\S+) % right", done.stdout)
        assert float(last) > 45
        done = programs.run(["-m", "examples.explore_device", tickets[0]], env=env, timeout=90)
        assert (done.returncode, done.stderr) == (0, "")
        assert "written to through its view: True" in done.stdout
        assert "as it should be: " in done.stdout
        assert "found it: True" in done.stdout
