"""The authority of a sandbox: what it signs, and who believes it."""

from __future__ import annotations

import gc
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from providers.runtime.network.authority import MOST_HOSTS, Authority
from tests.attacks.network.issued import server_context
from tests.attacks.network.proxied import (
    ADDRESS,
    EVIL,
    GOOD,
    Door,
    Proxied,
    Upstream,
    credential,
    holding,
    inner,
    read_all,
    status_of,
)


@pytest.fixture
def upstream(proxied: Proxied) -> Upstream:
    return proxied.secure()


@pytest.fixture
def door(proxied: Proxied, upstream: Upstream) -> Door:
    return proxied.door(holding(credential(upstream.bound()), lines=[upstream.rule]))


def shown_chain(door: Door, upstream: Upstream, host: str = GOOD) -> x509.Certificate:
    with door.tls(host, upstream.port) as sock:
        der = sock.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der)


def shake_hands(server: ssl.SSLContext, trusted: str, host: str) -> None:
    """Raises SSLError where a client that trusts this does not believe that server."""
    one, two = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cadata=trusted).wrap_bio(one, two, server_hostname=host)
    serving = server.wrap_bio(two, one, server_side=True)
    for _ in range(4):
        for each in (client, serving):
            try:
                each.do_handshake()
            except ssl.SSLWantReadError:
                continue


def test_it_may_sign_no_further_authority(door: Door) -> None:
    own = x509.load_pem_x509_certificate(door.authority.certificate)
    basic = own.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (basic.critical, basic.value.ca, basic.value.path_length) == (True, True, 0)
    usage = own.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert usage.value.key_cert_sign
    assert not usage.value.digital_signature


def test_a_leaf_names_its_host_alone(door: Door, upstream: Upstream) -> None:
    leaf = shown_chain(door, upstream)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName(GOOD)]
    basic = leaf.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not basic.ca
    usage = leaf.extensions.get_extension_for_class(x509.KeyUsage).value
    assert not usage.key_cert_sign
    kinds = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(kinds) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert EVIL not in str(leaf.subject)


def test_an_address_is_named_as_one(proxied: Proxied) -> None:
    upstream = Upstream(b"", ADDRESS)
    upstream.port = proxied.server(upstream.handle, proxied.authority.context(ADDRESS))
    door = proxied.door(holding(credential(upstream.bound()), lines=[upstream.rule]))
    leaf = shown_chain(door, upstream, ADDRESS)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each.value) for each in names] == [ADDRESS]


def test_a_leaf_signs_nothing_that_is_believed(door: Door) -> None:
    """Even of a program that had the key of a leaf."""
    leaf_key = ec.generate_private_key(ec.SECP256R1())
    authority = Authority.create()
    key = serialization.load_pem_private_key(authority.to_pem(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    own = x509.load_pem_x509_certificate(authority.certificate)
    for is_authority in (False, True):
        middle = _signed(leaf_key.public_key(), GOOD, own.subject, key, own, is_authority)
        end_key = ec.generate_private_key(ec.SECP256R1())
        end = _signed(end_key.public_key(), EVIL, middle.subject, leaf_key, own, False)
        pem = end_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        for each in (end, middle):
            pem += each.public_bytes(serialization.Encoding.PEM)
        with pytest.raises(ssl.SSLError):
            shake_hands(server_context(pem), authority.certificate.decode(), EVIL)


def _signed(
    public: ec.EllipticCurvePublicKey,
    host: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    dates: x509.Certificate,
    is_authority: bool,
) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)]))
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(dates.not_valid_before_utc)
        .not_valid_after(dates.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, SHA256())
    )


def test_a_leaf_is_believed_as_a_positive_control() -> None:
    authority = Authority.create()
    shake_hands(authority.context_for(GOOD), authority.certificate.decode(), GOOD)
    with pytest.raises(ssl.SSLError):
        shake_hands(authority.context_for(GOOD), authority.certificate.decode(), EVIL)


def test_two_sandboxes_have_two(proxied: Proxied, door: Door, upstream: Upstream) -> None:
    other = proxied.door(door.gate.network)
    assert other.authority.certificate != door.authority.certificate
    with pytest.raises(ssl.SSLCertVerificationError):
        door.tls(GOOD, upstream.port, other.trust())
    with pytest.raises(ssl.SSLCertVerificationError):
        other.tls(GOOD, upstream.port, door.trust())
    with door.tls(GOOD, upstream.port) as one, other.tls(GOOD, upstream.port) as two:
        assert one.getpeercert(True) != two.getpeercert(True)


def test_no_key_is_in_what_the_program_gets(door: Door, upstream: Upstream) -> None:
    assert b"PRIVATE" not in door.authority.certificate
    assert door.authority.certificate.count(b"BEGIN") == 1
    answer = door.ask(upstream)
    assert b"PRIVATE" not in answer
    for each in (door.gate, door.authority, door.gate.network):
        assert "PRIVATE" not in repr(each)


def test_each_sandbox_and_each_host_has_a_key_of_its_own(proxied: Proxied) -> None:
    one, two = proxied.secure(), proxied.secure(host=EVIL)
    held = [credential(one.bound()), credential(two.bound(), name="second")]
    door = proxied.door(holding(*held, lines=[one.rule, two.rule]))
    keys = {
        leaf.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        for leaf in (shown_chain(door, one), shown_chain(door, two, EVIL))
    }
    own = x509.load_pem_x509_certificate(door.authority.certificate).public_key()
    keys.add(
        own.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    assert len(keys) == 3


def test_it_signs_no_host_that_the_list_does_not_allow(proxied: Proxied) -> None:
    evil = proxied.secure(host=EVIL)
    held = credential("https://good.example")
    door = proxied.door(holding(held, lines=["https://good.example", f"{EVIL}:{evil.port}"]))
    for host in (EVIL, f"x.{GOOD}"):
        with pytest.raises((OSError, AssertionError)):
            door.tls(host, evil.port)
    assert evil.connections == 0


def test_hosts_without_number_are_kept_in_bounded_memory() -> None:
    authority = Authority.create()
    for number in range(3 * MOST_HOSTS):
        authority.context_for(f"{number}.good.example")
    gc.collect()
    contexts = [each for each in gc.get_referents(authority.__dict__) if hasattr(each, "keys")]
    assert max(len(each) for each in contexts) <= MOST_HOSTS


def test_a_session_of_one_sandbox_is_none_of_another(
    proxied: Proxied, door: Door, upstream: Upstream
) -> None:
    """A ticket stands for a certificate that was checked."""
    other = proxied.door(holding(lines=[f"https://{upstream.rule}/x"]))
    context = door.trust()
    context.load_verify_locations(cadata=other.authority.certificate.decode())
    with door.tls(GOOD, upstream.port, context) as sock:
        sock.sendall(inner(upstream, "/", "Connection: close"))
        assert status_of(read_all(sock)) == 200
        session = sock.session
    raw = other.tunnel(GOOD, upstream.port)
    with context.wrap_socket(raw, server_hostname=GOOD, session=session) as sock:
        assert not sock.session_reused
