"""Reading one text from a server that speaks the protocol of HashiCorp Vault: KV, version 2.

The token goes to VAULT_URL alone, and neither it nor what is read is in an error or a log record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from django.conf import settings
from django.views.decorators.debug import sensitive_variables

from providers.remote.secret import Secret

# Of an answer, which has all keys of a secret.
MOST_BYTES = 256 * 1024
SECONDS = 10.0
_SEGMENT = r"(?!\.{1,2}[/#])[A-Za-z0-9._~@+-]{1,100}"
_PLACE = re.compile(rf"({_SEGMENT})/({_SEGMENT}(?:/{_SEGMENT}){{0,19}})#([A-Za-z0-9._-]{{1,100}})")


class Place(NamedTuple):
    """A key of a secret: `mount/path#key`."""

    mount: str
    path: str
    key: str

    def __str__(self) -> str:
        return f"{self.mount}/{self.path}#{self.key}"


class NotFetched(Exception):
    """The value is not known. The text is for administrators, and has the remedy."""


class Gone(Exception):
    """The server says that there is no value: it was deleted or destroyed, or never there."""


def read_place(text: str) -> Place:
    """Read `mount/path#key`. Raises ValueError."""
    found = _PLACE.fullmatch(text)
    if found is None:
        raise ValueError("Must be mount/path#key, such as secret/openai#api_key.")
    return Place(*found.groups())


@sensitive_variables()
def fetch(place: Place) -> Secret:
    """Return the latest version, without the end of its last line. Raises NotFetched and Gone."""
    if not settings.VAULT_URL:
        raise NotFetched("There is no server to fetch it from. Set VAULT_URL and VAULT_TOKEN.")
    # A client of HTTP takes its time to load, and most processes never need this one.
    from executions.kernel import http
    from providers.addresses import Allowed, Rules
    from providers.remote.receiver import Receiver

    allowed = tuple(map(Allowed.parse, settings.VAULT_ALLOWED_NETWORKS))
    receiver = Receiver(Rules(allowed, allowed, "VAULT_ALLOWED_NETWORKS"), settings.VAULT_CA)
    headers = {"X-Vault-Request": "true", "X-Vault-Token": settings.VAULT_TOKEN}
    if settings.VAULT_NAMESPACE:
        headers["X-Vault-Namespace"] = settings.VAULT_NAMESPACE
    answer = http.get(
        f"{settings.VAULT_URL}/v1/{place.mount}/data/{place.path}",
        headers,
        receiver,
        most_bytes=MOST_BYTES,
        seconds=SECONDS,
    )
    if answer.problem:
        raise NotFetched(
            f"VAULT_URL did not answer: {answer.problem}. Check VAULT_URL, VAULT_CA_FILE and "
            "VAULT_ALLOWED_NETWORKS."
        )
    return _value(answer.status, answer.body, place)


@sensitive_variables()
def _value(status: int, body: bytes, place: Place) -> Secret:
    if status == 403:
        raise NotFetched(
            f"The server refuses VAULT_TOKEN (HTTP 403). Let its policy read "
            f"{place.mount}/data/{place.path}, or renew the token."
        )
    if status not in (200, 404):
        raise NotFetched(_REMEDIES.get(status, f"The server answers HTTP {status}. See its log."))
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        raise NotFetched(f"The answer (HTTP {status}) is not JSON. Check VAULT_URL.") from None
    found = said.get("data") if isinstance(said, dict) else None
    if isinstance(found, dict) and isinstance(found.get("metadata"), dict) and "data" in found:
        if found["data"] is None:
            raise Gone(f"The latest version of {place.mount}/{place.path} is deleted.")
        if status == 200 and isinstance(found["data"], dict):
            return _text(found["data"], place)
    # What else is not found is a mount or a namespace: that may be a mistake in the settings.
    if status == 404 and isinstance(said, dict) and said.get("errors") == []:
        raise Gone(f"There is no secret {place.mount}/{place.path}.")
    raise NotFetched(
        f"{place.mount}/ is not found as a secrets engine KV of version 2. Check the mount and "
        "VAULT_NAMESPACE."
    )


@sensitive_variables()
def _text(data: Mapping[str, Any], place: Place) -> Secret:
    if place.key not in data:
        raise Gone(f"The latest version of {place.mount}/{place.path} has no key {place.key}.")
    text = data[place.key]
    if not isinstance(text, str):
        raise NotFetched(f"{place} is not a text. Store it as a string.")
    return Secret(text.removesuffix("\n").removesuffix("\r"))


_REMEDIES = {
    **dict.fromkeys(
        (301, 302, 303, 307, 308),
        "The server redirects. Name the address of the active server in VAULT_URL.",
    ),
    400: "The server refuses the request (HTTP 400). Check VAULT_TOKEN and VAULT_NAMESPACE.",
    429: "The server has too many requests (HTTP 429).",
    503: "The server is sealed or in maintenance (HTTP 503). Unseal it.",
}
