from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from executions.capabilities.templates import advisories, builds
from executions.capabilities.templates.documents import read_file
from executions.capabilities.templates.models import Template
from executions.kernel.audit import current_actor
from executions.kernel.coroutines import run_sync
from executions.tenants.models import Tenant
from providers.errors import SandboxError

CHANGED = 1


class Command(BaseCommand):
    help = (
        "Build, list, verify and remove templates. `build FILE` builds the template that a TOML "
        f"file declares. `verify` ends with {CHANGED} where a file of a template has changed. "
        "`advisories FILE` loads what is known to be bad, such as the all.zip of an ecosystem of "
        "OSV, and tells which versions have it."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parts = parser.add_subparsers(dest="do", required=True, metavar="COMMAND")
        build = parts.add_parser("build", help="build a template of a TOML file")
        build.add_argument("file", metavar="FILE")
        build.add_argument("--refresh", action="store_true", help="resolve the packages anew")
        listing = parts.add_parser("list", help="list templates and their versions")
        removal = parts.add_parser("remove", help="remove a template")
        removal.add_argument("name", metavar="NAME")
        loading = parts.add_parser("advisories", help="load advisories on packages of a file")
        loading.add_argument("file", metavar="FILE")
        parts.add_parser("verify", help="compare the files of all templates with their digests")
        for each in (build, listing, removal):
            each.add_argument(
                "--tenant", metavar="SLUG", help="of this tenant; without it, of the installation"
            )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            getattr(self, f"_{options['do']}")(options)
        except SandboxError as error:
            raise CommandError(error.message) from error

    def _build(self, options: dict[str, Any]) -> None:
        path = Path(options["file"])
        try:
            document = read_file(path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"{path} cannot be read: {error}") from error
        version = builds.build_now(
            _tenant(options["tenant"]),
            document.name,
            document.declaration,
            current_actor(),
            document.description,
            refresh=options["refresh"],
        )
        self.stdout.write(version.log, ending="")
        if version.state == version.State.PENDING:
            self.stdout.write(f"{version} waits for the approval of an administrator.")
        elif version.state != version.State.READY:
            raise CommandError(f"{version}: {version.problem}")
        else:
            self.stdout.write(f"{version} is ready: {version.digest}")

    def _list(self, options: dict[str, Any]) -> None:
        tenant = _tenant(options["tenant"])
        for template in Template.objects.filter(tenant=tenant, removed_at=None):
            for version in template.versions.defer("log", "lock").order_by("-number"):
                size = f"{version.size_bytes >> 20} MiB"
                said = f"{version} {version.state} {size} {version.digest}"
                self.stdout.write(f"{said} {version.problem}".rstrip())

    def _remove(self, options: dict[str, Any]) -> None:
        name = options["name"]
        rows = Template.objects.filter(tenant=_tenant(options["tenant"]), removed_at=None)
        template = rows.filter(name=name).first()
        if template is None:
            raise CommandError(f"There is no template {name}.")
        run_sync(builds.remove(template, current_actor()))
        self.stdout.write(f"{name} was removed.")

    def _advisories(self, options: dict[str, Any]) -> None:
        path = Path(options["file"])
        try:
            with path.open("rb") as file:
                kinds = advisories.load(file)
        except (OSError, ValueError) as error:
            raise CommandError(f"{path} cannot be read: {error}") from error
        for kind, count in sorted(kinds.items()):
            self.stdout.write(f"{count} advisories on packages of {kind}.")
        for version, found in advisories.affected_versions():
            tenant = version.template.tenant
            for each in found:
                self.stdout.write(f"{tenant.slug if tenant else 'installation'} {version}: {each}")

    def _verify(self, options: dict[str, Any]) -> None:
        found = list(builds.problems())
        for version, problem in found:
            self.stdout.write(f"{version} {version.digest}: {problem}")
        if found:
            raise CommandError(f"{len(found)} templates are not as built.", returncode=CHANGED)
        self.stdout.write("All templates are as they were built.")


def _tenant(slug: str | None) -> Tenant | None:
    if slug is None:
        return None
    tenant = Tenant.objects.filter(slug=slug).first()
    if tenant is None:
        raise CommandError(f"There is no tenant {slug}.")
    return tenant
