"""The page that connects an agent with a key: blocks to copy for Codex and Claude Code."""

from __future__ import annotations

import json
import shlex
from typing import Any

from django import forms
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils import timezone
from django.views.decorators.debug import sensitive_variables
from unfold.widgets import UnfoldAdminTextInputWidget

from executions.admin.frame import ApiKeyModelAdmin
from executions.doors.codex.configuration import OPTIONS, environment_block
from executions.doors.codex.credentials import capability_of
from executions.tenants.keys import CONFIGURE
from executions.tenants.models import ApiKey, Scope
from providers.errors import InvalidConfiguration
from providers.hidden_characters import visible
from providers.services import two_person_rule

# What stands where the text of the key belongs: only its hash is stored.
PLACE = "cfd_..."
NEEDED = (Scope.EXECUTE, Scope.SESSIONS, Scope.FILES)
_MOST = 500


def _text(name: str) -> forms.CharField:
    widget = UnfoldAdminTextInputWidget()
    return forms.CharField(required=False, max_length=_MOST, help_text=OPTIONS[name], widget=widget)


class CodexForm(forms.Form):
    """What the block for Codex says of its sessions."""

    template = _text("template")
    network = _text("network")
    folder = _text("folder")


def claude_commands(address: str) -> str:
    """Return the commands that have Claude Code run its commands here."""
    header = f"Authorization: Bearer {PLACE}"
    words = ["claude", "mcp", "add", "--transport", "http", "cofferdam", f"{address}/mcp"]
    add = f'{shlex.join(words)} --header "{header}"'
    return f'{add}\nclaude --tools "" --allowedTools mcp__cofferdam\n'


def mcp_json(address: str) -> str:
    """Return the same as a project's .mcp.json."""
    server = {
        "type": "http",
        "url": f"{address}/mcp",
        "headers": {"Authorization": f"Bearer {PLACE}"},
    }
    return json.dumps({"mcpServers": {"cofferdam": server}}, indent=2) + "\n"


class Connect:
    """The view, of who may create keys and change this one."""

    def __init__(self, model_admin: ApiKeyModelAdmin) -> None:
        self.model_admin = model_admin

    @property
    def urls(self) -> list[URLPattern]:
        page = self.model_admin.admin_site.admin_view(self.page)
        return [path("<int:pk>/connect/", page, name="executions_apikey_connect")]

    @sensitive_variables()
    def page(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Show the blocks. That for Codex has a secret, and comes by POST alone."""
        if request.method not in ("GET", "POST"):
            raise Http404
        api_key = self._key(request, pk)
        form = CodexForm(request.POST if request.method == "POST" else None)
        block = ""
        if request.method == "POST" and form.is_valid():
            block = self._block(request, api_key, form)
        address = request.build_absolute_uri("/").rstrip("/")
        context: dict[str, Any] = {
            **self.model_admin.admin_site.each_context(request),
            "title": "Connect an agent",
            "opts": self.model_admin.opts,
            "api_key": api_key,
            "shown_name": visible(api_key.name),
            "missing": [scope.value for scope in NEEDED if not api_key.has_scope(scope)],
            "form": form,
            "codex": block,
            "has_token": not two_person_rule(),
            "claude": claude_commands(address),
            "mcp": mcp_json(address),
        }
        status = 400 if form.errors else 200
        page = TemplateResponse(
            request, "admin/executions/apikey/connect.html", context, status=status
        )
        page["Cache-Control"] = "no-store"
        return page

    def _key(self, request: HttpRequest, pk: int) -> ApiKey:
        """Raises PermissionDenied for who could not make such a key."""
        api_key = ApiKey.objects.select_related("tenant").filter(pk=pk).first()
        if api_key is None:
            raise Http404
        may_make = self.model_admin.has_add_permission(request)
        if not (may_make and self.model_admin.has_change_permission(request, api_key)):
            raise PermissionDenied
        if api_key.has_scope(Scope.ADMIN) and not request.user.has_perm(CONFIGURE):
            raise PermissionDenied
        if not api_key.is_valid(timezone.now()):
            raise Http404
        return api_key

    @sensitive_variables()
    def _block(self, request: HttpRequest, api_key: ApiKey, form: CodexForm) -> str:
        """The block for Codex; "" for what the form gets wrong, which it says."""
        # One person alone gets no working key under the two-person rule. Who made it has its text.
        has_token = not two_person_rule()
        token = capability_of(api_key) if has_token else PLACE
        scheme = "wss" if request.is_secure() else "ws"
        try:
            block = environment_block(f"{scheme}://{request.get_host()}", token, form.cleaned_data)
        except InvalidConfiguration as error:
            field = error.field if error.field in form.fields else None
            form.add_error(field, visible(error.message))
            return ""
        if has_token:
            # As one more who made the key: who has a token of it may not approve what it asks for.
            self.model_admin.log_addition(
                request, api_key, "Showed the configuration of Codex, with a token of this key."
            )
        return block
