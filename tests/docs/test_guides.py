"""Whoever follows the guides word by word gets what they show, and what they say of names is so.

That what all pages link to and name exists is in test_documentation.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from executions.capabilities.webhooks.service import signed_headers
from executions.runs.models import Execution
from providers.errors import CODES
from tests.support.processes import ROOT, Service, clean_environment, free_port, started
from tests.support.site import migrated

DOCS = ROOT / "docs"
# In the order in which a reader comes to them: the first one starts the service of all.
GUIDES = (
    *("quick-start.md", "../README.md", "api-guide.md", "clients.md", "operations.md"),
    "auditors-guide.md",
)
# How many blocks may say that they are not run.
MOST_NOT_RUN = 0
WRITTEN_URL = "http://127.0.0.1:8000"
# However busy the machine is.
SECONDS = 240

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_REASON = re.compile(r"<!-- not run: (.+?) -->\s*\Z", re.DOTALL)
_FILE = re.compile(r"# ([\w-]+\.py)\n")


@dataclass(frozen=True)
class Block:
    """One fenced block of commands or Python, and what the guide shows as its output, if it does.

    `reason` says why it is not run, "" where it is.
    """

    name: str
    language: str
    text: str
    shown: tuple[str, str] | None
    reason: str

    @property
    def script(self) -> str:
        """What a shell is given for it. Python that begins with the name of a file is that file."""
        if self.language == "sh":
            return self.text
        file = _FILE.match(self.text)
        target = f"cat > {file[1]}" if file else ".venv/bin/python -"
        return f"{target} << 'END_OF_PYTHON'\n{self.text}END_OF_PYTHON\n"


def blocks_of(name: str) -> list[Block]:
    text = (DOCS / name).read_text(encoding="utf-8")
    found: list[Block] = []
    end_of_last = 0
    for fence in _FENCE.finditer(text):
        indent, language, lines = fence.groups()
        if language == "ts":  # Compiled and run by test_typescript_client.py.
            continue
        body = re.sub(rf"^{indent}", "", lines, flags=re.MULTILINE)
        place = f"{name}:{text.count(chr(10), 0, fence.start()) + 1}"
        if language in ("sh", "python"):
            reason = _REASON.search(text[: fence.start()])
            found.append(Block(place, language, body, None, reason[1] if reason else ""))
        elif language in ("json", "text"):
            # What is shown is the output of the block right before it, whatever is said between.
            assert found, place
            assert found[-1].shown is None, place
            assert "\n#" not in text[end_of_last : fence.start()], place
            last = found[-1]
            found[-1] = Block(last.name, last.language, last.text, (language, body), last.reason)
        else:
            raise AssertionError(f"{place}: neither commands nor their output: {language!r}")
        end_of_last = fence.end()
    return found


def is_like(shown: Any, got: Any) -> bool:
    """Whether JSON is as shown, where "..." is any value, any text within one, or any more names."""
    if isinstance(shown, str):
        return shown == "..." or (isinstance(got, str) and bool(pattern_of(shown).fullmatch(got)))
    if isinstance(shown, dict):
        wanted = {name: each for name, each in shown.items() if name != "..."}
        return (
            isinstance(got, dict)
            and wanted.keys() <= got.keys()
            and ("..." in shown or wanted.keys() == got.keys())
            and all(is_like(each, got[name]) for name, each in wanted.items())
        )
    if isinstance(shown, list):
        same = isinstance(got, list) and len(shown) == len(got)
        return same and all(map(is_like, shown, got))
    return bool(shown == got)


def pattern_of(text: str) -> re.Pattern[str]:
    return re.compile(".*?".join(map(re.escape, text.split("..."))), re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands are typed: as the project's folder, with data of its own."""
    folder = tmp_path_factory.mktemp("guides")
    migrated(folder / "data")
    for name, target in {
        "manage.py": ROOT / "manage.py",
        "clients": ROOT / "clients",
        "examples": ROOT / "examples",
        "deploy": ROOT / "deploy",
        ".venv": Path(sys.prefix),
        "var": folder / "data",
    }.items():
        (folder / name).symlink_to(target)
    return folder


def path_without_gvisor() -> str:
    """PATH without the folders that have it: a sandbox of bubblewrap costs a tenth of its."""
    folders = os.environ["PATH"].split(os.pathsep)
    found = os.pathsep.join(each for each in folders if not Path(each, "runsc").exists())
    return found if shutil.which("python3", path=found) else os.environ["PATH"]


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    """What the first block of the quick start starts."""
    first = blocks_of(GUIDES[0])[0]
    environment = clean_environment(
        folder / "data",
        PATH=path_without_gvisor(),
        PORT=str(free_port()),
        POOL_PORT=str(free_port()),
        MAKEFLAGS=f"VENV={sys.prefix}",
    )
    with started(["sh", "-c", first.text], environment, ROOT, folder / "log") as service:
        service.wait_until_ready(SECONDS)
        yield service


