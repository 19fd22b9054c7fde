"""What programs trust when they speak TLS: the usual authorities, and the one of this sandbox.

The usual tools read one file of certificates that a variable names; Java reads a store of its own
kind. Both are files in /tmp, which a program may change for itself alone.
"""

import base64
import hashlib
import os
import struct

BUNDLE = "/tmp/.cofferdam-authorities.pem"
_JAVA_STORE = "/tmp/.cofferdam-authorities.jks"
# Where systems have the certificates they trust: Debian and Alpine, Fedora, SUSE.
_SYSTEM = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
# Those of OpenSSL and Python, requests, curl, git, pip, and what Deno and cargo read.
_VARIABLES = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT"),
    *("DENO_CERT", "CARGO_HTTP_CAINFO", "AWS_CA_BUNDLE"),
)
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
# Java asks for one, and protects nothing by it.
_PASSWORD = "changeit"


_last = ""


def extend(environment: "dict[str, str]", certificate: str) -> "dict[str, str]":
    """Add what has programs trust a certificate in PEM. What the environment says itself stays."""
    try:
        _write_files(certificate)
    except OSError:
        # A program has put something in the way, or has filled /tmp: it will trust nothing.
        return environment
    trusted = {**dict.fromkeys(_VARIABLES, BUNDLE), "NODE_EXTRA_CA_CERTS": BUNDLE, **environment}
    options = environment.get("JAVA_TOOL_OPTIONS", "")
    if "trustStore=" not in options:
        trusted["JAVA_TOOL_OPTIONS"] = f"{options} -Djavax.net.ssl.trustStore={_JAVA_STORE}".strip()
    return trusted


def _write_files(certificate: str) -> None:
    """Raises OSError."""
    global _last
    if certificate == _last and os.path.lexists(BUNDLE):
        return
    bundle = _read_system() + certificate
    _write(BUNDLE, bundle.encode())
    _write(_JAVA_STORE, java_store(bundle))
    _last = certificate


def java_store(bundle: str) -> bytes:
    """A keystore of Java (JKS, version 2) with the certificates of a bundle."""
    found = [_der(part) for part in bundle.split(_BEGIN)[1:]]
    body = struct.pack(">III", 0xFEEDFEED, 2, len(found))
    for number, certificate in enumerate(found):
        body += struct.pack(">I", 2) + _text(str(number)) + bytes(8) + _text("X.509")
        body += struct.pack(">I", len(certificate)) + certificate
    # The store's own checksum, which is no signature.
    said = _PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + body
    return body + hashlib.sha1(said, usedforsecurity=False).digest()


def _der(part: str) -> bytes:
    return base64.b64decode(part.partition(_END)[0])


def _text(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()


def _read_system() -> str:
    for path in _SYSTEM:
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().rstrip() + "\n"
        except OSError:
            continue
    return ""


def _write(path: str, content: bytes) -> None:
    """Replace a file as a whole, whatever a program has put in its place."""
    new = f"{path}.{os.getpid()}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        os.rename(new, path)
    except OSError:
        os.unlink(new)
        raise
