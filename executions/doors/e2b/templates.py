"""E2B's templates: announced, given files, built of steps, tagged, and removed.

To clients the id of a template is its name, and the id of a build that of a version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core import signing
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.csrf import csrf_exempt
from rest_framework.request import Request

from executions.capabilities.templates import builds, drafts
from executions.capabilities.templates.defaults import default_declaration, installed_packages
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.capabilities.templates.names import (
    assign_tags,
    read_name,
    remove_tags,
    templates_for,
)
from executions.capabilities.templates.requests import (
    NoSuchTemplate,
    own_template_of,
    template_of,
)
from executions.doors.e2b.connect import USUAL, Refused, invalid
from executions.doors.e2b.sandboxes import SandboxApiView
from executions.doors.e2b.template_steps import Steps, base_of
from executions.doors.native.frame import deferred
from executions.doors.native.rendering import json_response
from executions.runs.requests import Caller
from executions.runs.routing import ensure_unbound
from providers.templates.declaration import DEFAULT, Declaration

_HASH = re.compile(r"[0-9a-zA-Z]{1,64}")
# A link for an upload is good for as long as clients try one.
_LINK_SECONDS = 3600
_SALT = "e2b-template-upload"
MOST_ENTRIES = 100
_STATES = {
    "pending": "waiting",
    "queued": "waiting",
    "resolving": "building",
    "building": "building",
    "ready": "ready",
    "failed": "error",
    "cancelled": "error",
}


class _TemplateApiView(SandboxApiView):
    def own(self, name: str) -> Template:
        """A template of the tenant's own. Raises Refused."""
        try:
            return own_template_of(self.api_key.tenant, name.partition(":")[0])
        except NoSuchTemplate:
            raise _not_found("template") from None

    def maker(self) -> str:
        """Who acts. A key that is held to some templates may change none."""
        ensure_unbound(Caller.of_key(self.api_key))
        return self.by()

    def texts(self, name: str) -> list[str]:
        """A list of strings in the body, empty where it is not there. Raises Refused."""
        found = self.body().get(name) or []
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise invalid(f"{name}: Must be a list of strings.")
        return found

    def text(self, name: str) -> str:
        found = self.body().get(name) or ""
        if not isinstance(found, str):
            raise invalid(f"{name}: Must be a string.")
        return found


class TemplatesView(_TemplateApiView):
    def get(self, request: Request) -> HttpResponse:
        found = templates_for(self.api_key.tenant).order_by("name")
        listed = [_summary(each) for each in found[:MOST_ENTRIES]]
        return json_response([*_default(), *listed])

    def post(self, request: Request) -> HttpResponse:
        """Announce a build. Its declaration comes with the call that starts it."""
        name, _, tag = (self.text("name") or self.text("alias")).partition(":")
        tags = list(dict.fromkeys([*([tag] if tag else []), *self.texts("tags")]))
        if name == USUAL:
            raise invalid(f"name: {USUAL!r} is the template that is always there.")
        draft = drafts.announce(self.api_key.tenant, name, tags, self.maker())
        return json_response(
            {
                "templateID": name,
                "buildID": str(draft.pk),
                "public": False,
                "names": [name],
                "aliases": [name],
                "tags": tags,
            },
            202,
        )


class TemplateView(_TemplateApiView):
    def get(self, request: Request, template: str) -> HttpResponse:
        if template == DEFAULT and (listed := _default()):
            return json_response({**listed[0], "builds": []})
        try:
            found = template_of(self.api_key.tenant, template)
        except NoSuchTemplate:
            raise _not_found("template") from None
        versions = found.versions.defer("log", "lock", "declaration").order_by("-number")
        return json_response({**_summary(found), "builds": [_build(each) for each in versions]})

    @deferred
    async def delete(self, request: Request, template: str) -> HttpResponse:
        await builds.remove(self.own(template), self.maker())
        return HttpResponse(status=204)


