"""A client of Agent Sandbox, written against that service's documents alone. Standard library."""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.parse
import urllib.request
from typing import Any


class AgentSandbox:
    """One conversation: `user_id` and `session_id` own a sandbox with variables and files."""

    def __init__(self, base_url: str, api_key: str, user_id: str, session_id: str) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.who = {"user_id": user_id, "session_id": session_id}

    def execute(self, code: str, **fields: Any) -> dict[str, Any]:
        return self._post("/v1/execute", {**self.who, "code": code, **fields})

    def reset(self) -> dict[str, Any]:
        return self._post("/v1/sandbox/reset", self.who)

    def stop(self) -> dict[str, Any]:
        return self._post("/v1/sandbox/stop", self.who)

    def upload_urls(self, urls: list[str], **fields: Any) -> dict[str, Any]:
        return self._post("/v1/files/upload-urls", {**self.who, "urls": urls, **fields})

    def upload(self, path: str, content: bytes, **fields: Any) -> dict[str, Any]:
        boundary = secrets.token_hex(16)
        parts = []
        for name, value in {**self.who, "path": path, **fields}.items():
            parts += [
                f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode(),
                f"{value}\r\n".encode(),
            ]
        parts += [
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="file"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n".encode(),
            content,
            f"\r\n--{boundary}--\r\n".encode(),
        ]
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return self._ask("/v1/files/upload", b"".join(parts), headers)

    def files(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("/v1/files/list", self.who)["files"]
        return found

    def download_url(self, path: str, **fields: Any) -> dict[str, Any]:
        return self._get("/v1/files/download-url", {**self.who, "path": path, **fields})

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.base_url}/health", timeout=60) as answer:
            return dict(json.loads(answer.read()))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._ask(path, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _get(self, path: str, query: dict[str, Any]) -> dict[str, Any]:
        return self._ask(f"{path}?{urllib.parse.urlencode(query)}", None, {})

    def _ask(self, path: str, body: bytes | None, headers: dict[str, str]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.base_url + path, body, {"X-API-Key": self.api_key, **headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return dict(json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            return {"http_status": error.code, **json.loads(error.read())}
