"""Arguments and results as they travel: a flat list of items, and the tensors that it mentions.

A value is written in pre-order, so that however deeply it nests, the message does not. What JSON
has stands for itself; everything else is an item that is a list, whose first element says what it
is, and which may be followed by the items of its parts:

    ["l", n]  ["t", n]  ["s", n]  ["f", n]     list, tuple, set, frozenset: n values follow
    ["d", n]                                   dict: n keys and values follow in turn
    ["T", i]  ["P", i]                         tensor, parameter: number i of those beside
    ["B", i]  ["S", i]                         bytes, text too long to stand here: likewise
    ["C", shape, coalesced, wants_gradient]    sparse COO tensor: its indices and values follow
    ["r", name, fields]                        dataclass, named tuple: its fields' values follow
    ["e", name, member]                        member of an enumeration
    ["i", hex]  ["c", re, im]  ["z", sizes]    large integer, complex number, torch.Size
    ["dt", name]  ["dv", name]                 torch.dtype, torch.device
    ["n", id]                                  the id of a node
    ["q", name]                                a function or class that the reader exposes
    ["R", ...]                                 a remote reference
    ["K", i, tensors, refs]                    a pickle, where both sides allow them: see `pickled`

By default there is nothing else: no code, no class by its import path, nothing that runs when it is
read but the constructors of types that the reader has registered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from auth import IdentityError, NodeId
from mesh.rpc.encoding.pickled import has_pickle, read_pickle, refuse_pickle, write_pickle
from mesh.rpc.errors import Unsendable
from mesh.rpc.names.exposed import Exposures, exposed_name
from mesh.rpc.names.types import TypeTable
from mesh.rpc.workers import aside
from tensor_bridge import TensorError, describe, dtype_name, dtype_of, tensor_bytes
from transport import CborValue, ProtocolError

Received: TypeAlias = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

__all__ = [
    "MAX_DEPTH",
    "MAX_ITEMS",
    "Packed",
    "Packer",
    "Received",
    "RefReader",
    "RefWriter",
    "Unpacker",
]

MAX_DEPTH = 64
"""Deepest nesting of a value."""

MAX_ITEMS = 1 << 15
"""Most items of a message. Whoever has more to say, says it in tensors."""

MAX_TENSORS = 4096
"""Most tensors of a message."""

INLINE_BYTES = 4096
"""Longest text or byte string among the items; longer ones travel as tensors do."""

INLINE_TOTAL = 256 * 1024
"""All of them in a message: with its items, they have to fit into a frame."""

MAX_DIGITS = 4096
"""Most hexadecimal digits of an integer."""

MAX_DIMS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """A value ready to travel.

    Attributes:
        items: the value, without the content of its tensors.
        tensors: strided tensors, each once however often the value has it.
        differentiable: the tensors that want gradients: those of `tensors`, then the sparse ones.
    """

    items: list[CborValue]
    tensors: list[torch.Tensor]
    differentiable: list[torch.Tensor]


class RefWriter(Protocol):
    """What takes care of the remote references of a message that goes out."""

    def pack(self, ref: Any) -> list[CborValue] | None:
        """Return the item for `ref`, None if that is no reference."""


class RefReader(Protocol):
    """What takes care of the remote references of a message that came in."""

    def unpack(self, item: list[CborValue]) -> Any:
        """Return the reference that an item stands for.

        Raises:
            ProtocolError: it is malformed.
        """


class Packer:
    """Writes values of one message.

    Args:
        types: dataclasses, named tuples and enumerations that travel.
        refs: takes note of the references that it comes by.
        pickles: write what does not travel otherwise as a pickle.
    """

    def __init__(self, types: TypeTable, refs: RefWriter, *, pickles: bool = False) -> None:
        self._types = types
        self._pickles = pickles
        self._refs = refs
        self._items: list[CborValue] = []
        self._tensors: list[torch.Tensor] = []
        self._sparse: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._open: set[int] = set()
        self._room = INLINE_TOTAL

    def pack(self, value: object, path: str) -> None:
        """Add `value`, which errors call `path`.

        Raises:
            Unsendable: it, or a part of it, does not travel.
        """
        self._pack(value, path, 0)

    @property
    def packed(self) -> Packed:
        """All values added so far, as one message."""
        dense = [tensor for tensor in self._tensors if tensor.requires_grad]
        return Packed(self._items, self._tensors, dense + self._sparse)

    def _pack(self, value: Any, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _unsendable(path, f"it nests deeper than {MAX_DEPTH} levels")
        if len(self._items) >= MAX_ITEMS:
            raise _unsendable(
                path,
                f"a message has at most {MAX_ITEMS} values",
                "Send large collections of numbers as tensors.",
            )
        kind = type(value)
        writer = _WRITERS.get(kind)
        if writer is not None:
            writer(self, value, path, depth)
        elif isinstance(value, torch.Tensor):
            self._tensor(value, path, depth)
        elif (name := self._types.name_of(kind)) is not None:
            self._record(name, value, path, depth)
        elif (item := self._refs.pack(value)) is not None:
            self._items.append(item)
        elif self._pickles:
            self._pickle(value, path)
        elif callable(value) and (name := exposed_name(value)) is not None:
            self._items.append(["q", name])
        else:
            raise _unsendable(
                path,
                f"a {kind.__module__}.{kind.__qualname__} does not travel",
                "What does: None, numbers, text, bytes, lists, tuples, dicts, sets, tensors, "
                "remote references, and dataclasses, named tuples and enumerations that both "
                "sides have registered with mesh.rpc.register_type.",
            )

    # -- what stands for itself

    def _plain(self, value: Any, path: str, depth: int) -> None:
        self._items.append(value)

    def _integer(self, value: int, path: str, depth: int) -> None:
        if -(1 << 63) <= value < 1 << 63:
            self._items.append(value)
            return
        digits = f"{value:x}"
        if len(digits) > MAX_DIGITS:
            raise _unsendable(path, f"an integer of more than {MAX_DIGITS} hexadecimal digits")
        self._items.append(["i", digits])

    def _text(self, value: str, path: str, depth: int) -> None:
        try:
            data = value.encode()
        except UnicodeEncodeError as error:
            raise _unsendable(path, f"a text that is not Unicode ({error})") from error
        self._items.append(value if self._fits(data) else ["S", self._beside(data)])

    def _bytes(self, value: bytes | bytearray, path: str, depth: int) -> None:
        data = bytes(value)
        self._items.append(data if self._fits(data) else ["B", self._beside(data)])

    # -- what has parts

    def _sequence(self, mark: str, value: Any, path: str, depth: int) -> None:
        self._items.append([mark, len(value)])
        with _Guard(self._open, value, path):
            for index, part in enumerate(value):
                self._pack(part, f"{path}[{index}]", depth + 1)

    def _list(self, value: list[Any], path: str, depth: int) -> None:
        self._sequence("l", value, path, depth)

    def _tuple(self, value: tuple[Any, ...], path: str, depth: int) -> None:
        self._sequence("t", value, path, depth)

    def _set(self, value: set[Any], path: str, depth: int) -> None:
        self._sequence("s", value, path, depth)

    def _frozenset(self, value: frozenset[Any], path: str, depth: int) -> None:
        self._sequence("f", value, path, depth)

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> None:
        self._items.append(["d", len(value)])
        with _Guard(self._open, value, path):
            for key, part in value.items():
                where = f"{path}[{key!r:.40}]"
                self._pack(key, f"key {key!r:.40} of {path}", depth + 1)
                self._pack(part, where, depth + 1)

    def _record(self, name: str, value: Any, path: str, depth: int) -> None:
        member = self._types.member_of(value)
        if member is not None:
            self._items.append(["e", name, member])
            return
        fields = self._types.fields_of(value)
        self._items.append(["r", name, list(fields)])
        with _Guard(self._open, value, path):
            for field, part in fields.items():
                self._pack(part, f"{path}.{field}", depth + 1)

    def _pickle(self, value: object, path: str) -> None:
        try:
            data, tensors, refs = write_pickle(value, self._refs.pack)
        except Exception as error:
            raise _unsendable(path, f"it can't be pickled: {error}") from error
        numbers: list[CborValue] = [self._tensor_beside(tensor, path) for tensor in tensors]
        self._items.append(["K", self._beside(data), numbers, refs])

    # -- torch's own

    def _complex(self, value: complex, path: str, depth: int) -> None:
        self._items.append(["c", value.real, value.imag])

    def _size(self, value: torch.Size, path: str, depth: int) -> None:
        self._items.append(["z", list(value)])

    def _dtype(self, value: torch.dtype, path: str, depth: int) -> None:
        try:
            self._items.append(["dt", dtype_name(value)])
        except TensorError as error:
            raise _unsendable(path, str(error)) from error

    def _device(self, value: torch.device, path: str, depth: int) -> None:
        self._items.append(["dv", str(value)])

    def _node(self, value: NodeId, path: str, depth: int) -> None:
        self._items.append(["n", value.raw])

    def _tensor(self, value: torch.Tensor, path: str, depth: int) -> None:
        if value.layout is torch.sparse_coo and type(value) is torch.Tensor:
            plain = value.detach()
            if value.requires_grad:
                self._sparse.append(value)
            self._items.append(["C", list(value.shape), value.is_coalesced(), value.requires_grad])
            self._pack(plain._indices(), f"{path}.indices()", depth + 1)
            self._pack(plain._values(), f"{path}.values()", depth + 1)
            return
        mark = "P" if type(value) is torch.nn.Parameter else "T"
        self._items.append([mark, self._tensor_beside(value, path)])

    def _tensor_beside(self, tensor: torch.Tensor, path: str) -> int:
        try:
            describe(tensor)
        except TensorError as error:
            raise _unsendable(path, error.why or error.what, error.fix) from error
        return self._number(tensor)

    def _fits(self, data: bytes) -> bool:
        if len(data) > min(INLINE_BYTES, self._room):
            return False
        self._room -= len(data)
        return True

    def _beside(self, data: bytes) -> int:
        # Copied, for torch wants memory that may be written to.
        return self._number(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _number(self, tensor: torch.Tensor) -> int:
        number = self._numbers.get(id(tensor))  # all of them live as long as this
        if number is None:
            number = self._numbers[id(tensor)] = len(self._tensors)
            if number >= MAX_TENSORS:
                raise _unsendable("the message", f"it has more than {MAX_TENSORS} tensors")
            self._tensors.append(tensor)
        return number


class Unpacker:
    """Reads values of one message.

    Args:
        items: as `Packed` has them, off the wire.
        tensors: those that came beside.
        types, refs: as `Packer`.
        exposures: what functions and classes a name may stand for.
        pickles: read pickles, which run code of their writer's.
        received: makes of the tensors that want gradients, in the order of `Packed`, what stands
            for them here.

    Raises:
        ProtocolError: a sparse tensor that wants a gradient is malformed.
    """

    def __init__(
        self,
        items: Sequence[CborValue],
        tensors: Sequence[torch.Tensor],
        types: TypeTable,
        refs: RefReader,
        exposures: Exposures,
        *,
        pickles: bool = False,
        received: Received | None = None,
    ) -> None:
        self._pickles = pickles
        self._items = items
        self._tensors = list(tensors)
        self._linked: dict[int, torch.Tensor] = {}
        self._types = types
        self._refs = refs
        self._exposures = exposures
        self._next = 0
        if received is not None:
            self._link(received)

    def unpack(self) -> Any:
        """Return the next value.

        Raises:
            ProtocolError: the items are no value.
            NotExposed: a type or function that this side does not know.
        """
        return self._unpack(0)

    def finish(self) -> None:
        """Refuse what is left over."""
        if self._next != len(self._items):
            raise _malformed("items follow the last value")

    def _link(self, received: Received) -> None:
        """Put in place of the tensors that want gradients what `received` makes of them."""
        dense = [number for number, each in enumerate(self._tensors) if each.requires_grad]
        places = []
        sparse = []
        for place, item in enumerate(self._items):
            match item:
                case ["C", _, _, True]:
                    self._next = place
                    sparse.append(self._unpack(0))
                    places.append(place + 1)
        self._next = 0
        linked = received([*(self._tensors[number] for number in dense), *sparse])
        for number, tensor in zip(dense, linked, strict=False):
            self._tensors[number] = tensor
        self._linked = dict(zip(places, linked[len(dense) :], strict=True))

    async def unpack_all(self, count: int) -> list[Any]:
        """Return all values, which have to be `count`; pickles are read in a thread.

        Raises:
            ProtocolError, NotExposed: as `unpack`.
        """

        def unpack() -> list[Any]:
            values = [self.unpack() for _ in range(count)]
            self.finish()
            return values

        if self._pickles and has_pickle(self._items):
            return await aside(unpack)
        return unpack()

    def _unpack(self, depth: int) -> Any:
        if self._next >= len(self._items) or depth > MAX_DEPTH:
            raise _malformed("it ends early, or nests too deeply")
        item = self._items[self._next]
        self._next += 1
        if not isinstance(item, list):
            if isinstance(item, dict):
                raise _malformed("a map among its items")
            return item
        match item:
            case ["l", int(count)]:
                return self._parts(count, depth)
            case ["t", int(count)]:
                return tuple(self._parts(count, depth))
            case ["s" | "f" as mark, int(count)]:
                return self._set(self._parts(count, depth), mark)
            case ["d", int(count)]:
                return self._dict(count, depth)
            case ["T", int(number)]:
                return self._tensor(number)
            case ["P", int(number)]:
                tensor = self._tensor(number)
                # What is part of a graph can be no leaf of its own.
                return _parameter(tensor) if tensor.grad_fn is None else tensor
            case ["B", int(number)]:
                return self._data(number)
            case ["S", int(number)]:
                return self._text(number)
            case ["C", list(shape), bool(coalesced), bool(wants_gradient)]:
                return self._sparse(shape, coalesced, wants_gradient, depth)
            case ["r", str(name), list(fields)]:
                values = self._parts(len(fields), depth)
                return self._types.record(name, dict(zip(map(_word, fields), values, strict=True)))
            case ["e", str(name), str(member)]:
                return self._types.member(name, member)
            case ["i", str(digits)] if 0 < len(digits) <= MAX_DIGITS:
                return _integer(digits)
            case ["c", float(real), float(imaginary)]:
                return complex(real, imaginary)
            case ["z", list(sizes)]:
                return torch.Size(_sizes(sizes))
            case ["dt", str(name)]:
                return dtype_of(name)
            case ["dv", str(name)]:
                return _device(name)
            case ["n", bytes(raw)]:
                return _node_id(raw)
            case ["q", str(name)]:
                return self._exposures.callable(name)
            case ["R", *_]:
                return self._refs.unpack(item)
            case ["K", int(number), list(tensors), list(refs)]:
                return self._pickle(number, tensors, refs)
        raise _malformed("an item of no known kind")

    def _parts(self, count: int, depth: int) -> list[Any]:
        if not 0 <= count <= len(self._items) - self._next:
            raise _malformed("it announces more parts than there are")
        return [self._unpack(depth + 1) for _ in range(count)]

    def _set(self, parts: list[Any], mark: str) -> set[Any] | frozenset[Any]:
        try:
            return set(parts) if mark == "s" else frozenset(parts)
        except TypeError as error:
            raise _malformed(f"a set of what is in none ({error})") from error

    def _dict(self, count: int, depth: int) -> dict[Any, Any]:
        parts = self._parts(2 * count, depth)
        try:
            return dict(zip(parts[::2], parts[1::2], strict=True))
        except TypeError as error:
            raise _malformed(f"a key that is none ({error})") from error

    def _tensor(self, number: int) -> torch.Tensor:
        if not 0 <= number < len(self._tensors):
            raise _malformed("a tensor that is not there")
        return self._tensors[number]

    def _data(self, number: int) -> bytes:
        tensor = self._tensor(number)
        if tensor.dtype is not torch.uint8 or tensor.dim() != 1:
            raise _malformed("bytes that are none")
        return bytes(tensor_bytes(tensor))

    def _text(self, number: int) -> str:
        try:
            return self._data(number).decode()
        except UnicodeDecodeError as error:
            raise _malformed(f"a text that is not UTF-8 ({error})") from error

    def _pickle(self, number: int, tensors: list[CborValue], refs: list[CborValue]) -> Any:
        if not self._pickles:
            raise refuse_pickle()
        return read_pickle(
            self._data(number),
            [self._tensor(_size(each)) for each in tensors],
            [self._refs.unpack(each) for each in refs if isinstance(each, list)],
        )

    def _sparse(
        self, shape: list[CborValue], coalesced: bool, wants_gradient: bool, depth: int
    ) -> torch.Tensor:
        place = self._next
        indices, values = self._parts(2, depth)
        if place in self._linked:
            return self._linked[place]
        if not isinstance(indices, torch.Tensor) or not isinstance(values, torch.Tensor):
            raise _malformed("a sparse tensor of no tensors")
        try:
            # Checked: torch's kernels believe the indices, and would write wherever they say.
            return torch.sparse_coo_tensor(
                indices, values, _sizes(shape), check_invariants=True, is_coalesced=coalesced
            ).requires_grad_(wants_gradient)
        except (RuntimeError, ValueError, TypeError) as error:
            raise _malformed(f"a sparse tensor that is none ({error!s:.120})") from error


class _Guard:
    """Refuses a value that contains itself, which would otherwise be found at the depth limit."""

    def __init__(self, opened: set[int], value: object, path: str) -> None:
        self._opened = opened
        self._id = id(value)
        self._path = path

    def __enter__(self) -> None:
        if self._id in self._opened:
            raise _unsendable(self._path, "it contains itself")
        self._opened.add(self._id)

    def __exit__(self, *_: object) -> None:
        self._opened.discard(self._id)


_WRITERS: dict[type, Callable[[Packer, Any, str, int], None]] = {
    **dict.fromkeys((type(None), bool, float), Packer._plain),
    int: Packer._integer,
    str: Packer._text,
    bytes: Packer._bytes,
    bytearray: Packer._bytes,
    list: Packer._list,
    tuple: Packer._tuple,
    set: Packer._set,
    frozenset: Packer._frozenset,
    dict: Packer._dict,
    complex: Packer._complex,
    torch.Size: Packer._size,
    torch.dtype: Packer._dtype,
    torch.device: Packer._device,
    NodeId: Packer._node,
}
"""By exact type: a subclass, such as of ``int``, may mean something else."""


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)


def _integer(digits: str) -> int:
    try:
        return int(digits, 16)
    except ValueError as error:
        raise _malformed("an integer that is none") from error


def _sizes(sizes: list[CborValue]) -> list[int]:
    if len(sizes) > MAX_DIMS:
        raise _malformed(f"more than {MAX_DIMS} sizes")
    return [_size(size) for size in sizes]


def _size(value: CborValue) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise _malformed("a size that is none")
    return value


def _word(value: CborValue) -> str:
    if not isinstance(value, str):
        raise _malformed("a field without a name")
    return value


def _node_id(raw: bytes) -> NodeId:
    try:
        return NodeId(raw)
    except IdentityError as error:
        raise _malformed(f"a node id that is none ({error})") from error


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise _malformed(f"device {name!r:.40} is none") from error


def _unsendable(path: str, why: str, fix: str | None = None) -> Unsendable:
    return Unsendable("sending of a value", why=f"{path}: {why}", fix=fix)


def _malformed(why: str) -> ProtocolError:
    return ProtocolError("reading of a value", why=why)
