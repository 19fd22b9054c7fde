"""Files of a template's packages, fetched through the network lists and the guard of addresses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import httpcore
import httpx
from django.conf import settings

from executions.capabilities.network import lists
from executions.kernel.http import (
    HEAD_BYTES,
    Budget,
    Destinations,
    FetchError,
    exchange,
    port_of,
    read_url,
    redirected,
)
from providers.addresses import Allowed
from providers.errors import CreationFailed, InvalidConfiguration
from providers.network import Layer, Network, NetworkPolicy, Target, normalized_host
from providers.remote.receiver import Receiver
from providers.templates.files import BuildFailed

MOST_REDIRECTS = 5
FILE_SECONDS = 600.0
_PAUSE_SECONDS = 30.0
_REDIRECTS = (301, 302, 303, 307, 308)

Fetch = Callable[[str, int], Iterator[bytes]]


def network_of_build(tenant_slug: str, rules: Sequence[str]) -> Network:
    """Return what a build of the tenant may reach: the hosts of these rules, within its lists.

    Raises BuildFailed where the lists do not allow one of them.
    """
    policy = NetworkPolicy.parse("allowlist", rules)
    try:
        lists.ensure_within(tenant_slug, policy)
    except InvalidConfiguration as error:
        raise BuildFailed(f"The package index cannot be reached. {error.message}") from None
    network = lists.network_for(tenant_slug, Layer("template", policy))
    if network is None:
        raise BuildFailed("The network lists allow no package index.")
    return network


def fetcher(network: Network, keep_on: Callable[[], None] = lambda: None) -> Fetch:
    """Return what fetches the content of an address. `keep_on` is called for each piece, and may
    raise to end it."""
    # As for the sandbox that resolved the packages, at the same index.
    allowed = tuple(map(Allowed.parse, settings.NETWORK_ALLOWED_ADDRESSES))
    receiver = Receiver(Destinations(allowed, (), "NETWORK_ALLOWED_ADDRESSES"))

    def fetch(address: str, most_bytes: int) -> Iterator[bytes]:
        try:
            yield from _content(address, most_bytes, network, receiver, keep_on)
        except FetchError as error:
            raise CreationFailed(f"It cannot be fetched: {error.text}") from None

    return fetch


def _content(
    address: str,
    most_bytes: int,
    network: Network,
    receiver: Receiver,
    keep_on: Callable[[], None],
) -> Iterator[bytes]:
    """Raises FetchError, and CreationFailed for an address that the lists do not allow."""
    url = read_url(address, receiver.rules)
    budget = Budget(time.monotonic() + FILE_SECONDS, _PAUSE_SECONDS)
    for _ in range(MOST_REDIRECTS + 1):
        _ensure_allowed(url, network)
        with exchange(url, receiver, budget) as answer:
            if answer.status in _REDIRECTS:
                url = redirected(url, _location(answer), receiver.rules)
                continue
            if answer.status != 200:
                raise CreationFailed(f"The server answers with the status {answer.status}.")
            # Frames of small pieces are larger than what is in them.
            budget.allow(2 * most_bytes + HEAD_BYTES)
            left = most_bytes
            for piece in answer.iter_stream():
                keep_on()
                left -= len(piece)
                if left < 0:
                    raise CreationFailed(f"The file has more than {most_bytes} bytes.")
                yield piece
            return
    raise CreationFailed(f"The server redirects more than {MOST_REDIRECTS} times.")


def _ensure_allowed(url: httpx.URL, network: Network) -> None:
    try:
        host = normalized_host(url.raw_host.decode("ascii"))
    except ValueError as error:
        raise CreationFailed(str(error)) from None
    target = Target(host, port_of(url), url.scheme, "GET", url.path or "/")
    verdict = network.judge(target)
    if not verdict.is_allowed:
        whose = "of the package index" if verdict.layer == "template" else f"of the {verdict.layer}"
        raise CreationFailed(f"{host}:{port_of(url)} is not on the network list {whose}.")


def _location(answer: httpcore.Response) -> str:
    return next(
        (value.decode("latin-1") for name, value in answer.headers if name.lower() == b"location"),
        "",
    )
