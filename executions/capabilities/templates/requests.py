"""Requests for templates and their builds, and the shapes of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, TypedDict

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.config import JsonDict

from executions.capabilities.templates.advisories import Finding, findings_of
from executions.capabilities.templates.defaults import DESCRIPTION, installed_packages
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.capabilities.templates.names import templates_for, with_versions
from executions.kernel.bodies import Choices, Time
from executions.kernel.declarations import (
    END,
    STORABLE,
    STRICT,
    Body,
    Environment,
    Members,
    Query,
    Rule,
    declared,
    newest_first,
)
from executions.runs.network import NetworkField
from executions.runs.requests import PATH_PATTERN, Conflict
from executions.runs.results import DEFAULT_LIMIT, Cursor, Limit
from executions.sessions.requests import NOT_FOUND
from executions.tenants.models import Tenant
from providers.errors import InvalidConfiguration, SandboxError
from providers.runtime.guest.names import MOST_CHARACTERS, problem
from providers.templates.base import IMAGE
from providers.templates.declaration import (
    DEFAULT,
    FILES_BYTES,
    MOST_COMMANDS,
    MOST_FILES,
    MOST_REQUIREMENTS,
    MOST_SECONDS,
    NAME,
    PACKAGE,
    Declaration,
)
from providers.templates.sbom import cyclonedx

_LONGEST = 1000
MOST_VERSIONS_SHOWN = 20


def _text(form: str) -> dict[str, Any]:
    """What JSON Schema can say of a package: its form has a name."""
    return {"type": "string", "minLength": 1, "maxLength": _LONGEST, "format": form}


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError("Use small letters, digits, and . _ - between them, such as science.")
    return text


def _package(text: str) -> str:
    if not PACKAGE.fullmatch(text):
        raise ValueError("Must be the name of a Python package.")
    return text


def _path(text: str) -> str:
    if why := problem(text):
        raise ValueError(f"Cannot be a path in the workspace: {why}.")
    return text


_ADDS = {
    **dict.fromkeys(("python", "npm", "run"), "minItems"),
    **dict.fromkeys(("environment", "files"), "minProperties"),
    "base": "minLength",
}
_TYPES = {"minItems": "array", "minProperties": "object", "minLength": "string"}
# It adds something.
_SAYS: JsonDict = {
    "anyOf": [
        {"required": [name], "properties": {name: {"type": _TYPES[bound], bound: 1}}}
        for name, bound in _ADDS.items()
    ],
    # Packages of Debian are put into an image.
    "dependentSchemas": {
        "apt": {
            "anyOf": [
                {"properties": {"apt": {"maxItems": 0}}},
                {"required": ["base"], "properties": {"base": {"pattern": f"^{IMAGE}"}}},
            ]
        },
        # A source is built for this machine's programs.
        "build": {
            "anyOf": [
                {"properties": {"build": {"maxItems": 0}}},
                {"properties": {"base": {"maxLength": 0}}},
            ]
        },
    },
}


Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]


class DeclaredLimits(BaseModel):
    """Limits of runs, in seconds. They take away, and give nothing."""

    model_config = STRICT

    timeout: Annotated[Seconds | None, Field(description="Of runs that name no timeout.")] = None
    max_timeout: Annotated[Seconds | None, Field(description="Of all runs.")] = None


class DeclaredTemplate(BaseModel):
    """What a template adds to a sandbox."""

    model_config = ConfigDict(**STRICT, json_schema_extra={**_SAYS})

    python: Annotated[
        Sequence[
            Annotated[
                str,
                Field(min_length=1, max_length=_LONGEST),
                STORABLE,
                WithJsonSchema(_text("requirement")),
            ]
        ],
        Members(MOST_REQUIREMENTS),
        Field(description="Python packages as pip writes them, such as `pandas>=2`."),
    ] = ()
    npm: Annotated[
        Sequence[
            Annotated[
                str,
                Field(min_length=1, max_length=_LONGEST),
                STORABLE,
                WithJsonSchema(_text("npm-package")),
            ]
        ],
        Members(MOST_REQUIREMENTS),
        Field(description="npm packages, such as `dayjs@^1`."),
    ] = ()
    environment: Annotated[
        Environment, Field(description="Environment variables. Those of a request win.")
    ] = {}
    files: Annotated[
        Mapping[
            Annotated[
                str,
                Field(min_length=1, max_length=MOST_CHARACTERS),
                Rule(_path, {"pattern": PATH_PATTERN}),
            ],
            Annotated[str, Field(max_length=FILES_BYTES), STORABLE],
        ],
        Members(MOST_FILES),
        Field(description="Texts by their path in the workspace. Files of a request win."),
    ] = {}
    run: Annotated[
        Sequence[Annotated[str, Field(min_length=1, max_length=8000), STORABLE]],
        Members(MOST_COMMANDS),
        Field(
            description="Shell commands that the build runs in the workspace, with the packages. "
            "What they leave there is of the template."
        ),
    ] = ()
    start: Annotated[
        str,
        Field(
            max_length=_LONGEST,
            description="A shell command that each session with it starts, such as a server.",
        ),
        STORABLE,
    ] = ""
    ready: Annotated[
        str,
        Field(
            max_length=_LONGEST,
            description="A shell command that ends with 0 once the start command serves. The "
            "session is answered after that.",
        ),
        STORABLE,
    ] = ""
    network: Annotated[
        NetworkField | None,
        Field(
            description="One more network list for every run with it. It takes away, and gives "
            "nothing."
        ),
    ] = None
    build: Annotated[
        Sequence[
            Annotated[
                str,
                Field(min_length=1, max_length=200),
                Rule(_package, {"pattern": f"^{PACKAGE.pattern}{END}"}),
            ]
        ],
        Members(MOST_REQUIREMENTS),
        Field(
            description="Names of Python packages that are built from their source, where the "
            "installation allows it. Of all others there are wheels only."
        ),
    ] = ()
    limits: Annotated[DeclaredLimits | None, Field(description="Limits of every run with it.")] = (
        None
    )
    base: Annotated[
        str,
        Field(
            max_length=_LONGEST,
            description="What the rest is added to: `python3.12` for another interpreter of the "
            "machine, or `image:` and the name of an image. Empty: the machine's own programs.",
        ),
        STORABLE,
        WithJsonSchema({"type": "string", "maxLength": _LONGEST, "format": "template-base"}),
    ] = ""
    apt: Annotated[
        Sequence[
            Annotated[
                str,
                Field(min_length=1, max_length=_LONGEST),
                STORABLE,
                WithJsonSchema(_text("apt-package")),
            ]
        ],
        Members(MOST_REQUIREMENTS),
        Field(description="Packages of Debian, such as `ffmpeg`. The base must be an image."),
    ] = ()

    def declaration(self) -> Declaration:
        """Raises InvalidConfiguration with field declaration."""
        network = self.network
        document: dict[str, Any] = {
            "python": list(self.python),
            "npm": list(self.npm),
            "environment": dict(self.environment),
            "files": dict(self.files),
            "run": list(self.run),
            "build": list(self.build),
            "start": self.start,
            "ready": self.ready,
            "base": self.base,
            "apt": list(self.apt),
        }
        if self.limits is not None:
            document["limits"] = self.limits.model_dump(exclude_none=True)
        if network is not None:
            policy = network.policy
            rules = [str(rule) for rule in policy.rules]
            document["network"] = {"mode": policy.mode, "rules": rules}
        try:
            return Declaration.parse(document)
        except InvalidConfiguration as error:
            raise InvalidConfiguration(
                f"declaration.{error.message}", field="declaration"
            ) from None


TemplateName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=63,
        description="Small letters, digits, and `.`, `_` and `-` between them.",
    ),
    Rule(_name, {"pattern": f"^{NAME.pattern}{END}"}),
]


@declared
class TemplateRequest:
    """Create a template and build it."""

    name: TemplateName
    declaration: DeclaredTemplate
    description: Annotated[str, Field(max_length=300), STORABLE] = ""

    def __post_init__(self) -> None:
        self.declaration.declaration()


@declared
class BuildRequest:
    """Build the next version of a template."""

    declaration: Annotated[
        DeclaredTemplate | None,
        Field(description="The default is that of the newest version."),
    ] = None
    refresh: Annotated[
        bool,
        Field(description="Resolve the packages anew, also where the declaration is the same."),
    ] = False

    def __post_init__(self) -> None:
        if self.declaration is not None:
            self.declaration.declaration()


@declared
class SessionTemplateRequest:
    """Make a template of what pip and npm have installed in a session."""

    name: TemplateName
    description: Annotated[str, Field(max_length=300), STORABLE] = ""


@declared
class TemplateFilter:
    """Where to go on."""

    limit: Limit = DEFAULT_LIMIT
    cursor: Cursor | None = None


CREATE = Body(TemplateRequest, "TemplateRequest")
OF_SESSION = Body(SessionTemplateRequest, "SessionTemplate")
BUILD = Body(BuildRequest, "TemplateBuild")
LIST = Query(TemplateFilter, empty_is_none=True)


class NoSuchTemplate(SandboxError):
    """There is none of this name, or it is of another tenant: nobody is told which."""

    entry = NOT_FOUND


class VersionSummaryShape(TypedDict):
    version: int
    state: Annotated[str, Choices.of(TemplateVersion.State.values)]
    digest: Annotated[str | None, "The SHA-256 of all its files; null until it is ready."]
    base: Annotated[
        str | None, "The base that it was built on; null for the machine's own programs."
    ]
    created_at: Time
    ended_at: Time | None


class TemplateShape(TypedDict):
    """A name that runs and sessions can use once a version is ready."""

    name: str
    scope: Annotated[str, Choices.of(("tenant", "installation"))]
    description: str
    latest: Annotated[
        int | None, "The newest version that is ready; null without one, and for `data`."
    ]
    created_at: Time
    versions: Annotated[list[VersionSummaryShape], "The newest versions, newest first."]
    packages: Annotated[
        dict[str, str],
        "The versions by name of the packages of `data`. Other templates have them by version.",
    ]


class TemplatePackageShape(TypedDict):
    """One file of the lock."""

    kind: Annotated[str, Choices.of(("python", "npm", "apt"))]
    name: str
    version: str
    hash: Annotated[str, "Its algorithm and the hash in hexadecimal."]
    source: Annotated[
        str | None, "The same of the source that the wheel was built of; null for one of an index."
    ]
    licence: Annotated[str, "What the package says of its licence."]


class TemplateAdvisoryShape(TypedDict):
    """What is known to be bad of one package of the version."""

    id: Annotated[str, "Of the advisory; `yanked` for a file that its index had yanked."]
    kind: Annotated[str, Choices.of(("python", "npm"))]
    name: str
    version: str
    summary: str
    fixed: Annotated[str | None, "A version without it; null where none is known."]


class TemplateVersionShape(VersionSummaryShape):
    template: str
    problem: Annotated[str | None, "Why it failed; null if it did not."]
    packages: list[TemplatePackageShape]
    advisories: Annotated[
        list[TemplateAdvisoryShape],
        "What the loaded advisories say of its packages by now, and which were yanked.",
    ]
    size_bytes: int
    python: Annotated[str | None, "The release of Python that it is for."]
    image: Annotated[str | None, "The digest of the image that is its base."]
    execution: Annotated[str | None, "The execution that resolved the packages."]
    declaration: dict[str, Any]


class TemplateLogShape(TypedDict):
    log: str
    state: Annotated[str, Choices.of(TemplateVersion.State.values)]


def template_of(tenant: Tenant, name: str) -> Template:
    """Return the template that a name means for a tenant, its own first. Raises NoSuchTemplate."""
    rows = with_versions(templates_for(tenant).filter(name=name))
    found = sorted(rows, key=lambda each: each.tenant_id is None)
    if not found:
        raise _no_such()
    return found[0]


def own_template_of(tenant: Tenant, name: str) -> Template:
    """Return a template of the tenant's own. Raises NoSuchTemplate."""
    found = Template.objects.filter(tenant=tenant, name=name, removed_at=None).first()
    if found is None:
        raise _no_such()
    return found