class AliasView(_TemplateApiView):
    def get(self, request: Request, alias: str) -> HttpResponse:
        named = read_name(alias)
        found = None if named is None else self.own(named.name)
        if found is None:
            raise _not_found("template")
        return json_response({"templateID": found.name, "public": False})


class FilesView(_TemplateApiView):
    def get(self, request: Request, template: str, digest: str) -> HttpResponse:
        """Whether an archive was uploaded, and where it is to be put."""
        found = self.own(template)
        if not _HASH.fullmatch(digest):
            raise invalid("hash: Must be letters and digits.")
        self.maker()
        token = signing.dumps([str(found.pk), digest], salt=_SALT)
        place = reverse("e2b-template-upload", kwargs={"token": token})
        return json_response(
            {
                "present": drafts.upload_of(found, digest) is not None,
                "url": request.build_absolute_uri(place),
            },
            201,
        )


@csrf_exempt
def upload(request: HttpRequest, token: str) -> HttpResponse:
    """Take the archive that a signed link names. The link is all that its client has."""
    if request.method != "PUT":
        return HttpResponse(status=405, headers={"Allow": "PUT"})
    try:
        template_id, digest = signing.loads(token, salt=_SALT, max_age=_LINK_SECONDS)
    except signing.BadSignature:
        return json_response({"code": 403, "message": "The link is not valid any more."}, 403)
    template = drafts.template_of_link(template_id)
    if template is None:
        return json_response({"code": 404, "message": "The template was not found."}, 404)
    length = request.headers.get("Content-Length", "")
    if not length.isdigit() or int(length) > drafts.MOST_UPLOAD_BYTES:
        most = drafts.MOST_UPLOAD_BYTES
        return json_response({"code": 413, "message": f"At most {most} bytes."}, 413)
    drafts.store_upload(template, digest, request.read(int(length)))
    return HttpResponse(status=200)


class BuildView(_TemplateApiView):
    def post(self, request: Request, template: str, build_id: UUID) -> HttpResponse:
        """Build what was announced, of these steps."""
        by, body = self.maker(), self.body()
        draft = drafts.draft_of(self.api_key.tenant, build_id)
        if draft is None or draft.template.name != template:
            raise _not_found("build")
        if body.get("fromImageRegistry"):
            raise invalid("fromImageRegistry: Images of registries are not used here.")
        steps = Steps(self._base(), lambda digest: drafts.upload_of(draft.template, digest))
        listed = body.get("steps") or []
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise invalid("steps: Must be a list of objects.")
        for number, step in enumerate(listed, 1):
            try:
                steps.add(step)
            except Refused as error:
                raise invalid(f"Step {number}: {error.message}") from None
        declared = steps.declaration(self.text("startCmd"), self.text("readyCmd"))
        refresh = body.get("force") is True or any(each.get("force") is True for each in listed)
        drafts.start(draft, declared, by, refresh=refresh)
        return HttpResponse(status=202)

    def _base(self) -> Declaration:
        """What the steps are added to. Raises Refused."""
        if image := self.text("fromImage"):
            return Declaration(base=base_of(image, settings.TEMPLATE_IMAGES))
        name = self.text("fromTemplate")
        if not name or name.partition(":")[0] == USUAL:
            return Declaration()
        if name == DEFAULT:
            return default_declaration()
        try:
            found = template_of(self.api_key.tenant, name.partition(":")[0])
        except NoSuchTemplate:
            raise invalid(f"fromTemplate: There is no template {name[:100]!r}.") from None
        ready = found.versions.filter(state=TemplateVersion.State.READY).order_by("-number")
        version = ready.first()
        if version is None:
            raise invalid(f"fromTemplate: No version of {name[:100]!r} is ready.")
        return version.declared


