"""Every variable of Agent Sandbox is in docs/compatibility.md, and does what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployment_pages import blocks_of
from tests.support.env_files import load
from tests.support.processes import ROOT, clean_environment

PAGE = ROOT / "docs" / "compatibility.md"
_ROW = re.compile(r"^\| `([A-Z0-9_]+)` \| (honoured|refused) \| (\S*) ?\|", re.MULTILINE)

# The example of its README, with its remarks; the key is one that nobody has published.
KEY = "a key that nobody has published"
EXAMPLE = f"""
# Authentication
SANDBOX_API_KEY={KEY}

# S3/MinIO Configuration
S3_ENDPOINT_URL=http://127.0.0.1:9000
S3_ACCESS_KEY_ID=minioadmin
S3_SECRET_ACCESS_KEY=minioadmin
S3_BUCKET=sandbox
S3_REGION=us-east-1
S3_PREFIX_ROOT=sandboxes
PRESIGN_EXPIRES_SECONDS=300

# Docker Sandbox Configuration
SANDBOX_IMAGE=python:3.12-slim
SANDBOX_TTL_SECONDS=1800       # Max lifetime (30 minutes)
SANDBOX_IDLE_SECONDS=600       # Max idle time (10 minutes)
SANDBOX_EXEC_TIMEOUT_SECONDS=10 # Single execution timeout
SANDBOX_REAPER_INTERVAL=15     # Reaper polling interval (seconds)
SANDBOX_MAX_TOTAL=50           # Max simultaneous sandboxes

# Storage Paths
WORK_ROOT=./sandboxes

# Upload / Output Limits
MAX_UPLOAD_BYTES=52428800      # Max upload size: 50MB
MAX_OUTPUT_BYTES=200000        # Max output size: 200KB

# Cleanup Behavior
DELETE_S3_ON_CLEANUP=1         # Delete S3 prefix when cleaning sandbox (default)
DELETE_S3_ON_DELETE=0          # Delete S3 files when deleting local files? (default: no)

# SSRF Protection
ALLOW_PRIVATE_URLS=0           # Block private IP downloads (default)
"""
VARIABLES = re.findall(r"^([A-Z0-9_]+)=", EXAMPLE, re.MULTILINE)
_OPTIONS = "STORAGES['workspaces']['OPTIONS']"
# What each is read into, a value that is not its default, and what that is read as.
READ: dict[str, tuple[str, str, Any]] = {
    "SANDBOX_API_KEY": ("AGENT_SANDBOX.api_key", KEY, KEY),
    "S3_ENDPOINT_URL": (f"{_OPTIONS}['endpoint_url']", "https://s3.example", "https://s3.example"),
    "S3_ACCESS_KEY_ID": (f"{_OPTIONS}['access_key']", "somebody", "somebody"),
    "S3_SECRET_ACCESS_KEY": (f"{_OPTIONS}['secret_key']", "something", "something"),
    "S3_BUCKET": (f"{_OPTIONS}['bucket_name']", "box", "box"),
    "S3_REGION": (f"{_OPTIONS}['region_name']", "eu-1", "eu-1"),
    "S3_PREFIX_ROOT": (f"{_OPTIONS}['location']", "theirs", "theirs/workspaces"),
    "PRESIGN_EXPIRES_SECONDS": ("PRESIGN_EXPIRES_SECONDS", "301", 301),
    "SANDBOX_TTL_SECONDS": ("AGENT_SANDBOX.total_seconds", "1801", 1801),
    "SANDBOX_IDLE_SECONDS": ("AGENT_SANDBOX.idle_seconds", "601", 601),
    "SANDBOX_EXEC_TIMEOUT_SECONDS": ("AGENT_SANDBOX.execution_seconds", "11", 11),
    "SANDBOX_REAPER_INTERVAL": ("SANDBOX_REAPER_INTERVAL", "16", 16),
    "SANDBOX_MAX_TOTAL": ("SESSIONS_MAX_TOTAL", "51", 51),
    "MAX_UPLOAD_BYTES": ("AGENT_SANDBOX.upload_bytes", "52428801", 52428801),
    "MAX_OUTPUT_BYTES": ("AGENT_SANDBOX.output_bytes", "200001", 200001),
    "DELETE_S3_ON_CLEANUP": ("DELETE_S3_ON_CLEANUP", "0", False),
    "DELETE_S3_ON_DELETE": ("DELETE_S3_ON_DELETE", "1", True),
    "ALLOW_PRIVATE_URLS": ("ALLOW_PRIVATE_URLS", "1", True),
}
_WITHOUT_DEFAULT = {name for name in READ if name.startswith("S3_")} | {"SANDBOX_API_KEY"}


def rows() -> dict[str, tuple[str, str]]:
    text = PAGE.read_text(encoding="utf-8")
    return {name: (verdict, default.strip("`")) for name, verdict, default in _ROW.findall(text)}


def called(verdict: str) -> list[str]:
    return [name for name, (said, _) in rows().items() if said == verdict]


def test_each_variable_of_its_example_is_in_the_table_in_that_order() -> None:
    assert list(rows()) == VARIABLES
    assert sorted(READ) == sorted(called("honoured"))


def test_what_is_called_honoured_is_read(tmp_path: Path) -> None:
    given = {name: value for name, (_, value, _) in READ.items()}
    read = load("/dev/null", *(setting for setting, _, _ in READ.values()), **given)
    expected = [wanted for _, _, wanted in READ.values()]
    assert dict(zip(READ, read, strict=True)) == dict(zip(READ, expected, strict=True))


def test_the_defaults_of_the_table_are_those_in_force() -> None:
    names = [name for name in READ if name not in _WITHOUT_DEFAULT]
    read = load("/dev/null", *(READ[name][0] for name in names))
    said = [rows()[name][1] for name in names]
    assert [str(int(value)) for value in read] == said
    s3 = {name: READ[name][1] for name in READ if name.startswith("S3_")}
    del s3["S3_REGION"], s3["S3_PREFIX_ROOT"]
    region, prefix = load("/dev/null", READ["S3_REGION"][0], READ["S3_PREFIX_ROOT"][0], **s3)
    assert (region, prefix.removesuffix("/workspaces")) == (
        rows()["S3_REGION"][1],
        rows()["S3_PREFIX_ROOT"][1],
    )


def test_its_env_file_is_taken_but_for_what_is_refused(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    refused = re.compile(rf"^({'|'.join(called('refused'))})=.*\n", re.MULTILINE)
    file.write_text(refused.sub("", EXAMPLE))
    (command,) = blocks_of(PAGE)
    subprocess.run(["sh", "-c", command.text], cwd=tmp_path, check=True)
    read = load(
        file,
        "SESSIONS_MAX_TOTAL",
        "AGENT_SANDBOX.total_seconds",
        "AGENT_SANDBOX.upload_bytes",
        "ALLOW_PRIVATE_URLS",
        READ["S3_ENDPOINT_URL"][0],
    )
    assert read == [50, 1800, 52428800, False, "http://127.0.0.1:9000"]


@pytest.mark.parametrize("name", called("refused"))
def test_what_is_called_refused_is_refused_at_start_by_its_name(name: str, tmp_path: Path) -> None:
    value = dict(re.findall(r"^([A-Z0-9_]+)=(\S+)", EXAMPLE, re.MULTILINE))[name]
    ended = subprocess.run(
        [sys.executable, "manage.py", "check"],
        env=clean_environment(tmp_path) | {name: value},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode != 0
    assert f"{name} has no effect: " in ended.stderr
    assert ended.stderr.rstrip().endswith("Remove it")
