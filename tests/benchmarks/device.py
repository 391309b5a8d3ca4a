"""``device``: a peer's device beside the same work done here.

What one operation costs the program; a training step of an encoder on a device of another process,
as it is and captured; 64 MiB up and down, beside the put and get of a tensor; and a thousand
operations one after the other with a single read over a long way.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import anyio

from auth import SecretKey, allow_any
from tests.benchmarks.compare import Options, Row, Shown
from tests.benchmarks.harness import LOOPBACK, Pipe, Site, child, median
from tests.benchmarks.ours import configuration
from tests.lab import network
from tests.lab.delay import delayed_link, missing_tun

PART, OURS, LOCAL = "device", "quicmesh", "here"
MIB = 1 << 20
NBYTES = 64 * MIB
OPERATIONS, SERIES = 200, 20
"""Operations timed as a whole, by the CPU time of the thread that calls them, and how often."""

CHAIN = 1000
STEPS = 20
ROUND_TRIP = 0.02
MOST_OPERATION = 11e-6
TURN_SECONDS = 120.0

INTERFACE = "tun0"
HERE, THERE = "10.81.0.1", "10.81.0.2"


def missing() -> str | None:
    """Return why it can't be measured here, None if it can."""
    from mesh.device.server.nursery import CAN_FORK

    return None if CAN_FORK else "devices are not offered on this platform"


def run(options: Options) -> tuple[list[Row], list[Shown]]:
    """Measure; return the rows and the ratios."""
    adding = ("operation", "addition")
    orders = (*adding, "local", "remote", "captured", "up", "put", "down", "get", "chain")
    found = _measure(LOOPBACK, LOOPBACK, orders, options)
    step = "training step of an encoder"
    rows = [
        _row("a + b", LOCAL, "us", found["addition"], 1e6),  # 1.7 where nothing else runs
        _row("a + b", OURS, "us", found["operation"], 1e6),
        _row(step, LOCAL, "ms", found["local"], 1e3),
        _row(step, OURS, "ms", found["remote"], 1e3),
        _row(step, f"{OURS}, captured", "ms", found["captured"], 1e3),
        *(
            _row(f"{int(NBYTES * options.scale) / MIB:g} MiB", f"{OURS} {name}", "ms", times, 1e3)
            for name, times in found.items()
            if name in ("up", "put", "down", "get")
        ),
        _row(f"{CHAIN} operations, one read", OURS, "ms", found["chain"], 1e3),
    ]
    middle = {name: median(times) for name, times in found.items()}
    shown = [
        Shown(PART, "a + b / 11 us", middle["operation"] / MOST_OPERATION, 1.0, at_most=True),
        Shown(PART, f"{step} / {LOCAL}", middle["remote"] / middle["local"], 1.7, at_most=True),
        Shown(PART, f"{step}, captured", middle["captured"] / middle["local"], 1.3, at_most=True),
        Shown(PART, "up / put of a tensor", middle["up"] / middle["put"], 3.0, at_most=True),
        Shown(PART, "down / get of a tensor", middle["down"] / middle["get"], 3.0, at_most=True),
    ]
    if (network.missing() or missing_tun()) is None:
        far = _measure_far(options)["chain"]
        figure = f"{CHAIN} operations, one read, {1e3 * ROUND_TRIP:.0f} ms there and back"
        rows.append(_row(figure, OURS, "ms", far, 1e3))
        least = ROUND_TRIP + middle["chain"]
        shown.append(Shown(PART, f"{figure} / both apart", median(far) / least, 1.5, at_most=True))
    return rows, shown


def _measure_far(options: Options) -> dict[str, list[float]]:
    with network.lab() as lab:
        one, two = lab.host("a"), lab.host("b")
        with delayed_link(
            one, two, INTERFACE, f"{HERE}/24", f"{THERE}/24", round_trip=ROUND_TRIP
        ) as between:
            here = Site(HERE, INTERFACE, one.namespace, between=(between,))
            return _measure(here, Site(THERE, INTERFACE, two.namespace), ("chain",), options)


