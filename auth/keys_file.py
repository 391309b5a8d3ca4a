"""The file of authorized keys: its lines, read and edited.

One key a line::

    # anything behind a '#' is a comment
    <node id> [petname] [scopes=tensor,collective:my-job] [expires=2030-01-31T00:00:00Z]

A file with a line that can't be read lets nobody in who was not in before; taking a key out of it
works all the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from auth.encoding import check_time
from auth.errors import IdentityError
from auth.files import locked, read_file, replace_file
from auth.grant import DEFAULT_SCOPES, check_scopes
from auth.identity import NodeId, check_petname

__all__ = [
    "AuthorizedKey",
    "Salvage",
    "first_words",
    "parse_authorized_keys",
    "parse_lines",
    "read_keys_file",
    "remove_key",
    "rewrite",
    "salvage",
    "unusable",
    "with_line",
]

MAX_FILE_BYTES = 1 << 20
"""Some eight thousand lines; it is read within the event loop."""

_GROUP_AND_OTHERS_WRITE = 0o022

_HEADER = """\
# Nodes that may use this one. Changes take effect at once.
# <node id> [petname] [scopes=tensor,collective] [expires=2030-01-31T00:00:00Z]
"""


@dataclass(frozen=True, slots=True)
class AuthorizedKey:
    """One line of the file.

    Args:
        node_id: whose key.
        petname: what this node calls it; unique in the file.
        scopes: what it may do.
        expires_at: Unix time in seconds from which it may not; None for never.

    Raises:
        IdentityError: the petname can't be one, or anybody can sign with the key.
        ValueError: a scope is malformed, there is none, or the time is impossible.
    """

    node_id: NodeId
    petname: str | None = None
    scopes: tuple[str, ...] = DEFAULT_SCOPES
    expires_at: float | None = None

    def __post_init__(self) -> None:
        if self.node_id.is_weak:
            raise IdentityError(f"authorizing {self.node_id.short}", why="anybody can sign with it")
        object.__setattr__(self, "scopes", check_scopes(self.scopes))
        if not self.scopes:
            raise ValueError("there is no scope: a key that may do nothing is not authorized")
        if self.petname is not None:
            check_petname(self.petname)
        if self.expires_at is not None:
            check_time(self.expires_at)

    def line(self) -> str:
        """Return the line, as :func:`parse_authorized_keys` reads it, without its end."""
        parts = [str(self.node_id)]
        if self.petname is not None:
            parts.append(self.petname)
        if self.scopes != check_scopes(DEFAULT_SCOPES):
            parts.append("scopes=" + ",".join(self.scopes))
        if self.expires_at is not None:
            when = datetime.fromtimestamp(self.expires_at, UTC).isoformat()
            parts.append("expires=" + when.replace("+00:00", "Z"))
        return " ".join(parts)


def parse_authorized_keys(text: str) -> tuple[AuthorizedKey, ...]:
    """Read the content of a file.

    Raises:
        ValueError: a line is malformed, or repeats a key or petname; the text has its number.
    """
    keys, complaints = parse_lines(text)
    if complaints:
        raise ValueError(complaints[0])
    return tuple(keys.values())


@dataclass(frozen=True, slots=True)
class Salvage:
    """What could be read of a file, whatever else is in it.

    Args:
        names: every node id that a line begins with, with its petname if the line can be read.
        complaints: what is wrong with the other lines, each with its number.
    """

    names: dict[NodeId, str | None]
    complaints: tuple[str, ...]


def salvage(path: str | os.PathLike[str]) -> Salvage:
    """Read what can be read of a file: for taking keys out of it, never for letting any in.

    Raises:
        IdentityError: the file can't be trusted, or can't be read at all.
    """
    try:
        text = read_keys_file(Path(path))
    except FileNotFoundError:
        return Salvage({}, ())
    except (ValueError, OSError) as error:
        raise unusable("reading", Path(path), error) from error
    keys, complaints = parse_lines(text)
    names: dict[NodeId, str | None] = {}
    for word in first_words(text):
        with contextlib.suppress(IdentityError):
            node_id = NodeId.parse(word)
            names[node_id] = keys[node_id].petname if node_id in keys else None
    return Salvage(names, tuple(complaints))


def remove_key(path: str | os.PathLike[str], node_id: NodeId) -> bool:
    """Take every line of a key out of a file; return whether there was one.

    Lines that can't be read are left as they are, and stand in the way of nothing.

    Raises:
        IdentityError: the file can't be trusted, read or written.
    """

    def without(text: str) -> str | None:
        named = str(node_id) in first_words(text)
        return with_line(text, node_id, None) if named else None

    return rewrite(Path(path), without)


def unusable(doing: str, path: Path, error: Exception) -> IdentityError:
    """Return the error of a file that can't be used, for what was found wrong with it."""
    what = f"{doing} {path}"
    if isinstance(error, OSError):
        return IdentityError(what, why=error.strerror or str(error))
    return IdentityError(what, why=str(error), fix="Correct the file.")


