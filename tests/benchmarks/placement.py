"""What a training step keeps of its speed beside an endpoint that receives at full rate.

Run it with ``python -m tests.benchmarks.placement [rounds]``: a DDP-like step in a program whose
endpoint is in its thread, or in a process of its own, while another process sends to it as fast as
it can; and the same transfer beside a program that does nothing. The sender, which would be on
another host, takes its share of the same processors. What that leaves to any program says the case
``tls``: two processes, one of which sends to the other over OpenSSL, and nothing in the program.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.abc
from anyio.from_thread import start_blocking_portal

from auth import NodeId, SecretKey, allow_any
from tests.benchmarks.tcp import Tcp
from transport import Endpoint, EndpointConfig, Incoming, PeerAddress

SECONDS = 2.5
SIZE = 64 << 20
"""Bytes of one transfer; they follow each other on one connection."""

PLACES = ("loop", "process", "tls")

Step = Callable[[], object]


def training_step() -> Step:
    """Return a step of a small network whose gradients are copied as DDP's hooks do."""
    import torch

    torch.set_num_threads(1)
    layers = [part for _ in range(6) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    flat = torch.zeros(sum(each.numel() for each in model.parameters()))
    at = 0
    for each in model.parameters():
        bucket = flat[at : at + each.numel()]
        at += each.numel()
        each.register_post_accumulate_grad_hook(_copier(bucket))
    inputs = torch.randn(64, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(20):
        step()
    return step


def _copier(bucket: Any) -> Callable[[Any], None]:
    def copy(parameter: Any) -> None:
        bucket.copy_(parameter.grad.view(-1))

    return copy


def speed(step: Step | None, seconds: float) -> float:
    """Return how many steps a second are made."""
    if step is None:
        time.sleep(seconds)
        return 0.0
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        count += 1
    return count / (time.perf_counter() - began)


async def send(port: int, node: str) -> None:
    """Send to the node for `SECONDS`, and print MB/s."""
    data = memoryview(bytes(SIZE))
    config = EndpointConfig(bind="127.0.0.1:0", listen=False)
    async with Endpoint(SecretKey.generate(), allow_any(), config) as endpoint:
        where = PeerAddress(NodeId.parse(node), (("127.0.0.1", port),))
        connection = await endpoint.connect(where)
        print("ready", flush=True)
        sys.stdin.readline()
        began, sent = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS:
            async with await connection.open_stream("sink") as stream:
                await stream.send_lent(data)
                await stream.receive_message()
            sent += SIZE
        print(sent / (time.perf_counter() - began) / 1e6, flush=True)


async def receive(placement: str, *, task_status: anyio.abc.TaskStatus[object]) -> None:
    """Have an endpoint that takes all that comes."""
    room = memoryview(bytearray(SIZE))
    leave = anyio.Event()

    async def sink(request: Incoming) -> None:
        await request.stream.receive_into(room)
        await request.stream.send_message(None)

    config = EndpointConfig(bind="127.0.0.1:0", placement=placement)
    async with Endpoint(SecretKey.generate(), allow_any(), config) as endpoint:
        endpoint.register_service("sink", sink, scope="sink")
        task_status.started((endpoint, leave.set))
        await leave.wait()


@contextlib.contextmanager
def receiving(placement: str) -> Iterator[list[str]]:
    """Have something receive during the block; yield what a sender to it is told."""
    if placement == "tls":
        with started("receive-tls") as receiver:
            yield ["send-tls", said(receiver)]
        return
    with start_blocking_portal() as portal:
        future, (endpoint, leave) = portal.start_task(receive, placement)  # type: ignore[misc]
        yield ["send", str(endpoint.port), str(endpoint.node_id)]
        portal.call(leave)
        future.result()


def receive_tls() -> None:
    """Take all that comes on one connection, and print its port before."""
    room = memoryview(bytearray(SIZE))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        accepted, _ = listener.accept()
        with Tcp(is_tls=True).wrapped(accepted, server=True) as connection:
            while True:
                done = 0
                while done < SIZE:
                    count = connection.recv_into(room[done:], SIZE - done)
                    if not count:
                        return
                    done += count
                connection.sendall(b"k")


def send_tls(port: int) -> None:
    """Do what `send` does."""
    data = bytes(SIZE)
    raw = socket.create_connection(("127.0.0.1", port))
    with Tcp(is_tls=True).wrapped(raw, server=False) as connection:
        print("ready", flush=True)
        sys.stdin.readline()
        began, sent = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS:
            connection.sendall(data)
            connection.recv(1)
            sent += SIZE
        print(sent / (time.perf_counter() - began) / 1e6, flush=True)


def started(*what: str) -> subprocess.Popen[str]:
    """Start one more process of this benchmark."""
    command = [sys.executable, "-m", "tests.benchmarks.placement", *what]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def measure(placement: str, *, trains: bool) -> dict[str, float]:
    """Return the steps a second alone and beside the transfer, and the transfer's MB/s."""
    step = training_step() if trains else None
    alone = statistics.median(speed(step, SECONDS / 4) for _ in range(3))
    with receiving(placement) as target, started(*target) as sender:
        said(sender)
        assert sender.stdin is not None
        sender.stdin.write("\n")
        sender.stdin.flush()
        beside = speed(step, SECONDS)
        rate = float(said(sender))
    return {"alone": alone, "beside": beside, "MB/s": rate}


def main(arguments: list[str]) -> None:
    """Measure in processes of their own, in turns; print medians."""
    if arguments[:1] == ["send"]:
        anyio.run(send, int(arguments[1]), arguments[2])
        return
    if arguments[:1] == ["send-tls"]:
        send_tls(int(arguments[1]))
        return
    if arguments[:1] == ["receive-tls"]:
        receive_tls()
        return
    if arguments[:1] == ["measure"]:
        print(json.dumps(measure(arguments[1], trains=arguments[2] == "training")))
        return
    rounds = int(arguments[0]) if arguments else 5
    cases = [(where, what) for where in PLACES for what in ("training", "idle")]
    found: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            with started("measure", *case) as measuring:
                found[case].append(json.loads(said(measuring)))
    for where in PLACES:
        training, idle = found[where, "training"], found[where, "idle"]
        kept = statistics.median(each["beside"] / each["alone"] for each in training)
        rate = statistics.median(each["MB/s"] for each in training)
        full = statistics.median(each["MB/s"] for each in idle)
        print(
            f"{where}: training keeps {kept:.0%} of its speed beside {rate:.0f} MB/s, "
            f"which is {rate / full:.0%} of the {full:.0f} MB/s beside an idle program"
        )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1:])
