"""What a function depends on: what of that changes is noticed, and what can't be seen is said."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mesh.train.watching import NotUnderstood, Watch, mode_of_torch, random_states

FACTOR = 2.0
TABLE = {"scale": 1.0}
_log = logging.getLogger("test")
_numbers = itertools.count()


class Settings:
    scale = 1.0

    def __init__(self) -> None:
        self.inner = {"beta": [1.0]}

    def use(self, model: nn.Module, batch: Any) -> Any:
        return model(batch) * self.scale * self.inner["beta"][0]


SETTINGS = Settings()


BELOW: Any = None
PACKAGE: Any = None
SCALE: Any = None
SLOPE: Any = None
HALF: Any = None


class Net(nn.Module):
    more: list[int] | None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
        self.steps = 0
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * FACTOR * TABLE["scale"]


def plain(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def helped(model: nn.Module, batch: Any) -> Any:
    value = plain(model, batch) + SETTINGS.scale + BELOW.use(model, batch)
    value = value * PACKAGE.settings.gamma + SCALE * HALF(3) + SLOPE.sum() + SLOPE.more
    return value * ADDED if "ADDED" in globals() else value  # noqa: F821


def logs(model: nn.Module, batch: Any) -> Any:
    _log.info("a step")
    return model(batch)


def counts(model: nn.Module, batch: Any) -> Any:
    return model(batch) + next(_numbers)


def swap(module: nn.Module, name: str, value: object) -> None:
    setattr(module, name, value)


def with_global(name: str, value: object) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        globals()[name] = value

    return change


CHANGES: dict[str, Callable[[Net], object]] = {
    "an attribute": lambda net: swap(net, "steps", 1),
    "a new attribute": lambda net: swap(net, "more", 1),
    "the mode": lambda net: net.eval(),
    "the mode of a part": lambda net: net.layers[1].eval(),
    "an option of a part": lambda net: swap(net.layers[1], "p", 0.5),
    "another part": lambda net: net.layers.append(nn.ReLU()),
    "a part in another's place": lambda net: swap(net, "layers", nn.Identity()),
    "elements here": lambda net: net.get_buffer("mean").add_(1),
    "a parameter's memory": lambda net: swap(net.layers[0].weight, "data", torch.ones(2, 2)),
    "a hook": lambda net: net.layers[0].register_forward_hook(lambda *_: None),
    "a hook of a gradient": lambda net: net.register_full_backward_hook(lambda *_: None),
    "a global": with_global("FACTOR", 3.0),
    "what a global holds": lambda net: TABLE.update(scale=2.0),
    "another function": with_global("plain", logs),
    "an attribute of a global": lambda net: setattr(SETTINGS, "scale", 3.0),
    "an attribute of a class": lambda net: setattr(Settings, "scale", 4.0),
    "a method of a class that had it from another": lambda net: setattr(type(BELOW), "use", helped),
    "an attribute of a module of a package": lambda net: setattr(PACKAGE.settings, "gamma", 2.0),
    "a number here, by the way of numpy": lambda net: SCALE.numpy().fill(2.0),
    "a number here, by the way of its data": lambda net: SCALE.data.fill_(2.0),
    "an attribute of a tensor": lambda net: setattr(SLOPE, "more", 2.0),
    "whether a tensor has gradients": lambda net: net.layers[0].weight.requires_grad_(False),
    "a gradient": lambda net: setattr(SLOPE, "grad", torch.ones(2)),
    "a hook of a tensor": lambda net: SLOPE.register_hook(lambda grad: grad * 2),
    "a name that there was not": with_global("ADDED", 2.0),
    "a key": lambda net: (TABLE.pop("scale"), TABLE.update(other=1.0)),
    "the class of an object": lambda net: setattr(SETTINGS, "__class__", type(BELOW)),
    "the code of a function": lambda net: setattr(plain, "__code__", helped.__code__),
    "the defaults of a function": lambda net: setattr(plain, "__defaults__", (1,)),
    "what a partial function passes": lambda net: HALF.keywords.update(exp=3),
    "what an attribute holds": lambda net: SETTINGS.inner["beta"].append(2.0),
}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have what tests change be as it was, before and after."""
    own = globals()
    code, defaults = plain.__code__, plain.__defaults__
    below = type("Below", (Settings,), {"__module__": __name__})
    new = {
        "FACTOR": 2.0,
        "TABLE": {"scale": 1.0},
        "SETTINGS": Settings(),
        "BELOW": below(),
        "PACKAGE": types.ModuleType("package"),
        "SCALE": torch.tensor(1.0),
        "SLOPE": nn.Parameter(torch.ones(2)),
        "HALF": functools.partial(pow, exp=2),
        "plain": plain,
    }
    for name, value in new.items():
        monkeypatch.setitem(own, name, value)
    monkeypatch.setattr(Settings, "scale", 1.0)
    PACKAGE.settings = types.ModuleType("package.settings")
    PACKAGE.settings.gamma = SLOPE.more = 1.0
    yield
    own.pop("ADDED", None)
    new["plain"].__code__, new["plain"].__defaults__ = code, defaults


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.usefixtures("fresh")
def test_whatever_changes_is_noticed(what: str) -> None:
    net = Net()
    watch = Watch((helped, net))
    net(torch.ones(1, 2))
    assert watch.holds((helped, net))
    CHANGES[what](net)
    assert not watch.holds((helped, net))


