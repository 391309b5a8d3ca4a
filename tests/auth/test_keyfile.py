from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)

from auth import KeyFileError, SecretKey, load_key, load_or_create_key, save_key

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permission bits")


def pem(
    key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey,
    encryption: KeySerializationEncryption | None = None,
) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


def write(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(KeyFileError) as caught:
        load_key(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_saved_key_is_loaded(tmp_path: Path) -> None:
    key = SecretKey.generate()
    path = tmp_path / "key"
    save_key(path, key)
    assert load_key(path).to_bytes() == key.to_bytes()
    assert load_key(str(path)).node_id == key.node_id
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


@posix
def test_a_key_is_written_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save_key(tmp_path / "key", SecretKey.generate())
        load_or_create_key(tmp_path / "home" / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    first = SecretKey.generate()
    save_key(path, first)
    with pytest.raises(KeyFileError, match="never overwritten"):
        save_key(path, SecretKey.generate())
    assert load_key(path).node_id == first.node_id
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


@posix
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o777])
def test_a_key_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "a key", pem(SecretKey.generate().private), mode)
    text = refusal(path)
    assert f"{mode:04o}" in text
    assert f"chmod 600 '{path}'" in text
    path.chmod(0o600)
    load_key(path)


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can chown")
def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "key", pem(SecretKey.generate().private))
    os.chown(path, 12345, -1)
    assert "belongs to user 12345" in refusal(path)


def test_a_missing_key_says_how_to_make_one(tmp_path: Path) -> None:
    assert "mesh init" in refusal(tmp_path / "key")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no private key in PEM form"),
        (b"hello\n", "no private key in PEM form"),
        (b"\xff\x00" * 100, "no private key in PEM form"),
        (pem(SecretKey.generate().private)[:60], "no private key in PEM form"),
        (SecretKey.generate().to_bytes(), "no private key in PEM form"),
        (pem(ec.generate_private_key(ec.SECP256R1())), "of another kind"),
        (pem(SecretKey.generate().private, BestAvailableEncryption(b"x")), "passphrase"),
        (b"#" * 5000, "more than 4096 bytes"),
    ],
    ids=["empty", "text", "binary", "cut", "raw", "another kind", "passphrase", "too long"],
)
def test_a_file_that_holds_no_key_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    assert why in refusal(write(tmp_path / "key", content))


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    target = write(tmp_path / "target", pem(SecretKey.generate().private))
    link = tmp_path / "key"
    link.symlink_to(target)
    load_key(target)
    assert "it is a symbolic link" in refusal(link)
    with pytest.raises(KeyFileError, match="symbolic link"):
        load_or_create_key(link)


def test_a_dangling_link_is_not_followed_to_write(tmp_path: Path) -> None:
    link = tmp_path / "key"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyFileError):
        load_or_create_key(link)
    with pytest.raises(KeyFileError):
        save_key(link, SecretKey.generate())
    assert not (tmp_path / "elsewhere").exists()


@posix
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "not a regular file" in refusal(tmp_path / "directory")
    assert "not a regular file" in refusal(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        refusal(tmp_path / "socket")


@posix
def test_refusals_leak_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    write(tmp_path / "open", b"", 0o644)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("directory", "open", "missing"):
        refusal(tmp_path / name)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_path_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for attempt in (
        lambda: save_key(tmp_path / "none" / "key", SecretKey.generate()),
        lambda: load_or_create_key(tmp_path / "file" / "key"),
    ):
        with pytest.raises(KeyFileError, match="key"):
            attempt()


def test_a_key_is_created_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "home" / "key"
    first = load_or_create_key(path)
    assert load_or_create_key(path).node_id == first.node_id


def test_threads_that_create_at_once_get_the_same_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(load_or_create_key, [tmp_path / "home" / "key"] * 32))
    assert len({key.node_id for key in keys}) == 1


