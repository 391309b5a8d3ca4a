from __future__ import annotations

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from auth import IdentityError, SecretKey, certificate_for, node_id_of_certificate


def test_a_certificate_leads_back_to_its_node() -> None:
    key = SecretKey.generate()
    der = certificate_for(key).public_bytes(Encoding.DER)
    assert node_id_of_certificate(x509.load_der_x509_certificate(der)) == key.node_id


def test_a_key_has_one_certificate() -> None:
    key = SecretKey.generate()
    assert certificate_for(key) == certificate_for(SecretKey.from_bytes(key.to_bytes()))
    assert certificate_for(key) != certificate_for(SecretKey.generate())


def test_it_is_self_signed_and_names_the_node() -> None:
    key = SecretKey.generate()
    certificate = certificate_for(key)
    certificate.verify_directly_issued_by(certificate)
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert name.value == str(key.node_id)


@pytest.mark.parametrize("year", [1971, 2026, 2400])
def test_it_is_valid_whatever_the_clock_says(year: int) -> None:
    certificate = certificate_for(SecretKey.generate())
    now = datetime.datetime(year, 1, 1, tzinfo=datetime.UTC)
    assert certificate.not_valid_before_utc < now < certificate.not_valid_after_utc


def test_a_certificate_of_another_kind_of_key_names_no_node() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(SecretKey.generate().node_id))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(2100, 1, 1))
        .sign(key, hashes.SHA256())
    )
    with pytest.raises(IdentityError, match="not an Ed25519 key"):
        node_id_of_certificate(certificate)


def test_a_key_that_anybody_can_sign_with_names_no_node() -> None:
    key = SecretKey.generate()
    der = certificate_for(key).public_bytes(Encoding.DER)
    assert der.count(key.node_id.raw) == 1
    weak = der.replace(key.node_id.raw, (1).to_bytes(32, "little"))
    with pytest.raises(IdentityError, match="anybody can sign"):
        node_id_of_certificate(x509.load_der_x509_certificate(weak))
