"""Random programs of views, writes, aliases and mixed types give the same as on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from mesh.device.client import special
from tests.mesh.device.inprocess import Loopback, SlowMover

DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
SIZES = ((), (0,), (3,), (2, 3), (3, 2), (2, 1, 3), (4, 4))
NUMBERS = (2, -1, 0, 0.5, True, 3.25, 7)
MAX_ELEMENTS = 256

State = list[torch.Tensor]
Step = tuple[int, int, int, int, int]
Act = Callable[[State, Step], Any]


def pick(state: State, index: int) -> torch.Tensor:
    return state[index % len(state)]


def same_device(state: State, index: int, like: torch.Tensor) -> torch.Tensor:
    there = [each for each in state if tag(each) == tag(like)]
    return there[index % len(there)]


def tag(tensor: torch.Tensor) -> Any:
    return getattr(tensor, "place", None)


def binary(name: str) -> Act:
    def act(state: State, step: Step) -> Any:
        a = pick(state, step[1])
        return getattr(torch, name)(a, same_device(state, step[2], a))

    return act


def number(name: str) -> Act:
    return lambda state, step: getattr(torch, name)(
        pick(state, step[1]), NUMBERS[step[3] % len(NUMBERS)]
    )


def power(state: State, step: Step) -> Any:
    # To the power of True, torch infers another type than its CPU kernel makes.
    return torch.pow(pick(state, step[1]), (2, 0, 1, 0.5, -1, 3)[step[3] % 6])


def unary(name: str) -> Act:
    return lambda state, step: getattr(torch.Tensor, name)(pick(state, step[1]))


def in_place(name: str) -> Act:
    def act(state: State, step: Step) -> Any:
        a = pick(state, step[1])
        getattr(a, name)(same_device(state, step[2], a))

    return act


def dim_of(tensor: torch.Tensor, n: int) -> int:
    return n % max(tensor.dim(), 1)


def slice_(state: State, step: Step) -> Any:
    a = pick(state, step[1])
    return a.narrow(dim_of(a, step[2]), step[3] % 3, step[4] % 3)


def stepped(state: State, step: Step) -> Any:
    return pick(state, step[1])[:: step[3] % 3 + 1]


def select(state: State, step: Step) -> Any:
    a = pick(state, step[1])
    return a.select(dim_of(a, step[2]), step[3] % 3)


def permute(state: State, step: Step) -> Any:
    a = pick(state, step[1])
    return a.transpose(dim_of(a, step[2]), dim_of(a, step[3]))


def strided(state: State, step: Step) -> Any:
    a = pick(state, step[1])
    return a.as_strided((step[2] % 3, 2), (step[3] % 3, 1), a.storage_offset() + step[4] % 2)


def reduce(name: str) -> Act:
    def act(state: State, step: Step) -> Any:
        a = pick(state, step[1])
        found = getattr(torch, name)(a, dim_of(a, step[2]))
        return found[0] if isinstance(found, tuple) else found

    return act


def assign(state: State, step: Step) -> Any:
    a = pick(state, step[1])
    a[step[3] % 3] = NUMBERS[step[4] % len(NUMBERS)]


def masked(state: State, step: Step) -> Any:
    a = pick(state, step[1])
    a[a > 1] = NUMBERS[step[4] % len(NUMBERS)]


def chosen(state: State, step: Step) -> Any:
    a = pick(state, step[1])
    return a[a > 0]


def indexed(state: State, step: Step) -> Any:
    a = pick(state, step[1])
    return a[torch.tensor([step[3] % 3, step[4] % 3])]


def cat(state: State, step: Step) -> Any:
    a = pick(state, step[1])
    return torch.cat([a, same_device(state, step[2], a), a], dim_of(a, step[3]))


def where(state: State, step: Step) -> Any:
    a = pick(state, step[1])
    return torch.where(a > 0, a, same_device(state, step[2], a))


def typed(state: State, step: Step) -> Any:
    return pick(state, step[1]).to(DTYPES[step[3] % len(DTYPES)])


def reinterpreted(state: State, step: Step) -> Any:
    return pick(state, step[1]).view(DTYPES[step[3] % len(DTYPES)])


def out(state: State, step: Step) -> Any:
    a = pick(state, step[1])
    target = same_device(state, step[2], a)
    if target.shape != a.shape:  # grown in place, it would grow under its aliases here alone
        target = target.new_empty(0)
    torch.mul(a, 2, out=target)
    return target


def resize(state: State, step: Step) -> Any:
    a, size = pick(state, step[1]), SIZES[step[3] % len(SIZES)]
    room = a.untyped_storage().nbytes() // a.itemsize - a.storage_offset()
    if torch.Size(size).numel() <= room:  # what is beyond is zero at a peer, and anything here
        a.resize_(size)


def matmul(state: State, step: Step) -> Any:
    a = pick(state, step[1])
    return a @ same_device(state, step[2], a).t()


ACTS: tuple[Act, ...] = (
    *map(binary, ("add", "sub", "mul", "maximum", "eq", "lt", "logical_and", "div")),
    *map(number, ("add", "mul", "sub", "div", "remainder", "ge", "floor_divide")),
    power,
    *map(unary, ("neg", "abs", "clone", "t", "contiguous", "flatten", "square", "unique")),
    *map(unary, ("nonzero", "isnan", "sum", "squeeze", "detach", "sign", "diagonal", "cumsum_0")),
    *map(in_place, ("add_", "mul_", "copy_", "sub_", "fill_", "logical_or_", "clamp_min_")),
    *map(reduce, ("sum", "amax", "argmin", "cumsum", "sort", "softmax", "flip", "unbind", "var")),
    *(slice_, stepped, select, permute, strided, assign, masked, chosen, indexed, cat, where),
    *(typed, reinterpreted, out, resize, matmul),
)


def moved(tensor: torch.Tensor, place: Any, device: Any) -> torch.Tensor:
    """Return a copy on another device, which on the CPU is a name only."""
    copy = tensor.detach().clone() if device == "cpu" else tensor.to(device)
    return marked(copy, place)


def marked(tensor: torch.Tensor, place: Any) -> torch.Tensor:
    tensor.place = place  # type: ignore[attr-defined]
    return tensor


REFUSALS = (RuntimeError, IndexError, TypeError, ValueError, AttributeError)


def run(steps: list[Step], places: tuple[Any, ...], broken: set[int] | None = None) -> State:
    """Run a program and return all its tensors.

    Args:
        steps: what it does.
        places: its two devices.
        broken: steps to leave out; None to find out which don't work, and leave them out.
    """
    torch.manual_seed(1)
    state: State = []
    for place, device in enumerate(places):
        for shape, dtype in ((SIZES[3], DTYPES[0]), (SIZES[6], DTYPES[2]), (SIZES[2], DTYPES[5])):
            count = torch.Size(shape).numel()
            fresh = torch.arange(count, dtype=torch.float64).view(shape).sub(2).to(dtype)
            state.append(marked(fresh.to(device), place))
    finds, broken = broken is None, set() if broken is None else broken
    for index, step in enumerate(steps):
        if not finds and index in broken:
            continue
        try:
            perform(state, step, places)
        except REFUSALS:
            if not finds:
                raise
            broken.add(index)
    state.append(broken)  # type: ignore[arg-type]
    return state


def perform(state: State, step: Step, places: tuple[Any, ...]) -> None:
    source = pick(state, step[1])
    place = tag(source)
    if step[0] % 11 == 10:
        place = 1 - place
        made: Any = moved(source, place, places[place])
    else:
        made = ACTS[step[0] % len(ACTS)](state, step)
    if isinstance(made, torch.Tensor) and made.numel() <= MAX_ELEMENTS:
        state.append(marked(made, place))


_steps = st.lists(st.tuples(*(st.integers(0, 999) for _ in range(5))), min_size=3, max_size=12)


@pytest.mark.timeout(240)  # ten seconds, where nothing else runs
@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(_steps)
@example([(19, 0, 0, 0, 0), (0, 0, 1, 0, 0), (62, 6, 0, 284, 0)])  # a layout that resize_ keeps
def test_any_program(loopback: tuple[Loopback, list[torch.device]], steps: list[Step]) -> None:
    check(loopback, steps)


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(_steps)
def test_any_program_whose_moves_are_late(
    late: tuple[Loopback, list[torch.device]], steps: list[Step]
) -> None:
    check(late, steps)


@pytest.fixture
def late(
    loopback: tuple[Loopback, list[torch.device]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Loopback, list[torch.device]]]:
    """The same devices, into which everything moves beside the operations."""
    with late_moves(loopback[0], monkeypatch):
        yield loopback


@contextlib.contextmanager
def late_moves(carrier: Loopback, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(special, "MOVE_BYTES", 1)
    monkeypatch.setattr(carrier.session, "moves", True)
    carrier.mover = SlowMover(carrier)
    yield
    carrier.mover.settle()
    assert carrier.mover.waited > 5, "nothing ever had to wait"
    carrier.mover = None


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("number", range(50))
def test_many_programs(
    loopback: tuple[Loopback, list[torch.device]], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Fifty times two thousand programs, each time others; any of them can be run alone."""
    with contextlib.ExitStack() as stack:
        if number % 5 == 0:
            stack.enter_context(late_moves(loopback[0], monkeypatch))

        @seed(number)
        @settings(
            max_examples=2000,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(_steps)
        def run_them(steps: list[Step]) -> None:
            check(loopback, steps)

        run_them()


def check(loopback: tuple[Loopback, list[torch.device]], steps: list[Step]) -> None:
    *expected, broken = run(steps, ("cpu", "cpu"))
    *found, _ = run(steps, tuple(loopback[1]), broken)  # type: ignore[arg-type]
    for one, other in zip(found, expected, strict=True):
        values = one.cpu()
        assert values.dtype is other.dtype
        assert values.shape == other.shape
        if 0 not in other.shape:
            strides = zip(other.shape, one.stride(), other.stride(), strict=True)
            assert all(size == 1 or here == there for size, here, there in strides)
        assert torch.equal(values.nan_to_num(), other.nan_to_num())
