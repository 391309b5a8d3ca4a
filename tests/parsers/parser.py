"""What it takes to test a parser of bytes from the network, whichever it is."""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
import random
from collections.abc import Callable
from typing import Any, Literal

from hypothesis import strategies as st

from transport import CborValue, cbor

__all__ = ["Parser", "arbitrary", "bombs", "cbor_values", "mutated", "texts", "to_bytes"]

MAX_MESSAGE = 1 << 20
"""Longest CBOR message on any stream."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parser:
    """A reader of what the network brings, its writer, and what they promise.

    Attributes:
        name: for the names of tests.
        covers: the qualified names of the public functions that `read` exercises.
        form: what it reads: bytes, text, or a decoded CBOR value.
        values: every value that may be written.
        write: writes one.
        read: reads what was written.
        refuses: everything that `read` may raise.
        same: whether two values are the same.
        is_canonical: whether what is read must be written the very same way; otherwise reading may
            drop what it doesn't know, and only what was kept must survive another round.
        is_total: whether arbitrary input is ever accepted. It is not expected of what is signed or
            has a checksum; the mutations still must find it refused or the same.
    """

    name: str
    covers: tuple[str, ...]
    form: Literal["bytes", "text", "message"]
    values: st.SearchStrategy[Any]
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    refuses: tuple[type[Exception], ...]
    same: Callable[[Any, Any], bool] = operator.eq
    is_canonical: bool = True

    def __repr__(self) -> str:
        return self.name


# -- values

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 64), (1 << 64) - 1)
    | st.sampled_from([0, 1, -1, 31, 32, 33, 255, 256, 65535, 65536, (1 << 63) - 1, 1 << 63])
    | st.floats()
    | st.binary(max_size=40)
    | texts
)
cbor_values: st.SearchStrategy[CborValue] = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
"""Whatever CBOR value a peer can send."""

# -- hostile input

_OPERATIONS = ("set", "flip", "delete", "insert", "repeat", "cut", "lie", "respell")
# Heads of CBOR items, of 8-byte lengths and without an end, separators of texts, extremes.
_TELLING = (
    bytes.fromhex("00 01 18 1b 3b 40 5b 5f 60 7b 80 9b 9f a0 bb bf c1 f7 f9 fb ff") + b'\n:,%[]{}"'
)

_TELLING_NAMES = ("x", "grad", "order", "name", "version", "more", "code", "denial", "axis")

_GRAFTS = ("replace", "near", "near", "delete", "add", "double")
_TELLING_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 31, 33, 255, 65535, 65536, 1 << 31, (1 << 63) - 1, 1 << 63),
    *((1 << 64) - 1, -(1 << 64), 0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 1e300),
    *(b"", b"x", bytes(16), bytes(31), bytes(32), bytes(33), bytes(300), b"\xff" * 64),
    *("", "x", "\0", "\x1b[31m", "ab" * 16, "x" * 129, "1.2.3.4:5", "float32", "qint8", "\u202e"),
    *([], [[]], [None] * 70, [0, 1], [1, 0], [[["x"]]], ["1.2.3.4", 5], {}, {"code": "denied"}),
    *({"x": {}}, {"dtype": "qint8", "shape": [3]}, {"err": {}}, {"ok": None}),
)

# Drawn as one number: a mutation has nothing to shrink, and 10,000 of each must be cheap.
_seeds = st.integers(0, (1 << 64) - 1)


def arbitrary(parser: Parser) -> st.SearchStrategy[Any]:
    """Return input that knows nothing of the parser but its form."""
    match parser.form:
        case "bytes":
            return st.binary(max_size=300)
        case "text":
            return st.text(max_size=100) | st.text('0123456789abcdef.:[]%/,=-_ {}"\n', max_size=60)
        case _:
            return cbor_values


def mutated(parser: Parser) -> st.SearchStrategy[Any]:
    """Return what the parser reads, with a few things wrong."""
    written = parser.values.map(parser.write)
    match parser.form:
        case "bytes":
            return st.builds(_mutate_bytes, written, _seeds)
        case "text":
            return st.builds(
                lambda text, seed: _mutate_bytes(text.encode(), seed).decode(errors="replace"),
                written,
                _seeds,
            )
        case _:
            return st.builds(_mutate_message, written, _seeds)


def _mutate_bytes(data: bytes, seed: int) -> bytes:
    draw = random.Random(seed)
    out = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        at = draw.randint(0, len(out))
        byte = draw.choice(_TELLING) if draw.getrandbits(1) else draw.getrandbits(8)
        match draw.choice(_OPERATIONS):
            case "set":
                out[at : at + 1] = bytes([byte])
            case "flip":
                out[at : at + 1] = bytes(b ^ (byte or 1) for b in out[at : at + 1])
            case "delete":
                del out[at : at + 1 + byte % 8]
            case "insert":
                out[at:at] = bytes([byte])
            case "repeat":
                out[at:at] = out[at : at + 1 + byte]
            case "cut":
                del out[at:]
            case "respell":  # the same CBOR item with a longer head, most often the outermost
                at = draw.choice((0, 0, at))
                out[at : at + 1] = b"".join(
                    bytes([head & 0xE0 | 24, head & 31]) for head in out[at : at + 1]
                )
            case _:  # an item that claims to be longer than memory
                out[at : at + 1] = bytes([byte | 0x1B]) + b"\xff" * (byte % 9)
    return bytes(out)


def _mutate_message(message: CborValue, seed: int) -> CborValue:
    draw = random.Random(seed)
    root: list[Any] = [copy.deepcopy(message)]
    for _ in range(draw.randint(1, 3)):
        container, key = draw.choice(_places(root))
        value = copy.deepcopy(draw.choice(_TELLING_VALUES))
        match draw.choice(_GRAFTS):
            case "replace":
                container[key] = value
            case "near":
                container[key] = _near(container[key], draw.getrandbits(2))
            case "delete" if container is not root:
                del container[key]
            case "double" if isinstance(container, list) and container is not root:
                container.insert(key, copy.deepcopy(container[key]))
            case _ if isinstance(container, dict):
                container[draw.choice(_TELLING_NAMES)] = value
            case _ if container is not root:
                container.append(value)
    return root[0]  # type: ignore[no-any-return]


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """Return where every value stands, as container and key, outermost first."""
    places: list[tuple[Any, Any]] = []
    pending: list[Any] = [root]
    while pending:
        container = pending.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            places.append((container, key))
            if isinstance(container[key], list | dict):
                pending.append(container[key])
    return places


def _near(value: Any, which: int) -> Any:
    """Return something that is almost `value`: the off-by-one, the other type, one more."""
    match value:
        case bool():
            return int(value)
        case int():
            return (value + 1, value - 1, -value, bool(value & 1))[which] % (1 << 64)
        case float():
            return (-value, float("nan"), float("inf"), 0)[which]
        case bytes():
            return (value[:-1], value + b"\0", bytes(reversed(value)), "text")[which]
        case str():
            return (value[:-1], value + "\0", value.upper(), value.encode())[which]
        case list():
            return (value[:-1], value * 2, value[::-1], {})[which]
        case dict():
            return list(value.values())
    return (0, "", b"", [])[which]


# -- bombs


def to_bytes(parser: Parser, value: Any) -> bytes:
    """Return `value`, of the parser's form, as it would travel."""
    match parser.form:
        case "bytes":
            return bytes(value)
        case "text":
            return str(value).encode("utf-8", "surrogatepass")
        case _:
            return cbor.encode(value, max_size=MAX_MESSAGE)


