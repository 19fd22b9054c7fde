"""Aliyun's Code Interpreter protocol on loopback, for the unmodified SDK; it verifies signatures.

Code runs for real, as tests/support/notebook.py tells. The control plane (templates and lists of sandboxes) is
spoken over HTTPS alone, so a test that needs it gives a certificate.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.support.agentrun_files import OPERATIONS
from tests.support.notebook import Cell, Context, Notebook
from tests.support.wire_server import Answer, Request, Sent, WireServer, send_json

VERSION = "/2025-09-10/"
_ACS3 = re.compile(
    r"ACS3-HMAC-SHA256 Credential=(?P<key>[^,]+),SignedHeaders=(?P<headers>[^,]+),"
    r"Signature=(?P<signature>[0-9a-f]{64})"
)


class AgentRunServer(WireServer):
    """Faults beyond the common ones: `truncated`, `dead` (the sandbox is found to be gone),
    `lost` (the code runs, and then the connection is cut), `refused` (200, but no SUCCESS).
    """

    def __init__(
        self,
        *,
        access_key_id: str = "LTAI5t-key-id",
        access_key_secret: str = "the-access-key-secret",
        region: str = "cn-hangzhou",
        certificate: Path | None = None,
    ) -> None:
        self.access_key_id = access_key_id
        self.access_key_secret = access_key_secret
        self.region = region
        self.sandboxes: dict[str, Notebook] = {}
        self.idle_seconds: list[int] = []
        self.templates = {"code"}
        self.unsigned = 0
        # Whether a file that is moved replaces another, which the service does not say of itself.
        self.replaces = True
        # What is answered in place of the truth, where there is something.
        self.lies: Callable[[str], Any] = lambda operation: None
        super().__init__()
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.serve_tls(context)

    def close(self) -> None:
        super().close()
        for notebook in list(self.sandboxes.values()):
            notebook.kill()

    def error_body(self, status: int) -> Any:
        return {
            "code": "Ordered",
            "requestId": "request-4711",
            "message": f"ordered to fail with {status}",
        }

    def operation(self, request: Request) -> str:
        method, parts = request.method, request.path.strip("/").split("/")
        if request.path.startswith(VERSION):
            return f"{method} {parts[1]}"
        if parts[0] != "sandboxes":
            raise Answer(404, {"code": "NoRoute", "message": f"{method} {request.path}"})
        if len(parts) == 1:
            return "create"
        if len(parts) == 2:
            return "delete" if method == "DELETE" else "get"
        if parts[2:] == ["contexts", "execute"]:
            return "execute"
        return parts[3] if parts[2] in ("filesystem", "processes") and len(parts) > 3 else parts[2]

    def answer(self, operation: str, request: Request, fault: str | None) -> None:
        if request.path.startswith(VERSION):
            self._control(operation, request)
        self._verify(request)
        if operation == "create":
            self._create(request, fault)
        sandbox_id = request.path.strip("/").split("/")[1]
        if fault == "dead" and sandbox_id in self.sandboxes:
            self.sandboxes.pop(sandbox_id).kill()
        notebook = self.sandboxes.get(sandbox_id)
        if notebook is None:
            raise Answer(
                404,
                {
                    "code": "SandboxNotFound",
                    "requestId": "request-4711",
                    "message": f"sandbox not found: {sandbox_id}",
                },
            )
        if operation == "delete":
            del self.sandboxes[sandbox_id]
            notebook.kill()
            raise Answer(200, _success({"sandboxId": sandbox_id, "status": "TERMINATED"}))
        if operation == "get":
            raise Answer(200, _success({"sandboxId": sandbox_id, "status": "READY"}))
        if operation == "execute":
            self._execute(notebook, request, fault)
        if operation == "contexts":
            _contexts(notebook, request)
        if (lie := self.lies(operation)) is not None:
            raise Answer(200, lie)
        if operation in OPERATIONS:
            OPERATIONS[operation](notebook, request, self)
        raise Answer(404, {"code": "NoRoute", "message": operation})

    def _verify(self, request: Request) -> None:
        """Compute the signature anew, from the secret, and refuse another one or an old one."""
        from agentrun.utils.ram_signature.signer import get_agentrun_signed_headers

        given = request.headers.get("Agentrun-Authorization", "")
        try:
            signed_at = datetime.strptime(
                request.headers.get("x-acs-date", ""), "%Y-%m-%dT%H:%M:%SZ"
            ).replace(tzinfo=UTC)
        except ValueError:
            signed_at = datetime.min.replace(tzinfo=UTC)
        expected = get_agentrun_signed_headers(
            url=f"http://{request.headers['Host']}{request.target}",
            method=request.method,
            access_key_id=self.access_key_id,
            access_key_secret=self.access_key_secret,
            region=self.region,
            sign_time=signed_at,
        )["Agentrun-Authorization"]
        if given != expected or abs(datetime.now(UTC) - signed_at) > timedelta(minutes=15):
            self.unsigned += 1
            raise Answer(
                403,
                {
                    "code": "SignatureNotMatch",
                    "requestId": "request-4711",
                    "message": f"The signature of {given.partition(',')[0]} does not match.",
                },
            )

    def _verify_control(self, request: Request) -> None:
        """Alibaba Cloud's signature of version 3, written from its description and not the SDK's.

        https://www.alibabacloud.com/help/en/sdk/product-overview/v3-request-structure-and-signature
        """
        payload = hashlib.sha256(request.body).hexdigest()
        given = _ACS3.fullmatch(request.headers.get("Authorization", ""))
        names = given["headers"].split(";") if given else []
        query = "&".join(
            f"{quote(name, safe='~')}={quote(value, safe='~')}"
            for name, value in sorted(request.query.items())
        )
        headers = "".join(f"{name}:{request.headers.get(name, '').strip()}\n" for name in names)
        lines = (request.method, request.path, query, headers, ";".join(names), payload)
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        expected = hmac.new(
            self.access_key_secret.encode(), f"ACS3-HMAC-SHA256\n{digest}".encode(), "sha256"
        ).hexdigest()
        if (
            given is None
            or not {"host", "x-acs-date", "x-acs-action", "x-acs-content-sha256"} <= set(names)
            or request.headers["x-acs-content-sha256"] != payload
            or (given["key"], given["signature"]) != (self.access_key_id, expected)
        ):
            self.unsigned += 1
            message = "The signature does not match."
            raise Answer(403, {"code": "SignatureDoesNotMatch", "message": message})

    def _create(self, request: Request, fault: str | None) -> None:
        asked = request.json
        if fault == "refused":
            raise Answer(200, {"code": "QuotaExceeded", "message": "no more sandboxes for you"})
        if asked["templateName"] not in self.templates:
            raise Answer(404, {"code": "TemplateNotFound", "message": "template does not exist"})
        sandbox_id = asked.get("sandboxId") or str(uuid.uuid4())
        self.idle_seconds.append(asked["sandboxIdleTimeoutSeconds"])
        self.sandboxes[sandbox_id] = Notebook()
        data = {
            "sandboxId": sandbox_id,
            "templateName": asked["templateName"],
            "status": "READY",
        }
        send_json(request, 200, _success(data), truncated=fault == "truncated")
        raise Sent

    def _execute(self, notebook: Notebook, request: Request, fault: str | None) -> None:
        asked = request.json
        context = None
        if asked.get("contextId"):
            context = notebook.contexts.get(asked["contextId"])
            if context is None:
                raise Answer(404, {"code": "ContextNotFound", "message": "context not found"})
        language = context.language if context else asked.get("language", "python")
        self.count(asked["code"])
        try:
            cell = notebook.run(asked["code"], language, context)
        except (OSError, RuntimeError):
            request.cut()
            raise Sent from None
        if notebook.dead or fault == "lost":
            request.cut()
            raise Sent
        self.refuse_what_ran(fault)
        if fault == "slow":
            self.pause(5)
        body = {"contextId": asked.get("contextId"), "results": _results(cell)}
        send_json(request, 200, body, truncated=fault == "truncated")
        raise Sent

    def _control(self, operation: str, request: Request) -> None:
        self._verify_control(request)
        if operation == "GET sandboxes":
            names = list(self.sandboxes)
            items = [{"sandboxId": name, "templateName": "code"} for name in names]
            raise Answer(200, _success({"items": items}))
        if operation == "POST templates":
            name = request.json["templateName"]
            self.templates.add(name)
            raise Answer(200, _success({"templateName": name, "status": "READY"}))
        if operation == "GET templates":
            name = request.path.rsplit("/", 1)[1]
            if name not in self.templates:
                message = f"template {name} does not exist"
                raise Answer(404, {"code": "TemplateNotFound", "message": message})
            raise Answer(200, _success({"templateName": name, "status": "READY"}))
        raise Answer(404, {"code": "NoRoute", "message": operation})


def _success(data: Any) -> dict[str, Any]:
    return {"code": "SUCCESS", "requestId": "request-4711", "data": data}


def _results(cell: Cell) -> list[dict[str, Any]]:
    results = [
        {"type": kind, "text": text}
        for kind, text in (("stdout", cell.stdout), ("stderr", cell.stderr))
        if text
    ]
    if cell.text is not None:
        results.append({"type": "result", "text": cell.text})
    if cell.error is not None:
        text = cell.error["traceback"] or f"{cell.error['name']}: {cell.error['value']}"
        results.append({"type": "error", "text": text})
    status = "error" if cell.error else "ok"
    return [*results, {"type": "endOfExecution", "status": status}]


def _contexts(notebook: Notebook, request: Request) -> None:
    parts = request.path.strip("/").split("/")
    if request.method == "POST":
        name = uuid.uuid4().hex
        asked = request.json
        notebook.contexts[name] = Context(notebook, asked["language"], asked["cwd"])
        raise Answer(200, {"id": name, "language": asked["language"], "cwd": asked["cwd"]})
    if request.method == "DELETE":
        context = notebook.contexts.pop(parts[3], None)
        if context is None:
            raise Answer(404, {"code": "ContextNotFound", "message": "context not found"})
        context.restart()
        raise Answer(204)
    raise Answer(
        200,
        [
            {"id": name, "language": context.language, "cwd": context.cwd}
            for name, context in notebook.contexts.items()
        ],
    )
