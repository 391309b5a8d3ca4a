from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auth import ADMIN, DEFAULT_SCOPES, Denial, Grant, Quotas, permits
from auth.grant import check_scopes

words = st.sampled_from(["a", "b", "tensor", "my-job", "x.y_z"])
scopes = st.one_of(
    st.just("*"),
    st.builds(":".join, st.lists(words, min_size=1, max_size=3)),
    st.builds(lambda parts: ":".join([*parts, "*"]), st.lists(words, min_size=1, max_size=2)),
)
exact_scopes = st.builds(":".join, st.lists(words, min_size=1, max_size=4))
scope_sets = st.frozensets(scopes, max_size=4)


@pytest.mark.parametrize(
    ("granted", "asked", "answer"),
    [
        ("tensor", "tensor", True),
        ("tensor", "tensor:put", True),
        ("tensor", "tensor:put:big", True),
        ("tensor", "tensor:*", True),
        ("tensor", "tensors", False),
        ("tensor", "node", False),
        ("tensor", "*", False),
        ("tensor:put", "tensor:put", True),
        ("tensor:put", "tensor", False),
        ("tensor:put", "tensor:get", False),
        ("tensor:put", "tensor:putter", False),
        ("collective:*", "collective:job", True),
        ("collective:*", "collective:*", True),
        ("collective:*", "collective", False),
        ("collective:*", "collectives:job", False),
        ("*", "tensor:put", True),
        ("*", ADMIN, True),
        ("*", "*", True),
    ],
)
def test_what_a_scope_covers(granted: str, asked: str, answer: bool) -> None:
    assert permits([granted], asked) is answer
    assert permits(["other", granted], asked) is answer
    assert Grant(frozenset({granted})).permits(asked) is answer


def test_nothing_granted_permits_nothing() -> None:
    assert not permits([], "tensor")
    assert not Grant(frozenset()).permits("tensor")


def test_the_defaults_leave_the_node_alone() -> None:
    assert not permits(DEFAULT_SCOPES, ADMIN)
    assert not permits(DEFAULT_SCOPES, "*")


@pytest.mark.parametrize(
    "scope",
    [
        "",
        ":",
        "a:",
        ":a",
        "a::b",
        "a b",
        "a,b",
        "a*",
        "*a",
        "*:a",
        "a:*:b",
        "**",
        "ä",
        "a\n",
        "-a",
        "a" * 129,
    ],
)
def test_a_malformed_scope_is_refused(scope: str) -> None:
    with pytest.raises(ValueError, match="not a scope"):
        check_scopes(["tensor", scope])
    with pytest.raises(ValueError, match="not a scope"):
        Grant(frozenset({scope}))


def test_scopes_are_sorted_and_unique() -> None:
    assert check_scopes(["b", "a", "b"]) == ("a", "b")


def test_scopes_are_bounded_and_text() -> None:
    assert len(check_scopes(f"s{n}" for n in range(64))) == 64
    with pytest.raises(ValueError, match="more than 64"):
        check_scopes(f"s{n}" for n in range(65))
    with pytest.raises(ValueError, match="text"):
        check_scopes([b"tensor"])
    with pytest.raises(TypeError, match="not one"):
        check_scopes("tensor")


@given(scope_sets, scope_sets, exact_scopes)
def test_restricting_keeps_exactly_what_both_permit(
    have: frozenset[str], want: frozenset[str], asked: str
) -> None:
    left = Grant(have).restrict(want)
    assert left.permits(asked) is (permits(have, asked) and permits(want, asked))


@given(scope_sets, scope_sets, scopes)
def test_restricting_never_widens(have: frozenset[str], want: frozenset[str], asked: str) -> None:
    if Grant(have).restrict(want).permits(asked):
        assert permits(have, asked)
        assert permits(want, asked)


@pytest.mark.parametrize(
    ("own", "other", "left"),
    [(None, None, None), (5.0, None, 5.0), (None, 5.0, 5.0), (4.0, 5.0, 4.0)],
)
def test_restricting_keeps_the_sooner_end(
    own: float | None, other: float | None, left: float | None
) -> None:
    quotas = Quotas(max_bytes=7)
    grant = Grant(frozenset({"a"}), own, quotas).restrict(["a"], expires_at=other)
    assert grant == Grant(frozenset({"a"}), left, quotas)


def test_expiry() -> None:
    assert not Grant(frozenset()).expired(1e10)
    grant = Grant(frozenset(), expires_at=10.0)
    assert not grant.expired(9.99)
    assert grant.expired(10.0)


@pytest.mark.parametrize("name", ["max_bytes", "max_objects", "max_streams"])
def test_quotas_are_not_negative(name: str) -> None:
    Quotas(**{name: 0})
    with pytest.raises(ValueError, match=name):
        Quotas(**{name: -1})


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "x"),
        ("Not", "x"),
        ("a b", "x"),
        ("a" * 33, "x"),
        ("a\n", "x"),
        ("a", ""),
        ("a", "x" * 257),
    ],
)
def test_a_denial_has_a_code_and_a_reason(code: str, reason: str) -> None:
    Denial("not-authorized", "x" * 256)
    Denial("not-authorized", "x", "y" * 256)
    for fix in ("", "y" * 257):
        with pytest.raises(ValueError, match="a fix has"):
            Denial("not-authorized", "x", fix)
    with pytest.raises(ValueError, match=r"code|reason"):
        Denial(code, reason)


def test_answers_travel_between_processes() -> None:
    for answer in (Grant(frozenset({"a"}), 1.0, Quotas(1, 2, 3)), Denial("no", "because")):
        assert pickle.loads(pickle.dumps(answer)) == answer