def bombs(parser: Parser, sample: Any, size: int) -> dict[str, Any]:
    """Return inputs of about `size` bytes that make a careless parser work or hold far more.

    Args:
        parser: whose form they have.
        sample: something that it accepts, whose parts are blown up.
        size: in bytes.
    """
    match parser.form:
        case "bytes":
            bare = _byte_bombs(size)
            behind = {f"{name} behind a good one": sample + bare[name] for name in list(bare)[::2]}
            return bare | behind
        case "text":
            return _text_bombs(sample, size)
        case _:
            return _message_bombs(sample, size)


def _byte_bombs(size: int) -> dict[str, bytes]:
    heads = {"text": 0x60, "bytes": 0x40, "list": 0x80, "map": 0xA0, "tag": 0xC0}
    lies = {
        f"{kind} of {width}-byte length": bytes([head | short]) + b"\xff" * width
        for kind, head in heads.items()
        for short, width in ((0x1A, 4), (0x1B, 8))
    }
    repeated = {
        "nested lists": b"\x81",
        "nested maps": b"\xa1\x60",
        "nested endless lists": b"\x9f",
        "nested tags": b"\xc1",
        "nested lists, each a lie": b"\x9a\x7f\xff\xff\xff",
        "open brackets": b"[",
        "open objects": b'{"a":',
        "nines": b"9",
        "zeros": b"\0",
        "ones": b"\xff",
    }
    many = b"\x9a" + (size - 5).to_bytes(4, "big")
    filled = {
        "empty lists": many + b"\x80" * (size - 5),
        "empty maps": many + b"\xa0" * (size - 5),
        "empty texts": many + b"\x60" * (size - 5),
        "nulls": many + b"\xf6" * (size - 5),
    }
    return lies | {name: part * (size // len(part)) for name, part in repeated.items()} | filled


def _text_bombs(sample: str, size: int) -> dict[str, str]:
    parts = [*"90a[]:%,^ \n#=", "\u0663", "\ud800"]
    found: dict[str, str] = {}
    for part in parts:
        run = part * (size // len(part))
        found |= {
            f"only {part!r}": run,
            f"begun with {part!r}": run + sample,
            f"ended with {part!r}": sample + run,
            f"amidst {part!r}": sample[: len(sample) // 2] + run + sample[len(sample) // 2 :],
        }
    return found


_MAX_PLACES = 6
"""Places within a message at which bombs are laid."""


def _message_bombs(sample: CborValue, size: int) -> dict[str, CborValue]:
    deep: CborValue = None
    for _ in range(cbor.MAX_DEPTH - 4):
        deep = [deep]
    loads: dict[str, CborValue] = {
        "bytes": bytes(size),
        "text": "9" * size,
        "empty lists": [[] for _ in range(size)],
        "numbers": list(range(size // 5)),
        "descending numbers": list(range(size // 5, 0, -1)),
        "map": {f"{number}": None for number in range(size // 8)},
        "depth": deep,
    }
    found: dict[str, CborValue] = {}
    count = len(_places([sample]))
    for place in range(0, count, 1 + count // _MAX_PLACES):
        for name, load in loads.items():
            root: list[Any] = [copy.deepcopy(sample)]
            container, key = _places(root)[place]
            container[key] = load
            found[f"{name} at {place}"] = root[0]
    return found