def here(text: str, service: Service) -> str:
    return text.replace(WRITTEN_URL, service.url)


def follow(guide: str, blocks: list[Block], folder: Path, service: Service) -> dict[str, str]:
    """What each block prints, in one shell. Raises AssertionError for the first one that fails."""
    lines = ["set -eu"]
    for block in blocks:
        lines += [here(block.script, service), f"printf '\\n== %s\\n' '{block.name}'"]
    environment = clean_environment(folder / "data", LOG_LEVEL="WARNING", PORT=str(service.port))
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        env=environment | {"PATH": os.environ["PATH"]},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    printed: dict[str, str] = {}
    rest = done.stdout
    for block in blocks:
        output, mark, rest = rest.partition(f"\n== {block.name}\n")
        assert mark, f"{block.name} failed:\n{output}\n{done.stderr[-3000:]}"
        printed[block.name] = output
    return printed


def test_the_first_block_starts_the_service_and_shows_what_it_prints(service: Service) -> None:
    first = blocks_of(GUIDES[0])[0]
    assert first.text == "make run\n"
    assert first.shown is not None
    assert pattern_of(here(first.shown[1], service)).search(service.output), service.output


@pytest.mark.parametrize("guide", GUIDES)
def test_its_commands_do_what_it_shows(guide: str, folder: Path, service: Service) -> None:
    blocks = [
        block for block in blocks_of(guide) if not block.reason and block.text != "make run\n"
    ]
    assert blocks
    printed = follow(guide, blocks, folder, service)
    for block in blocks:
        if block.shown is None:
            continue
        kind, shown = block.shown
        shown, got = here(shown, service), printed[block.name]
        if kind == "json":
            assert is_like(json.loads(shown), json.loads(got)), f"{block.name}:\n{got}"
        else:
            assert pattern_of(shown.strip()).fullmatch(got.strip()), f"{block.name}:\n{got}"


def test_what_is_not_run_says_why_and_is_little() -> None:
    blocks = [block for guide in GUIDES for block in blocks_of(guide)]
    assert len(blocks) > 35
    assert len([block for block in blocks if block.reason]) <= MOST_NOT_RUN


def test_the_guide_tells_a_signed_webhook_from_others() -> None:
    [block] = [each for each in blocks_of("api-guide.md") if each.text.startswith("# webhook.py")]
    names: dict[str, Any] = {}
    exec(block.text, names)
    secret, other, body = "whsec_c2VjcmV0", "whsec_b3RoZXI=", b'{"type": "execution.finished"}'
    headers = signed_headers([other, secret], "msg_1", 1_000_000, body)
    assert names["is_signed"](secret, headers, body, now=1_000_010)
    assert not names["is_signed"](secret, headers, body + b" ", now=1_000_010)
    assert not names["is_signed"](secret, headers, body, now=1_000_999)
    assert not names["is_signed"]("whsec_bmV2ZXI=", headers, body, now=1_000_010)


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The table below a heading, without its first two lines."""
    text = (DOCS / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    lines = text.split("\n## ")[0].splitlines()
    rows = [line for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_the_terminal_states_are_those_that_an_execution_can_end_in() -> None:
    told = [row[0].strip("`") for row in rows_of("api-guide.md", "Terminal states")]
    ends = set(Execution.Status.values) - set(Execution.OPEN)
    assert sorted(told) == sorted(ends)
    [client] = [each for each in blocks_of("api-guide.md") if each.text.startswith("# agent.py")]
    names = re.search(r"ENDED = \{(.+)\}", client.text)
    assert names is not None
    assert set(re.findall(r'"(\w+)"', names[1])) == ends


def test_the_errors_have_the_status_that_the_guide_says() -> None:
    told = {row[0]: row[1] for row in rows_of("api-guide.md", "Errors")}
    verdicts = {"SB005", "SB006", "SB007"}
    for code, entry in CODES.items():
        [status] = [said for name, said in told.items() if code in name.split(", ")]
        wanted = 200 if code in verdicts else entry.http_status
        assert status.startswith(str(wanted)), code


def test_troubleshooting_has_each_code_by_its_name() -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    told = re.findall(r"^### (SB\d+), (.+)$", text, re.MULTILINE)
    assert told == [(code, entry.title.lower()) for code, entry in CODES.items()]
