"""Templates over the native API: parse, call a service, render."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import HttpResponse
from django.urls import reverse
from rest_framework.request import Request

from executions.capabilities.templates import builds
from executions.capabilities.templates.additions import declaration_of
from executions.capabilities.templates.models import TemplateVersion
from executions.capabilities.templates.requests import (
    BUILD,
    CREATE,
    LIST,
    OF_SESSION,
    TemplateLogShape,
    TemplateShape,
    TemplateVersionShape,
    default_detail,
    list_templates,
    own_template_of,
    parts_of,
    template_detail,
    template_of,
    version_detail,
    version_of,
)
from executions.doors.native.frame import RunningView, deferred
from executions.doors.native.rendering import json_response, page_of
from executions.doors.native.schema import endpoint
from executions.kernel.bodies import PageShape
from executions.runs.requests import Caller
from executions.runs.routing import ensure_unbound
from executions.sessions.queries import living_session_of
from providers.templates.declaration import DEFAULT


class TemplateApiView(RunningView):
    tag = "templates"

    def by(self) -> str:
        """Who acts. A key that is held to some templates may change none."""
        ensure_unbound(Caller.of_key(self.api_key))
        return f"key:{self.api_key.prefix}"

    def requested(self, request: Request, version: TemplateVersion) -> HttpResponse:
        response = json_response(version_detail(version), 202)
        place = {"template": version.template.name, "number": version.number}
        path = reverse("template-version", kwargs=place)
        response["Location"] = request.build_absolute_uri(path)
        return response


class TemplatesView(TemplateApiView):
    @endpoint("create_template", request=CREATE, answers={202: TemplateVersionShape}, errors=(409,))
    def post(self, request: Request) -> HttpResponse:
        """Create a template.

        Its first version is built in the background: the answer's `state` says how far it is.
        """
        wanted, by = CREATE.read(request.data), self.by()
        version = builds.create(
            self.api_key.tenant,
            wanted.name,
            wanted.declaration.declaration(),
            by,
            wanted.description,
        )
        return self.requested(request, version)

    @endpoint("list_templates", parameters=(LIST,), answers={200: PageShape[TemplateShape]})
    def get(self, request: Request) -> HttpResponse:
        """List templates.

        The tenant's own and the installation's, newest first, and `data` where it is installed.
        """
        found, cursor = list_templates(self.api_key.tenant, LIST.read(request.query_params.dict()))
        return json_response(page_of(request, found, cursor))


class SessionTemplateView(TemplateApiView):
    @endpoint(
        "make_template_of_session",
        request=OF_SESSION,
        answers={202: TemplateVersionShape},
        errors=(404, 409, 502),
    )
    @deferred
    async def post(self, request: Request, session_id: UUID) -> HttpResponse:
        """Make a template of a session.

        It has the session's own template, and the packages that pip and npm have installed in the
        session. A template of this name gets another version.
        """
        session = living_session_of(self.api_key.tenant, session_id)
        wanted, by = OF_SESSION.read(request.data), self.by()
        declared = await declaration_of(session)
        version = builds.request(self.api_key.tenant, wanted.name, declared, by, wanted.description)
        return self.requested(request, version)


class TemplateView(TemplateApiView):
    @endpoint("get_template", answers={200: TemplateShape})
    def get(self, request: Request, template: str) -> HttpResponse:
        """Get a template."""
        if template == DEFAULT and (usual := default_detail()):
            return json_response(usual)
        return json_response(template_detail(template_of(self.api_key.tenant, template)))

    @endpoint("delete_template", answers={204: None}, errors=(409,))
    @deferred
    async def delete(self, request: Request, template: str) -> HttpResponse:
        """Delete a template of the tenant's own.

        Open sessions keep it. A build that is under way is cancelled.
        """
        found = own_template_of(self.api_key.tenant, template)
        await builds.remove(found, self.by())
        return HttpResponse(status=204)


class BuildsView(TemplateApiView):
    @endpoint("build_template", request=BUILD, answers={202: TemplateVersionShape}, errors=(409,))
    def post(self, request: Request, template: str) -> HttpResponse:
        """Build the next version of a template of the tenant's own.

        The same declaration keeps the packages of the version before it, unless `refresh` asks for
        newer ones.
        """
        wanted, by = BUILD.read(request.data), self.by()
        found = own_template_of(self.api_key.tenant, template)
        declared = wanted.declaration
        version = builds.request_build(
            found,
            by,
            None if declared is None else declared.declaration(),
            refresh=wanted.refresh,
        )
        return self.requested(request, version)


class VersionView(TemplateApiView):
    @endpoint("get_template_version", answers={200: TemplateVersionShape})
    def get(self, request: Request, template: str, number: int) -> HttpResponse:
        """Get a version of a template, with its packages."""
        found = template_of(self.api_key.tenant, template)
        return json_response(version_detail(version_of(found, number)))


class LogView(TemplateApiView):
    @endpoint("get_template_log", answers={200: TemplateLogShape})
    def get(self, request: Request, template: str, number: int) -> HttpResponse:
        """Get the log of a build of the tenant's own, as far as it is."""
        version = version_of(own_template_of(self.api_key.tenant, template), number)
        return json_response({"log": version.log, "state": version.state})


class PartsView(TemplateApiView):
    @endpoint("get_template_sbom", answers={200: dict[str, Any]}, errors=(409,))
    def get(self, request: Request, template: str, number: int) -> HttpResponse:
        """Get the parts list of a version, as CycloneDX 1.6 has it."""
        found = template_of(self.api_key.tenant, template)
        return json_response(parts_of(version_of(found, number)))


class CancelView(TemplateApiView):
    @endpoint("cancel_template_build", answers={200: TemplateVersionShape}, errors=(409,))
    @deferred
    async def post(self, request: Request, template: str, number: int) -> HttpResponse:
        """Cancel a build of the tenant's own, and the execution that resolves its packages."""
        version = version_of(own_template_of(self.api_key.tenant, template), number)
        version = await builds.cancel_build(version, self.by())
        return json_response(version_detail(version))
