"""The examples of gradients across workers: each a job of several programs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mesh import Home
from tests.programs import Program

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(170)]


@pytest.mark.parametrize(
    ("example", "size", "told"),
    [
        ("two_workers", 2, "stepped"),
        ("pipeline", 4, "loss"),
        ("split_rnn", 2, "loss"),
        ("embedding_ddp", 4, "loss"),
    ],
)
def test_examples_learn(tmp_path: Path, example: str, size: int, told: str) -> None:
    home = tmp_path / "home"
    Home(home).create()
    arguments = ["--home", str(home), "--bind", "127.0.0.1:0", "--meet", f"file://{tmp_path}/meet"]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    programs = [
        Program(["-m", f"examples.{example}", "--rank", str(rank), *arguments], env=environment)
        for rank in range(size)
    ]
    try:
        ends = [program.communicate(timeout=150) for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0] * size, ends
    assert ends[0][0].startswith(told)