def test_processes_that_create_at_once_get_the_same_key(tmp_path: Path) -> None:
    code = "import sys, auth; print(auth.load_or_create_key(sys.argv[1]).node_id)"
    command = [sys.executable, "-c", code, str(tmp_path / "key")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    ids = {process.communicate(timeout=30)[0].strip() for process in started}
    assert ids == {str(load_key(tmp_path / "key").node_id)}


def test_a_refusal_never_quotes_the_file(tmp_path: Path) -> None:
    secret = pem(SecretKey.generate().private)
    broken = secret.replace(b"-----END", b"----END")
    text = refusal(write(tmp_path / "key", broken))
    assert secret.split(b"\n")[1].decode() not in text


# -- a passphrase


def test_a_protected_key_is_loaded_with_its_passphrase(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = SecretKey.generate()
    save_key(path, key, passphrase="caf\u00e9 au lait")
    assert b"ENCRYPTED" in path.read_bytes()
    asked = []

    def ask() -> str:
        asked.append(path)
        return "cafe\u0301 au lait"  # the same, as another keyboard types it

    assert load_key(path, passphrase="caf\u00e9 au lait").to_bytes() == key.to_bytes()
    assert load_key(path, passphrase=ask).to_bytes() == key.to_bytes()
    assert load_or_create_key(path, passphrase=ask).to_bytes() == key.to_bytes()
    assert asked == [path, path]


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    save_key(tmp_path / "key", SecretKey.generate(), passphrase="words")
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("there is no openssl to read it")
    command = [openssl, "pkey", "-in", str(tmp_path / "key"), "-passin", "pass:words", "-noout"]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize("missing", [None, lambda: None])
def test_a_missing_passphrase_says_where_to_give_it(
    tmp_path: Path, missing: Callable[[], str | None] | None
) -> None:
    save_key(tmp_path / "key", SecretKey.generate(), passphrase="words")
    with pytest.raises(KeyFileError, match="none was given") as caught:
        load_key(tmp_path / "key", passphrase=missing)
    assert str(tmp_path / "key") in str(caught.value)
    assert "MESH_KEY_PASSPHRASE" in str(caught.value)


def test_a_wrong_passphrase_is_told_from_a_missing_one(tmp_path: Path) -> None:
    save_key(tmp_path / "key", SecretKey.generate(), passphrase="the right words")
    with pytest.raises(KeyFileError, match="the passphrase is wrong") as caught:
        load_key(tmp_path / "key", passphrase="the wrong words")
    for words in ("the right words", "the wrong words"):
        assert words not in str(caught.value)
    with pytest.raises(KeyFileError, match="1 to 1023 bytes"):
        load_key(tmp_path / "key", passphrase="")


@pytest.mark.parametrize("words", ["", "x" * 1024])
def test_a_passphrase_that_can_not_be_used_is_refused(tmp_path: Path, words: str) -> None:
    with pytest.raises(KeyFileError, match="1 to 1023 bytes"):
        save_key(tmp_path / "key", SecretKey.generate(), passphrase=words)
    with pytest.raises(KeyFileError, match="1 to 1023 bytes"):
        load_or_create_key(tmp_path / "key", passphrase=words)
    assert list(tmp_path.iterdir()) == []
    save_key(tmp_path / "key", SecretKey.generate(), passphrase="x" * 1023)
    load_key(tmp_path / "key", passphrase="x" * 1023)


def test_nobody_is_asked_about_a_key_that_is_not_protected(tmp_path: Path) -> None:
    def never() -> str:
        raise AssertionError

    key = load_or_create_key(tmp_path / "key", passphrase=never)
    assert b"ENCRYPTED" not in (tmp_path / "key").read_bytes()
    assert load_key(tmp_path / "key", passphrase=never).node_id == key.node_id
    assert load_key(tmp_path / "key", passphrase="whatever").node_id == key.node_id


def test_a_new_key_is_protected_by_the_passphrase_given(tmp_path: Path) -> None:
    key = load_or_create_key(tmp_path / "key", passphrase="words")
    assert b"ENCRYPTED" in (tmp_path / "key").read_bytes()
    assert load_or_create_key(tmp_path / "key", passphrase="words").node_id == key.node_id
