"""A stranger's ``auth``, ``transport`` or ``tensor_bridge`` is named before it does harm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mesh
from mesh._siblings import SIBLINGS, check_siblings

ROOT = Path(mesh.__file__).parent.parent


def import_mesh(path: Path, *, first: str = "") -> subprocess.CompletedProcess[str]:
    """Import mesh in a new interpreter that finds `path` before the project."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(path), str(ROOT)))}
    return subprocess.run(
        [sys.executable, "-c", f"{first}\nimport mesh"],
        env=environment,
        cwd=path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize("name", SIBLINGS)
@pytest.mark.parametrize("form", ["module", "package", "namespace"])
def test_another_package_of_that_name(tmp_path: Path, name: str, form: str) -> None:
    if form == "module":
        stranger = tmp_path / f"{name}.py"
        stranger.touch()
    else:
        stranger = tmp_path / name
        stranger.mkdir()
        if form == "package":
            stranger = stranger / "__init__.py"
            stranger.touch()
    done = import_mesh(tmp_path)
    if form == "namespace":
        # A directory without __init__.py gives way to a package that comes later on the path.
        assert done.returncode == 0
        return
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert str(stranger) in last
    assert str(ROOT / name / "__init__.py") in last
    assert "Rename" in last


def test_a_stranger_that_was_imported_already(tmp_path: Path) -> None:
    (tmp_path / "auth.py").touch()
    done = import_mesh(tmp_path, first=f"import auth, sys; sys.path.remove({str(tmp_path)!r})")
    assert str(tmp_path / "auth.py") in done.stderr.splitlines()[-1]


def test_a_stranger_made_by_hand(tmp_path: Path) -> None:
    code = "import sys, types; sys.modules['transport'] = types.ModuleType('transport')"
    done = import_mesh(tmp_path, first=code)
    assert "ImportError: mesh needs its own package 'transport'" in done.stderr


def test_positive_control(tmp_path: Path) -> None:
    (tmp_path / "authority.py").touch()
    assert import_mesh(tmp_path).returncode == 0


def test_missing_sibling_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh._siblings.SIBLINGS", ("no_such_package_anywhere",))
    with pytest.raises(ImportError, match="Install it again: python -m pip install") as caught:
        check_siblings()
    assert caught.value.name == "no_such_package_anywhere"


def test_another_distribution_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "rival.py").touch()
    monkeypatch.setattr("mesh._siblings.SIBLINGS", ("rival",))
    monkeypatch.syspath_prepend(packages)
    with pytest.raises(ImportError, match="Another installed distribution"):
        check_siblings()
