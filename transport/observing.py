"""What who debugs a network may watch, off by default: a trace of each connection, and its keys.

A trace (qlog) says which packets and frames came and went, and when: no content, and nothing that
opens any. A key log opens all content to whoever reads it, so it is a file that nobody else can
read, and is warned of each time.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shlex
import stat
import sys
from pathlib import Path
from typing import Any, TextIO, cast

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.logger import QLOG_VERSION, QuicLogger, QuicLoggerTrace
from aioquic.quic.packet import QuicTransportParameters

from transport.config import EndpointConfig
from transport.errors import TransportError

__all__ = ["Observing", "Trace", "observed"]

KEY_LOG_VARIABLE = "SSLKEYLOGFILE"
QLOG_VARIABLE = "QLOGDIR"

_OTHER_FILE = f"Name another, as key_log or in {KEY_LOG_VARIABLE}."
_OTHER_DIRECTORY = f"Name another, as qlog or in {QLOG_VARIABLE}."

MAX_TRACE_BYTES = 256 << 20
"""Longest trace of one connection; it ends there, and says so."""

MAX_TRACED_BYTES = 8 << 30
"""All traces of one endpoint together: strangers have packets written down, too."""

MAX_TRACES = 10_000
"""Connections of one endpoint that are traced: strangers begin some, too."""

RECORD_SEPARATOR = "\x1e"
"""What precedes each record (RFC 7464)."""

_OTHERS = 0o077
_FLAGS = (
    os.O_WRONLY
    | os.O_APPEND
    | os.O_CREAT
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # a named pipe without a reader must not hold us
)

_log = logging.getLogger("quicmesh.transport")


def observed(config: EndpointConfig) -> EndpointConfig:
    """Return `config` with what it leaves to the environment, and with paths that hold anywhere."""

    def found(given: str | None, variable: str) -> str:
        if given is None:
            given = "" if sys.flags.ignore_environment else os.environ.get(variable, "")
        return given and str(Path(given).absolute())

    return dataclasses.replace(
        config,
        key_log=found(config.key_log, KEY_LOG_VARIABLE),
        qlog=found(config.qlog, QLOG_VARIABLE),
    )


class Observing:
    """What is written down of the connections of one endpoint.

    Args:
        config: as `observed` returns it.

    Raises:
        TransportError: a file or directory can't be written, or others could read the keys.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self._keys = KeyLog(Path(config.key_log)) if config.key_log else None
        self._traces = Traces(Path(config.qlog)) if config.qlog else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What everybody who runs the endpoint has to know, each a sentence or more."""
        out = []
        if self._keys is not None:
            out.append(
                f"TLS KEY LOG: the keys of every connection go to {self._keys.path}. Whoever reads "
                "it can read, from a recording, everything that this node sends and is sent. When "
                f"you have what you need, turn it off (key_log, {KEY_LOG_VARIABLE}) and delete it."
            )
        if self._traces is not None:
            out.append(
                f"every packet is written down in {self._traces.path}, which takes time and space; "
                f"turn it off when you have what you need (qlog, {QLOG_VARIABLE})."
            )
        return tuple(out)

    def watch(self, configuration: QuicConfiguration) -> QuicConfiguration:
        """Have the connections made of `configuration` watched; return it."""
        configuration.quic_logger = self._traces
        configuration.secrets_log_file = cast(TextIO, self._keys)
        return configuration

    def note(self, trace: QuicLoggerTrace | None) -> None:
        """Write down what has happened on a connection since it was noted last."""
        if trace is not None:
            cast(Trace, trace).flush()

    def close(self) -> None:
        """Let go of the files."""
        if self._keys is not None:
            self._keys.close()


class KeyLog:
    """A file of TLS secrets in the format of NSS, as aioquic writes it; mode 0600, appended to.

    Once it can't be written it is given up, with an error in the log: connections go on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        what = f"TLS key log {path}"
        try:
            self._descriptor = os.open(path, _FLAGS, 0o600)
        except OSError as error:
            raise TransportError(what, why=error.strerror or str(error), fix=_OTHER_FILE) from error
        status = os.fstat(self._descriptor)
        why = fix = None
        if not stat.S_ISREG(status.st_mode):
            why = "it is not a regular file"
        elif sys.platform != "win32" and status.st_uid != os.geteuid():
            why = f"it belongs to user {status.st_uid}, who could read the keys"
        elif sys.platform != "win32" and status.st_mode & _OTHERS:
            why = f"its mode is {stat.S_IMODE(status.st_mode):04o}: others could read the keys"
            fix = f"chmod 600 {shlex.quote(str(path))}, or name a file that is not there yet."
        if why is not None:
            self.close()
            raise TransportError(what, why=why, fix=fix or _OTHER_FILE)

    def write(self, line: str) -> None:
        """Append one line, whole: other processes may append to the same file."""
        if self._descriptor < 0:
            return
        data = line.encode()
        try:
            # Less is written where a disk is about to be full: what follows would be no line.
            why = "no space left" if os.write(self._descriptor, data) < len(data) else None
        except OSError as error:
            why = error.strerror
        if why is not None:
            _log.error("the TLS key log %s ends here: %s", self.path, why)
            self.close()

    def flush(self) -> None:
        """Each line has been written."""

    def close(self) -> None:
        """Write nothing more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Traces(QuicLogger):
    """A directory of traces, a file for each connection; made, for its owner alone, if missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun = 0
        self._room = Room(MAX_TRACED_BYTES)
        what = f"qlog directory {path}"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            why = error.strerror or str(error)
            raise TransportError(what, why=why, fix=_OTHER_DIRECTORY) from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise TransportError(what, why="files can't be made in it", fix=_OTHER_DIRECTORY)

    def start_trace(self, is_client: bool, odcid: bytes) -> Trace:
        """Begin the trace of one connection."""
        self._begun += 1
        if self._begun == MAX_TRACES + 1:
            _log.warning("%d connections were traced, and no more are: see qlog", MAX_TRACES)
        trace = Trace(self.path, self._room, is_client=is_client, odcid=odcid)
        trace.is_over = self._begun > MAX_TRACES or self._room.is_full
        return trace

    def end_trace(self, trace: QuicLoggerTrace) -> None:
        """Write what is left of it."""
        cast(Trace, trace).flush()


