"""Which node a process group runs on, said explicitly.

``init_process_group("mesh", pg_options=Options(node=node))``, or in a block of ``use(node)``. New
groups of a group that runs on the mesh run on the same node unless told otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Protocol

from anyio.from_thread import BlockingPortal

from mesh.collective import UnsupportedCollective
from transport import Endpoint

__all__ = ["DEFAULT_JOB", "MeshNode", "Options", "options_in_use", "use"]

DEFAULT_JOB = "default"

DEVICES = {"cpu": ("gloo",), "cuda": ("nccl", "gloo")}
"""Types of devices, and the backends that may serve their tensors inside a host."""

_JOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")  # one word of a scope


class MeshNode(Protocol):
    """What a process group needs of a node: `mesh.blocking.Node` has it."""

    @property
    def portal(self) -> BlockingPortal:
        """The way from threads into the node's event loop."""

    @property
    def endpoint(self) -> Endpoint:
        """The node's endpoint, open."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What ``pg_options`` takes.

    Attributes:
        node: this rank's node, which must stay open as long as the group.
        job: the ranks' common name. Members must hold the scope ``collective:JOB`` at each other.
            Whoever holds it can make the others run code, through torch's own object collectives.
        objects: whether torch's object collectives, which unpickle what other ranks send, may be
            used with the group; off, `UnsupportedCollective` is raised before anything is sent or
            unpickled. ``gather_object`` and the like, and what stands on them: consolidation of
            sharded optimizers, checkpoints.
        inside: for types of devices the backend that reduces and broadcasts their tensors among the
            ranks of one host, ``{"cuda": "nccl"}``; see `mesh.distributed.inside`.
    """

    node: MeshNode
    job: str = DEFAULT_JOB
    objects: bool = True
    inside: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not _JOB.fullmatch(self.job):
            raise UnsupportedCollective(
                f"job name {self.job!r}",
                why="it must be 1 to 64 letters, digits, '_', '.', '-', and not begin with . or -",
            )

        for device, backend in self.inside.items():
            if device not in DEVICES or backend not in DEVICES[device]:
                raise UnsupportedCollective(
                    f"backend {backend!r} for devices of type {device!r} inside hosts",
                    why="there are gloo for 'cpu', and nccl or gloo for 'cuda'",
                )

    def __deepcopy__(self, memo: object) -> Options:
        return self  # torch copies the options of a group that is split; there is one node

    @property
    def scope(self) -> str:
        """The scope that members need, and the name of the service that they meet on."""
        return f"collective:{self.job}"


_in_use: ContextVar[Options | None] = ContextVar("mesh_options", default=None)


@contextlib.contextmanager
def use(
    node: MeshNode,
    *,
    job: str = DEFAULT_JOB,
    objects: bool = True,
    inside: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Let groups that are formed in this block, by this thread, run on `node`; see `Options`."""
    token = _in_use.set(Options(node, job, objects, inside or {}))
    try:
        yield
    finally:
        _in_use.reset(token)


def options_in_use() -> Options | None:
    """Return the options of the innermost `use` block, or None outside of any."""
    return _in_use.get()
