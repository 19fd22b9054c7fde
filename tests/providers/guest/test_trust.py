"""The files by which programs of a sandbox trust its own authority."""

from __future__ import annotations

import base64
import hashlib
import os
import struct
from pathlib import Path

import pytest

from providers.runtime.guest import trust
from tests.support.certificates import Authority


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "system.pem"
    system.write_text(Authority().pem)
    monkeypatch.setattr(trust, "_SYSTEM", (str(tmp_path / "none"), str(system)))
    monkeypatch.setattr(trust, "BUNDLE", str(tmp_path / "bundle.pem"))
    monkeypatch.setattr(trust, "_JAVA_STORE", str(tmp_path / "store.jks"))
    monkeypatch.setattr(trust, "_last", "")


def entries(store: bytes) -> list[bytes]:
    """The certificates of a store of Java, whose end is a digest of it with its password."""
    body, digest = store[:-20], store[-20:]
    password = "changeit".encode("utf-16-be") + b"Mighty Aphrodite"
    assert hashlib.sha1(password + body, usedforsecurity=False).digest() == digest
    magic, version, count = struct.unpack_from(">III", body)
    assert (magic, version) == (0xFEEDFEED, 2)
    found, at = [], 12
    for _ in range(count):
        (size,) = struct.unpack_from(">H", body, at + 4)
        at += 4 + 2 + size + 8
        (size,) = struct.unpack_from(">H", body, at)
        at += 2 + size
        (size,) = struct.unpack_from(">I", body, at)
        found.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    assert at == len(body)
    return found


def test_the_bundle_and_the_store_have_the_usual_authorities_and_the_own(tmp_path: Path) -> None:
    own = Authority().pem
    environment = trust.extend({"JAVA_TOOL_OPTIONS": "-Da=b", "CURL_CA_BUNDLE": "/mine"}, own)
    bundle = Path(trust.BUNDLE).read_text()
    assert bundle.count("BEGIN CERTIFICATE") == 2
    assert bundle.endswith(own)
    usual, added = entries((tmp_path / "store.jks").read_bytes())
    assert usual != added
    assert base64.b64encode(added).decode() == "".join(own.splitlines()[1:-1])
    assert environment["SSL_CERT_FILE"] == environment["NODE_EXTRA_CA_CERTS"] == trust.BUNDLE
    assert environment["CURL_CA_BUNDLE"] == "/mine"
    store = tmp_path / "store.jks"
    assert environment["JAVA_TOOL_OPTIONS"] == f"-Da=b -Djavax.net.ssl.trustStore={store}"


def test_what_a_program_puts_in_the_way_costs_it_its_own_trust(tmp_path: Path) -> None:
    os.mkdir(trust.BUNDLE)
    assert trust.extend({"A": "b"}, Authority().pem) == {"A": "b"}
    os.rmdir(trust.BUNDLE)
    os.symlink("/etc/passwd", trust.BUNDLE)
    trust.extend({}, Authority().pem)
    assert not os.path.islink(trust.BUNDLE)


def test_another_authority_takes_the_place_of_the_former() -> None:
    for own in (Authority().pem, Authority().pem):
        trust.extend({}, own)
        assert Path(trust.BUNDLE).read_text().endswith(own)
