"""The README's code is the examples', word for word, and the examples run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = dict(re.findall(r"<!-- (examples/\w+\.py) -->\n```python\n(.*?)```", README, re.DOTALL))


def test_the_readme_shows_a_daemon_and_a_client():
    assert set(BLOCKS) == {"examples/daemon.py", "examples/client.py"}
    assert "```python" not in re.sub(r"<!-- examples/\w+\.py -->\n```python", "", README)


@pytest.mark.parametrize("path", BLOCKS)
def test_the_readme_shows_the_examples_word_for_word(path):
    assert BLOCKS[path] == (ROOT / path).read_text()


@pytest.mark.e2e
def test_the_daemon_and_the_client_run_together(tmp_path):
    environment = os.environ | {"MESH_HOME": str(tmp_path / "nobody"), "PYTHONPATH": str(ROOT)}
    daemon = subprocess.Popen(
        [sys.executable, "-m", "examples.daemon", str(tmp_path / "home")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    try:
        assert daemon.stdout is not None
        ticket = daemon.stdout.readline().strip()
        client = subprocess.run(
            [sys.executable, "-m", "examples.client", ticket],
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
            timeout=45,
            check=False,
        )
        assert client.returncode == 0, client.stderr
        assert client.stderr == ""
        assert "round trip" in client.stdout
        assert "[2., 5.]" in client.stdout
        daemon.send_signal(signal.SIGINT)
        _, errors = daemon.communicate(timeout=10)
        assert daemon.returncode == 0, errors
        assert errors == ""
    finally:
        daemon.kill()
        daemon.communicate()
