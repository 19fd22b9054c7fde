"""E2B's secrets: written here, and put into requests of sandboxes whose network names them."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.views.decorators.debug import sensitive_variables
from rest_framework.request import Request

from executions.capabilities.network.models import NetworkCredential
from executions.capabilities.network.secrets import (
    change_secret,
    create_secret,
    find_secret,
    id_of,
    remove_secret,
    secrets_of,
)
from executions.doors.e2b.connect import Refused, invalid, unimplemented
from executions.doors.e2b.sandboxes import SandboxApiView
from executions.doors.native.rendering import json_response


class _SecretApiView(SandboxApiView):
    def secret(self, text: str) -> NetworkCredential:
        """Raises Refused."""
        found = find_secret(self.api_key.tenant, text)
        if found is None:
            raise Refused(404, "not_found", "The secret was not found.")
        return found

    @sensitive_variables()
    def texts(self, *names: str) -> list[str]:
        """The texts of the body. Raises Refused."""
        body = self.body()
        if body.get("metadata"):
            raise unimplemented("metadata")
        if unknown := set(body) - {*names, "metadata"}:
            raise invalid(f"{min(unknown)[:64]}: Is not known.")
        if not all(isinstance(body.get(name), str) for name in names):
            raise invalid(f"{' and '.join(names)}: Must be a string.")
        return [body[name] for name in names]


class SecretsView(_SecretApiView):
    def get(self, request: Request) -> HttpResponse:
        """All of the tenant's: there are few."""
        return json_response([_detail(each) for each in secrets_of(self.api_key.tenant)])

    @sensitive_variables()
    def post(self, request: Request) -> HttpResponse:
        name, value = self.texts("name", "value")
        made = create_secret(self.api_key.tenant, name, value, self.by())
        return json_response(_detail(made), 201)


class OneSecretView(_SecretApiView):
    def get(self, request: Request, secret: str) -> HttpResponse:
        return json_response(_detail(self.secret(secret)))

    @sensitive_variables()
    def post(self, request: Request, secret: str) -> HttpResponse:
        found = self.secret(secret)
        (value,) = self.texts("value")
        change_secret(found, self.api_key.tenant, value, self.by())
        return json_response(_detail(found))

    def delete(self, request: Request, secret: str) -> HttpResponse:
        remove_secret(self.secret(secret), self.by())
        return HttpResponse(status=204)


def _detail(secret: NetworkCredential) -> dict[str, Any]:
    return {
        "secretID": id_of(secret),
        "name": secret.name,
        "currentVersion": secret.version,
        "metadata": {},
        "createdAt": secret.created_at.isoformat(),
        "updatedAt": secret.changed_at.isoformat(),
    }
