"""Records of TLS that carry nothing, and cost the proxy work and answers."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from hashlib import sha384
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from tests.attacks.network.proxied import (
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

MANY = 80_000
# KeyUpdate that asks for another one.
UPDATE = b"\x18\x00\x00\x01\x01"


class Sender:
    """The sending side of a program in TLS 1.3, whose keys the test knows (RFC 8446)."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._start()

    def _start(self) -> None:
        self._key = AESGCM(self._expand(b"key", 32))
        self._iv = int.from_bytes(self._expand(b"iv", 12), "big")
        self._number = 0

    def _expand(self, label: bytes, size: int) -> bytes:
        name = b"tls13 " + label
        info = size.to_bytes(2, "big") + bytes([len(name)]) + name + b"\0"
        return HKDFExpand(SHA384(), size, info).derive(self._secret)

    def record(self, kind: int, content: bytes) -> bytes:
        head = b"\x17\x03\x03" + (len(content) + 17).to_bytes(2, "big")
        nonce = (self._iv ^ self._number).to_bytes(12, "big")
        self._number += 1
        return head + self._key.encrypt(nonce, content + bytes([kind]), head)

    def update(self) -> bytes:
        found = self.record(22, UPDATE)
        self._secret = self._expand(b"traffic upd", sha384().digest_size)
        self._start()
        return found


def sender_of(door: Door, upstream: Upstream, folder: Path) -> tuple[socket.socket, Sender]:
    """A connection whose handshake is done, from which nothing was sent."""
    context = door.trust()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.keylog_filename = str(folder / "keys")
    sock = door.tls(GOOD, upstream.port, context)
    cipher = sock.cipher()
    assert cipher is not None
    assert cipher[0] == "TLS_AES_256_GCM_SHA384"
    lines = (folder / "keys").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith("CLIENT_TRAFFIC_SECRET_0 ")]
    raw = socket.socket(fileno=sock.detach())
    raw.settimeout(30)
    return raw, Sender(bytes.fromhex(words[-1][2]))


@pytest.fixture
def upstream(proxied: Proxied) -> Upstream:
    return proxied.secure()


@pytest.fixture
def door(proxied: Proxied, upstream: Upstream) -> Door:
    return proxied.door(holding(credential(upstream.bound()), lines=[upstream.rule]))


def test_new_keys_are_a_positive_control(door: Door, upstream: Upstream, tmp_path: Path) -> None:
    sock, sender = sender_of(door, upstream, tmp_path)
    with sock:
        sock.sendall(sender.update() + sender.update())
        sock.sendall(sender.record(23, inner(upstream, "/", "Connection: close")))
        while sock.recv(1 << 16):
            pass
    assert len(upstream.heads) == 1
    assert door.only().outcome == "allowed"


@pytest.mark.parametrize("kind", ["new keys", "empty"])
def test_records_without_content_come_to_an_end(
    door: Door, upstream: Upstream, tmp_path: Path, kind: str
) -> None:
    """No budget counts them, and each has an answer that waits for the program to read it."""
    sock, sender = sender_of(door, upstream, tmp_path)
    with sock:
        # Less than the time of a head, which would end it, too.
        sock.settimeout(15)
        with suppress(ConnectionError):
            for _ in range(MANY // 100):
                records = (
                    sender.update() if kind == "new keys" else sender.record(23, b"")
                    for _ in range(100)
                )
                sock.sendall(b"".join(records))
        read_all(sock)
    door.wait_until_idle()
    assert upstream.connections == 0
    assert status_of(door.ask(upstream)) == 200
