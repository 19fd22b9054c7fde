"""What the providers' admin pages share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.admin import ModelAdmin

from providers import guarded, registry
from providers.errors import InvalidConfiguration
from providers.hidden_characters import visible
from providers.models import ConfigVersion, PendingChange, ProviderConfig

if TYPE_CHECKING:
    from django.contrib import admin

    ProviderConfigModelAdmin = admin.ModelAdmin[ProviderConfig]
    ConfigVersionModelAdmin = admin.ModelAdmin[ConfigVersion]
    PendingChangeModelAdmin = admin.ModelAdmin[PendingChange]
else:
    ProviderConfigModelAdmin = ConfigVersionModelAdmin = PendingChangeModelAdmin = ModelAdmin


def author_of(request: HttpRequest) -> str:
    """Who acts, as it is kept with a change."""
    assert not isinstance(request.user, AnonymousUser)  # noqa: S101  admin_view has seen to it
    return f"user:{request.user.get_username()}"


def provider_name(provider_id: str) -> str:
    """In words, with the name of the configuration where it is not the first of its class."""
    name = visible(provider_id.partition("@")[2])
    try:
        found: str = registry.get(provider_id).name
        return f"{found}, {name}" if name else found
    except InvalidConfiguration:
        return f"{visible(provider_id)} (unavailable)"


def account_of(request: HttpRequest) -> int:
    """The id of who acts: a name can be changed."""
    assert not isinstance(request.user, AnonymousUser)  # noqa: S101  as above
    return int(request.user.pk)


def subject_name(subject: str, shown_as: str = "") -> str:
    """What a version or a waiting change is about, in words."""
    if not guarded.is_row(subject):
        return provider_name(subject)
    if shown_as:
        return visible(shown_as)
    try:
        kind, pk = guarded.parse(subject)
    except InvalidConfiguration:
        return subject
    return f"{kind.name} {pk}"


def badge(text: str, tone: str, title: str = "") -> SafeString:
    """`tone` is good, bad, warn or quiet."""
    return format_html('<span class="badge badge-{}" title="{}">{}</span>', tone, title, text)


def diff_table(diff: Iterable[Mapping[str, Any]]) -> SafeString:
    """A diff as it is kept: secrets are masked in it."""
    rows = format_html_join(
        "",
        "<tr><th scope='row'>{}</th><td>{}</td><td class='diff-old'>{}</td>"
        "<td class='diff-new'>{}</td></tr>",
        (
            (
                visible(entry["label"]),
                entry["change"],
                _shown(entry["before"]),
                _shown(entry["after"]),
            )
            for entry in diff
        ),
    )
    if not rows:
        return format_html("<p>{}</p>", "No differences.")
    return format_html(
        "<table class='plain diff'><thead><tr><th scope='col'>Field</th><th scope='col'>Change"
        "</th><th scope='col'>Before</th><th scope='col'>After</th></tr></thead>"
        "<tbody>{}</tbody></table>",
        rows,
    )


def _shown(value: Any) -> str:
    # What is approved must read as what is saved.
    return "–" if value in (None, "") else visible(str(value))