def _measure(
    here: Site, there: Site, orders: tuple[str, ...], options: Options
) -> dict[str, list[float]]:
    """Return the seconds of each order, which take turns."""
    found: dict[str, list[float]] = {order: [] for order in orders}
    with (
        child(_serve, there) as (where, _, _),
        child(_use, here, where, options.scale) as (_, _, pipe),
    ):
        for turn in range(-1, options.rounds):  # the first to warm up
            for order in orders:
                pipe.send(order)
                if not pipe.poll(TURN_SECONDS):
                    raise TimeoutError(f"{order} took more than {TURN_SECONDS:.0f} s")
                seconds = pipe.recv()
                if turn >= 0:
                    found[order].append(seconds)
    return found


def _row(figure: str, who: str, unit: str, times: list[float], scale: float) -> Row:
    values = [each * scale for each in times]
    return Row(PART, figure, who, unit, median(values), min(values), max(values), len(values))


def _serve(pipe: Pipe, site: Site) -> None:
    from mesh import Node
    from mesh.device import DeviceLimits, DeviceService
    from mesh.device.server.executor import ExecutorLimits

    async def main() -> None:
        node = Node.embedded(
            key=SecretKey.generate(), authorizer=allow_any(), config=configuration(site)
        )
        limits = DeviceLimits(executor=ExecutorLimits(threads=1))
        async with node, DeviceService(node.endpoint, ["cpu"], limits, store=node.store):
            pipe.send(node.ticket().encode())
            await anyio.sleep_forever()

    anyio.run(main)


def _use(pipe: Pipe, site: Site, ticket: str, scale: float) -> None:
    import torch

    from mesh import blocking

    torch.set_num_threads(1)
    with blocking.Node.embedded(
        key=SecretKey.generate(),
        authorizer=allow_any(),
        config=configuration(site),
        tensors=False,
    ) as node:
        orders = _orders(node, ticket, scale)
        pipe.send("ready")
        while True:
            pipe.send(orders[pipe.recv()]())


def _orders(node: Any, ticket: str, scale: float) -> dict[str, Callable[[], float]]:
    import torch

    import mesh

    d = mesh.device(ticket, node=node)
    a, b = torch.ones(4, device=d), torch.ones(4, device=d)
    x, y = torch.ones(4), torch.ones(4)
    big = torch.ones(int(NBYTES * scale) // 4)
    there = big.to(d)
    client = node.run(functools.partial(_client, node.node, ticket))
    put = functools.partial(client.put, big)
    refs = [node.run(put)]
    steps = {"local": _step("cpu"), "remote": _step(d), "captured": _step(d)}
    for step in steps.values():
        step()  # makes the optimizer's state
    with mesh.device.capture(d) as captured:
        steps["captured"]()

    def timed(work: Callable[[], object], count: int = 1, *, wait: bool = True) -> float:
        mesh.device.synchronize(d)
        began = time.perf_counter()
        for _ in range(count):
            work()
        if wait:
            mesh.device.synchronize(d)
        return (time.perf_counter() - began) / count

    def operations(a: torch.Tensor, b: torch.Tensor) -> float:
        costs = []
        for _ in range(SERIES):
            mesh.device.synchronize(d)
            began = time.thread_time()
            for _ in range(OPERATIONS):
                a + b
            costs.append((time.thread_time() - began) / OPERATIONS)
        return median(costs)

    def chain() -> float:
        total = a
        for _ in range(CHAIN):
            total = total + b
        return total.sum().item()

    def put_one() -> None:
        refs.append(node.run(put))

    def put_timed() -> float:
        seconds = timed(put_one, wait=False)
        node.run(functools.partial(client.delete, refs.pop(0)))
        return seconds

    return {
        "operation": lambda: operations(a, b),
        "addition": lambda: operations(x, y),
        "chain": lambda: timed(chain, wait=False),
        "local": lambda: timed(steps["local"], STEPS),
        "remote": lambda: timed(steps["remote"], STEPS),
        "captured": lambda: timed(captured.replay, STEPS),
        "up": lambda: timed(lambda: big.to(d)),
        "down": lambda: timed(there.cpu, wait=False),
        "put": put_timed,
        "get": lambda: timed(lambda: node.run(functools.partial(client.get, refs[0])), wait=False),
    }


async def _client(node: Any, ticket: str) -> Any:
    return await (await node.connect(ticket)).tensors()


def _step(device: Any) -> Callable[[], object]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(1), nn.Linear(128 * 32, 10))
    model.to(device)
    x = torch.randn(16, 32, 128).to(device)
    y = torch.randint(0, 10, (16,)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> object:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step
