"""The switches for who debugs a network: traces of connections, and their keys."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aioquic.quic.crypto import CryptoContext, CryptoError
from aioquic.quic.packet import QuicProtocolVersion
from aioquic.tls import CipherSuite

from auth import SecretKey
from tests.transport.nodes import at, endpoint, pair
from tests.transport.pair import World, connect
from transport import Connection, Endpoint, Incoming
from transport import observing as module
from transport.errors import TransportError
from transport.observing import Traces
from transport.protocol.batch.sealing import seal_packet
from transport.protocol.batch.writer import keys_of
from transport.protocol.connection_ids import ID_LENGTH
from transport.udp import UdpSocket

pytestmark = pytest.mark.anyio

BULK = bytes(range(256)) * (4 << 12)
"""Four mebibytes."""

processes = pytest.mark.skipif(sys.platform != "linux", reason="no endpoint processes here")

MARKER = b"what nobody else is to read"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SSLKEYLOGFILE", "QLOGDIR"):
        monkeypatch.delenv(variable, raising=False)


async def swap_bulk(listener: Endpoint, connection: Connection) -> None:
    """Send `BULK` to the listener, and have it sent back."""
    held = bytearray(len(BULK))

    async def mirror(request: Incoming) -> None:
        await request.stream.receive_into(memoryview(held))
        await request.stream.send_lent(memoryview(held))

    listener.register_service("mirror", mirror, scope="x")
    async with await connection.open_stream("mirror") as stream:
        await stream.send_lent(memoryview(BULK))
        back = bytearray(len(BULK))
        await stream.receive_into(memoryview(back))
    assert bytes(back) == BULK


def traces(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of one connection, by the side that has noted them."""
    out: dict[str, list[dict[str, Any]]] = {}
    for path in directory.iterdir():
        first, *records = path.read_text().split("\x1e")[1:]
        head = json.loads(first)
        assert (head["qlog_format"], head["qlog_version"]) == ("JSON-SEQ", "0.3")
        assert path.suffix == ".sqlog"
        out[head["trace"]["vantage_point"]["type"]] = [json.loads(text) for text in records]
    return out


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def packets(events: list[dict[str, Any]], what: str) -> dict[int, dict[str, Any]]:
    found = [event["data"] for event in events if event["name"] == f"transport:{what}"]
    numbered = {data["header"]["packet_number"]: data for data in found}
    assert len(numbered) == len(found)
    return numbered


def said(packet: dict[str, Any]) -> list[dict[str, Any]]:
    """The frames of a packet. Padding is told by who receives it, and by who sends it not always.

    Delays are told in steps of a microsecond by the one, and more exactly by the other.
    """
    frames = [frame for frame in packet["frames"] if frame["frame_type"] != "padding"]
    return [{key: frame[key] for key in frame if key != "ack_delay"} for frame in frames]


def stream_bytes(data: Iterator[dict[str, Any]] | Any) -> int:
    """How much of one stream packets carry, from its beginning without a gap."""
    frames = [frame for each in data for frame in each["frames"] if frame["frame_type"] == "stream"]
    longest = 0
    for stream_id in {frame["stream_id"] for frame in frames}:
        stop = 0
        own = [frame for frame in frames if frame["stream_id"] == stream_id]
        for frame in sorted(own, key=lambda frame: frame["offset"]):
            if frame["offset"] > stop:
                break
            stop = max(stop, frame["offset"] + frame["length"])
        longest = max(longest, stop)
    return longest


@pytest.mark.parametrize("placement", ["loop", pytest.param("process", marks=processes)])
async def test_a_trace_tells_of_every_packet_of_both_directions(
    tmp_path: Path, placement: str
) -> None:
    async with pair(qlog=str(tmp_path / "traces"), placement=placement) as (_, listener, dialled):
        await swap_bulk(listener, dialled)
    both = traces(tmp_path / "traces")
    assert set(both) == {"client", "server"}
    for here, there in (("client", "server"), ("server", "client")):
        sent, received = packets(both[here], "packet_sent"), packets(both[there], "packet_received")
        numbers = sorted(sent)
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "none is left out"
        # What arrives is noted by the other end, the same packet with the same frames.
        assert set(received) <= set(sent)
        assert len(received) > len(sent) * 0.5
        in_bulk = [number for number in received if sent[number]["raw"]["length"] > 1200]
        assert in_bulk, "packets that aioquic's own code never makes"
        for number, data in received.items():
            assert data["raw"] == sent[number]["raw"]
            assert said(data) == said(sent[number])
        assert stream_bytes(sent.values()) >= len(BULK)
        assert stream_bytes(received.values()) >= len(BULK)
    names = {event["name"] for event in both["client"]}
    assert {"recovery:metrics_updated", "transport:datagrams_sent", "security:key_updated"} <= names


async def test_traces_and_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        traced, keys = tmp_path / "new" / "traces", tmp_path / "keys"
        async with pair(qlog=str(traced), key_log=str(keys)):
            pass
    finally:
        os.umask(before)
    assert traced.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in files(traced)] == [0o600, 0o600]
    assert keys.stat().st_mode & 0o777 == 0o600


