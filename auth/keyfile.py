"""The machine's key on disk: a PKCS #8 PEM file that its owner alone can read.

A key file that others may read, that belongs to somebody else, or that is reached through a
symbolic link is refused: whoever could read it can be this node.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from auth.errors import KeyFileError
from auth.files import create_file, read_file
from auth.identity import SecretKey

__all__ = ["load_key", "load_or_create_key", "save_key"]

# An Ed25519 key in PEM takes 119 bytes.
_MAX_BYTES = 4096
_GROUP_AND_OTHERS = 0o077


def load_key(path: str | os.PathLike[str]) -> SecretKey:
    """Read the key at ``path``.

    The mode is checked on POSIX only; Windows has no such bits.

    Raises:
        KeyFileError: there is no file, others can read it, or it holds no Ed25519 key. Names the
            path and the way out, ``chmod 600 PATH`` for a mode.
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
    return SecretKey(_parse(data, what))


def save_key(path: str | os.PathLike[str], key: SecretKey) -> None:
    """Write ``key`` to a new file at ``path``, mode 0600, on disk when this returns.

    Raises:
        KeyFileError: something is at ``path`` already (it is left alone), or it can't be written.
    """
    file = Path(path)
    what = f"writing key file {file}"
    try:
        create_file(file, _pem(key))
    except FileExistsError:
        raise KeyFileError(
            what,
            why="the file exists, and a key is never overwritten",
            fix="Move it away first.",
        ) from None
    except OSError as error:
        raise KeyFileError(what, why=error.strerror or type(error).__name__) from error


def load_or_create_key(path: str | os.PathLike[str]) -> SecretKey:
    """Read the key at ``path``; make one there first, and its directory (0700), if there is none.

    Several processes that start at once all end with the same key.

    Raises:
        KeyFileError: as :func:`load_key` and :func:`save_key`.
    """
    file = Path(path)
    if not os.path.lexists(file):
        what = f"writing key file {file}"
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            create_file(file, _pem(SecretKey.generate()))
        except FileExistsError:
            # Another process was first (or the parent is a file, which reading will say).
            pass
        except OSError as error:
            raise KeyFileError(what, why=error.strerror or type(error).__name__) from error
    return load_key(file)


def _pem(key: SecretKey) -> bytes:
    return key.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _parse(data: bytes, what: str) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError:
        raise KeyFileError(what, why="its key is protected by a passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        # The parser's own words may quote the content, so they are not passed on.
        raise KeyFileError(
            what,
            why="it holds no private key in PEM form",
            fix="Move it away and run: mesh init",
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(what, why="its key is of another kind; a node has an Ed25519 key")
    return key
