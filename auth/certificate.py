"""The certificate that carries a node's key through TLS, and the way back to the node id.

No authority signs it and nothing in it but the key is believed: TLS 1.3 makes each side prove that
it holds the key (CertificateVerify, RFC 8446 section 4.4.3), and the node id *is* the key.
"""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import NameOID

from auth.errors import IdentityError
from auth.identity import NodeId, SecretKey

__all__ = ["certificate_for", "node_id_of_certificate"]

# A key does not age, and a peer's clock may be wrong by years: the certificate is valid throughout.
# The end is the date that RFC 5280 section 4.1.2.5 gives to "no well-defined expiration".
_NOT_BEFORE = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)

# With nothing random in it, a key has one certificate.
_SERIAL = 1


def certificate_for(key: SecretKey) -> x509.Certificate:
    """Return the self-signed certificate of ``key``, its common name the full node id.

    The same key gives the same bytes each time.
    """
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(key.node_id))])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.private.public_key())
        .serial_number(_SERIAL)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .sign(key.private, algorithm=None)
    )


def node_id_of_certificate(certificate: x509.Certificate) -> NodeId:
    """Return the node whose key ``certificate`` carries.

    The names, dates and signature in it are not looked at. The caller must have seen the peer prove
    that it holds the key.

    Raises:
        IdentityError: the key is not Ed25519, can't be read, or is one anybody can sign with.
    """
    what = "reading the peer's certificate"
    try:
        public = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise IdentityError(what, why="its key can't be read") from error
    if not isinstance(public, Ed25519PublicKey):
        raise IdentityError(what, why="its key is not an Ed25519 key, so it names no node")
    node_id = NodeId(public.public_bytes_raw())
    if node_id.is_weak:
        raise IdentityError(what, why="its key is one that anybody can sign with")
    return node_id
