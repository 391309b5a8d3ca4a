from __future__ import annotations

import copy
import pickle

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from auth import IdentityError, NodeId, SecretKey, match_node
from auth.identity import check_petname

raw_ids = st.binary(min_size=32, max_size=32).filter(lambda raw: not NodeId(raw).is_weak)

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P


def node(first: int) -> NodeId:
    return NodeId(bytes([first]) + bytes(range(1, 32)))


@given(raw_ids)
def test_the_text_form_is_read_back_in_either_case(raw: bytes) -> None:
    node_id = NodeId(raw)
    assert len(str(node_id)) == 52
    assert NodeId.parse(str(node_id)) == NodeId.parse(str(node_id).upper()) == node_id


@given(raw_ids)
def test_the_short_form_is_the_beginning(raw: bytes) -> None:
    node_id = NodeId(raw)
    assert node_id.short == f"{str(node_id)[:4]}-{str(node_id)[4:8]}"
    assert repr(node_id) == f"NodeId({node_id.short})"


@given(st.text(max_size=80))
def test_arbitrary_text_is_a_node_id_or_refused(text: str) -> None:
    try:
        node_id = NodeId.parse(text)
    except IdentityError:
        return
    assert str(node_id) == text.lower()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0 characters"),
        ("a" * 51, "51 characters"),
        ("b" * 53, "53 characters"),
        ("1" + "a" * 51, "alphabet"),
        ("b" * 52, "altered"),
        ("ä" + "a" * 51, "alphabet"),
        ("a" * 52, "anybody can sign"),
    ],
)
def test_a_bad_text_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(IdentityError, match=why):
        NodeId.parse(text)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_only_32_bytes_are_a_node_id(length: int) -> None:
    with pytest.raises(IdentityError, match="32 bytes"):
        NodeId(bytes(length))
    with pytest.raises(IdentityError, match="32 bytes"):
        SecretKey.from_bytes(bytes(length))


def test_node_ids_are_hashable_and_ordered() -> None:
    assert {node(1), node(1)} == {node(1)}
    assert sorted([node(2), node(1)]) == [node(1), node(2)]


def test_a_signature_is_by_one_key_over_one_message() -> None:
    key, other = SecretKey.generate(), SecretKey.generate()
    signature = key.sign(b"message")
    assert key.node_id.verify(signature, b"message")
    assert not key.node_id.verify(signature, b"massage")
    assert not other.node_id.verify(signature, b"message")
    assert not key.node_id.verify(signature[:-1], b"message")
    assert not key.node_id.verify(b"", b"message")


def test_a_key_survives_its_bytes() -> None:
    key = SecretKey.generate()
    again = SecretKey.from_bytes(key.to_bytes())
    assert again.node_id == key.node_id
    assert again.sign(b"x") == key.sign(b"x")


def test_a_secret_key_shows_nothing_and_can_not_be_copied() -> None:
    key = SecretKey.generate()
    assert repr(key) == str(key) == f"SecretKey(node {key.node_id.short})"
    for copies in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="can't be pickled or copied"):
            copies(key)


def small_order_points() -> set[tuple[int, int]]:
    """All points of small order, found by the arithmetic of the curve (RFC 8032 section 5.1.4)."""

    def add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        (x1, y1), (x2, y2) = a, b
        t = D * x1 * x2 * y1 * y2
        return (
            (x1 * y2 + x2 * y1) * pow(1 + t, -1, P) % P,
            (y1 * y2 + x1 * x2) * pow(1 - t, -1, P) % P,
        )

    def times(n: int, point: tuple[int, int]) -> tuple[int, int]:
        result = (0, 1)
        while n:
            if n & 1:
                result = add(result, point)
            point, n = add(point, point), n >> 1
        return result

    order = 2**252 + 27742317777372353535851937790883648493
    y = 2
    while True:
        square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
        x = pow(square, (P + 3) // 8, P)
        if x * x % P != square:
            x = x * pow(2, (P - 1) // 4, P) % P
        if x * x % P == square:
            torsion = times(order, (x, y))
            multiples = {times(n, torsion) for n in range(8)}
            if len(multiples) == 8:
                return multiples
        y += 1


def test_every_point_of_small_order_is_weak() -> None:
    for x, y in small_order_points():
        raw = (y | (x & 1) << 255).to_bytes(32, "little")
        assert NodeId(raw).is_weak
    for spelled_again in (P, P + 1):
        assert NodeId(spelled_again.to_bytes(32, "little")).is_weak
    assert not SecretKey.generate().node_id.is_weak


def test_a_signature_that_needs_no_secret_is_no_signature() -> None:
    # Under the identity point, R = S = "zero" satisfies the equation for every message.
    identity = (1).to_bytes(32, "little")
    forged = identity + bytes(32)
    Ed25519PublicKey.from_public_bytes(identity).verify(forged, b"anything")  # control: it passes
    assert not NodeId(identity).verify(forged, b"anything")


@pytest.mark.parametrize("name", ["gpu-a", "A", "7", "a.b_c-d", "x" * 63])
def test_petnames(name: str) -> None:
    assert check_petname(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "-a", ".a", "a b", "a=b", "a#b", "x" * 64, "ä", "a\n", "k7f3-7q2m", "K7F3-7Q2M", "a" * 52],
)
def test_bad_petnames(name: str) -> None:
    with pytest.raises(IdentityError, match="petname"):
        check_petname(name)


class TestMatchNode:
    a = NodeId.parse("abcdefgh" + "a" * 44)
    b = NodeId.parse("abcdzzzz" + "a" * 44)
    c = NodeId.parse("cccccccc" + "a" * 44)
    known = {a: "gpu-a", b: None, c: "abcd"}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            (str(a), a),
            (str(a).upper(), a),
            (a.short, a),
            ("abcd-e", a),
            ("abcde", a),
            ("abcd-zzzz", b),
            ("gpu-a", a),
            (" gpu-a ", a),
            ("cccc", c),
        ],
    )
    def test_each_way_to_write_a_node(self, text: str, found: NodeId) -> None:
        assert match_node(text, self.known) == found

    def test_a_petname_goes_before_a_prefix(self) -> None:
        assert match_node("abcd", self.known) == self.c

    def test_an_ambiguous_prefix_names_those_it_could_mean(self) -> None:
        with pytest.raises(IdentityError) as caught:
            match_node("abcd", {self.a: "gpu-a", self.b: None})
        assert "gpu-a (abcd-efgh), abcd-zzzz" in str(caught.value)

    def test_a_petname_used_twice_is_ambiguous(self) -> None:
        with pytest.raises(IdentityError, match="could be any"):
            match_node("gpu", {self.a: "gpu", self.b: "gpu"})

    @pytest.mark.parametrize("text", ["ccc", "dddd", "", "GPU-A", "-", "d" * 52, str(node(9))])
    def test_what_names_none_lists_the_known(self, text: str) -> None:
        with pytest.raises(IdentityError, match=r"none of the known ones: gpu-a \(abcd-efgh\)"):
            match_node(text, self.known)

    def test_with_none_known_it_says_so(self) -> None:
        with pytest.raises(IdentityError, match="no node is known yet"):
            match_node("abcd", {})

    def test_a_long_list_is_cut(self) -> None:
        with pytest.raises(IdentityError, match="12 more"):
            match_node("none", {node(n): None for n in range(20)})
