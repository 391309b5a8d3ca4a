from __future__ import annotations

import auth

PUBLIC = {
    *("ADMIN", "DEFAULT_SCOPES", "Denial", "Grant", "Quotas", "permits"),
    *("AccessDenied", "IdentityError", "KeyFileError", "MeshError", "TicketError", "TokenRefused"),
    *("AccessRequest", "ConnectRequest", "FetchRequest", "MintRequest", "ServiceRequest"),
    *("Authorizer", "AuthorizedKey", "AuthorizedKeys", "Credential", "Stage"),
    *("allow_any", "any_of", "decide", "decide_now", "deny_all"),
    *("all_of", "by_alpn", "by_service", "callback"),
    *("Challenge", "SharedSecret"),
    *("Capability", "Claim", "TokenBook", "TokenFacts", "TokenLimits", "TokenState"),
    *("Delegation", "Invite", "InviteBook", "PeerIdentity", "SocketAddress", "Ticket"),
    *("NodeId", "SecretKey", "certificate_for", "match_node", "node_id_of_certificate"),
    *("load_key", "load_or_create_key", "save_key"),
}


def test_public_names_are_pinned() -> None:
    assert len(auth.__all__) == len(PUBLIC)
    assert set(auth.__all__) == PUBLIC


def test_every_public_name_exists() -> None:
    for name in auth.__all__:
        assert hasattr(auth, name)
