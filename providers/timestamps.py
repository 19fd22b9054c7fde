"""Times on pages: alike on every list, so that lines of two lists can be laid side by side."""

from __future__ import annotations

from datetime import datetime

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timezone import localtime

# What a page shows where there is nothing. Lists leave it out on a phone.
NOTHING = SafeString('<span class="nothing">-</span>')


def shown_moment(moment: datetime | None) -> SafeString | str:
    """To the second and with the zone; pointed at, in ISO 8601 to the millisecond."""
    if moment is None:
        return NOTHING
    local = localtime(moment)
    exact = local.isoformat(timespec="milliseconds")
    return format_html(
        '<time class="moment" datetime="{}" title="{}">{}</time>', exact, exact, in_words(moment)
    )


def in_words(moment: datetime) -> str:
    """The same as text alone."""
    return f"{localtime(moment):%Y-%m-%d %H:%M:%S %Z}"
