"""S3-compatible services over real sockets, which can be away.

`s3` is moto, which is there at once and believes every signature; `swift` is OpenStack Swift, which
believes none that is wrong or late, and keeps on a disk what it took.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
import pytest
from botocore.config import Config
from django.core.files.storage import storages

from executions.kernel import bucket
from executions.kernel.storage import ARTIFACTS
from executions.ledger import checkpoints
from executions.runs.models import Artifact
from sandbox_site import storage_settings
from sandbox_site.environment import StrictEnv
from tests.support.processes import ROOT, free_port
from tests.support.required import missing

BUCKET = "cofferdam-tests"
SWIFT_PYTHON = Path("/usr/local/lib/cofferdam-swift/bin/python")


@dataclass
class S3:
    """`url` is a STORAGE_URL, `environment` all that a process needs for it."""

    log: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    access_key: str = "somebody"
    secret_key: str = "something"
    prefix: str = "kept"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        endpoint = quote(self.endpoint, safe="")
        return f"s3://{BUCKET}/{self.prefix}?endpoint={endpoint}&region=us-east-1&addressing=path"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "STORAGE_URL": self.url,
            "STORAGE_ACCESS_KEY": self.access_key,
            "STORAGE_SECRET_KEY": self.secret_key,
        }

    def start(self) -> None:
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                self.command(), stdout=stream, stderr=stream, start_new_session=True
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def stop(self) -> None:
        """Whoever connects is refused. What was kept is gone, as moto keeps it in memory."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}),
        )

    def make_bucket(self) -> None:
        self.client().create_bucket(Bucket=BUCKET)

    def names(self) -> list[str]:
        """Of everything in the bucket."""
        listed = self.client().list_objects_v2(Bucket=BUCKET)
        return [found["Key"] for found in listed.get("Contents", ())]


@dataclass
class Swift(S3):
    """Of a folder of its own, where what was taken outlives the process that took it."""

    access_key: str = "test:tester"
    secret_key: str = field(default_factory=lambda: secrets.token_hex(16))

    def command(self) -> list[str]:
        return [
            str(SWIFT_PYTHON),
            "-W",
            "ignore",
            str(ROOT / "tests" / "swift" / "server.py"),
            str(self.log.parent),
            str(self.port),
            self.secret_key,
        ]


def keep_in(service: S3, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process keeps its files in the bucket, the ledger's checkpoints too."""
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    settings.STORAGES = storage_settings.storages(StrictEnv())
    settings.LEDGER_CHECKPOINTS = "storage"
    monkeypatch.setattr(Artifact._meta.get_field("file"), "storage", storages[ARTIFACTS])
    monkeypatch.setattr(bucket, "_silent_until", float("-inf"))
    monkeypatch.setattr(bucket, "_SILENCE_SECONDS", 0.0)
    # A checkpoint that another test could not write is not to be written among this one's.
    behind = checkpoints.AsyncWriter(checkpoints._note_far, checkpoints.EVERY)
    monkeypatch.setattr(checkpoints, "_behind", behind)


@pytest.fixture
def on_s3(s3: S3, settings: Any, monkeypatch: pytest.MonkeyPatch) -> S3:
    keep_in(s3, settings, monkeypatch)
    return s3


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3]:
    service = S3(tmp_path / "s3.log")
    service.start()
    service.make_bucket()
    yield service
    service.stop()


@contextmanager
def swift_service() -> Iterator[Swift]:
    if not SWIFT_PYTHON.exists():
        missing("OpenStack Swift is not installed: .ci/install-swift")
    # It keeps what it knows of a file in attributes that not every /tmp has.
    folder = Path(tempfile.mkdtemp(prefix="cofferdam-swift.", dir="/var/tmp"))
    service = Swift(folder / "log")
    try:
        service.start()
        service.make_bucket()
        yield service
    finally:
        if service.process is not None:
            service.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def shared_swift() -> Iterator[Swift]:
    """One for all tests that do not stop it."""
    with swift_service() as service:
        yield service


@pytest.fixture
def on_swift(shared_swift: Swift, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Swift:
    """The same service for everybody, and a place in it that is this test's own."""
    service = replace(shared_swift, prefix=secrets.token_hex(8))
    keep_in(service, settings, monkeypatch)
    return service


@pytest.fixture
def own_swift(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swift]:
    """One to be stopped."""
    with swift_service() as service:
        keep_in(service, settings, monkeypatch)
        yield service
