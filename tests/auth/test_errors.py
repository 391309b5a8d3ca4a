from __future__ import annotations

import pickle

import pytest

from auth import (
    AccessDenied,
    Denial,
    IdentityError,
    KeyFileError,
    MeshError,
    TicketError,
    TokenRefused,
)


def test_a_message_joins_what_is_known() -> None:
    error = MeshError(
        "move of tensor 'w'",
        peer="gpu-a (k7f3-9q2m)",
        stage="claim",
        after=1.23,
        why="the token has expired",
        fix="Ask the owner for a new one.",
    )
    assert str(error) == (
        "move of tensor 'w' with gpu-a (k7f3-9q2m) at stage 'claim' after 1.2 s: "
        "the token has expired. Ask the owner for a new one."
    )
    asked = MeshError("move", why=str(MeshError("send", fix="Is it there?")), fix="Look.")
    assert str(asked) == "move: send. Is it there? Look."
    assert str(MeshError("move")) == "move"


def test_a_reason_that_is_a_sentence_keeps_its_one_full_stop() -> None:
    inner = IdentityError("node id 'x'", why="it is short", fix="Copy it again.")
    outer = IdentityError("reading a file", why=str(inner), fix="Correct it.")
    assert str(outer) == "reading a file: node id 'x': it is short. Copy it again. Correct it."


def test_no_message_is_empty() -> None:
    with pytest.raises(ValueError, match="what failed"):
        MeshError("")


def test_an_error_survives_pickling_with_all_its_parts() -> None:
    error = AccessDenied("access", peer="a", stage="connect", after=1.0, why="b", fix="c")
    error.denial = Denial("closed", "b")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is AccessDenied
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("kind", "parent", "code", "exit_code"),
    [
        (IdentityError, MeshError, "identity", 2),
        (KeyFileError, IdentityError, "key-file", 2),
        (TicketError, IdentityError, "ticket", 2),
        (AccessDenied, MeshError, "denied", 4),
        (TokenRefused, AccessDenied, "token-refused", 4),
    ],
)
def test_the_tree(
    kind: type[MeshError], parent: type[MeshError], code: str, exit_code: int
) -> None:
    assert kind.__bases__ == (parent,)
    assert (kind.code, kind.exit_code) == (code, exit_code)
    assert AccessDenied("access").denial is None
