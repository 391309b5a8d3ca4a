"""Nothing that reads bytes from the network can be added without being tested as such."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parsers.all import PARSERS

PACKAGES = ("auth", "transport", "tensor_bridge", "mesh")

READS = re.compile(r"(decode|parse|from_|read|load|unpack|pull|unseal)")
"""How the name of whatever makes a value out of bytes or text begins."""

ELSEWHERE = {
    "transport.protocol.demux.Demultiplexer.route": (
        "tests/transport/test_protocol_demux.py::test_garbage_makes_no_state_and_no_noise",
        "tests/transport/test_protocol_demux.py"
        "::test_garbage_behind_a_valid_header_leaves_no_state",
    ),
    "transport.protocol.connection.ConnectionCore.receive_datagram": (
        "tests/transport/test_protocol_demux.py"
        "::test_no_mutilated_datagram_of_a_live_connection_breaks_it",
    ),
    "transport.protocol.aioquic_adapter.AdaptedConnection.receive_datagram": (
        "tests/transport/test_protocol_hostile.py::test_no_sequence_of_frames_makes_anything_raise",
    ),
    "transport.protocol.batch.reader.BatchReader.read": (
        "tests/transport/test_batch_hostile.py"
        "::test_no_mutilated_batch_of_a_live_connection_breaks_it",
    ),
    "transport.protocol.batch.sealing.decode_packet_number": (
        "tests/transport/test_batch_hostile.py"
        "::test_packet_numbers_are_what_aioquic_takes_them_for",
    ),
    "auth.shared_secret.SharedSecret.verify": (
        "tests/auth/test_shared_secret.py::test_other_bytes_are_no_proof",
        "tests/auth/test_shared_secret.py::test_a_tag_holds_for_its_own_transcript_and_side_alone",
    ),
}
"""What is not a parser in the sense of `Parser`, and the tests marked ``fuzz`` that it has."""

EXEMPT = {
    "auth.files.read_file": "bytes of a file of this machine, not looked at",
    "auth.identity.SecretKey.from_bytes": "a secret of this machine; any 32 bytes are one",
    "auth.keyfile.load_key": "a file of this machine that others can't write, or it is refused",
    "auth.keyfile.load_or_create_key": "the same file",
    "auth.keys_file.parse_lines": "what parse_authorized_keys is made of",
    "auth.keys_file.read_keys_file": "bytes of a file of this machine, not looked at",
    "auth.shared_secret.SharedSecret.from_passphrase": "words of this machine's user",
    "mesh.collective.host.header.decode_rest": "integers, whatever the bytes are",
    "mesh.rpc.encoding.pickled.read_pickle": "for peers that may run any code; see test_pickles.py",
    "mesh.rpc.refs.passing.Incoming.unpack": "an item of a value: three ids and addresses, matched",
    "mesh.rpc.modules.RemoteModule.load_state_dict": "refuses, whatever it is given",
    "mesh.rpc.encoding.values.RefReader.unpack": "a protocol without a body",
    "mesh.device.api.read": "asks a peer; what comes is read by mesh.device.wire.read_answer",
    "mesh.train.checkpoint.load_checkpoint": "a file of this machine; damaged ones in test_fit.py",
    "mesh.train.replicated.Replicated.load": "takes what load_checkpoint has read",
    "mesh.train.strategy.Strategy.load": "as above",
    "tensor_bridge.reading.read_into": "a client of the wire messages; raw bytes are not parsed",
    "transport.admission.Admission.receive_introduction": "reads a hello, by Hello.from_value",
    "transport.process.records.decode": "this node's own process; bounds in test_records.py",
    "transport.protocol.batch.sending.SendPart.read": "bytes of this node, on their way out",
    "transport.stream.Stream.receive_message": "a length and a value, by transport.cbor.decode",
}
"""What is named like a parser, and why bytes from the network can't do harm there."""


def readers() -> Iterator[str]:
    """The qualified name of each public function and method that is named like a parser."""
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        for found in pkgutil.walk_packages(path, f"{package}."):
            if found.name.endswith("__main__"):
                continue
            module = importlib.import_module(found.name)
            for name, member in vars(module).items():
                if name.startswith("_") or getattr(member, "__module__", None) != found.name:
                    continue
                if inspect.isfunction(member) and READS.match(name):
                    yield f"{found.name}.{name}"
                if inspect.isclass(member):
                    for method, value in vars(member).items():
                        if READS.match(method) and not isinstance(value, property):
                            yield f"{found.name}.{name}.{method}"


def test_every_reader_of_the_packages_is_fuzzed_or_exempt() -> None:
    covered = {name for parser in PARSERS for name in parser.covers}
    known = covered | set(ELSEWHERE) | set(EXEMPT)
    assert set(readers()) <= known, "add a Parser to tests/parsers, or say why it needs none"


def test_nothing_is_listed_that_is_not_there() -> None:
    covered = {name for parser in PARSERS for name in parser.covers}
    assert not covered & set(EXEMPT)
    for name in (*covered, *ELSEWHERE, *EXEMPT):
        module, _, attribute = name.rpartition(".")
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, kind = module.rpartition(".")
            owner = getattr(importlib.import_module(module), kind)
        assert callable(getattr(owner, attribute)), name


def test_names_of_parsers_are_their_own() -> None:
    names = [parser.name for parser in PARSERS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("test", [test for tests in ELSEWHERE.values() for test in tests])
def test_what_is_fuzzed_elsewhere_is(test: str) -> None:
    path, _, name = test.partition("::")
    source = (Path(__file__).parents[2] / path).read_text()
    decorators = re.search(rf"((?:^@.*(?:\n[ )].*)*\n)+)def {name}\(", source, re.MULTILINE)
    assert decorators is not None
    assert "@pytest.mark.fuzz\n" in decorators[1]
    assert "max_examples" not in decorators[1]