async def test_the_key_log_opens_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[bytes] = []
    send = UdpSocket.send_batch

    def send_batch(self: UdpSocket, data: Any, segment: int, address: Any) -> int:
        recorded.extend(bytes(data[at : at + segment]) for at in range(0, len(data), segment))
        return send(self, data, segment, address)

    monkeypatch.setattr(UdpSocket, "send_batch", send_batch)
    keys = tmp_path / "keys"
    async with pair(key_log=str(keys), placement="loop") as (_, _, connection):
        assert await connection.call("echo", MARKER) == MARKER
    assert not any(MARKER in each for each in recorded)
    lines = [line.split(" ") for line in keys.read_text().splitlines()]
    assert len({client_random for _, client_random, _ in lines}) == 1
    secrets = {label: bytes.fromhex(secret) for label, _, secret in lines}
    assert set(secrets) == {
        f"{side}_{kind}"
        for side in ("CLIENT", "SERVER")
        for kind in ("HANDSHAKE_TRAFFIC_SECRET", "TRAFFIC_SECRET_0")
    }
    for label in ("CLIENT_TRAFFIC_SECRET_0", "SERVER_TRAFFIC_SECRET_0"):
        plain = [_opened(each, secrets[label]) for each in recorded]
        assert sum(MARKER in each for each in plain) >= 1, label
    # Without the very secret nothing opens: what was found above was encrypted.
    assert not any(_opened(each, bytes(48)) for each in recorded)


def _opened(datagram: bytes, secret: bytes) -> bytes:
    context = CryptoContext()
    suite = {48: CipherSuite.AES_256_GCM_SHA384, 32: CipherSuite.AES_128_GCM_SHA256}[len(secret)]
    context.setup(cipher_suite=suite, secret=secret, version=QuicProtocolVersion.VERSION_1)
    if datagram[0] & 0x80:
        return b""
    try:
        return context.decrypt_packet(datagram, 1 + ID_LENGTH, 0)[1]
    except CryptoError:
        return b""


async def test_nothing_is_written_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    async with pair(placement="loop") as (_, _, connection):
        quic = connection.core.quic  # type: ignore[attr-defined]
        assert quic.trace is None
        assert quic._configuration.secrets_log_file is None
        assert await connection.call("echo", 1) == 1
    assert not files(tmp_path)
    assert "KEY LOG" not in caplog.text


@pytest.mark.parametrize("placement", ["loop", pytest.param("process", marks=processes)])
async def test_the_variables_that_everybody_knows_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSLKEYLOGFILE", "keys")
    monkeypatch.setenv("QLOGDIR", "traces")
    async with pair(placement=placement) as (dialer, _, _):
        assert dialer.config.key_log == str(tmp_path / "keys")
    assert "SERVER_TRAFFIC_SECRET_0" in (tmp_path / "keys").read_text()
    assert set(traces(tmp_path / "traces")) == {"client", "server"}
    written = (tmp_path / "keys").read_text()
    async with pair(key_log="", qlog="", placement=placement) as (dialer, _, _):
        assert dialer.warnings == ()
    assert (tmp_path / "keys").read_text() == written
    assert len(files(tmp_path / "traces")) == 2


async def test_the_key_log_is_warned_of_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    async with endpoint(key_log=str(keys), qlog=str(tmp_path / "traces")) as node:
        loud, quieter = node.warnings[:2]
    assert loud.startswith(f"TLS KEY LOG: the keys of every connection go to {keys}. Whoever reads")
    assert str(tmp_path / "traces") in quieter
    said = [each for each in caplog.records if each.getMessage() == loud]
    assert [each.levelno for each in said] == [logging.WARNING]


def _readable(path: Path) -> str:
    path.touch(0o644)
    path.chmod(0o640)
    return "its mode is 0640"


def _symlink(path: Path) -> str:
    path.symlink_to(path.with_name("elsewhere"))
    return "symbolic link"


def _pipe(path: Path) -> str:
    os.mkfifo(path)
    return ""


def _directory(path: Path) -> str:
    path.mkdir()
    return "directory"


def _of_another(path: Path) -> str:
    path.touch(0o600)
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)
    return "belongs to user 12345"


@pytest.mark.parametrize("make", [_readable, _symlink, _pipe, _directory, _of_another])
async def test_keys_go_to_no_file_that_others_could_read(tmp_path: Path, make: Any) -> None:
    keys = tmp_path / "keys"
    why = make(keys)
    with pytest.raises(TransportError, match=f"TLS key log {keys}") as caught:
        async with endpoint(key_log=str(keys)):
            raise AssertionError("it must not open")
    assert why.lower() in str(caught.value).lower()
    assert not (tmp_path / "elsewhere").exists()


async def test_a_qlog_directory_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TransportError, match="qlog directory"):
        async with endpoint(qlog=str(tmp_path / "file")):
            raise AssertionError("it must not open")


