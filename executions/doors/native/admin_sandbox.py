"""The endpoints with which an administrator configures sandbox providers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict, TypeVar, cast

from django.http import HttpResponse
from drf_spectacular.utils import PolymorphicProxySerializer
from pydantic import Field
from rest_framework.authentication import SessionAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from executions.doors.native.authentication import has_scopes, key_text_of
from executions.doors.native.frame import ApiView
from executions.doors.native.rendering import ErrorShape, json_response
from executions.doors.native.schema import endpoint
from executions.kernel.audit import log_action
from executions.kernel.bodies import JsonObject
from executions.kernel.declarations import STORABLE, Body, declared
from executions.tenants import keys
from executions.tenants.models import ApiKey, Scope
from providers import registry
from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration, SandboxError
from providers.manager import manager
from providers.models import PendingChange, ProviderConfig
from providers.provider_status import languages_of
from providers.schema import mask_secrets
from providers.services import (
    ConfigurationConflict,
    request_change,
    stored_config,
    two_person_rule,
)
from providers.services.configuration import Unreadable
from providers.services.trial import try_provider

if TYPE_CHECKING:
    from rest_framework.views import APIView


class AdminDataShape(TypedDict):
    data: Any


class AdminMessageShape(TypedDict):
    message: str


class AdminPendingShape(AdminMessageShape):
    pending: Annotated[int, "Id of the change that waits for approval."]


class AdminRefusedShape(TypedDict):
    """An error in RAGFlow's format."""

    error: str
    details: NotRequired[Annotated[Any, "One problem per field, or a text."]]


class AdminTrialShape(TypedDict):
    success: bool
    message: str
    latency_ms: float | None
    runtime: str | None
    isolation: str | None
    language: str | None
    code: Annotated[str | None, "The error code, SB001 to SB009; null on success."]
    field: str | None
    errors: Annotated[JsonObject, "The refused fields, with the reason for each."]


# A body that cannot be read, and a key without the scope, are told as everywhere in this API.
_ERROR = PolymorphicProxySerializer(
    component_name="AdminError",
    serializers=cast("Any", [AdminRefusedShape, ErrorShape]),
    resource_type_field_name=None,
)


VIEW = "providers.view_providerconfig"
CHANGE = "providers.change_providerconfig"
ACTIVATE = "providers.activate_providerconfig"
TEST = "providers.test_providerconfig"


class AdminAuthentication(SessionAuthentication):
    """A key where one is sent, else the session, whose unsafe requests need the CSRF token.

    Whatever is missing or wrong is answered with 403, so that the answer tells a stranger nothing.
    """

    def authenticate(self, request: Request) -> tuple[Any, Any] | None:
        if key_text := key_text_of(request):
            try:
                address = request.META.get("REMOTE_ADDR", "")
                return None, keys.authenticate(key_text, address)
            except keys.Unauthenticated:
                return None
        return super().authenticate(request)


class MayAdministrate(BasePermission):
    """A key needs the scope, a user the permission that the view names for the method."""

    message = "This needs an administrator, or an API key with the scope admin."

    def has_permission(self, request: Request, view: APIView) -> bool:
        if isinstance(request.auth, ApiKey):
            return has_scopes(request)
        return may(request, view.needs.get(request.method, CHANGE))  # type: ignore[attr-defined]


def may(request: Request, permission: str) -> bool:
    """Whether whoever sent the request has a permission. A key of scope admin has them all."""
    if isinstance(request.auth, ApiKey):
        return request.auth.has_scope(Scope.ADMIN)
    user = request.user
    return bool(user and user.is_active and user.is_staff and user.has_perm(permission))


def author_of(request: Request) -> str:
    """Who acts, for the record: `user:NAME` or `key:PREFIX`."""
    if isinstance(request.auth, ApiKey):
        return f"key:{request.auth.prefix}"
    return f"user:{request.user.get_username()}"


T = TypeVar("T")
Action = PendingChange.Action
ProviderId = Annotated[
    str,
    Field(
        min_length=1,
        description="The provider's id; for a further configuration of it, `id@name`.",
    ),
]
Reason = Annotated[str, Field(max_length=500), STORABLE]


class _Refused(Exception):
    """What is answered with 400 or 403, in this API's own shape."""

    def __init__(self, error: str, details: Any = None, status: int = 400) -> None:
        super().__init__(error)
        self.body: AdminRefusedShape = {"error": error}
        if details is not None:
            self.body["details"] = details
        self.status = status


