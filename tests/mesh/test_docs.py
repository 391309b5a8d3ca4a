"""The pages of docs: their code runs as printed, and what they name is there."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio.to_thread
import pytest
import torch  # noqa: F401  takes seconds, which no event loop is to be blocked for

import mesh

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted((*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"))
ROOMS = ("auth", "transport", "tensor_bridge", "mesh", "tests", "examples", "docs")


@pytest.mark.anyio
async def test_the_example_of_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESH_HOME", str(tmp_path / "none"))
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "admission.md").read_text(), re.DOTALL)
    names: dict[str, Callable[[], Awaitable[None]]] = {}
    await anyio.to_thread.run_sync(exec, code, names)
    await names["main"]()
    assert "node_id" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_rooms_that_a_page_names_are_there(page: Path) -> None:
    for place in re.findall(rf"`((?:{'|'.join(ROOMS)})/[a-z_][\w/.-]*)`", page.read_text()):
        assert (ROOT / place).exists(), place


def test_the_map_has_every_room() -> None:
    shown = (DOCS / "architecture.md").read_text()
    for package in ("auth", "transport", "tensor_bridge", "mesh"):
        for path in (ROOT / package).rglob("__init__.py"):
            room = path.parent.relative_to(ROOT)
            above = [f"`{each}/`" for each in room.parents if each.parent != each.parent.parent]
            assert f"`{room}/" in shown or any(each in shown for each in above), room


def test_the_list_of_public_names_is_whole() -> None:
    shown = (DOCS / "api.md").read_text()
    missing = [name for name in mesh.__all__ if f"`{name}`" not in shown]
    assert not missing


def test_every_page_is_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert {page.name for page in DOCS.glob("*.md")} <= set(re.findall(r"docs/(\w+\.md)", readme))
