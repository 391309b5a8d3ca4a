"""An unmodified program, under torchrun and under ``mesh run``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, Program

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(170)]

EXAMPLE = ("-m", "examples.train_sampler")


def environment(tmp_path: Path) -> dict[str, str]:
    """Return one in which torch finds the entry point, as where the project is installed."""
    site = tmp_path / "site"
    info = site / "quicmesh_here-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quicmesh-here\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nmesh = _quicmesh_autoload:load\n")
    return dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(site), os.environ.get("PYTHONPATH", ""))),
        "MESH_HOME": str(tmp_path / "home"),
        "MESH_BIND": "127.0.0.1:0",
        "OMP_NUM_THREADS": "1",
    }


def run(tmp_path: Path, *arguments: str) -> list[dict[str, float]]:
    with Program(arguments, env=environment(tmp_path), torch=False) as program:
        out, errors = program.communicate(timeout=150)
    assert program.returncode == 0, errors
    lines = [line.partition("{") for line in out.splitlines()]
    return [json.loads(brace + rest) for _, brace, rest in lines if brace]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
MESH_RUN = ("-m", "mesh", "run", "--nproc-per-node", "2", "--bind", "127.0.0.1:0")


def test_a_training_is_gone_on_with_under_another_launcher(tmp_path: Path) -> None:
    saved = ("--checkpoint", str(tmp_path / "digits.pt"))
    first = run(tmp_path, *TORCHRUN, *EXAMPLE, *saved, "--epochs", "2")
    rest = run(tmp_path, *MESH_RUN, *EXAMPLE, *saved, "--epochs", "3")
    assert [one["epoch"] for one in (*first, *rest)] == [0, 1, 2]
    assert rest[0]["loss"] < first[1]["loss"] < first[0]["loss"]
    assert rest[0]["accuracy"] > 0.85


@pytest.mark.slow
def test_what_is_gone_on_with_is_the_same_training(tmp_path: Path) -> None:
    saved = ("--checkpoint", str(tmp_path / "digits.pt"))
    parts = [
        *run(tmp_path, *MESH_RUN, *EXAMPLE, *saved, "--epochs", "2"),
        *run(tmp_path, *MESH_RUN, *EXAMPLE, *saved, "--epochs", "3"),
    ]
    whole = run(tmp_path, *MESH_RUN, *EXAMPLE, "--epochs", "3")
    for found, expected in zip(parts, whole, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("launcher", "module", "package"),
    [
        (MESH_RUN, "examples.train_accelerate", "accelerate"),
        (TORCHRUN, "examples.train_trainer", "transformers"),
    ],
    ids=["Accelerate", "Trainer"],
)
def test_other_frameworks_train_by_the_backends_name(
    tmp_path: Path, launcher: tuple[str, ...], module: str, package: str
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    last = run(tmp_path, *launcher, "-m", module)[-1]
    assert last["accuracy"] > 0.8


def test_the_project_has_the_entry_point() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (where,) = project["project"]["entry-points"]["torch.backends"].values()
    module, _, function = where.partition(":")
    assert callable(getattr(__import__(module), function))
    assert f"{module}.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert sys.modules[module].__file__ == str(ROOT / f"{module}.py")