class StatusView(_TemplateApiView):
    def get(self, request: Request, template: str, build_id: UUID) -> HttpResponse:
        found = self.own(template)
        version = found.versions.filter(pk=build_id).first()
        offset = request.query_params.get("logsOffset", "0")
        if not offset.isdigit() or len(offset) > 9:
            raise invalid("logsOffset: Must be a whole number.")
        if version is None:
            if drafts.draft_of(self.api_key.tenant, build_id) is None:
                raise _not_found("build")
            return json_response(_status(found, build_id, "waiting", []))
        lines = version.log.splitlines()[int(offset) :][:MOST_ENTRIES]
        answer = _status(found, build_id, _STATES[version.state], lines)
        if answer["status"] == "error":
            answer["reason"] = {"message": version.problem}
        return json_response(answer)


class TagsView(_TemplateApiView):
    """Tags of versions. One that is named is where the tags go."""

    def post(self, request: Request) -> HttpResponse:
        by, tags = self.maker(), self.texts("tags")
        version = self._version(self.text("target"))
        assign_tags(version, tags, by)
        return json_response({"buildID": str(version.pk), "tags": tags}, 201)

    def delete(self, request: Request) -> HttpResponse:
        by = self.maker()
        remove_tags(self.own(self.text("name")), self.texts("tags"), by)
        return HttpResponse(status=204)

    def _version(self, target: str) -> TemplateVersion:
        named = read_name(target)
        if named is None:
            raise _not_found("build")
        found = self.own(named.name)
        rows = found.versions.filter(state=TemplateVersion.State.READY).order_by("-number")
        number = found.tags.get(named.tag) if named.tag else named.number
        version = rows.filter(number=number).first() if number else rows.first()
        if version is None or (named.tag and not number and named.tag not in ("default", "latest")):
            raise _not_found("build")
        return version


class TemplateTagsView(_TemplateApiView):
    def get(self, request: Request, template: str) -> HttpResponse:
        found = self.own(template)
        rows = found.versions.filter(number__in=found.tags.values()).only("number", "created_at")
        versions = {each.number: each for each in rows}
        return json_response(
            [
                {
                    "tag": tag,
                    "buildID": str(versions[number].pk),
                    "createdAt": versions[number].created_at.isoformat(),
                }
                for tag, number in sorted(found.tags.items())
                if number in versions
            ]
        )


def _not_found(what: str) -> Refused:
    return Refused(404, "not_found", f"The {what} was not found.")


def _status(template: Template, build_id: UUID, status: str, lines: list[str]) -> dict[str, Any]:
    now = timezone.now().isoformat()
    return {
        "templateID": template.name,
        "buildID": str(build_id),
        "status": status,
        "logs": [],
        "logEntries": [{"timestamp": now, "level": "info", "message": line} for line in lines],
    }


def _summary(template: Template) -> Mapping[str, Any]:
    newest = template.versions.defer("log", "lock", "declaration").order_by("-number").first()
    moment = template.created_at if newest is None else newest.created_at
    return {
        "templateID": template.name,
        "buildID": str(newest.pk) if newest else "",
        "buildStatus": _STATES[newest.state] if newest else "waiting",
        "public": template.tenant_id is None,
        "names": [template.name],
        "aliases": [template.name],
        "buildCount": newest.number if newest else 0,
        "createdAt": template.created_at.isoformat(),
        "updatedAt": moment.isoformat(),
    }


def _default() -> list[Mapping[str, Any]]:
    """The template of the default packages, where they are installed."""
    known = installed_packages()
    if known is None:
        return []
    moment = datetime.fromtimestamp(known.installed_at, UTC).isoformat()
    return [
        {
            "templateID": DEFAULT,
            "buildID": "",
            "buildStatus": "ready",
            "public": True,
            "names": [DEFAULT],
            "aliases": [DEFAULT],
            "buildCount": 0,
            "createdAt": moment,
            "updatedAt": moment,
        }
    ]


def _build(version: TemplateVersion) -> Mapping[str, Any]:
    ended = version.ended_at
    return {
        "buildID": str(version.pk),
        "status": _STATES[version.state],
        "createdAt": version.created_at.isoformat(),
        "updatedAt": (ended or version.created_at).isoformat(),
        "finishedAt": ended.isoformat() if ended else None,
    }