async def test_a_trace_opens_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither keys nor content, nor what ends a connection; and the log has no keys either."""
    caplog.set_level(logging.DEBUG)
    key = SecretKey.generate()
    settings = {"qlog": str(tmp_path / "traces"), "key_log": str(tmp_path / "keys")}
    async with endpoint(key=key, **settings) as dialer, endpoint(**settings) as listener:
        connection = await dialer.connect(at(listener))
        assert await connection.call("echo", MARKER) == MARKER
    text = "".join(path.read_text() for path in files(tmp_path / "traces"))
    keys = (tmp_path / "keys").read_text().splitlines()
    assert len(keys) == 8, "both ends have told theirs"
    assert "new_connection_id" in text
    assert "initial_source_connection_id" in text
    assert "reset_token" not in text
    for told in (text, caplog.text):
        assert MARKER.hex() not in told
        assert MARKER.decode() not in told
        assert key.to_bytes().hex() not in told
        assert not any(line.rpartition(" ")[2] in told for line in keys)


async def test_a_trace_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TRACE_BYTES", 20_000)
    async with pair(qlog=str(tmp_path), placement="loop") as (_, listener, connection):
        await swap_bulk(listener, connection)
        quic = connection.core.quic  # type: ignore[attr-defined]
        assert not quic.trace._events, "nothing gathers in memory"
    for path in files(tmp_path):
        assert path.stat().st_size <= 20_500
        assert "ends at its limit of 20000 bytes" in path.read_text().splitlines()[-1]


HOSTILE_FRAMES = [
    pytest.param(b"\xc0\0\0", id="half a frame type"),
    pytest.param(b"\x01\x40", id="half a frame type behind a frame"),
    pytest.param(b"\x06\0\x7f\xff\0", id="longer than the packet"),
    pytest.param(b"\x02\0\0\xff" + b"\xff" * 7 + b"\0", id="acknowledges without end"),
    pytest.param(b"\x40\x7f", id="unknown"),
    pytest.param(b"\x1d\0\x03\xff\xfe\0", id="a reason that is no text"),
]


@pytest.mark.attack
@pytest.mark.parametrize("frames", HOSTILE_FRAMES)
def test_what_a_peer_may_send_ends_alike_whether_traced_or_not(
    tmp_path: Path, frames: bytes
) -> None:
    ends = []
    for watches in (False, True):
        world = World()
        dialer, listener = connect(world)
        quic, peer = listener.core.quic, dialer.core.quic
        if watches:
            quic._quic_logger = Traces(tmp_path).start_trace(is_client=False, odcid=bytes(8))
        packet = seal_packet(
            keys_of(peer.data_crypto.send),
            peer._peer_cid.cid,
            peer._packet_number,
            frames,
            spin=False,
        )
        listener.core.receive_batch(
            bytearray(packet), len(packet), len(packet), dialer.host.address, world.now
        )
        listener.pump()
        ends.append(listener.core.ended)
    assert ends[0] == ends[1]
    assert ends[1] is not None


async def test_all_traces_together_have_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_TRACED_BYTES", 50_000)
    async with endpoint(qlog=str(tmp_path), placement="loop") as listener:
        for first in (True, False, False):
            async with endpoint() as dialer:
                connection = await dialer.connect(at(listener))
                if first:
                    await swap_bulk(listener, connection)
                assert await connection.call("echo", 1) == 1
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 50_500
    assert len(files(tmp_path)) == 1, "whoever comes later is not traced at all"
    assert "all traces end at their limit of 50000 bytes" in files(tmp_path)[0].read_text()
    assert caplog.text.count("the traces end at 50000 bytes together") == 1
    assert traces(tmp_path)


async def test_as_many_connections_are_traced_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_TRACES", 1)
    async with endpoint(qlog=str(tmp_path), placement="loop") as listener:
        for _ in range(3):
            async with endpoint() as dialer:
                await dialer.connect(at(listener))
    assert len(files(tmp_path)) == 1
    assert caplog.text.count("1 connections were traced, and no more are") == 1


async def test_a_key_log_with_room_for_half_a_line_ends_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What came behind half a line would be none, and nobody would know that a key is missing."""
    write, path = os.write, tmp_path / "keys"

    def nearly_full(descriptor: int, data: bytes) -> int:
        is_it = path.exists() and os.path.sameopenfile(descriptor, opened.fileno())
        return write(descriptor, data[:10] if is_it else data)

    path.touch(mode=0o600)
    with path.open() as opened:
        async with endpoint(key_log=str(path), placement="loop") as listener:
            monkeypatch.setattr(os, "write", nearly_full)
            async with endpoint() as dialer:
                connection = await dialer.connect(at(listener))
                assert await connection.call("echo", 1) == 1
            monkeypatch.undo()
    assert len(path.read_bytes()) == 10
    assert caplog.text.count("ends here: no space left") == 1


async def test_a_connection_goes_on_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    async with endpoint(
        qlog=str(tmp_path / "traces"), key_log=str(tmp_path / "keys"), placement="loop"
    ) as listener:
        monkeypatch.setattr(os, "write", full)
        (tmp_path / "traces").rmdir()
        async with endpoint() as dialer:
            connection = await dialer.connect(at(listener))
            assert await connection.call("echo", 1) == 1
            monkeypatch.undo()
    assert caplog.text.count("ends here: No space left on device") == 1
    assert caplog.text.count("ends here: No such file or directory") == 1
