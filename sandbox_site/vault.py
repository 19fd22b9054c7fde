"""The server that has values of network credentials, as the settings name it."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from environ.compat import ImproperlyConfigured

from sandbox_site.environment import PROJECT, StrictEnv

_URL = re.compile(r"https?://[^\s/?#@\\]+/?")
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*/?")


class Server(NamedTuple):
    """`ca` is PEM text. All are empty where there is no server."""

    url: str = ""
    token: str = ""
    namespace: str = ""
    ca: str = ""


def server(env: StrictEnv, allowed: Iterable[str]) -> Server:
    """Read the VAULT_ variables. `allowed` is VAULT_ALLOWED_NETWORKS.

    Raises ImproperlyConfigured, in which the token is not.
    """
    url, token = env.str("VAULT_URL"), env.secret("VAULT_TOKEN")
    namespace, file = env.str("VAULT_NAMESPACE"), env.str("VAULT_CA_FILE")
    if not url:
        others = {"VAULT_TOKEN": token, "VAULT_NAMESPACE": namespace, "VAULT_CA_FILE": file}
        if given := [name for name, value in others.items() if value]:
            raise ImproperlyConfigured(
                f"{given[0]} needs VAULT_URL, such as https://vault.example.com:8200"
            )
        return Server()
    if not token:
        raise ImproperlyConfigured("VAULT_URL needs VAULT_TOKEN or VAULT_TOKEN_FILE")
    _check_url(url, allowed)
    if not re.fullmatch("[!-~]+", token):
        raise ImproperlyConfigured("VAULT_TOKEN: must be printable ASCII, without spaces")
    if namespace and not _NAMESPACE.fullmatch(namespace):
        raise ImproperlyConfigured(f"VAULT_NAMESPACE: {namespace!r} is not a namespace")
    return Server(url.rstrip("/"), token, namespace, _ca(file, url))


def _check_url(url: str, allowed: Iterable[str]) -> None:
    from providers.addresses import Allowed, Rules

    try:
        is_address = _URL.fullmatch(url) is not None and urlsplit(url).port != 0
    except ValueError:
        is_address = False
    if not is_address:
        # Not its text, in which a password may be.
        raise ImproperlyConfigured("VAULT_URL: must be such as https://vault.example.com:8200")
    entries = tuple(map(Allowed.parse, allowed))
    try:
        Rules(entries, entries).check_url(url)
    except ValueError:
        raise ImproperlyConfigured(
            f"VAULT_URL: {url} is plain http or not a public address. Name it in "
            "VAULT_ALLOWED_NETWORKS, or use another one"
        ) from None


def _ca(file: str, url: str) -> str:
    if not file:
        return ""
    if url.startswith("http:"):
        raise ImproperlyConfigured("VAULT_CA_FILE: plain http has no certificates. Use https")
    try:
        text = (PROJECT / file).read_text(encoding="ascii")
        ssl.create_default_context(cadata=text)
    except (OSError, UnicodeDecodeError, ssl.SSLError) as error:
        raise ImproperlyConfigured(f"VAULT_CA_FILE: cannot read {file}: {error}") from None
    return text
