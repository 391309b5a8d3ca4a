"""``make demo``: two peers and a client, a direct move, a training, a picture.

Everything happens on this machine over loopback, between processes that could as well be on three:
two peer daemons, this client, and two training ranks, each with a key of its own.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
from anyio.to_thread import run_sync as in_thread
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

import mesh
from examples import digits
from examples.demo.peers import PeerProcess, running
from examples.demo.picture import Traffic, draw, human

MOVE_BYTES = 64 << 20
CLIENT_LIMIT = 64 << 10
"""Bytes that the client's socket may carry in all while the tensor moves."""

TARGET_ACCURACY = 0.95
PICTURE = Path("demo-out") / "quicmesh-demo.png"

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quicmesh-demo-") as name:
        folder = Path(name)
        a, b = PeerProcess("A", folder / "a"), PeerProcess("B", folder / "b")
        step(1, "Two peer daemons, each a process with its own key; they let each other in.")
        with running(a, b):
            b.run("join", a.invite("peer-b"), "--name", "peer-a")
            describe(a)
            describe(b)
            step(2, "A client joins by one-time invites and has A's tensor moved straight to B.")
            move = anyio.run(move_tensor, a, b, folder / "client")
            epochs, training = train(a, b, folder)
            PICTURE.parent.mkdir(exist_ok=True)
            draw(epochs, move, training, PICTURE)
    console.print(f"\n[bold green]Done[/] in {time.monotonic() - began:.0f} s.")
    console.print(f"The picture: [bold]{PICTURE}[/]")
    console.print(
        "\nNext: run [bold].venv/bin/mesh up[/] and type what it prints on another machine, "
        "or in a second terminal with [bold].venv/bin/mesh --home second-node join ...[/]"
    )
    return 0


async def move_tensor(a: PeerProcess, b: PeerProcess, home: Path) -> Traffic:
    """Create a tensor on A, move it to B, and count the bytes at each of the three."""
    invites = [await in_thread(peer.invite, "client") for peer in (a, b)]
    async with mesh.Node.client(*invites, home=home) as node:
        ids = [peer.ids["node_id"] for peer in (a, b)]
        names = {ids[0]: a.name, ids[1]: b.name, str(node.node_id): "client"}
        on_a, on_b = [await node.connect(node_id) for node_id in ids]
        ref = await on_a.create("randn", (MOVE_BYTES // 4,), name="weights", seed=7)
        before = await count(a, b, node, names)
        bar = Progress(
            TextColumn("  A to B"),
            BarColumn(40),
            DownloadColumn(True),
            TextColumn("{task.fields[said]}"),
        )
        with bar:
            task = bar.add_task("move", total=MOVE_BYTES, said="")
            began = time.perf_counter()
            await ref.copy_to(on_b, progress=lambda at: bar.update(task, completed=at.moved))
            took = 1e3 * (time.perf_counter() - began)
            bar.update(task, completed=MOVE_BYTES, said=f"in {took:.0f} ms")
        after = await count(a, b, node, names)
    moved = {pair: after[pair] - before.get(pair, 0) for pair in after}
    show(moved)
    through_client = sum(size for pair, size in moved.items() if "client" in pair)
    check(through_client < CLIENT_LIMIT, f"the client's socket carried {human(through_client)}")
    return moved


def train(a: PeerProcess, b: PeerProcess, folder: Path) -> tuple[list[dict[str, Any]], Traffic]:
    """Train over the mesh, and alone for comparison."""
    from examples.demo.training import largest_difference, train_alone, train_on

    step(3, "DistributedDataParallel over the mesh: handwritten digits, a rank under each peer.")
    epochs: list[dict[str, Any]] = []
    with Progress(
        TextColumn("  {task.description}"), BarColumn(40), TextColumn("{task.fields[said]}")
    ) as bar:
        task = bar.add_task("two ranks ", total=digits.EPOCHS, said="starting")

        def on_epoch(said: dict[str, Any]) -> None:
            epochs.append(said)
            text = f"loss {said['loss']:.4f}  accuracy {100 * said['accuracy']:.1f} %"
            bar.update(task, completed=said["epoch"], said=text)

        parameters, sent = train_on([a, b], folder, on_epoch)
        alone = bar.add_task("one process", total=digits.EPOCHS, said="the reference")
        reference = train_alone(lambda: bar.advance(alone))
    check(largest_difference(*parameters) == 0, "both ranks have identical parameters")
    off = largest_difference(parameters[0], reference)
    check(off < 1e-5, f"they equal the single process's (largest difference {off:.1e})")
    accuracy = epochs[-1]["accuracy"]
    check(accuracy > TARGET_ACCURACY, f"test accuracy {100 * accuracy:.1f} %")
    traffic = {
        (f"rank {rank}", f"rank {1 - rank}"): sum(by_peer.values())
        for rank, by_peer in enumerate(sent)
    }
    return epochs, traffic


async def count(a: PeerProcess, b: PeerProcess, node: mesh.Node, names: dict[str, str]) -> Traffic:
    """Return the bytes each of the three has sent to each other so far, as its socket counts."""
    sent = {peer.name: await in_thread(peer.sent) for peer in (a, b)}
    sent["client"] = {str(peer.node_id): peer.bytes_sent or 0 for peer in node.peers()}
    return {
        (sender, names[receiver]): size
        for sender, by_receiver in sent.items()
        for receiver, size in by_receiver.items()
        if receiver in names
    }


def show(traffic: Traffic) -> None:
    table = Table("sender", "receiver", "bytes on the wire", box=None, padding=(0, 2))
    for (sender, receiver), size in sorted(traffic.items()):
        table.add_row(sender, receiver, f"{size:>12,}")
    console.print(table)
    console.print("  (on one host a tensor's content goes through shared memory, past the sockets)")


def describe(peer: PeerProcess) -> None:
    where = ", ".join(peer.ask("status")["addresses"])
    console.print(f"  {peer.name} is {peer.ids['short']} at {where}")


def step(number: int, text: str) -> None:
    console.print(f"\n[bold cyan]{number}.[/] [bold]{text}[/]")


def check(holds: bool, text: str) -> None:
    console.print(f"  {'[green]✓[/]' if holds else '[red]✗[/]'} {text}")
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