def version_of(template: Template, number: int) -> TemplateVersion:
    """Raises NoSuchTemplate."""
    rows = TemplateVersion.objects.filter(template=template, number=number)
    found = rows.select_related("template").first()
    if found is None:
        raise NoSuchTemplate("Version not found.")
    return found


def list_templates(tenant: Tenant, wanted: TemplateFilter) -> tuple[list[TemplateShape], str]:
    """A page of the templates that the tenant can use, newest first, and the next cursor. The
    default packages come last."""
    rows = with_versions(templates_for(tenant))
    found, cursor = newest_first(rows, wanted.cursor, wanted.limit)
    listed = [template_detail(each) for each in found]
    if not cursor and (usual := default_detail()):
        if len(listed) < wanted.limit:
            listed.append(usual)
        else:
            cursor = str(found[-1].pk)
    return listed, cursor


def default_detail() -> TemplateShape | None:
    """The template of the default packages, None where they are not installed."""
    known = installed_packages()
    if known is None:
        return None
    return {
        "name": DEFAULT,
        "scope": "installation",
        "description": DESCRIPTION,
        "latest": None,
        "created_at": datetime.fromtimestamp(known.installed_at, UTC).isoformat(),
        "versions": [],
        "packages": dict(known.versions),
    }


def template_detail(template: Template) -> TemplateShape:
    """One template with its newest versions, which `with_versions` has read."""
    versions = list(template.versions.all())
    ready = (each.number for each in versions if each.state == TemplateVersion.State.READY)
    return {
        "name": template.name,
        "scope": "installation" if template.tenant_id is None else "tenant",
        "description": template.description,
        "latest": next(ready, None),
        "created_at": template.created_at.isoformat(),
        "versions": [version_summary(each) for each in versions[:MOST_VERSIONS_SHOWN]],
        "packages": {},
    }


