"""What a tenant or a redirect may give for a URL."""

from __future__ import annotations

import re
from urllib.parse import urljoin

import httpx

from executions.services.fetching.destinations import BAD_PORTS
from executions.services.fetching.errors import FetchError, Reason
from providers.addresses import Rules, is_host, literal

MOST_CHARACTERS = 8192

_PORTS = {"http": 80, "https": 443}


def read_url(text: str, to: Rules) -> httpx.URL:
    """The URL that `text` is, without fragment, its host in ASCII. Raises FetchError.

    Names are not resolved. An address that the host spells out is checked already.
    """
    text = text.strip()
    if len(text) > MOST_CHARACTERS:
        raise _refused(f"The URL has more than {MOST_CHARACTERS} characters.")
    if "\\" in text or not text.isprintable():
        # Which readers of URLs understand in several ways.
        raise _refused("The URL has a backslash or a character that cannot be seen.")
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, UnicodeError):
        raise _refused("This is not a URL.") from None
    if url.scheme not in _PORTS:
        raise _refused("The URL must begin with https:// or http://.")
    if url.userinfo or "@" in re.split("[/?#]", text.partition("//")[2])[0]:
        raise _refused("The URL has a user or password. They are not supported.")
    host = url.raw_host.decode("ascii")
    if not is_host(host):
        raise _refused("The URL names no host.")
    if port_of(url) in BAD_PORTS or not 0 < port_of(url) < 65536:
        raise _refused("Files may not be fetched from the URL's port.")
    address = literal(host)
    if address is not None and not to.is_allowed(host, address, port_of(url)):
        raise FetchError(Reason.HOST, "Files may not be fetched from the URL's address.")
    return url.copy_with(fragment=None)


def redirected(url: httpx.URL, location: str, to: Rules) -> httpx.URL:
    """Where a redirect from `url` leads, checked as any URL is. Raises FetchError."""
    try:
        joined = urljoin(str(url), location)
    except ValueError:
        raise FetchError(Reason.REDIRECTS, "The server redirects to an invalid URL.") from None
    try:
        new = read_url(joined, to)
    except FetchError as error:
        text = f"The server redirects elsewhere, which is refused: {error.text}"
        raise FetchError(error.reason, text) from None
    if url.scheme == "https" and new.scheme == "http":
        raise FetchError(Reason.REDIRECTS, "The server redirects from https to http.")
    return new


def port_of(url: httpx.URL) -> int:
    return _PORTS[url.scheme] if url.port is None else url.port


def without_secrets(url: httpx.URL) -> str:
    """A URL to be shown and kept: signatures and tokens are in the query."""
    return str(url.copy_with(query=None))


def _refused(text: str) -> FetchError:
    return FetchError(Reason.URL, text)
