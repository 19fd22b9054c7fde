"""Which URLs a webhook may be sent to: https, on the internet, whatever name leads there.

An operator may allow plain http, and single networks and hosts of its own. What lets files be
fetched from private networks lets no webhook in: a POST does more than a GET.
"""

from __future__ import annotations

from typing import Annotated

import httpx
from django.conf import settings
from pydantic import BaseModel, Field

from executions.kernel.addresses import Destinations, FetchError, Reason, read_url
from executions.kernel.declarations import STRICT, Rule
from providers.addresses import Allowed

MOST_CHARACTERS = 2048


def rules() -> Destinations:
    """Those of the deployment."""
    allowed = tuple(map(Allowed.parse, settings.WEBHOOK_ALLOWED_NETWORKS))
    return Destinations(allowed, (), "WEBHOOK_ALLOWED_NETWORKS")


def read_receiver(text: str) -> httpx.URL:
    """The URL that a webhook is sent to. Raises FetchError; names are not resolved."""
    url = read_url(text, rules())
    if url.scheme != "https" and not settings.WEBHOOK_PLAIN_HTTP:
        raise FetchError(Reason.URL, "Plain http is not allowed here.")
    return url


def origin_of(url: httpx.URL) -> str:
    """What may be shown of it: path and query may be a secret."""
    return str(url.copy_with(path="/", query=None, fragment=None)).rstrip("/")


def _checked(text: str) -> str:
    try:
        read_receiver(text)
    except FetchError:
        schemes = "http or https" if settings.WEBHOOK_PLAIN_HTTP else "https"
        raise ValueError(
            f"Its url must be {schemes}, without user and password, and lead to the internet."
        ) from None
    return text


def _says() -> dict[str, str]:
    """What JSON Schema can say of such a URL."""
    scheme = "[Hh][Tt][Tt][Pp]" + ("[Ss]?" if settings.WEBHOOK_PLAIN_HTTP else "[Ss]")
    plain = r"\\\u0000-\u001f\u007f-\u009f"
    rest = rf"[^/?#@\s{plain}]+([/?#][^{plain}]*)?"
    return {"format": "uri", "pattern": rf"^\s*{scheme}://{rest}$"}


class Webhook(BaseModel):
    """The receiver of the webhook."""

    model_config = STRICT

    url: Annotated[
        str,
        Field(min_length=1, max_length=MOST_CHARACTERS),
        Rule(_checked, _says),
    ]
