"""A few hosts on one machine: network namespaces, and veth pairs between them. Needs root."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.programs import Program

__all__ = ["Host", "Lab", "NodeProcess", "enter", "lab", "missing"]

REPOSITORY = Path(__file__).parents[2]

NO_NAMES = (
    "mount --bind /dev/null /etc/resolv.conf; mount --bind /dev/null /etc/hosts; "
    "mount --bind /dev/null /etc/nsswitch.conf; hostname nohost.invalid; "
)
"""What makes a host one without any resolver; the mounts are the namespace's own."""

_CLONE_NEWNET = 0x40000000


@functools.cache
def missing() -> str | None:
    """Return why there can be no lab here, None if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"qm{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"`ip netns add` fails: {made.stderr.strip()}"
    try:
        link = f"ip -n {name} link add eth0 type veth peer name eth1"
        made = subprocess.run(link.split(), capture_output=True, text=True, check=False)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return f"there are no veth pairs: {made.stderr.strip()}" if made.returncode else None


def enter(namespace: str) -> None:
    """Put this thread, and the sockets that it makes from now on, into a network namespace."""
    with (Path("/var/run/netns") / namespace).open("rb") as there:
        # os.setns came with Python 3.12.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"entering the namespace {namespace}")


class Host:
    """One network namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def ip(self, arguments: str) -> None:
        """Run ``ip`` on this host."""
        subprocess.run(
            ["ip", "-n", self.namespace, *arguments.split()], check=True, capture_output=True
        )

    def shell(self, script: str) -> list[str]:
        """Return the command line that runs `script` here, with a host name of its own."""
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", script]

    @contextmanager
    def node(
        self, backend: str, *, has_names: bool = True, **settings: Any
    ) -> Iterator[NodeProcess]:
        """Run a node on this host for the block; `settings` as in `node_process`."""
        settings |= {"backend": backend, "namespace": self.namespace}
        process: subprocess.Popen[str] | Program
        if has_names:
            process = Program(["-m", "tests.lab.node_process"], stdin=True, torch=False)
        else:
            # Only a process of the host's own can have no names.
            process = subprocess.Popen(
                self.shell(f"{NO_NAMES} exec {sys.executable} -m tests.lab.node_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=REPOSITORY,
            )
        with process:
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps(settings) + "\n")
                process.stdin.flush()
                yield NodeProcess(process)
            finally:
                process.kill()


class NodeProcess:
    """A node that runs on a host, and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str] | Program) -> None:
        self._process = process
        self.started = self.next()
        """Its ticket, its addresses, its warnings; or the error that kept it from starting."""

    def next(self) -> dict[str, Any]:
        """Return the next thing it says."""
        assert self._process.stdout is not None
        said = json.loads(self._process.stdout.readline())
        assert isinstance(said, dict)
        return said


class Lab:
    """The hosts of one test."""

    def __init__(self) -> None:
        self._prefix = f"qm{secrets.token_hex(3)}"
        self._namespaces: list[str] = []

    def host(self, name: str) -> Host:
        """Add a host without any link but its loopback."""
        namespace = f"{self._prefix}-{name}"
        subprocess.run(["ip", "netns", "add", namespace], check=True)
        self._namespaces.append(namespace)
        host = Host(namespace)
        # Without duplicate address detection: it keeps an IPv6 address unusable for a second.
        settings = [
            f"echo 0 > /proc/sys/net/ipv6/conf/{scope}/{name}"
            for scope in ("all", "default")
            for name in ("accept_dad", "dad_transmits")
        ]
        subprocess.run(host.shell("; ".join(settings)), check=True)
        host.ip("link set lo up")
        return host

    def link(self, one: Host, two: Host, interface: str, address: str, other: str) -> None:
        """Join two hosts by an interface of one name on both, each with an address of its own."""
        one.ip(f"link add {interface} type veth peer name {interface} netns {two.namespace}")
        for host, own in ((one, address), (two, other)):
            host.ip(f"address add {own} dev {interface}" + (" nodad" if ":" in own else ""))
            host.ip(f"link set {interface} up")

    def close(self) -> None:
        """Remove every host."""
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False)


@contextmanager
def lab() -> Iterator[Lab]:
    """A lab for the block."""
    built = Lab()
    try:
        yield built
    finally:
        built.close()