def test_roots_are_the_same_where_their_parts_are() -> None:
    def make(beta: float) -> Any:
        return lambda model, batch, extra=FACTOR: model(batch) * beta

    one, two = 0.5, 0.25
    watch = Watch([make(one)])
    assert watch.holds([make(one)])
    assert not watch.holds([make(two)])
    assert not watch.holds([plain])
    assert not watch.holds([make(one), make(one)])
    watch = Watch([SETTINGS.use])
    assert watch.holds([SETTINGS.use])
    assert not watch.holds([Settings().use])
    watch = Watch([functools.partial(plain, batch=one)])
    assert watch.holds([functools.partial(plain, batch=one)])
    assert not watch.holds([functools.partial(plain, batch=two)])


def test_what_is_enclosed_is_watched() -> None:
    seen: list[float] = []
    count = 0

    def collect(model: nn.Module, batch: Any) -> Any:
        nonlocal count
        count += 1
        seen.append(1.0)

    watch = Watch([collect])
    assert watch.holds([collect])
    seen.append(1.0)
    assert not watch.holds([collect])
    seen.clear()
    assert watch.holds([collect])
    count += 1
    assert not watch.holds([collect])


def test_what_a_method_belongs_to_is_watched() -> None:
    seen: list[float] = []
    note = seen.append

    def collect(model: nn.Module, batch: Any) -> Any:
        note(1.0)

    watch = Watch([collect])
    assert watch.holds([collect])
    collect(nn.Identity(), None)
    assert not watch.holds([collect])


@pytest.mark.usefixtures("fresh")
def test_modules_that_a_function_imports_or_encloses_are_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def imports(model: nn.Module, batch: Any) -> Any:
        from package import settings

        return model(batch) * settings.gamma

    def encloses(model: nn.Module, batch: Any, module: Any = PACKAGE) -> Any:
        return model(batch) * module.settings.gamma

    monkeypatch.setitem(sys.modules, "package", PACKAGE)
    for loss in (imports, encloses):
        PACKAGE.settings.gamma = 1.0
        watch = Watch([loss])
        assert watch.holds([loss])
        PACKAGE.settings.gamma = 2.0
        assert not watch.holds([loss])


def test_optimizers() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    parameters[0].grad = torch.ones(2)
    optimizer.step()
    watch = Watch([optimizer])
    assert watch.holds([optimizer])
    optimizer.param_groups[0]["lr"] = 0.2
    assert not watch.holds([optimizer])
    watch = Watch([optimizer])
    optimizer.load_state_dict(optimizer.state_dict())
    assert not watch.holds([optimizer])
    counting = torch.optim.Adam(parameters)
    counting.step()
    watch = Watch([counting])
    counting.step()  # its steps are counted here
    assert not watch.holds([counting])


class Slots:
    __slots__ = ("x",)


class SlotsBelow(Slots):
    pass


class Dice(random.Random):
    """Its state is none of its attributes."""


@pytest.mark.parametrize(
    "root",
    [
        SlotsBelow(),
        Dice(1),
        logs,
        counts,
        threading.Lock(),
        [torch.Generator()],
        torch.zeros(1 << 10),
    ],
)
def test_what_can_not_be_seen_is_said(root: object) -> None:
    with pytest.raises(NotUnderstood):
        Watch([root])


def test_what_looks_on_is_noticed() -> None:
    before = mode_of_torch()
    assert before is not None
    with torch.autocast("mesh", torch.bfloat16):
        assert mode_of_torch() not in (None, before)

    class Looking(TorchFunctionMode):
        pass

    with Looking():
        assert mode_of_torch() is None
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert mode_of_torch() is None
    hook.remove()
    assert mode_of_torch() == before


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1)])
def test_random_numbers_that_are_drawn_here_are_noticed(draw: Callable[[], object]) -> None:
    before = random_states()
    assert random_states() == before
    draw()
    assert random_states() != before


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    from mesh.device.client import backend

    backend.register()
