"""A first call with a key, as a line of shell that works when it is pasted."""

from __future__ import annotations

import json
import shlex

from django.http import HttpRequest
from django.urls import reverse

from executions.tenants.models import ApiKey, Scope
from providers.languages import TABLE


def example_call(request: HttpRequest, api_key: ApiKey, key_text: str) -> str:
    """What this key may do: run a program, or else look; "" for one that opens nothing.

    To the host that this page was asked of, whose name Django has checked.
    """
    path, body = _asked(api_key)
    if not path:
        return ""
    words = ["curl", "-sS", request.build_absolute_uri(path), "-H", f"X-API-Key: {key_text}"]
    if body:
        words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return shlex.join(words)


def _asked(api_key: ApiKey) -> tuple[str, dict[str, str]]:
    """The path, and the body of what is to be run."""
    programs = {known.name: known.probe for known in TABLE if known.probe}
    language = next((name for name in programs if api_key.allows("languages", name)), "")
    if api_key.has_scope(Scope.EXECUTE) and language:
        return reverse("executions"), {"language": language, "code": programs[language]}
    if api_key.has_scope(Scope.READ):
        return reverse("executions"), {}
    if api_key.has_scope(Scope.ADMIN):
        return reverse("admin-providers"), {}
    return (reverse("languages") if api_key.scopes else ""), {}