class Room:
    """How many bytes the traces of one endpoint may take."""

    def __init__(self, size: int) -> None:
        self.size = self._left = size

    @property
    def is_full(self) -> bool:
        """Whether there was no room for something."""
        return self._left < 0

    def take(self, size: int) -> bool:
        """Take so many bytes of it; return False, and never again give any, if it has fewer."""
        if self.is_full:
            return False
        self._left -= size
        if self._left >= 0:
            return True
        _log.warning("the traces end at %d bytes together: see qlog", self.size)
        return False


class Trace(QuicLoggerTrace):
    """The trace of one connection, written as things happen: JSON text sequences, ``.sqlog``.

    Upstream's is kept in memory until the connection is over. The format is the one of
    draft-ietf-quic-qlog-main-schema-02, section 6.2, which qvis and its like read. Tokens with
    which a reader could end connections, or dial, are left out.
    """

    def __init__(self, directory: Path, room: Room, *, is_client: bool, odcid: bytes) -> None:
        super().__init__(is_client=is_client, odcid=odcid)
        self._room = room
        self._path = directory / f"{odcid.hex()}_{self._vantage_point['type']}.sqlog"
        self._vantage_point["name"] = "quicmesh"
        self._written = 0
        self.is_over = False
        """Whether nothing more is written."""

    def log_event(self, *, category: str, event: str, data: dict[str, Any]) -> None:
        """Note what has happened. Upstream goes on filling `data` until it is written."""
        if not self.is_over:
            super().log_event(category=category, event=event, data=data)

    def flush(self) -> None:
        """Write what has been noted."""
        if not self._events:
            return
        records: list[dict[str, Any]] = list(self._events)
        self._events.clear()
        if not self._written:
            records.insert(0, self._head())
        text = _sequence(records)
        limit = None
        if self._written + len(text) > MAX_TRACE_BYTES:
            limit = f"this trace ends at its limit of {MAX_TRACE_BYTES} bytes"
        elif not self._room.take(len(text)):
            limit = f"all traces end at their limit of {self._room.size} bytes together"
        if limit is not None:
            self.log_event(category="generic", event="warning", data={"message": limit})
            text = _sequence([self._head(), *self._events] if not self._written else self._events)
            self._events.clear()
            self.is_over = True
        flags = _FLAGS | (0 if self._written else os.O_EXCL)
        self._written += len(text)
        try:
            # Not held open: there may be more connections than descriptors.
            descriptor = os.open(self._path, flags, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self.is_over = True
            _log.error("the trace %s ends here: %s", self._path, error.strerror)

    def encode_new_connection_id_frame(
        self,
        connection_id: bytes,
        retire_prior_to: int,
        sequence_number: int,
        stateless_reset_token: bytes,
    ) -> dict[str, Any]:
        """As upstream, without the token."""
        frame = super().encode_new_connection_id_frame(
            connection_id, retire_prior_to, sequence_number, stateless_reset_token
        )
        del frame["reset_token"]
        return frame

    def encode_new_token_frame(self, token: bytes) -> dict[str, Any]:
        """As upstream, without the token."""
        return {"frame_type": "new_token", "length": len(token)}

    def encode_transport_parameters(
        self, owner: str, parameters: QuicTransportParameters
    ) -> dict[str, Any]:
        """As upstream, without the token."""
        data = super().encode_transport_parameters(owner, parameters)
        data.pop("stateless_reset_token", None)
        return data

    def _head(self) -> dict[str, Any]:
        return {
            "qlog_format": "JSON-SEQ",
            "qlog_version": QLOG_VERSION,
            "trace": {
                "common_fields": {"ODCID": self._odcid.hex(), "time_format": "absolute"},
                "vantage_point": self._vantage_point,
            },
        }


def _sequence(records: Any) -> str:
    return "".join(f"{RECORD_SEPARATOR}{json.dumps(record)}\n" for record in records)
