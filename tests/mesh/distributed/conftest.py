"""Records of timeouts go where tests clean up."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _flight_records(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_FLIGHT_DIR", str(tmp_path_factory.getbasetemp()))
