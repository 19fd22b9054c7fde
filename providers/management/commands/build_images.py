"""`manage.py build_images`: make the images that Docker sandboxes are started from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import docker
from django.core.management.base import BaseCommand, CommandError, CommandParser

from providers.checks import BEFORE_WORK
from providers.errors import SandboxError
from providers.languages import TABLE
from providers.self_managed.images.build import (
    REPOSITORY,
    build_from_debian,
    build_from_registry,
    build_template,
)

LANGUAGES = tuple(each.name for each in TABLE if each.image)


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Builds the images cofferdam/python and cofferdam/nodejs, or with --template one of your "
        "own on top of them. Images that are up to date are left alone."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--from-debian",
            action="store_true",
            help="Build with debootstrap, for hosts without an image registry. Needs root.",
        )
        parser.add_argument("--template", metavar="NAME", help="Build cofferdam/NAME instead.")
        parser.add_argument(
            "--requirements",
            type=Path,
            metavar="FILE",
            help="File with its Python packages, in pip's format.",
        )
        parser.add_argument(
            "--base", default=f"{REPOSITORY}/python", help="Its base image (default: %(default)s)."
        )
        parser.add_argument(
            "--rebuild", action="store_true", help="Also rebuild images that are up to date."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if bool(options["template"]) != bool(options["requirements"]):
            raise CommandError("--template and --requirements must be given together.")
        # What lies in an image is for the sandboxes' users to read, unlike all else we write.
        os.umask(0o022)
        try:
            # Importing a whole system takes the engine a while.
            client = docker.from_env(timeout=900)
            for name, digest in self._build(client, options).items():
                self.stdout.write(f"{name} {digest}")
        except SandboxError as error:
            raise CommandError(error.message) from error
        except (docker.errors.DockerException, OSError) as error:
            raise CommandError(f"The Docker engine failed: {error}") from error

    def _build(self, client: docker.DockerClient, options: dict[str, Any]) -> dict[str, str]:
        """The images' names with their digests."""
        if name := options["template"]:
            requirements, base = options["requirements"], options["base"]
            digest = build_template(client, name, requirements, base, tell=self._tell)
            return {f"{REPOSITORY}/{name}": digest}
        rebuild = options["rebuild"]
        if options["from_debian"]:
            digest = build_from_debian(client, rebuild=rebuild, tell=self._tell)
            return {f"{REPOSITORY}/{language}": digest for language in LANGUAGES}
        return {
            f"{REPOSITORY}/{language}": build_from_registry(
                client, language, rebuild=rebuild, tell=self._tell
            )
            for language in LANGUAGES
        }

    def _tell(self, line: str) -> None:
        self.stderr.write(line)
