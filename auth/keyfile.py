"""The machine's key on disk: a PKCS #8 PEM file that its owner alone can read.

A key file that others may read, that belongs to somebody else, or that is reached through a
symbolic link is refused: whoever could read it can be this node.

A passphrase protects the key of a stolen disk or backup (PBES2, RFC 8018, as OpenSSL reads it). It
is stretched only 2048 times there, so it should be several random words.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from auth.errors import KeyFileError
from auth.files import create_file, read_file
from auth.identity import SecretKey

__all__ = ["Passphrase", "load_key", "load_or_create_key", "save_key"]

Passphrase = str | Callable[[], str | None] | None
"""What protects a key file, or what asks for it: called only for a file that is protected."""

# OpenSSL's own limit; the library refuses longer ones.
MAX_PASSPHRASE_BYTES = 1023

# An Ed25519 key in PEM takes 119 bytes, and 302 when it is protected.
_MAX_BYTES = 4096
_GROUP_AND_OTHERS = 0o077
_PROTECTED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"


def load_key(path: str | os.PathLike[str], *, passphrase: Passphrase = None) -> SecretKey:
    """Read the key at ``path``.

    The mode is checked on POSIX only; Windows has no such bits.

    Args:
        path: the file.
        passphrase: of a protected file, or a function that asks for it and returns None where
            nobody can be asked. Not needed, and not looked at, where the file is not protected.

    Raises:
        KeyFileError: there is no file, others can read it, it holds no Ed25519 key, or the
            passphrase is missing or wrong. Names the path and the way out, ``chmod 600 PATH`` for
            a mode.
    """
    file = Path(path)
    what = f"reading key file {file}"
    try:
        data = read_file(file, max_bytes=_MAX_BYTES, refuse_mode=_GROUP_AND_OTHERS, follow=False)
    except FileNotFoundError:
        raise KeyFileError(what, why="there is no such file", fix="Run: mesh init") from None
    except OSError as error:
        raise KeyFileError(what, why=error.strerror or type(error).__name__) from error
    except ValueError as error:
        raise KeyFileError(what, why=str(error)) from None
    return SecretKey(_parse(data, what, passphrase))


def save_key(
    path: str | os.PathLike[str], key: SecretKey, *, passphrase: str | None = None
) -> None:
    """Write ``key`` to a new file at ``path``, mode 0600, on disk when this returns.

    Args:
        path: the file to make.
        key: what to write.
        passphrase: protects the file; None leaves it to the mode alone.

    Raises:
        KeyFileError: something is at ``path`` already (it is left alone), it can't be written, or
            the passphrase is empty or longer than 1023 bytes.
    """
    file = Path(path)
    what = f"writing key file {file}"
    try:
        create_file(file, _pem(key, what, passphrase))
    except FileExistsError:
        raise KeyFileError(
            what,
            why="the file exists, and a key is never overwritten",
            fix="Move it away first.",
        ) from None
    except OSError as error:
        raise KeyFileError(what, why=error.strerror or type(error).__name__) from error


def load_or_create_key(path: str | os.PathLike[str], *, passphrase: Passphrase = None) -> SecretKey:
    """Read the key at ``path``; make one there first, and its directory (0700), if there is none.

    Several processes that start at once all end with the same key.

    Args:
        path: the file.
        passphrase: as in :func:`load_key`. Given as text, it also protects a key made here; a
            function is asked only about a key that is there.

    Raises:
        KeyFileError: as :func:`load_key` and :func:`save_key`.
    """
    file = Path(path)
    if not os.path.lexists(file):
        what = f"writing key file {file}"
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            protection = passphrase if isinstance(passphrase, str) else None
            create_file(file, _pem(SecretKey.generate(), what, protection))
        except FileExistsError:
            # Another process was first (or the parent is a file, which reading will say).
            pass
        except OSError as error:
            raise KeyFileError(what, why=error.strerror or type(error).__name__) from error
    return load_key(file, passphrase=passphrase)


def _pem(key: SecretKey, what: str, passphrase: str | None) -> bytes:
    encryption: KeySerializationEncryption = NoEncryption()
    if passphrase is not None:
        encryption = BestAvailableEncryption(_checked(passphrase, what))
    return key.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def _parse(data: bytes, what: str, passphrase: Passphrase) -> Ed25519PrivateKey:
    password: bytes | None = None
    if _PROTECTED in data:
        text = passphrase() if callable(passphrase) else passphrase
        if text is None:
            raise KeyFileError(
                what,
                why="its key is protected by a passphrase, and none was given",
                fix="Set MESH_KEY_PASSPHRASE, or run the command in a terminal to be asked.",
            )
        password = _checked(text, what)
    try:
        key = load_pem_private_key(data, password=password)
    except (TypeError, ValueError, UnsupportedAlgorithm):
        # The parser's own words may quote the content, so they are not passed on.
        if password is not None:
            raise KeyFileError(
                what, why="the passphrase is wrong, or the file is damaged"
            ) from None
        raise KeyFileError(
            what,
            why="it holds no private key in PEM form",
            fix="Move it away and run: mesh init",
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(what, why="its key is of another kind; a node has an Ed25519 key")
    return key


def _checked(passphrase: str, what: str) -> bytes:
    password = unicodedata.normalize("NFC", passphrase).encode("utf-8", "surrogateescape")
    if not 0 < len(password) <= MAX_PASSPHRASE_BYTES:
        raise KeyFileError(
            what, why=f"a passphrase has 1 to {MAX_PASSPHRASE_BYTES} bytes, not {len(password)}"
        )
    return password
