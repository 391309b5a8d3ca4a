"""The examples of remote calls, as a user starts them: each says what to do next, and gets on."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import programs
from tests.e2e.machines import Daemon, Machine
from tests.programs import Program

pytest.importorskip("sklearn")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(170)]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a machine's programs."""
    machine = Machine(tmp_path / "home")
    machine.run("init")
    here = {"MESH_HOME": str(machine.home), "MESH_BIND": "127.0.0.1:0", "OMP_NUM_THREADS": "1"}
    return dict(os.environ) | here


@contextmanager
def example(env: dict[str, str], *arguments: str) -> Iterator[Daemon]:
    with Program(["-m", *arguments], env=env, stderr=False) as process:
        try:
            yield Daemon(process)
        finally:
            process.kill()


def test_a_parameter_server_trains_with_two_workers(env: dict[str, str]) -> None:
    name = "examples.parameter_server"
    with example(env, name, "--updates", "60") as server:
        command = server.wait_for(rf"^  python (-m {name} mesh1\w+)$")[1].split()[1:]
        with example(env, *command) as one, example(env, *command) as two:
            server.wait_for("^done after 60 updates", 120)
            *_, last = re.findall(r"updates: (\S+) % right", "\n".join(server.lines))
            sent = [int(each.wait_for(r"^sent (\d+) gradients")[1]) for each in (one, two)]
            assert all(each.wait() == 0 for each in (one, two))
        assert server.wait() == 0
    assert sum(sent) >= 60
    assert all(sent)
    assert float(last) > 60


def test_calls_are_answered_in_batches_and_a_web_app_makes_some(env: dict[str, str]) -> None:
    pytest.importorskip("fastapi")
    with example(env, "examples.batched_calls", "--epochs", "4") as server:
        command = server.wait_for(r"^  python (-m examples.batched_calls mesh1\w+)$")[1].split()
        done = programs.run(command, env=env, timeout=60)
        assert done.returncode == 0, done.stderr
        right = re.search(r"389 calls, (\S+) % right", done.stdout)
        assert right is not None
        assert float(right[1]) > 60
        size = re.search(r"run on (\S+) images at a time", done.stdout)
        assert size is not None
        assert float(size[1]) > 1.5

        _, *web = server.wait_for(r"^  python (-m examples.fastapi_calls mesh1\w+)$")[1].split()
        with example(env, *web, "--http", "0") as app:
            app.wait_for(r"^Calling \S+\. Try: curl")
            url = app.wait_for(r"(http://127\.0\.0\.1:[1-9]\d*) ")[1]
            with urllib.request.urlopen(f"{url}/digit/7", timeout=20) as answer:
                told = json.load(answer)
            assert told["image"] == 7
            assert 0 <= told["seen"] <= 9
            server.process.kill()
            server.wait()
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"{url}/digit/8", timeout=20)
            assert caught.value.code == 502
            assert "error" in json.load(caught.value)


def test_observers_on_peers_learn_to_catch(env: dict[str, str]) -> None:
    alone = programs.run(["-m", "examples.reinforcement"], env=env, timeout=60)
    assert alone.returncode == 2
    assert "mesh run --nproc-per-node 3 -m examples.reinforcement" in alone.stdout
    launch = ["-m", "mesh", "run", "--nproc-per-node", "3", "--bind", "127.0.0.1:0"]
    done = programs.run([*launch, "-m", "examples.reinforcement"], env=env, timeout=150)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"round \d+: \d+ % caught", done.stdout)) == 6
    (last,) = re.findall(r"in the end: (\d+) % caught", done.stdout)
    assert int(last) > 35, "by chance it is every fifth"
