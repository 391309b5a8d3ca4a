"""The root of the project's one exception tree, and the part of it that belongs to admission.

    MeshError                       everything this project raises on purpose
    ├── IdentityError               a key, id, ticket or invite that can't be used as given
    │   ├── KeyFileError            key file: missing, readable by others, or not a key
    │   └── TicketError             ticket or invite text: truncated, altered, of another kind
    └── AccessDenied                an authorizer said no, or failed, which counts as no
        └── TokenRefused            a capability token that does not permit this, here, now

Each package adds its own branch in its own ``errors`` module; ``mesh.errors`` draws the whole tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from auth.grant import Denial

__all__ = [
    "AccessDenied",
    "IdentityError",
    "KeyFileError",
    "MeshError",
    "TicketError",
    "TokenRefused",
]


class MeshError(Exception):
    """What failed, with which peer, at which stage, after how long, why, and what to do about it.

    The parts are kept as attributes for programs and joined into one sentence for people::

        move of tensor 'w' failed with gpu-a (k7f3-9q2m) at stage 'claim' after 1.2 s:
        the token has expired. Ask the owner for a new one.

    Args:
        what: what was being done, as a phrase: ``"move of tensor 'w'"``. Never empty.
        peer: the other side, as petname and short id or as an address.
        stage: the step within the operation.
        after: seconds since the operation began.
        why: the reason, without a full stop.
        fix: what the reader can do, as a sentence.
    """

    code: ClassVar[str] = "failed"
    """Stable name on the wire and in ``--json`` output."""

    exit_code: ClassVar[int] = 1
    """Exit status of the ``mesh`` command when this error ends it."""

    def __init__(
        self,
        what: str,
        *,
        peer: object | None = None,
        stage: str | None = None,
        after: float | None = None,
        why: str | None = None,
        fix: str | None = None,
    ) -> None:
        if not what:
            raise ValueError("an error must say what failed")
        super().__init__(what)
        self.what = what
        self.peer = None if peer is None else str(peer)
        self.stage = stage
        self.after = after
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        head = self.what
        if self.peer is not None:
            head += f" with {self.peer}"
        if self.stage is not None:
            head += f" at stage '{self.stage}'"
        if self.after is not None:
            head += f" after {self.after:.1f} s"
        text = head if self.why is None else f"{head}: {self.why}"
        if self.fix is None:
            return text
        # Where an error is the reason of another it has its full stop, or question mark, already.
        return f"{text} {self.fix}" if text.endswith((".", "?")) else f"{text}. {self.fix}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt from the parts: the default would pass only `what` and lose the keyword arguments.
        parts = (self.what, self.peer, self.stage, self.after, self.why, self.fix)
        return (_rebuild, (type(self), parts), self.__dict__)


class IdentityError(MeshError):
    """A key, node id, ticket or invite can't be used as given."""

    code = "identity"
    exit_code = 2


class KeyFileError(IdentityError):
    """A key file is missing, readable by others, or does not hold a key. Names the path."""

    code = "key-file"


class TicketError(IdentityError):
    """A ticket or invite was truncated, altered, or is of another kind or version."""

    code = "ticket"


class AccessDenied(MeshError):
    """An authorizer refused. ``why`` is the reason it chose to tell; details stay in its log."""

    code = "denied"
    exit_code = 4

    denial: Denial | None = None
    """What the peer is told, with the code that programs go by; None where none was given."""


class TokenRefused(AccessDenied):
    """A capability token was refused.

    Unknown, used, expired, revoked and wrong-audience look the same to a remote peer: telling
    them apart would let a stranger test guesses.
    """

    code = "token-refused"


def _rebuild(kind: type[MeshError], parts: tuple[Any, ...]) -> MeshError:
    what, peer, stage, after, why, fix = parts
    error = kind.__new__(kind)
    MeshError.__init__(error, what, peer=peer, stage=stage, after=after, why=why, fix=fix)
    return error
