"""The peers this machine knows: petnames it gave them and the addresses that led to them last.

Knowing is not trusting: who may do what stands in ``authorized_keys``. A petname is this machine's
own name for a key, so no two keys share one. What a peer calls its host is a suggestion for a peer
without one: it takes no name from anybody, and never changes one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from auth import IdentityError, NodeId, SocketAddress
from auth.encoding import check_time
from auth.files import locked, read_file, replace_file
from auth.identity import check_petname
from mesh.errors import HomeError

__all__ = ["KnownPeer", "PeerBook", "check_free", "suggest_petname"]

MAX_PEERS = 4096
"""Peers kept; beyond it the one not seen for longest makes room, unless it has a petname."""

MAX_ADDRESSES = 16
"""Addresses kept of a peer, as many as fit in a ticket."""

MAX_BYTES = 8 << 20
"""Largest book that is read: `MAX_PEERS` full entries take less."""

_VERSION = 1
_OTHERS_WRITE = 0o022


@dataclasses.dataclass(frozen=True, slots=True)
class KnownPeer:
    """One entry. `seen` is the unix time of the last connection, None before the first."""

    node_id: NodeId
    petname: str | None = None
    addresses: tuple[SocketAddress, ...] = ()
    seen: float | None = None

    @property
    def label(self) -> str:
        """The name for messages: ``gpu-a (k7f3-9q2m)``, or the short id alone."""
        short = self.node_id.short
        return short if self.petname is None else f"{self.petname} ({short})"


class PeerBook:
    """The book in the file at `path`, shared by all processes of a home; re-read when it changed.

    Every method raises `HomeError` when the file is there and is not a book, or can't be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._peers: dict[NodeId, KnownPeer] = {}

    def entries(self) -> tuple[KnownPeer, ...]:
        """Return every entry, petnames first, in order of the name."""
        peers = self._read().values()
        return tuple(sorted(peers, key=lambda p: (p.petname is None, p.petname or "", p.node_id)))

    def get(self, node_id: NodeId) -> KnownPeer | None:
        """Return the entry of one peer."""
        return self._read().get(node_id)

    def petnames(self) -> Mapping[NodeId, str | None]:
        """Return what `auth.match_node` looks names up in."""
        return {node_id: peer.petname for node_id, peer in self._read().items()}

    def remember(
        self,
        node_id: NodeId,
        *,
        petname: str | None = None,
        addresses: Iterable[SocketAddress] | None = None,
        seen: float | None = None,
    ) -> KnownPeer:
        """Note something about a peer; what is not given stays as it was.

        Raises:
            IdentityError: the petname is malformed or belongs to another peer.
        """
        with self._editing():
            peers = self._read()
            old = peers.get(node_id, KnownPeer(node_id))
            if petname is not None:
                check_free(petname, node_id, self.petnames())
            new = KnownPeer(
                node_id,
                petname=petname or old.petname,
                addresses=old.addresses if addresses is None else _bounded_addresses(addresses),
                seen=old.seen if seen is None else seen,
            )
            if new != peers.get(node_id):
                self._write(_bounded({**peers, node_id: new}, keep=node_id))
        return new

    def forget(self, node_id: NodeId) -> bool:
        """Remove a peer and say whether it was there."""
        with self._editing():
            peers = dict(self._read())
            if peers.pop(node_id, None) is None:
                return False
            self._write(peers)
        return True

    @contextlib.contextmanager
    def _editing(self) -> Iterator[None]:
        try:
            with locked(self.path):
                yield
        except OSError as error:  # TimeoutError, another process' lock, is one too
            raise HomeError(
                f"change of the peers book {self.path}", why=error.strerror or str(error)
            ) from error

    def _read(self) -> dict[NodeId, KnownPeer]:
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                data = read_file(
                    self.path, max_bytes=MAX_BYTES, refuse_mode=_OTHERS_WRITE, follow=True
                )
                self._peers = _parse(data)
                self._stamp = stamp
        except FileNotFoundError:
            self._stamp, self._peers = None, {}
        except (OSError, ValueError) as error:
            raise HomeError(
                f"peers book {self.path}",
                why=str(error),
                fix="Mend the file, or move it away: peers can be added again with `mesh join`.",
            ) from error
        return self._peers

    def _write(self, peers: dict[NodeId, KnownPeer]) -> None:
        entries = {
            str(node_id): {
                "petname": peer.petname,
                "addresses": [list(address) for address in peer.addresses],
                "seen": peer.seen,
            }
            for node_id, peer in sorted(peers.items())
        }
        text = json.dumps({"version": _VERSION, "peers": entries}, indent=2) + "\n"
        replace_file(self.path, text.encode())


def check_free(petname: str, node_id: NodeId, names: Mapping[NodeId, str | None]) -> None:
    """Return if `petname` can be given to `node_id`, where `names` are given already.

    Raises:
        IdentityError: it can't be a petname, or means another peer.
    """
    check_petname(petname)
    for other, name in names.items():
        if name == petname and other != node_id:
            raise IdentityError(
                f"petname '{petname}'",
                why=f"it already means {other.short}",
                fix=f"Choose another name, or free this one: mesh deny {petname}",
            )


def suggest_petname(hostname: str, taken: Iterable[str | None]) -> str | None:
    """Turn what a peer calls its host into a petname that is free here, or None."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", hostname.split(".")[0]).strip("-._")[:48]
    used = set(taken)
    for name in (base, *(f"{base}-{number}" for number in range(2, 100))):
        if name not in used and _is_petname(name):
            return name
    return None


def _is_petname(name: str) -> bool:
    try:
        check_petname(name)
    except IdentityError:
        return False
    return True


def _bounded_addresses(addresses: Iterable[SocketAddress]) -> tuple[SocketAddress, ...]:
    return tuple(dict.fromkeys(addresses))[:MAX_ADDRESSES]


def _bounded(peers: dict[NodeId, KnownPeer], *, keep: NodeId) -> dict[NodeId, KnownPeer]:
    while len(peers) > MAX_PEERS:
        spare = [p for p in peers.values() if p.petname is None and p.node_id != keep]
        if not spare:
            raise HomeError(
                "change of the peers book",
                why=f"it holds {MAX_PEERS} named peers, and more are not kept",
                fix="Free some: mesh deny NAME",
            )
        del peers[min(spare, key=lambda p: p.seen or 0.0).node_id]
    return peers


def _parse(data: bytes) -> dict[NodeId, KnownPeer]:
    try:
        book = json.loads(data)
        if book["version"] != _VERSION:
            raise ValueError(f"its version is {book['version']!r}, and this one reads {_VERSION}")
        peers = {}
        for text, entry in book["peers"].items():
            node_id = NodeId.parse(text)
            peers[node_id] = KnownPeer(
                node_id,
                petname=None if entry["petname"] is None else check_petname(entry["petname"]),
                addresses=tuple(_address(*pair) for pair in entry["addresses"][:MAX_ADDRESSES]),
                seen=None if entry["seen"] is None else check_time(float(entry["seen"])),
            )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"it has not the form of a book ({type(error).__name__}: {error})"
        ) from error
    except IdentityError as error:
        raise ValueError(str(error)) from error
    return peers


def _address(host: object, port: object) -> SocketAddress:
    if not isinstance(host, str):
        raise TypeError("a host is no text")
    if type(port) is not int or not 0 < port < 1 << 16:
        raise ValueError(f"port {port!r} is out of range")
    return str(ipaddress.ip_address(host)), port