@declared
class ConfigRequest:
    """A provider's configuration, to be saved."""

    provider_type: ProviderId
    config: Annotated[
        Mapping[str, Any],
        Field(description="A masked or missing secret keeps its stored value."),
    ]
    set_active: bool = True
    test_connection: bool = False
    reason: Annotated[
        Reason, Field(description="The reason for the change, stored with the version.")
    ] = ""


@declared
class TrialRequest:
    """A provider to be tried: with this configuration, or with the stored one."""

    provider_type: ProviderId | None = None
    provider: Annotated[
        ProviderId | None, Field(description="Another name for `provider_type`.")
    ] = None
    config: Annotated[
        Mapping[str, Any] | None, Field(description="Default: the stored configuration.")
    ] = None


@declared
class ActiveRequest:
    """The provider that is to run the code."""

    provider: ProviderId
    reason: Reason = ""


CONFIGURE = Body(ConfigRequest, "AdminConfig", has_null=True)
TRY = Body(
    TrialRequest,
    "AdminTest",
    has_null=True,
    says={
        "anyOf": [
            {"required": [name], "properties": {name: {"type": "string"}}}
            for name in ("provider_type", "provider")
        ]
    },
)
CHOOSE = Body(ActiveRequest, "AdminActive", has_null=True)


class _AdminView(ApiView):
    """For administrators, and for API keys with the scope admin."""

    authentication_classes = (AdminAuthentication,)
    permission_classes = (MayAdministrate,)
    needs: Mapping[str, str] = {}
    tag = "administration"
    errors = (400, 403, 429, 503)
    error_shape = _ERROR

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        general = super().get_exception_handler()

        def handler(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
            if isinstance(exc, _Refused):
                return json_response(exc.body, exc.status)
            if isinstance(exc, ConfigurationConflict):
                return json_response(AdminRefusedShape(error="Conflict", details=str(exc)), 409)
            if isinstance(exc, InvalidConfiguration) and exc.field != "body":
                details = exc.errors or {"config": exc.message}
                return json_response(
                    AdminRefusedShape(error="Invalid config", details=details), 400
                )
            return general(exc, context)

        return handler


class ProvidersView(_AdminView):
    needs = {"GET": VIEW}

    @endpoint("list_providers", answers={200: AdminDataShape})
    def get(self, request: Request) -> HttpResponse:
        """List providers with their schemas.

        For administrators, and for API keys with the scope admin.
        """
        return json_response(
            AdminDataShape(data=[_describe(each) for each in registry.all_providers().values()])
        )


class ConfigView(_AdminView):
    needs = {"GET": VIEW, "POST": CHANGE}

    @endpoint("get_config", answers={200: AdminDataShape})
    def get(self, request: Request) -> HttpResponse:
        """Get the configuration of every provider, with masked secrets.

        For administrators, and for API keys with the scope admin.
        """
        rows = {row.provider_id: row for row in ProviderConfig.objects.defer("config")}
        active = next((row.provider_id for row in rows.values() if row.is_active), None)
        data: dict[str, Any] = {"active": active}
        unreadable: dict[str, str] = {}
        others = [provider_id for provider_id in rows if "@" in provider_id]
        classes = registry.all_providers()
        for provider_id in (*classes, *others):
            if (provider := classes.get(registry.class_id(provider_id))) is None:
                continue
            try:
                data[provider_id] = _shown_config(provider, rows.get(provider_id))
            except Unreadable as error:
                data[provider_id] = {}
                unreadable[provider_id] = error.message
        if unreadable:
            data["unreadable"] = unreadable
        return json_response(AdminDataShape(data=data))

    @endpoint(
        "set_config",
        request=CONFIGURE,
        answers={200: AdminMessageShape, 202: AdminPendingShape},
        errors=(409,),
    )
    def post(self, request: Request) -> HttpResponse:
        """Configure a provider.

        With `test_connection`, the provider is tested first. It becomes the active provider unless
        `set_active` is false. 202 if a second administrator has to approve the change.
        """
        wanted = _read(CONFIGURE, request)
        provider_id = _ensure_known(wanted.provider_type)
        config = dict(wanted.config)
        if wanted.set_active and not may(request, ACTIVATE):
            raise _Refused("You may not choose the active provider", status=403)
        # What is refused is refused before anything is tried.
        if wanted.test_connection:
            trial = try_provider(provider_id, config, author=author_of(request))
            if not trial.success and trial.errors:
                raise _Refused("Invalid config", dict(trial.errors))
            if not trial.success:
                raise _Refused("Connection failed", trial.message)
        action = Action.SAVE_AND_ACTIVATE if wanted.set_active else Action.SAVE
        return _change(request, provider_id, action, config, wanted.reason, "Configuration saved")


class TestView(_AdminView):
    needs = {"POST": TEST}

    @endpoint("test_connection", request=TRY, answers={200: AdminTrialShape})
    def post(self, request: Request) -> HttpResponse:
        """Test a provider: start a sandbox and run code in it.

        Uses the stored configuration, or the one in the request, which is not saved.
        """
        wanted = _read(TRY, request)
        provider_id = _ensure_known(wanted.provider_type or wanted.provider)
        config = None
        if wanted.config is not None:
            # Values of one's own could send a stored secret to an address of one's own.
            if not may(request, CHANGE):
                raise _Refused("You may only test the stored configuration", status=403)
            config = dict(wanted.config)
        trial = try_provider(provider_id, config, author=author_of(request))
        outcome = "worked" if trial.success else f"failed with {trial.code}"
        log_action(request.user, provider_id, f"Tested the connection, which {outcome}.")
        return json_response(trial.as_json())


class ActiveView(_AdminView):
    needs = {"PUT": ACTIVATE}

    @endpoint(
        "set_active",
        request=CHOOSE,
        answers={200: AdminMessageShape, 202: AdminPendingShape},
        errors=(409,),
    )
    def put(self, request: Request) -> HttpResponse:
        """Choose the provider that runs the code.

        For administrators, and for API keys with the scope admin.
        """
        wanted = _read(CHOOSE, request)
        provider_id = _ensure_known(wanted.provider)
        if not ProviderConfig.objects.filter(provider_id=provider_id).exists():
            raise _Refused("Provider not configured")
        return _change(
            request, provider_id, Action.ACTIVATE, None, wanted.reason, "Active provider updated"
        )


def _change(
    request: Request,
    provider_id: str,
    action: PendingChange.Action,
    config: dict[str, Any] | None,
    reason: str,
    done: str,
) -> HttpResponse:
    if two_person_rule() and isinstance(request.auth, ApiKey):
        # Whoever holds a key could approve as a user what was asked for with it.
        raise _Refused(
            "With two-person approval, a change needs a signed-in user, not an API key", status=403
        )
    author = author_of(request)
    account = getattr(request.user, "pk", None)
    change = request_change(
        provider_id, action, config, author=author, author_id=account, reason=reason
    )
    if isinstance(change, PendingChange):
        log_action(request.user, provider_id, f"Requested: {change.get_action_display()}.")
        message = "Waiting for a second administrator"
        return json_response(AdminPendingShape(message=message, pending=change.pk), 202)
    log_action(request.user, provider_id, f"{done}.")
    return json_response(AdminMessageShape(message=done))


def _describe(provider: type[SandboxProvider]) -> dict[str, Any]:
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
    active = manager.in_force() or ""
    with suppress(SandboxError):
        if registry.class_id(active) == provider.id:
            with manager.lease(wait=False) as lease:
                if lease.provider_id == active:
                    return languages_of(lease.provider)
    with suppress(SandboxError):
        return provider().get_supported_languages()
    return []


def _shown_config(provider: type[SandboxProvider], row: ProviderConfig | None) -> dict[str, Any]:
    fields = provider.config_fields
    config = stored_config(row) or {}
    values = {key: config.get(key, declared.default) for key, declared in fields.items()}
    return mask_secrets(fields, {k: "" if v is None else v for k, v in values.items()})


def _ensure_known(provider_id: str | None) -> str:
    """The id, of a configuration of a class that there is."""
    if provider_id is None:
        raise _Refused("Unknown provider")
    try:
        registry.get(provider_id)
    except InvalidConfiguration as error:
        raise _Refused("Unknown provider", error.message) from None
    return provider_id


def _read(body: Body[T], request: Request) -> T:
    """What was asked for; what is wrong with it is told in this API's own shape."""
    try:
        return body.read(request.data)
    except InvalidConfiguration as error:
        name = error.field or "body"
        if name in ("provider_type", "provider"):
            raise _Refused("Unknown provider") from None
        problem = error.message.removeprefix(f"{name}: ")
        if name not in (*body.known, "body"):
            problem = "Unknown field."
        summary = "Invalid config" if name == "config" else "Invalid request"
        raise _Refused(summary, {name: problem}) from None
