"""Conversations of Agent Sandbox in tests: asked for below /v1, as its clients do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from tests.conftest import Caller
from tests.support.kept_service import kept_by
from tests.support.kept_service import shared_service as shared_service


@pytest.fixture(name="conversations")
def provide_conversations(
    transactional_db: None, tmp_path: Path, settings: Any, shared_service: Path
) -> Iterator[None]:
    """Real sandboxes that stay, in bubblewrap, and a storage of the test's own."""
    settings.DATA_DIR = tmp_path
    with kept_by(shared_service, tmp_path):
        yield


def execute(caller: Caller, code: str, user_id: str = "alice", **body: Any) -> Any:
    return caller.client.post("/v1/execute", {"user_id": user_id, "code": code, **body})


def output(caller: Caller, code: str, user_id: str = "alice", **body: Any) -> str:
    """What code has printed, which ran."""
    answer = execute(caller, code, user_id, **body)
    assert answer.status_code == 200, answer.content
    assert "output" in answer.json(), answer.json()
    return str(answer.json()["output"])


def control(caller: Caller, what: str, user_id: str = "alice", **body: Any) -> Any:
    return caller.client.post(f"/v1/sandbox/{what}", {"user_id": user_id, **body})


def upload(caller: Caller, content: bytes, user_id: str = "alice", **form: Any) -> Any:
    sent = SimpleUploadedFile(form.pop("filename", "sent.txt"), content)
    return caller.client.post(
        "/v1/files/upload", {"user_id": user_id, "file": sent, **form}, format="multipart"
    )


def upload_urls(caller: Caller, urls: list[str], user_id: str = "alice", **body: Any) -> Any:
    return caller.client.post("/v1/files/upload-urls", {"user_id": user_id, "urls": urls, **body})


def listed(caller: Caller, user_id: str = "alice", **query: Any) -> list[str]:
    """The paths of a conversation's files."""
    answer = caller.client.get("/v1/files/list", {"user_id": user_id, **query})
    assert answer.status_code == 200, answer.content
    return [each["path"] for each in answer.json()["files"]]


def download_url(caller: Caller, path: str, user_id: str = "alice", **query: Any) -> Any:
    return caller.client.get("/v1/files/download-url", {"user_id": user_id, "path": path, **query})


def content(url: str) -> bytes:
    """What whoever holds a link gets by it."""
    answer = Client().get(url)
    assert answer.status_code == 200, answer.content
    return b"".join(answer.streaming_content)  # type: ignore[arg-type]
