"""The node of a program that names none: opened with its first process group.

An unmodified script says ``backend="mesh"`` and no more. Its node acts under this machine's key,
which is made if there is none, and admits whom the machine admits, and the ranks of its jobs.

====================  =============================================================
``MESH_HOME``         the machine's state directory
``MESH_JOB``          the job's name, ``default`` by default
``MESH_BIND``         where to listen, ``[::]:0`` by default
``MESH_OBJECTS``      ``0`` refuses torch's object collectives, which unpickle
====================  =============================================================
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable

from auth import DEFAULT_SCOPES, NodeId, any_of
from mesh import node as async_node
from mesh.blocking import Node
from mesh.distributed.members import JobMembers
from mesh.distributed.options import DEFAULT_JOB, Options
from mesh.home import Home
from mesh.node import PROGRAM_LIFETIME
from transport import EndpointConfig

__all__ = ["admit", "program_options"]


@dataclasses.dataclass(slots=True)
class _Program:
    node: Node
    members: JobMembers
    job: str


_lock = threading.Lock()
_programs: dict[int, _Program] = {}
"""By process, since a child that was forked needs a node of its own."""


def program_options(job: str | None = None) -> Options:
    """Return options with the program's own node, which the first call opens.

    Args:
        job: the job of groups from now on; by default the last one given, or ``$MESH_JOB``.

    Raises:
        HomeError, KeyFileError: the state directory or its key can't be used.
        TransportError: the address to listen on can't be had.
    """
    with _lock:
        program = _programs.get(os.getpid())
        if program is None:
            program = _programs[os.getpid()] = _open()
        if job is not None:
            program.job = job
    objects = os.environ.get("MESH_OBJECTS", "1") != "0"
    return Options(program.node, program.job, objects=objects)


def admit(options: Options, members: Iterable[NodeId]) -> None:
    """Admit the ranks of the job of `options`, if its node is the program's own.

    Another node has a policy of its maker's, which is left alone.
    """
    program = _programs.get(os.getpid())
    if program is not None and program.node is options.node:
        program.node.portal.call(program.members.vouch, options.job, members)


def _open() -> _Program:
    home = Home()
    machine = home.create()
    key, delegation = home.program(DEFAULT_SCOPES, PROGRAM_LIFETIME)
    members = JobMembers()
    node = Node(
        async_node.Node(
            key=key,
            authorizer=any_of(home.authorized_keys(machine.node_id), members),
            config=EndpointConfig(bind=os.environ.get("MESH_BIND") or "[::]:0"),
            delegation=delegation,
            home=home,
        )
    )
    node.open()
    return _Program(node, members, os.environ.get("MESH_JOB") or DEFAULT_JOB)