def rewrite(path: Path, edit: Callable[[str], str | None]) -> bool:
    """Replace the content by what ``edit`` makes of it, if it makes something; say whether."""
    try:
        path = path.resolve()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path):
            text = _HEADER
            with contextlib.suppress(FileNotFoundError):
                text = read_keys_file(path)
            edited = edit(text)
            if edited is not None:
                replace_file(path, edited.encode("utf-8", "surrogateescape"))
            return edited is not None
    except (ValueError, OSError) as error:
        raise unusable("editing", path, error) from error


def read_keys_file(path: Path) -> str:
    """Return the content, surrogates standing for what is not UTF-8.

    Raises:
        ValueError: others may write to it, or it is too large.
        OSError: it can't be read.
    """
    data = read_file(
        path, max_bytes=MAX_FILE_BYTES, refuse_mode=_GROUP_AND_OTHERS_WRITE, follow=True
    )
    # What is not UTF-8 is for the parser to complain of, and must be written back as it was.
    return data.decode("utf-8-sig", "surrogateescape")


def parse_lines(text: str) -> tuple[dict[NodeId, AuthorizedKey], list[str]]:
    """Return the keys that can be read, and what is wrong with the other lines."""
    keys: dict[NodeId, AuthorizedKey] = {}
    petnames: set[str] = set()
    complaints: list[str] = []
    if text and not text.endswith("\n"):
        # A line cut short could grant more than it was meant to: "scopes=tensor" of "tensor:put".
        complaints.append("the last line does not end with a newline: is it half written?")
    for number, line in enumerate(text.split("\n"), 1):
        try:
            key = _parse_line(line)
            if key is None:
                continue
            if key.node_id in keys:
                raise ValueError(f"{key.node_id.short} is there twice")
            if key.petname in petnames:
                raise ValueError(f"the petname {key.petname!r} is there twice")
        except (ValueError, IdentityError) as error:
            complaints.append(f"line {number}: {error}")
            continue
        keys[key.node_id] = key
        if key.petname is not None:
            petnames.add(key.petname)
    return keys, complaints


def first_words(text: str) -> frozenset[str]:
    """Return what each line begins with, in lower case."""
    lines = (line.partition("#")[0].split() for line in text.split("\n"))
    return frozenset(words[0].lower() for words in lines if words)


def _parse_line(line: str) -> AuthorizedKey | None:
    if any("\udc80" <= character <= "\udcff" for character in line):
        raise ValueError("it is not text in UTF-8")
    words = line.partition("#")[0].split()
    if not words:
        return None
    node_id = NodeId.parse(words[0])
    petname: str | None = None
    scopes: tuple[str, ...] = DEFAULT_SCOPES
    expires_at: float | None = None
    seen: set[str] = set()
    for word in words[1:]:
        name, equals, value = word.partition("=")
        name = name if equals else "petname"
        if name in seen:
            raise ValueError(f"{word!r} is a second {name}")
        seen.add(name)
        if not equals:
            petname = word
        elif name == "scopes":
            scopes = tuple(value.split(","))
        elif name == "expires":
            expires_at = _parse_time(value)
        else:
            raise ValueError(f"{name!r} is no option; there are scopes= and expires=")
    return AuthorizedKey(node_id, petname, scopes, expires_at)


def _parse_time(text: str) -> float:
    example = "one looks like 2030-01-31T00:00:00Z"
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time; {example}") from None
    if when.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; {example}")
    return when.timestamp()


def with_line(text: str, node_id: NodeId, key: AuthorizedKey | None) -> str:
    """Return the content with ``key`` in the place of the line of ``node_id``, or without one."""
    lines: list[str] = []
    new = [] if key is None else [key.line()]
    # The same lines as the parser's: splitlines() knows more ends, and could make one of a comment.
    whole = text.split("\n")
    unfinished = whole.pop()
    for line in whole:
        words = line.partition("#")[0].split()
        if words and words[0].lower() == str(node_id):
            lines += new
            new = []
        else:
            lines.append(line)
    if str(node_id) in first_words(unfinished):
        unfinished = ""
    return "".join(f"{line}\n" for line in lines + new) + unfinished
