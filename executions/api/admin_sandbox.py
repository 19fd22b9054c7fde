"""The admin API, `/api/admin/sandbox`: providers, their configuration, tests, the active one.

Paths and shapes are those of RAGFlow's admin server, whose clients can be pointed here. No answer
holds a secret: they are masked, and a masked value that is sent back stands for the stored one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from executions.api import schema
from executions.api.admin_authentication import (
    ACTIVATE,
    CHANGE,
    TEST,
    VIEW,
    AdminAuthentication,
    MayAdministrate,
    author_of,
    may,
)
from executions.api.base import ApiView
from executions.api.rendering import json_response
from executions.models import ApiKey
from executions.services.admin_actions import log_action
from providers import registry
from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration, SandboxError
from providers.manager import manager
from providers.models import PendingChange, ProviderConfig
from providers.schema import mask_secrets
from providers.services import (
    ConfigurationConflict,
    request_change,
    stored_config,
    two_person_rule,
)
from providers.services.trial import try_provider

Action = PendingChange.Action


class _Refused(Exception):
    """What is answered with 400 or 403, in this API's own shape."""

    def __init__(self, error: str, details: Any = None, status: int = 400) -> None:
        super().__init__(error)
        self.body = {"error": error} | ({} if details is None else {"details": details})
        self.status = status