def version_summary(version: TemplateVersion) -> VersionSummaryShape:
    return {
        "version": version.number,
        "state": version.state,
        "digest": version.digest or None,
        "base": version.base.get("name") or None,
        "created_at": version.created_at.isoformat(),
        "ended_at": version.ended_at.isoformat() if version.ended_at else None,
    }


def version_detail(version: TemplateVersion) -> TemplateVersionShape:
    return {
        **version_summary(version),
        "template": version.template.name,
        "problem": version.problem or None,
        "packages": [
            {
                "kind": each.kind,
                "name": each.name,
                "version": each.version,
                "hash": f"{each.algorithm}:{each.hash}",
                "source": each.source_hash or None,
                "licence": str(version.licences.get(each.name, "")),
            }
            for each in version.locked.packages
        ],
        "advisories": [_advisory(each) for each in findings_of(version.locked)],
        "size_bytes": version.size_bytes,
        "python": version.python or None,
        "image": version.base.get("image") or None,
        "execution": str(version.execution_id) if version.execution_id else None,
        "declaration": version.declaration,
    }


def parts_of(version: TemplateVersion) -> dict[str, Any]:
    """Return the parts list of a version, as CycloneDX has it. Raises Conflict before it is
    ready."""
    if version.state != TemplateVersion.State.READY:
        raise Conflict("The version is not ready. Only what was built has a parts list.")
    return cyclonedx(
        version.template.name,
        str(version.number),
        version.digest,
        version.locked,
        {name: str(licence) for name, licence in version.licences.items()},
    )


def _advisory(finding: Finding) -> TemplateAdvisoryShape:
    return {
        "id": finding.advisory,
        "kind": finding.kind,
        "name": finding.name,
        "version": finding.version,
        "summary": finding.summary,
        "fixed": finding.fixed or None,
    }


def _no_such() -> NoSuchTemplate:
    return NoSuchTemplate("Template not found.")
