"""What nodes say to each other about a backward, apart from the gradients. Pure: no I/O.

====================  ==========================================================================
``autograd.mark``     a call: `MarkOrder` in; `Marked` or a `Failure` out
``autograd.claim``    a call: `ClaimOrder` in; `Claimed` or a `Failure` out
``autograd.start``    a call: `StartOrder` in; out, when all is done, nothing or a `Failure`
``autograd.settle``   a call: `SettleOrder` in; nothing or a `Failure` out
``autograd.release``  a call: a context's id in; out, when it is freed, nothing
====================  ==========================================================================

Gradients travel as a call's arguments do, with the target ``"gradients"``: see `Gradients`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Self

import torch

from auth import IdentityError, NodeId
from mesh.rpc.links import MAX_NUMBER, ContextId, Wanted, decode_wanted, encode_wanted
from tensor_bridge.fields import Fields
from transport import CborValue, ProtocolError

__all__ = [
    "CLAIM_SERVICE",
    "MARK_SERVICE",
    "RELEASE_SERVICE",
    "SETTLE_SERVICE",
    "START_SERVICE",
    "ClaimOrder",
    "Claimed",
    "Failure",
    "Gradients",
    "MarkOrder",
    "Marked",
    "SettleOrder",
    "MarkingId",
    "StartOrder",
]

MARK_SERVICE, START_SERVICE = "autograd.mark", "autograd.start"
CLAIM_SERVICE, SETTLE_SERVICE = "autograd.claim", "autograd.settle"
RELEASE_SERVICE = "autograd.release"

MAX_MARKED = 2048
"""Most messages in one order: with their tensors, they have to fit into a frame."""

MAX_FORGOTTEN = 64

MAX_LENDERS = 1 << 20

_LINE = re.compile(r'File "(?:[^"\n]*[/\\])?([^"/\\\n]+)", line (\d+)')

MarkingId = ContextId
"""Which node has begun a marking, and what number it gave it."""


@dataclasses.dataclass(frozen=True, slots=True)
class MarkOrder:
    """Mark what a backward needs, here and beyond.

    Attributes:
        context: what was recorded in.
        marking: the marking that this is part of.
        wanted: messages of the reader's to the writer; None for all that the reader ever sent.
        forgotten: earlier markings by the same node that no backward will use any more.
    """

    context: ContextId
    marking: MarkingId
    wanted: Wanted | None
    forgotten: tuple[int, ...] = ()

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        value: dict[str, CborValue] = {
            "context": self.context.encode(),
            "marking": self.marking.encode(),
        }
        if self.wanted is not None:
            value["wanted"] = encode_wanted(self.wanted)
        if self.forgotten:
            value["forgotten"] = list(self.forgotten)
        return value

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "order to mark")
        context = ContextId.decode(fields.value("context"))
        marking = ContextId.decode(fields.value("marking"))
        wanted = decode_wanted(fields.value("wanted"), MAX_MARKED) if fields.has("wanted") else None
        forgotten: tuple[int, ...] = ()
        if fields.has("forgotten"):
            forgotten = fields.integers("forgotten", longest=MAX_FORGOTTEN)
        fields.finish()
        return cls(context, marking, wanted, forgotten)


@dataclasses.dataclass(frozen=True, slots=True)
class Marked:
    """All is marked that others than the reader have to mark.

    Attributes:
        is_first: whether it was the reader who has brought the marking here.
        wanted: messages of the reader's to the writer, which this has led to.
        lenders: how many nodes it has led to parameters of reducers at, for the first time.
    """

    is_first: bool
    wanted: Wanted = dataclasses.field(default_factory=dict)
    lenders: int = 0

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        value: dict[str, CborValue] = {"first": self.is_first}
        if self.wanted:
            value["wanted"] = encode_wanted(self.wanted)
        if self.lenders:
            value["lenders"] = self.lenders
        return value

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "answer about a marking")
        is_first = fields.flag("first")
        wanted = decode_wanted(fields.value("wanted"), MAX_MARKED) if fields.has("wanted") else {}
        lenders = fields.integer("lenders", high=MAX_LENDERS) if fields.has("lenders") else 0
        fields.finish()
        return cls(is_first, wanted, lenders)


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimOrder:
    """Claim, for a run that is to come, what it needs of the parameters of reducers.

    Attributes:
        context, marking, run: which run.
        age: when the backward has begun at its root, in nanoseconds since 1970.
        gives_up: let go of it instead; this run will not be started.
    """

    context: ContextId
    marking: MarkingId
    run: int
    age: int
    gives_up: bool = False

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        value: dict[str, CborValue] = {
            "context": self.context.encode(),
            "marking": self.marking.encode(),
            "run": self.run,
            "age": self.age,
            "gives_up": self.gives_up,
        }
        return value

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "claim of parameters")
        context = ContextId.decode(fields.value("context"))
        marking = ContextId.decode(fields.value("marking"))
        run = fields.integer("run", high=MAX_NUMBER)
        age = fields.integer("age", high=MAX_NUMBER)
        gives_up = fields.flag("gives_up")
        fields.finish()
        return cls(context, marking, run, age, gives_up)


@dataclasses.dataclass(frozen=True, slots=True)
class Claimed:
    """Whether all is claimed; if not, an older backward has some of it."""

    is_so: bool

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"claimed": self.is_so}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "answer about a claim")
        message = cls(fields.flag("claimed"))
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class StartOrder:
    """Go backward through what was marked.

    Attributes:
        context: where gradients go.
        marking: what was marked.
        run: which run through it this is.
        retain_graph: keep the graph, and the marking, for another run.
        seconds: how long it may take; 0 for as long as it likes.
        puts_aside: put the gradients aside, until a `SettleOrder` says what is to be of them.
    """

    context: ContextId
    marking: MarkingId
    run: int
    retain_graph: bool
    seconds: float
    puts_aside: bool = False

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {
            "context": self.context.encode(),
            "marking": self.marking.encode(),
            "run": self.run,
            "retain_graph": self.retain_graph,
            "seconds": self.seconds,
            "puts_aside": self.puts_aside,
        }

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "order to go backward")
        context = ContextId.decode(fields.value("context"))
        marking = ContextId.decode(fields.value("marking"))
        run = fields.integer("run", high=MAX_NUMBER)
        retain_graph = fields.flag("retain_graph")
        seconds = fields.value("seconds")
        if not isinstance(seconds, float) or not 0 <= seconds < 1e9:
            raise fields.wrong("'seconds' is no time limit")
        puts_aside = fields.flag("puts_aside")
        fields.finish()
        return cls(context, marking, run, retain_graph, seconds, puts_aside)


@dataclasses.dataclass(frozen=True, slots=True)
class SettleOrder:
    """Do with the gradients of a run that were put aside as this says.

    Attributes:
        context, marking, run: which run.
        counts: whether they are the context's, now; if not, let go of them.
    """

    context: ContextId
    marking: MarkingId
    run: int
    counts: bool

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {
            "context": self.context.encode(),
            "marking": self.marking.encode(),
            "run": self.run,
            "counts": self.counts,
        }

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "order about gradients")
        context = ContextId.decode(fields.value("context"))
        marking = ContextId.decode(fields.value("marking"))
        run = fields.integer("run", high=MAX_NUMBER)
        counts = fields.flag("counts")
        fields.finish()
        return cls(context, marking, run, counts)


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a backward has failed, and where.

    Attributes:
        node: where.
        worker: that node's rank, if it has one.
        error: what was raised, as `encode_exception` writes it.
        raised: that itself, where it was raised.
    """

    node: NodeId
    worker: int | None
    error: CborValue
    raised: BaseException | None = dataclasses.field(default=None, compare=False)

    @staticmethod
    def is_in(value: CborValue) -> bool:
        """Return whether an answer is one."""
        return isinstance(value, dict) and "failed" in value

    @property
    def place(self) -> str:
        """The line that raised it: ``"model.py:12"``, empty if that is not known."""
        told = self.error.get("traceback") if isinstance(self.error, dict) else None
        lines = _LINE.findall(told) if isinstance(told, str) else []
        return f"{lines[-1][0]}:{lines[-1][1]}" if lines else ""

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"failed": self.error, "node": self.node.raw, "worker": self.worker}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "answer of a backward")
        error, worker = fields.value("failed"), fields.value("worker")
        try:
            node = NodeId(fields.data("node", shortest=32, longest=32))
        except (IdentityError, ValueError) as wrong:
            raise fields.wrong(str(wrong)) from wrong
        fields.finish()
        if worker is not None and (type(worker) is not int or not 0 <= worker <= MAX_NUMBER):
            raise fields.wrong("'worker' is no rank")
        return cls(node, worker, error)


@dataclasses.dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of one message, on their way to its sender.

    Attributes:
        context, marking, run: the run that they belong to.
        message: the message's number at its sender.
        gradients: one for each of its tensors that wanted one, None where there is none.
    """

    context: ContextId
    marking: MarkingId
    run: int
    message: int
    gradients: list[torch.Tensor | None]

    def arguments(self) -> tuple[Any, ...]:
        """Return them as the arguments of a call."""
        ids = (*self.context.encode(), *self.marking.encode(), self.run, self.message)
        return (*ids, self.gradients)

    @classmethod
    def of_arguments(cls, arguments: tuple[Any, ...]) -> Self:
        """Return those in the arguments of a call."""
        match arguments:
            case [owner, number, root, marking, int(run), int(message), list(gradients)] if all(
                each is None or isinstance(each, torch.Tensor) for each in gradients
            ):
                context = ContextId.decode([owner, number])
                return cls(context, ContextId.decode([root, marking]), run, message, gradients)
        raise ProtocolError("reading of gradients", why="they are none")
