"""Which references live, who holds them, how large and how old: what ``mesh refs`` shows.

==============  =======  =====================================================================
call            scope    answers
==============  =======  =====================================================================
``rpc.list``    node     the references here that the asker holds, or a program of its machine;
                         all of them to who has the scope ``admin``
``node.refs``   admin    those of this node, and what each connected peer answers to ``rpc.list``
==============  =======  =====================================================================
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Self

import anyio

from auth import ADMIN, IdentityError, MeshError, NodeId
from mesh.rpc.refs.owned import RefRow
from tensor_bridge.fields import Fields
from transport import CborValue, Connection, Endpoint, Incoming, ProtocolError, ServiceUnknown

if TYPE_CHECKING:
    from mesh.node import Node
    from mesh.rpc.agent import Agent

__all__ = ["LIST_CALL", "Listing", "references_around", "register_listing"]

LIST_CALL = "rpc.list"

MAX_ROWS = 1000
"""References in one answer, the oldest first: some 400 bytes each within a frame of 1 MiB."""

MAX_HOLDERS = 8
"""Holders that are named of each."""

MAX_KIND = 128
"""Longest type of a value, in characters."""

MAX_SHOWN = 500
"""References that ``mesh refs`` shows in all, with names."""

ASK_SECONDS = 5.0
"""How long one peer may take to answer."""

ASK_AT_ONCE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """References of one owner.

    Attributes:
        rows: the oldest first; of each at most `MAX_HOLDERS` holders.
        left_out: how many more there are.
    """

    rows: tuple[RefRow, ...]
    left_out: int = 0

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        rows: list[CborValue] = [
            {
                "ref": row.ref,
                "kind": row.kind[:MAX_KIND],
                "holders": [holder.raw for holder in row.holders[:MAX_HOLDERS]],
                "held": len(row.holders),
                "bytes": row.nbytes,
                "age": row.age,
            }
            for row in self.rows
        ]
        return {"rows": rows, "left_out": self.left_out}

    @classmethod
    def decode(cls, value: CborValue) -> tuple[Self, list[int]]:
        """Return the message in `value`, and how many holders each reference has in all."""
        fields = Fields(value, "list of references")
        rows: list[RefRow] = []
        held: list[int] = []
        for item in fields.items("rows", MAX_ROWS):
            row = Fields(item, "reference in a list")
            age = row.value("age")
            if not isinstance(age, float) or not age >= 0:
                raise row.wrong("'age' is no time")
            rows.append(
                RefRow(
                    row.text("ref", longest=64),
                    row.text("kind", longest=MAX_KIND),
                    tuple(_node(row, each) for each in row.items("holders", MAX_HOLDERS)),
                    row.integer("bytes"),
                    age,
                )
            )
            held.append(row.integer("held", low=len(rows[-1].holders)))
            row.finish()
        listing = cls(tuple(rows), fields.integer("left_out"))
        fields.finish()
        return listing, held


def register_listing(agent: Agent, endpoint: Endpoint) -> None:
    """Answer peers about the references that they hold here."""

    async def answer(incoming: Incoming) -> CborValue:
        rows = agent.references()
        if not incoming.grant.permits(ADMIN):
            machine = incoming.peer.machine_id
            rows = tuple(
                row
                for row in rows
                if any(_machine(endpoint, holder) == machine for holder in row.holders)
            )
        rows = tuple(sorted(rows, key=lambda row: -row.age))
        return Listing(rows[:MAX_ROWS], max(0, len(rows) - MAX_ROWS)).encode()

    endpoint.register_call(LIST_CALL, answer, scope="node")


async def references_around(node: Node, agent: Agent | None, asker: NodeId) -> CborValue:
    """Return the references of a node and of its peers, as far as those tell it.

    Args:
        node: whose peers are asked, all that are connected.
        agent: the node's own, if it has begun.
        asker: who is not asked.
    """
    found: list[tuple[NodeId, Listing, list[int]]] = []
    silent: list[CborValue] = []
    if agent is not None:
        rows = agent.references()
        found.append((node.node_id, Listing(rows), [len(row.holders) for row in rows]))
    limiter = anyio.CapacityLimiter(ASK_AT_ONCE)

    async def ask(connection: Connection) -> None:
        who = connection.peer.node_id
        try:
            async with limiter:
                answer = await connection.call(LIST_CALL, None, timeout=ASK_SECONDS)
            found.append((who, *Listing.decode(answer)))
        except ServiceUnknown:
            pass  # it makes no remote calls
        except MeshError as error:
            silent.append({"label": node.label(who), "why": error.why or error.what})

    async with anyio.create_task_group() as tasks:
        for connection in node.endpoint.connections:
            if connection.peer.node_id != asker:
                tasks.start_soon(ask, connection)
    shown: list[CborValue] = [
        {
            "ref": row.ref,
            "kind": row.kind,
            "owner": _who(node, owner),
            "holders": [_who(node, holder) for holder in row.holders[:MAX_HOLDERS]],
            "holders_in_all": held,
            "bytes": row.nbytes,
            "age": row.age,
        }
        for owner, listing, counts in sorted(found, key=lambda each: each[0])
        for row, held in zip(listing.rows, counts, strict=True)
    ]
    left_out = sum(listing.left_out for _, listing, _ in found)
    return {
        "references": shown[:MAX_SHOWN],
        "left_out": left_out + max(0, len(shown) - MAX_SHOWN),
        "silent": silent,
    }


def _who(node: Node, node_id: NodeId) -> CborValue:
    return {"node_id": str(node_id), "label": node.label(node_id)}


def _machine(endpoint: Endpoint, holder: NodeId) -> NodeId:
    """Return whose program a holder is, as far as it is connected; itself otherwise."""
    connection = endpoint.connection(holder)
    return holder if connection is None else connection.peer.machine_id


def _node(fields: Fields, value: CborValue) -> NodeId:
    try:
        if isinstance(value, bytes):
            return NodeId(value)
    except IdentityError:
        pass
    raise ProtocolError("list of references", why="a holder that is no node")
