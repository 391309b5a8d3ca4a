"""Two hosts joined by WireGuard in user space: what one would set up today between two sites."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.lab.network import Host

__all__ = ["TunnelEnd", "missing_wireguard", "tunnel"]

INTERFACE = "wg0"
PORT = 51820
START_SECONDS = 10.0

_SOCKETS = Path("/var/run/wireguard")


class TunnelEnd(NamedTuple):
    """The process that encrypts at one end, and the interface that it made."""

    process: int
    interface: str


def missing_wireguard() -> str | None:
    """Return why there can be no tunnel here, None if there can."""
    for program, package in (("wireguard-go", "wireguard-go"), ("wg", "wireguard-tools")):
        if shutil.which(program) is None:
            return f"there is no `{program}` (Debian's package {package})"
    return None if Path("/dev/net/tun").exists() else "there is no /dev/net/tun"


@contextmanager
def tunnel(
    one: Host, two: Host, outside: tuple[str, str], inside: tuple[str, str]
) -> Iterator[tuple[TunnelEnd, TunnelEnd]]:
    """Join two hosts that reach each other already; yield both ends.

    Args:
        one: a host.
        two: the other.
        outside: the addresses at which they reach each other now.
        inside: the addresses within the tunnel, of one /24.
    """
    # Its control socket lies in the file system, which both hosts share: names must differ.
    names = [f"{INTERFACE}{host.namespace[-9:]}"[:15] for host in (one, two)]
    hosts = (one, two)
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = [_key_pair(Path(folder) / name) for name in names]
        try:
            for host, name in zip(hosts, names, strict=True):
                command = ["ip", "netns", "exec", host.namespace, "wireguard-go", "-f", name]
                processes.append(
                    subprocess.Popen(
                        command,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env={**os.environ, "WG_PROCESS_FOREGROUND": "1"},
                    )
                )
                _wait_for(_SOCKETS / f"{name}.sock", processes[-1])
            for here in (0, 1):
                there = 1 - here
                _configure(
                    hosts[here],
                    names[here],
                    keys[here][0],
                    f"peer {keys[there][1]} allowed-ips {inside[there]}/32 "
                    f"endpoint {outside[there]}:{PORT}",
                )
                hosts[here].ip(f"address add {inside[here]}/24 dev {names[here]}")
                hosts[here].ip(f"link set {names[here]} up")
            yield TunnelEnd(processes[0].pid, names[0]), TunnelEnd(processes[1].pid, names[1])
        finally:
            for process in processes:
                process.terminate()
                process.wait()


def _key_pair(path: Path) -> tuple[Path, str]:
    private = subprocess.run(["wg", "genkey"], check=True, capture_output=True).stdout
    path.touch(mode=0o600)
    path.write_bytes(private)
    public = subprocess.run(["wg", "pubkey"], check=True, capture_output=True, input=private)
    return path, public.stdout.decode().strip()


def _configure(host: Host, name: str, key: Path, peer: str) -> None:
    command = f"ip netns exec {host.namespace} wg set {name} listen-port {PORT} private-key {key} "
    subprocess.run((command + peer).split(), check=True, capture_output=True)


def _wait_for(socket: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise OSError("wireguard-go did not start")
        time.sleep(0.02)
