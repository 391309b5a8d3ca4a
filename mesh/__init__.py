"""A peer-to-peer compute mesh for PyTorch over QUIC.

Ways in::

    mesh up                                          # a machine: a peer daemon
    async with mesh.Node.client(ticket) as node:     # a program that only dials
    async with mesh.Node.worker() as node:           # a program that peers dial as well: a rank
    mesh.Node.embedded(key=..., authorizer=...)      # an async app: its own endpoint and policy
    d = mesh.device(ticket, 0)                       # a `torch.device`: compute at a peer

`mesh.blocking` has the same names for threads and notebooks. Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh._lazy import lazy_names
from mesh._siblings import check_siblings

check_siblings()

if TYPE_CHECKING:
    from auth import (
        AuthorizedKeys,
        Authorizer,
        Grant,
        Invite,
        InviteBook,
        NodeId,
        SecretKey,
        Ticket,
        allow_any,
        any_of,
        deny_all,
    )
    from mesh import autograd, blocking, distributed, errors, nn, optim, rpc, train
    from mesh.device.api import describe, device, devices
    from mesh.device.groups.context import DistributedContext, ReduceOperation
    from mesh.errors import AccessDenied, MeshError
    from mesh.home import Home
    from mesh.node import Node
    from mesh.peer import Peer, TensorRef
    from mesh.status import PeerState, PeerStatus
    from transport import EndpointConfig

__all__ = [
    # nodes
    "Node",
    "Peer",
    "TensorRef",
    "PeerState",
    "PeerStatus",
    "Home",
    "EndpointConfig",
    "blocking",
    # remote calls
    "rpc",
    "autograd",
    "optim",
    "nn",
    # collectives
    "distributed",
    # devices of peers
    "device",
    "devices",
    "describe",
    "DistributedContext",
    "ReduceOperation",
    "train",
    # identity and policy
    "NodeId",
    "SecretKey",
    "Ticket",
    "Invite",
    "InviteBook",
    "Authorizer",
    "AuthorizedKeys",
    "Grant",
    "allow_any",
    "any_of",
    "deny_all",
    # errors
    "MeshError",
    "AccessDenied",
    "errors",
]

if not TYPE_CHECKING:  # A checker that saw __getattr__ would accept every name.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Node": "mesh.node",
            "Peer": "mesh.peer",
            "TensorRef": "mesh.peer",
            "PeerState": "mesh.status",
            "PeerStatus": "mesh.status",
            "Home": "mesh.home",
            "EndpointConfig": "transport",
            "blocking": "mesh.blocking",
            "rpc": "mesh.rpc",
            "autograd": "mesh.autograd",
            "optim": "mesh.optim",
            "distributed": "mesh.distributed",
            "nn": "mesh.nn",
            "device": "mesh.device",
            "devices": "mesh.device.api",
            "describe": "mesh.device.api",
            "DistributedContext": "mesh.device.groups.context",
            "ReduceOperation": "mesh.device.groups.context",
            "train": "mesh.train",
            "NodeId": "auth",
            "SecretKey": "auth",
            "Ticket": "auth",
            "Invite": "auth",
            "InviteBook": "auth",
            "Authorizer": "auth",
            "AuthorizedKeys": "auth",
            "Grant": "auth",
            "allow_any": "auth",
            "any_of": "auth",
            "deny_all": "auth",
            "MeshError": "mesh.errors",
            "AccessDenied": "mesh.errors",
            "errors": "mesh.errors",
        },
    )