class _AdminView(ApiView):
    authentication_classes = (AdminAuthentication,)
    permission_classes = (MayAdministrate,)
    needs: Mapping[str, str] = {}

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        general = super().get_exception_handler()

        def handler(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
            if isinstance(exc, _Refused):
                return json_response(exc.body, exc.status)
            if isinstance(exc, ConfigurationConflict):
                return json_response({"error": "Conflict", "details": str(exc)}, 409)
            if isinstance(exc, InvalidConfiguration) and exc.field != "body":
                details = exc.errors or {"config": exc.message}
                return json_response({"error": "Invalid config", "details": details}, 400)
            return general(exc, context)

        return handler


class ProvidersView(_AdminView):
    needs = {"GET": VIEW}

    @extend_schema(
        operation_id="list_providers",
        summary="List providers with their schemas",
        tags=["administration"],
        responses={200: schema.AdminDataSerializer},
    )
    def get(self, request: Request) -> HttpResponse:
        return json_response({"data": [_described(p) for p in registry.all_providers().values()]})


class ConfigView(_AdminView):
    needs = {"GET": VIEW, "POST": CHANGE}

    @extend_schema(
        operation_id="get_config",
        summary="Every provider's configuration, secrets masked",
        tags=["administration"],
        responses={200: schema.AdminDataSerializer},
    )
    def get(self, request: Request) -> HttpResponse:
        rows = {row.provider_id: row for row in ProviderConfig.objects.defer("config")}
        active = next((row.provider_id for row in rows.values() if row.is_active), None)
        data: dict[str, Any] = {"active": active}
        for provider_id, provider in registry.all_providers().items():
            data[provider_id] = _shown(provider, rows.get(provider_id))
        return json_response({"data": data})

    @extend_schema(
        operation_id="set_config",
        summary="Configure a provider",
        description="Tests it first with `test_connection`; makes it the active one unless "
        "`set_active` is false. 202 where a second administrator has to approve.",
        tags=["administration"],
        request=schema.AdminConfigSerializer,
        responses={200: schema.AdminMessageSerializer, 202: schema.AdminMessageSerializer},
    )
    def post(self, request: Request) -> HttpResponse:
        body = _body(request, "provider_type", "config", "set_active", "test_connection", "reason")
        provider = _provider(body, "provider_type")
        config = _object(body, "config")
        set_active = _boolean(body, "set_active", default=True)
        if set_active and not may(request, ACTIVATE):
            raise _Refused("You may not choose the active provider", status=403)
        # What is refused is refused before anything is tried.
        if _boolean(body, "test_connection", default=False):
            trial = try_provider(provider.id, config, author=author_of(request))
            if not trial.success and trial.errors:
                raise _Refused("Invalid config", dict(trial.errors))
            if not trial.success:
                raise _Refused("Connection failed", trial.message)
        action = Action.SAVE_AND_ACTIVATE if set_active else Action.SAVE
        return _change(request, provider.id, action, config, body, "Configuration saved")


class TestView(_AdminView):
    needs = {"POST": TEST}

    @extend_schema(
        operation_id="test_connection",
        summary="Start a sandbox and run code in it",
        description="With the stored configuration, or with the one given, which is not saved.",
        tags=["administration"],
        request=schema.AdminTestSerializer,
        responses={200: schema.AdminTrialSerializer},
    )
    def post(self, request: Request) -> HttpResponse:
        body = _body(request, "provider_type", "provider", "config")
        name = "provider_type" if "provider_type" in body else "provider"
        provider = _provider(body, name)
        config = None
        if body.get("config") is not None:
            # Values of one's own could send a stored secret to an address of one's own.
            if not may(request, CHANGE):
                raise _Refused("You may only test what is stored", status=403)
            config = _object(body, "config")
        trial = try_provider(provider.id, config, author=author_of(request))
        outcome = "worked" if trial.success else f"failed with {trial.code}"
        log_action(request.user, provider.id, f"Tested the connection, which {outcome}.")
        return json_response(trial.as_json())


class ActiveView(_AdminView):
    needs = {"PUT": ACTIVATE}

    @extend_schema(
        operation_id="set_active",
        summary="Choose the provider that runs the code",
        tags=["administration"],
        request=schema.AdminActiveSerializer,
        responses={200: schema.AdminMessageSerializer, 202: schema.AdminMessageSerializer},
    )
    def put(self, request: Request) -> HttpResponse:
        body = _body(request, "provider", "reason")
        provider = _provider(body, "provider")
        if not ProviderConfig.objects.filter(provider_id=provider.id).exists():
            raise _Refused("Provider not configured")
        return _change(request, provider.id, Action.ACTIVATE, None, body, "Active provider updated")


def _change(
    request: Request,
    provider_id: str,
    action: PendingChange.Action,
    config: dict[str, Any] | None,
    body: Mapping[str, Any],
    done: str,
) -> HttpResponse:
    if two_person_rule() and isinstance(request.auth, ApiKey):
        # Whoever holds a key could approve as a user what was asked for with it.
        raise _Refused("Under the two-person rule a change needs a signed-in person", status=403)
    reason = body.get("reason", "")
    if not isinstance(reason, str) or len(reason) > 500 or "\0" in reason:
        raise _Refused("Invalid request", {"reason": "Must be at most 500 characters."})
    author = author_of(request)
    account = getattr(request.user, "pk", None)
    change = request_change(
        provider_id, action, config, author=author, author_id=account, reason=reason
    )
    if isinstance(change, PendingChange):
        log_action(request.user, provider_id, f"Asked for: {change.get_action_display()}.")
        message = "Waiting for a second administrator"
        return json_response({"message": message, "pending": change.pk}, 202)
    log_action(request.user, provider_id, f"{done}.")
    return json_response({"message": done})


def _described(provider: type[SandboxProvider]) -> dict[str, Any]:
    return {
        "id": provider.id,
        "name": provider.name,
        "description": provider.description,
        "icon": provider.icon,
        "tags": list(provider.tags),
        "config_schema": provider.get_config_schema(),
        "supported_languages": _languages(provider),
    }


def _languages(provider: type[SandboxProvider]) -> list[str]:
    """Those that the active provider really runs; of others, what they say unconfigured."""
    try:
        with manager.lease() as lease:
            if lease.provider_id == provider.id:
                return lease.provider.get_supported_languages()
        return provider().get_supported_languages()
    except SandboxError:
        return []


def _shown(provider: type[SandboxProvider], row: ProviderConfig | None) -> dict[str, Any]:
    fields = provider.config_fields
    config = stored_config(row) or {}
    values = {key: config.get(key, declared.default) for key, declared in fields.items()}
    return mask_secrets(fields, {k: "" if v is None else v for k, v in values.items()})


def _body(request: Request, *known: str) -> dict[str, Any]:
    body = request.data
    if not isinstance(body, dict):
        raise _Refused("Invalid request", {"body": "Must be a JSON object."})
    if unknown := {key: "Unknown field." for key in body if key not in known}:
        raise _Refused("Invalid request", unknown)
    return body


def _provider(body: Mapping[str, Any], name: str) -> type[SandboxProvider]:
    provider_id = body.get(name)
    if not isinstance(provider_id, str):
        raise _Refused("Unknown provider")
    try:
        return registry.get(provider_id)
    except InvalidConfiguration as error:
        raise _Refused("Unknown provider", error.message) from None


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict):
        raise _Refused("Invalid config", {name: "Must be a JSON object."})
    return value


def _boolean(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise _Refused("Invalid request", {name: "Must be true or false."})
    return value
