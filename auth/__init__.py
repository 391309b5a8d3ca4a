"""Keys, node ids, tickets, authorizers, grants and capability tokens.

Knows no torch, no network, and no files but its own.
"""

from __future__ import annotations

from auth.authorized_keys import AuthorizedKeys
from auth.authorizer import (
    AccessRequest,
    Authorizer,
    ConnectRequest,
    Credential,
    FetchRequest,
    MintRequest,
    ServiceRequest,
    Stage,
    allow_any,
    any_of,
    decide,
    decide_now,
    deny_all,
)
from auth.certificate import certificate_for, node_id_of_certificate
from auth.delegation import Delegation, PeerIdentity
from auth.errors import (
    AccessDenied,
    IdentityError,
    KeyFileError,
    MeshError,
    TicketError,
    TokenRefused,
)
from auth.grant import ADMIN, DEFAULT_SCOPES, Denial, Grant, Quotas, permits
from auth.identity import NodeId, SecretKey, match_node
from auth.invite import Invite, InviteBook
from auth.keyfile import load_key, load_or_create_key, save_key
from auth.keys_file import AuthorizedKey
from auth.policies import all_of, by_alpn, by_service, callback
from auth.proof import Challenge
from auth.shared_secret import SharedSecret
from auth.ticket import SocketAddress, Ticket
from auth.tokens import Capability, Claim, TokenBook, TokenFacts, TokenLimits, TokenState

__all__ = [
    # errors
    "MeshError",
    "IdentityError",
    "KeyFileError",
    "TicketError",
    "AccessDenied",
    "TokenRefused",
    # who a node is
    "NodeId",
    "SecretKey",
    "match_node",
    "load_key",
    "load_or_create_key",
    "save_key",
    "certificate_for",
    "node_id_of_certificate",
    "Delegation",
    "PeerIdentity",
    # how to reach it and get in
    "SocketAddress",
    "Ticket",
    "Invite",
    "InviteBook",
    # what a peer may do
    "ADMIN",
    "DEFAULT_SCOPES",
    "Grant",
    "Denial",
    "Quotas",
    "permits",
    # who decides
    "Authorizer",
    "AccessRequest",
    "ConnectRequest",
    "ServiceRequest",
    "MintRequest",
    "FetchRequest",
    "Credential",
    "Stage",
    "decide",
    "decide_now",
    "allow_any",
    "deny_all",
    "any_of",
    "all_of",
    "by_alpn",
    "by_service",
    "callback",
    "AuthorizedKeys",
    "AuthorizedKey",
    "SharedSecret",
    "Challenge",
    # capability tokens
    "TokenBook",
    "TokenFacts",
    "TokenLimits",
    "TokenState",
    "Capability",
    "Claim",
]
