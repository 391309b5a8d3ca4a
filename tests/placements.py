"""Where the packets of the suite's nodes are moved: in their loops, or by an endpoint process.

``python -m pytest --placement process TESTS`` has those of the tests' nodes, and of the programs
that tests start, moved by an endpoint process, which all of a run share as the programs of a
machine's daemon do: one each takes half a second of a processor.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["choose", "forget", "placed", "shared_at"]

_WHERE = "QUICMESH_TESTS_PLACEMENT"
_SHARED = "QUICMESH_TESTS_ENDPOINT"
"""They are in the environment so that programs of tests know as well."""


def choose(where: str) -> None:
    """Have the nodes of this run, and of its programs, placed so."""
    os.environ[_WHERE] = where
    os.environ[_SHARED] = str(Path(tempfile.mkdtemp(prefix="quicmesh-")) / "endpoint.sock")


def forget() -> None:
    """Leave nothing of `choose` behind."""
    shutil.rmtree(shared_at().parent, ignore_errors=True)


def placed(but: Mapping[str, object] = {}, *, alone: bool = False) -> dict[str, Any]:
    """Return the settings of an `EndpointConfig` that place a node as this run wants it.

    Args:
        but: settings that a test has of its own; none are returned if they place the node.
        alone: with a process of its own, if with any.
    """
    if "placement" in but:
        return {}
    where = os.environ.get(_WHERE, "loop")
    is_shared = where == "process" and not alone
    return {"placement": where, "share": str(shared_at()) if is_shared else None}


def shared_at() -> Path:
    """Return where programs come to the endpoint process that they share."""
    return Path(os.environ[_SHARED])
