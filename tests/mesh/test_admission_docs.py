"""The code in docs/admission.md runs as printed."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio.to_thread
import pytest

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.anyio


async def test_the_example_of_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESH_HOME", str(tmp_path / "none"))
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "admission.md").read_text(), re.DOTALL)
    names: dict[str, Callable[[], Awaitable[None]]] = {}
    await anyio.to_thread.run_sync(exec, code, names)
    await names["main"]()
    assert "node_id" in capsys.readouterr().out


def test_what_it_links_to_is_there() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", (DOCS / "admission.md").read_text()):
        assert (DOCS / link).exists()
