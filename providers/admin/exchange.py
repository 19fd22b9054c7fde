"""Configurations as a file: saved with their secrets masked, and brought in after a look."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

from django import forms
from django.contrib.admin import ModelAdmin
from django.contrib.messages import error as say_error
from django.contrib.messages import success, warning
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.views.decorators.debug import sensitive_post_parameters, sensitive_variables

from providers import aes_gcm, key_ring
from providers.admin.pages import account_of, author_of, diff_table, provider_name
from providers.admin_pages import WAITS, log_request
from providers.errors import InvalidConfiguration
from providers.hidden_characters import visible
from providers.models import PendingChange, ProviderConfig
from providers.services import ConfigurationConflict, two_person_rule
from providers.services.exchange import MOST_BYTES, Plan, bring_in, export_settings, plan, read

ACTIVATE = "providers.activate_providerconfig"
# How long what was looked at may be confirmed.
_SECONDS = 900
_OTHER = "This file differs from the preview. Choose the file again."
_LIST = "admin:providers_providerconfig_changelist"
_TEMPLATE = "admin/providers/providerconfig/import.html"


class ImportForm(forms.Form):
    file = forms.FileField(label="system_settings.json file")

    def clean_file(self) -> Any:
        file = self.cleaned_data["file"]
        if file.size > MOST_BYTES:
            raise forms.ValidationError(f"Must be at most {MOST_BYTES // 1024} KiB.")
        return file


def export_view(request: HttpRequest, admin: ModelAdmin[ProviderConfig]) -> HttpResponse:
    """Every configuration, its secrets masked: in clear they leave by a command on the server."""
    if request.method != "GET" or not admin.has_view_permission(request):
        raise PermissionDenied
    try:
        document = export_settings()
    except InvalidConfiguration as problem:
        say_error(request, f"Nothing was exported. {problem.message}")
        return redirect(_LIST)
    log_request(request, ProviderConfig, "Exported (secrets masked).", "all configurations")
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    response = HttpResponse(text, content_type="application/json; charset=utf-8")
    response["Content-Disposition"] = 'attachment; filename="system_settings.json"'
    response["Cache-Control"] = "no-store"
    return response


@sensitive_post_parameters()
@sensitive_variables()
def import_view(request: HttpRequest, admin: ModelAdmin[ProviderConfig]) -> HttpResponse:
    """A file is chosen, what it would change is shown, and then it is made or left waiting."""
    if not (admin.has_add_permission(request) and admin.has_change_permission(request)):
        raise PermissionDenied
    context: dict[str, Any] = {
        **admin.admin_site.each_context(request),
        "title": "Import configurations",
        "opts": admin.opts,
        "form": ImportForm(),
        "two_person_rule": two_person_rule(),
    }
    try:
        if "_looked_at" in request.POST:
            _make(request)
            return redirect(_LIST)
        if request.method == "POST":
            form = context["form"] = ImportForm(request.POST, request.FILES)
            if form.is_valid():
                context |= _look(request, form.cleaned_data["file"].read(MOST_BYTES + 1))
    except (InvalidConfiguration, ConfigurationConflict) as problem:
        context["problem"] = visible(f"Nothing was changed. {problem}")
    response = TemplateResponse(request, _TEMPLATE, context)
    response["Cache-Control"] = "no-store"
    return response


@sensitive_variables()
def _look(request: HttpRequest, text: bytes) -> dict[str, Any]:
    document = read(text)
    found = plan(document)
    _refuse_to_activate(request, found)
    shown = [(provider_name(each.provider_id), diff_table(each.diff)) for each in found.changes]
    looked_at = {"at": time.time(), "document": document, "versions": found.versions}
    looked_at["active"] = found.active
    skipped = [(visible(name), why) for name, why in found.skipped.items()]
    sealed = _sealed(request, looked_at)
    return {"plan": found, "shown": shown, "skipped": skipped, "looked_at": sealed}


@sensitive_variables()
def _make(request: HttpRequest) -> None:
    looked_at = _opened(request, request.POST["_looked_at"])
    _refuse_to_activate(request, plan(looked_at["document"]))
    done = bring_in(
        looked_at["document"],
        looked_at["versions"],
        looked_at["active"],
        author=author_of(request),
        author_id=account_of(request),
        reason=request.POST.get("_reason", "").replace("\0", "")[:500] or "Imported.",
    )
    for each in done:
        if isinstance(each, PendingChange):
            log_request(request, PendingChange, f"Requested: {each}.", str(each), each.pk)
            warning(request, f"{each}: {WAITS}")
        elif each is not None:
            log_request(request, ProviderConfig, "Imported.", each.provider_id, each.pk)
            success(request, f"{provider_name(each.provider_id)} was imported.")


def _refuse_to_activate(request: HttpRequest, found: Plan) -> None:
    if found.active and not request.user.has_perm(ACTIVATE):
        raise InvalidConfiguration(
            f"The file activates {found.active}. You don't have permission to choose the active "
            "provider."
        )


def _context_of(request: HttpRequest) -> str:
    return f"import of settings by {account_of(request)}"


@sensitive_variables()
def _sealed(request: HttpRequest, looked_at: Any) -> str:
    """What was looked at, secrets and all, as a text that the page may hold and nobody reads."""
    plain = json.dumps(looked_at).encode()
    sealed = aes_gcm.seal(key_ring.fernet_keys(), _context_of(request), plain)
    return base64.b64encode(sealed).decode()


@sensitive_variables()
def _opened(request: HttpRequest, text: str) -> Any:
    """Raises InvalidConfiguration for what was not sealed here, for this person, just now."""
    try:
        token = base64.b64decode(text, validate=True)
        plain = aes_gcm.unseal(key_ring.fernet_keys(), _context_of(request), token)
        looked_at = json.loads(plain)
    except (aes_gcm.NotOpened, ValueError):
        raise InvalidConfiguration(_OTHER) from None
    if time.time() - looked_at["at"] > _SECONDS:
        raise InvalidConfiguration("The preview has expired. Choose the file again.")
    return looked_at
