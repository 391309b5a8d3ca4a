"""``memory``: what gigabytes cost in memory at either end, beyond the tensors themselves.

The sender writes to a stream whose reader stops and starts again: what it holds beyond its baseline
is what waits to be sent or acknowledged. The receiver takes tensors that are put into its store:
its peak, less what it held before, is how often each was allocated.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio

from auth import NodeId, SecretKey, allow_any
from tests.benchmarks.compare import Options, Row, Shown
from tests.benchmarks.harness import LOOPBACK, Pipe, Site, child, filled, median, obey_async
from tests.benchmarks.ours import configuration, until_ended
from transport import Endpoint, Incoming, PeerAddress

PART, OURS = "memory", "quicmesh"
MIB = 1 << 20
NBYTES = 4 << 30
WRITTEN = 1 * MIB
"""What the sender writes at a time, each time the same memory."""

READ_BEFORE_STOP = 32 * MIB
STOP_SECONDS = 0.1
TENSOR = 64 * MIB
TENSORS = 3
PAGE = 4096
MAX_GROWTH = 64 * MIB
SAMPLE_SECONDS = 0.01
START_SECONDS = 120.0


def missing() -> str | None:
    """Return why memory can't be looked at here, None if it can."""
    return None if Path("/proc/self/clear_refs").exists() else "there is no /proc/PID/clear_refs"


def run(options: Options) -> tuple[list[Row], list[Shown]]:
    """Measure; return the rows and the ratios."""
    nbytes = max(READ_BEFORE_STOP, int(NBYTES * options.scale))
    tensor = max(MIB, int(TENSOR * min(1.0, options.scale * 4)))
    grown, seconds = sender_growth(nbytes)
    peaks = [receiver_peak(tensor) for _ in range(options.rounds)]
    figure = f"{nbytes / (1 << 30):g} GiB to a reader that stops"
    growth = _row(figure, "sender", grown, nbytes)
    held = _row(f"put of {tensor / MIB:g} MiB", "receiver", peaks, tensor)
    rate = nbytes / seconds / 1e6
    moved = Row(PART, f"{figure}: rate", OURS, "MB/s", rate, rate, rate, 1, nbytes=nbytes)
    return [growth, moved, held], [
        Shown(PART, "sender's growth / 64 MiB", max(grown) / MAX_GROWTH, 1.0, at_most=True),
        # What is left above 1 is not the tensor's: buffers of the socket and of the interpreter.
        Shown(PART, "receiver's peak / tensor", held.median * MIB / tensor, 1.25, at_most=True),
    ]


def sender_growth(nbytes: int) -> tuple[list[float], float]:
    """Return by how many bytes a sender was above its baseline, each time that was looked at, and
    the seconds that it took to send `nbytes`, those included in which the reader stood still."""
    with (
        child(_serve_reader, LOOPBACK) as (where, _, _),
        child(_dial_writer, LOOPBACK, where) as (_, process, pipe),
    ):
        for order in ("lend", "write"):  # windows and caches grow to what they will be
            pipe.send((order, READ_BEFORE_STOP))
            _answer(pipe)
        baseline = _status(process.pid, "VmRSS")
        seen: list[float] = []
        pipe.send(("write", nbytes))
        began = time.monotonic()
        while not pipe.poll(SAMPLE_SECONDS):
            seen.append(_status(process.pid, "VmRSS") - baseline)
            if time.monotonic() - began > START_SECONDS:
                raise TimeoutError(f"{nbytes} bytes took more than {START_SECONDS:.0f} s")
        pipe.recv()
        seconds = time.monotonic() - began
        return seen or [_status(process.pid, "VmRSS") - baseline], seconds


def receiver_peak(tensor: int) -> float:
    """Return how many bytes above what it held before a receiver came as one tensor was put.

    Each is of a size of its own, so that it lands in new memory, and not in that of the one before;
    the first, which is not counted, brings what the two processes share.
    """
    with (
        child(_serve_store, LOOPBACK) as (where, process, _),
        child(_dial_store, LOOPBACK, where) as (_, _, pipe),
    ):
        peaks = []
        for number in range(1 + TENSORS):
            before = _status(process.pid, "VmRSS")
            # Makes the peak what is held now (proc(5)).
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")
            pipe.send(("put", tensor + number * PAGE))
            _answer(pipe)
            peaks.append(_status(process.pid, "VmHWM") - before)
        return median(peaks[1:])


def _row(figure: str, who: str, values: list[float], nbytes: int) -> Row:
    sizes = [value / MIB for value in values]
    return Row(
        PART,
        figure,
        f"{OURS}, {who}",
        "MiB",
        median(sizes),
        min(sizes),
        max(sizes),
        len(sizes),
        nbytes=nbytes,
    )


def _status(pid: int | None, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return float(line.split()[1]) * 1024
    raise OSError(f"process {pid} has ended")


def _answer(pipe: Pipe) -> Any:
    if not pipe.poll(START_SECONDS):
        raise TimeoutError("no answer")
    return pipe.recv()


def _serve_reader(pipe: Pipe, site: Site) -> None:
    async def read(request: Incoming) -> None:
        room = memoryview(filled(READ_BEFORE_STOP))
        for start in range(0, request.value, READ_BEFORE_STOP):
            await request.stream.receive_into(room[: min(READ_BEFORE_STOP, request.value - start)])
            await anyio.sleep(STOP_SECONDS)
        await request.stream.send_message("read")
        await until_ended(request.stream)

    async def main() -> None:
        async with Endpoint(SecretKey.generate(), allow_any(), configuration(site)) as endpoint:
            endpoint.register_service("read", read, scope="bench")
            pipe.send((str(endpoint.node_id), endpoint.addresses))
            await anyio.sleep_forever()

    anyio.run(main)


def _dial_writer(pipe: Pipe, site: Site, where: Any) -> None:
    async def main() -> None:
        async with Endpoint(SecretKey.generate(), allow_any(), configuration(site)) as endpoint:
            there = PeerAddress(NodeId.parse(where[0]), where[1])
            connection = await endpoint.connect(there)
            data = memoryview(filled(WRITTEN))

            async def lend(nbytes: int) -> str:
                async with await connection.open_stream("read", nbytes) as stream:
                    await stream.send_lent(memoryview(filled(nbytes)))
                    return str(await stream.receive_message())

            async def write(nbytes: int) -> str:
                async with await connection.open_stream("read", nbytes) as stream:
                    for start in range(0, nbytes, WRITTEN):
                        await stream.send(data[: min(WRITTEN, nbytes - start)])
                    return str(await stream.receive_message())

            await obey_async(pipe, {"lend": lend, "write": write})

    anyio.run(main)


def _serve_store(pipe: Pipe, site: Site) -> None:
    async def main() -> None:
        from mesh import Node

        node = Node.embedded(
            key=SecretKey.generate(), authorizer=allow_any(), config=configuration(site)
        )
        async with node:
            pipe.send(node.ticket().encode())
            await anyio.sleep_forever()

    anyio.run(main)


def _dial_store(pipe: Pipe, site: Site, where: Any) -> None:
    async def main() -> None:
        import torch

        from mesh import Node

        async with Node.embedded(
            key=SecretKey.generate(),
            authorizer=allow_any(),
            config=configuration(site),
            tensors=False,
        ) as node:
            peer = await node.connect(where)

            async def put(nbytes: int) -> str:
                ref = await peer.put(torch.ones(nbytes, dtype=torch.uint8))
                await ref.delete()
                return "put"

            await obey_async(pipe, {"put": put})

    anyio.run(main)
