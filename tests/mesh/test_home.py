"""The state directory: where it is, who may touch it, what runs in it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from auth import KeyFileError, PeerIdentity, SecretKey
from mesh.errors import HomeError
from mesh.filelock import FileLock
from mesh.home import Home
from mesh.runfile import RunFile

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX permission bits")


def run_file(home: Home) -> RunFile:
    return RunFile(
        node_id=home.key().node_id,
        pid=os.getpid(),
        boot="00" * 16,
        started=1.5,
        version="1",
        control=(("127.0.0.1", 4433),),
        addresses=(("192.0.2.1", 4433), ("2001:db8::1", 4433)),
    )


def test_environment_names_the_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESH_HOME", str(tmp_path / "x"))
    assert Home().path == tmp_path / "x"
    assert Home(tmp_path / "y").path == tmp_path / "y"


def test_platform_directory_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MESH_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert Home().path == tmp_path / "quicmesh"
    assert Home().path.name == "quicmesh"


def test_making_the_object_touches_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path / "new")
    assert not home.exists()
    assert home.running() is None
    assert not home.path.exists()


@posix
def test_create_is_private_and_keeps_the_key(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir(mode=0o755)
    home = Home(tmp_path / "new")
    key = home.create()
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(home.key_path.stat().st_mode) == 0o600
    assert home.create().node_id == key.node_id == home.key().node_id


def test_no_key_yet(tmp_path: Path) -> None:
    with pytest.raises(HomeError, match="mesh init"):
        Home(tmp_path).key()


@posix
def test_key_that_others_can_read(tmp_path: Path) -> None:
    home = Home(tmp_path / "h")
    home.create()
    home.key_path.chmod(0o640)
    with pytest.raises(KeyFileError, match=r"0640.*chmod 600 .*machine\.key"):
        home.key()


@posix
def test_directory_that_others_can_write(tmp_path: Path) -> None:
    home = Home(tmp_path / "h")
    home.create()
    home.path.chmod(0o770)
    with pytest.raises(HomeError, match=f"0770.*chmod 700 {home.path}"):
        home.key()
    home.path.chmod(0o750)
    home.key()


def test_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(HomeError, match="not a directory"):
        Home(tmp_path / "f").create()


def test_program_acts_under_the_machine(tmp_path: Path) -> None:
    home = Home(tmp_path / "h")
    machine = home.create()
    key, delegation = home.program(("tensor",), 60.0)
    delegation.verify(key.node_id, time.time())
    assert PeerIdentity(key.node_id, delegation).machine_id == machine.node_id
    assert key.node_id != machine.node_id
    assert delegation.scopes == ("tensor",)
    assert home.program(("tensor",), 60.0)[0].node_id != key.node_id


def test_run_file_counts_only_while_the_lock_is_held(tmp_path: Path) -> None:
    home = Home(tmp_path / "h")
    home.create()
    written = run_file(home)
    written.save(home.run_path)
    assert home.running() is None
    assert home.daemon_lock.acquire()
    assert home.running() == written
    assert Home(home.path).running() == written
    home.daemon_lock.release()
    assert Home(home.path).running() is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"node_id": 1}', b"\xff", b"[" * 100_000], ids=range(6)
)
def test_run_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "daemon.json"
    path.write_bytes(content)
    assert RunFile.load(path) is None


@pytest.mark.parametrize("field", ["node_id", "pid", "control", "addresses", "boot", "started"])
def test_run_file_without_a_field(tmp_path: Path, field: str) -> None:
    home = Home(tmp_path / "h")
    home.create()
    run_file(home).save(home.run_path)
    content = json.loads(home.run_path.read_bytes())
    home.run_path.write_text(json.dumps(content | {"pid": 1}))
    assert RunFile.load(home.run_path) is not None
    home.run_path.write_text(json.dumps(content | {"pid": float("inf")}))
    assert RunFile.load(home.run_path) is None
    del content[field]
    home.run_path.write_text(json.dumps(content))
    assert RunFile.load(home.run_path) is None


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys; from pathlib import Path; from mesh.filelock import FileLock\n"
        f"assert FileLock(Path({str(path)!r})).acquire()\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        lock = FileLock(path)
        assert lock.is_held()
        assert not lock.acquire()
        process.kill()
        process.wait(timeout=10)
    assert not lock.is_held()
    assert lock.acquire()
    assert not lock.acquire()
    assert FileLock(path).is_held()
    lock.release()
    lock.release()
    assert not FileLock(path).is_held()


def test_those_who_ask_are_no_holders(tmp_path: Path) -> None:
    lock, path = FileLock(tmp_path / "lock"), tmp_path / "lock"
    path.touch()
    with path.open() as other:
        fcntl = pytest.importorskip("fcntl")
        fcntl.flock(other, fcntl.LOCK_SH)  # as another process does while it asks
        assert not lock.is_held()
        assert not lock.acquire()  # to be tried again
    assert lock.acquire()


def test_asking_leaves_no_file(tmp_path: Path) -> None:
    assert not FileLock(tmp_path / "lock").is_held()
    assert not (tmp_path / "lock").exists()


def test_secret_is_not_shown(tmp_path: Path) -> None:
    home = Home(tmp_path / "h")
    key: SecretKey = home.create()
    assert key.to_bytes().hex() not in repr(home) + repr(key)


def test_a_key_with_a_passphrase(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESH_KEY_PASSPHRASE", "several random words")
    key = Home(tmp_path).create()
    assert b"ENCRYPTED" in (tmp_path / "machine.key").read_bytes()
    assert Home(tmp_path).key().node_id == key.node_id
    monkeypatch.setenv("MESH_KEY_PASSPHRASE", "other words")
    with pytest.raises(KeyFileError, match="wrong"):
        Home(tmp_path).key()
    monkeypatch.delenv("MESH_KEY_PASSPHRASE")
    with pytest.raises(KeyFileError, match="none was given"):
        Home(tmp_path).key()
    asked: list[Path] = []

    def ask(path: Path) -> str:
        asked.append(path)
        return "several random words"

    home = Home(tmp_path, ask_passphrase=ask)
    assert home.key().node_id == home.create().node_id == key.node_id
    assert asked == [tmp_path / "machine.key"], "once for all"


def test_nobody_is_asked_without_need(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(path: Path) -> str:
        raise AssertionError

    monkeypatch.delenv("MESH_KEY_PASSPHRASE", raising=False)
    home = Home(tmp_path, ask_passphrase=never)
    assert home.create().node_id == home.key().node_id
    monkeypatch.setenv("MESH_KEY_PASSPHRASE", "words")  # of another home
    assert home.key().node_id == home.create().node_id


def test_a_directory_in_place_of_the_lock_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    lock = FileLock(tmp_path / "lock")
    for ask in (lock.acquire, lock.is_held):
        with pytest.raises(HomeError, match=r"lock.*directory"):
            ask()
