"""The TypeScript client as somebody has it who has installed it, and programs that use it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import require
from tests.support.processes import ROOT
from tests.support.site import Site

SOURCE = ROOT / "clients" / "typescript"
SCENARIOS = ROOT / "tests" / "typescript"
PAGES = (SOURCE / "README.md", ROOT / "docs" / "clients.md")

_EXAMPLE = re.compile(r"^```ts\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHOWN = re.compile(r"^ *console\.log\(.*\); +// (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A program of a page. `shown` is what it says that it prints, a line each."""

    name: str
    text: str

    @property
    def shown(self) -> list[str]:
        return _SHOWN.findall(self.text)


def examples() -> list[Example]:
    return [
        Example(f"{page.parent.name}-{number}", text)
        for page in PAGES
        for number, text in enumerate(_EXAMPLE.findall(page.read_text(encoding="utf-8")), 1)
    ]


class Installed:
    """A folder with the built package in its `node_modules`, and all programs compiled."""

    def __init__(self, folder: Path) -> None:
        self._node = require("node")
        self.folder = folder
        package = folder / "node_modules" / "cofferdam"
        built = shutil.ignore_patterns("dist", "node_modules")
        shutil.copytree(SOURCE, package, ignore=built)
        self._compile(package)
        # What is in the package is what it says of itself.
        told = json.loads((package / "package.json").read_text())
        for path in package.iterdir():
            if path.name not in (*told["files"], "package.json"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(SCENARIOS, folder, dirs_exist_ok=True)
        for example in examples():
            (folder / f"{example.name}.ts").write_text(example.text, encoding="utf-8")
        self._compile(folder)

    def _compile(self, folder: Path) -> None:
        done = subprocess.run(
            [require("tsc"), "--project", folder], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout

    def run(
        self, program: str, *arguments: str, site: Site, url: str = "", given: str = "", **more: str
    ) -> str:
        """What a program prints that is to talk with this service, or through this address."""
        environment = {
            "PATH": os.environ["PATH"],
            "COFFERDAM_URL": url or site.service.url,
            "COFFERDAM_API_KEY": site.alice,
            **more,
        }
        done = subprocess.run(
            [self._node, f"{program}.js", *arguments],
            env=environment,
            cwd=self.folder,
            input=given,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout}{done.stderr}"
        return done.stdout
