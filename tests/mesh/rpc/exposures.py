"""Functions that the tests call at each other's nodes."""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import torch

from mesh import rpc

rpc.expose(__name__)


@rpc.register_type
@dataclasses.dataclass
class Point:
    x: float
    y: torch.Tensor


@rpc.register_type
class Pair(NamedTuple):
    first: Any
    second: Any


@rpc.register_type
class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


@rpc.register_type
@dataclasses.dataclass(frozen=True)
class Positive:
    value: int

    def __post_init__(self) -> None:
        if self.value <= 0:
            raise ValueError("not positive")


class Unregistered:
    pass


class PickyError(Exception):
    def __init__(self, first: str, second: int) -> None:
        super().__init__(f"{first} {second}")


class Counter:
    """An object that lives at its owner."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.secret = lambda: "not a method of the class"

    def add(self, step: int) -> int:
        self.count += step
        return self.count

    async def later(self) -> int:
        await anyio.lowlevel.checkpoint()
        return self.count

    def _hidden(self) -> int:
        return self.count


def echo(*args: Any, **kwargs: Any) -> Any:
    if kwargs:
        return args, kwargs
    return args[0] if len(args) == 1 else args


def leaf() -> torch.Tensor:
    return torch.ones((), requires_grad=True)


def add(a: torch.Tensor, b: Any) -> torch.Tensor:
    return a + b


def fail(kind: str) -> None:
    if kind == "picky":
        raise PickyError("first", 2)
    if kind == "key":
        raise KeyError("missing")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "base":
        raise BaseException("of no kind")  # noqa: TRY002
    raise ValueError("as was expected")


async def fail_async() -> None:
    raise ValueError("as was expected")


async def exit_async() -> None:
    raise SystemExit(3)


async def count_to(count: int) -> int:
    total = 0
    for _ in range(count):
        await anyio.lowlevel.checkpoint()
        total += 1
    return total


cancelling: list[str] = []
"""What `wait_long` has been through."""


async def wait_long() -> None:
    cancelling.append("begun")
    try:
        await anyio.sleep_forever()
    finally:
        cancelling.append("ended")


def make(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)


def items(value: Any, times: int) -> Iterator[Any]:
    for _ in range(times):
        yield value


async def items_async(value: Any, times: int) -> AsyncIterator[Any]:
    for _ in range(times):
        await anyio.lowlevel.checkpoint()
        yield value


def nap(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


running = threading.Semaphore(0)
"""Released by each call of `hold` as it begins."""

let_go = threading.Event()
"""What they wait for."""


def hold(*_: Any) -> str:
    running.release()
    let_go.wait(10)
    return "held"


class _Odd(torch.Tensor):
    @property
    def layout(self) -> Any:  # type: ignore[override]
        raise ValueError("of no size")


def odd() -> Any:
    return torch.zeros(1).as_subclass(_Odd)


def lazy() -> torch.nn.Module:
    return torch.nn.LazyLinear(1)


def kind_of(ref: rpc.RRef[Any]) -> str:
    return type(ref.local_value()).__name__


def unsendable() -> Any:
    return [1, {"deep": Unregistered()}]


def kinds(*args: Any) -> list[str]:
    return [type(each).__name__ for each in args]


def unwrap(ref: rpc.RRef[Any]) -> Any:
    return ref.local_value()


def fetch(ref: rpc.RRef[Any]) -> Any:
    return ref.to_here()


def keep(ref: rpc.RRef[Any]) -> None:
    kept.append(ref)


kept: list[Any] = []

players: list[Any] = []
"""Two agents, who call each other in `ping_pong`."""


def ping_pong(depth: int) -> int:
    """Call the other side, which does the same, `depth` deep."""
    if depth == 0:
        return 0
    me, other = players if depth % 2 else players[::-1]
    return 1 + me.bridge.block_on(lambda: me.call(other.node_id, ping_pong, (depth - 1,)))


def device_of(tensor: torch.Tensor) -> str:
    return str(tensor.device)
