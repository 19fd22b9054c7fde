"""`http/request`: a request that a program in the session's sandbox sends for the client.

It is an execution as every command is. The network of the session holds for it, and its record has
the attempt.
"""

from __future__ import annotations

import json
import re
import shlex
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field

from executions.doors.codex.filesystem import read_bytes
from executions.doors.codex.messages import INTERNAL, INVALID_REQUEST, Failure, Params
from executions.kernel.declarations import Members
from executions.runs.requests import Caller
from executions.sessions import cells, files
from executions.sessions.models import Session
from executions.sessions.requests import CommandRequest

MOST_REQUEST_BYTES = 32 * 1024
MOST_ANSWER_BYTES = 4 * 1024 * 1024
# What one notification has of an answer.
_PIECE_BYTES = 512 * 1024
_PROGRAM = """\
import base64, json, os, sys, urllib.error, urllib.request
method, url, path, most = sys.argv[1:5]
wanted = json.loads(os.environ["REQUEST"])
class Stop(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *given):
        return None
opener = urllib.request.build_opener(*([Stop] if wanted["stop"] else []))
body = None if wanted["body"] is None else base64.b64decode(wanted["body"])
request = urllib.request.Request(url, body, method=method)
for name, value in wanted["headers"]:
    request.add_header(name, value)
try:
    answer = opener.open(request, timeout=wanted["seconds"])
except urllib.error.HTTPError as error:
    answer = error
except OSError as error:
    sys.exit(str(error))
with answer, open(path, "xb") as file:
    file.write(answer.read(int(most) + 1))
headers = [[name, value] for name, value in answer.headers.items()]
print(json.dumps({"status": answer.status, "headers": headers}))
"""
_SECONDS = 60.0
_HEAD = shlex.join(["python3", "-c", _PROGRAM])
# A URL in quotation marks, or one that needs none.
_WORDS = re.compile(
    r"([A-Z]{1,16}) (?:'([^']*)'|([^\s'\"]+)) /tmp/codex-[0-9a-f]{32} [0-9]+", re.ASCII
)


class Header(Params):
    name: str
    value: str
    value_env_var: str | None = None


class HttpRequest(Params):
    method: str = Field(pattern="^[A-Z]{1,16}$")
    url: str = Field(pattern="^[Hh][Tt][Tt][Pp][Ss]?://", max_length=8192)
    request_id: str = Field(max_length=256)
    headers: Annotated[list[Header], Members(100)] = Field(default_factory=list)
    body_base64: str | None = None
    timeout_ms: int | None = Field(default=None, gt=0, lt=2**64)
    redirect_policy: str = "follow"
    stream_response: bool = False


@dataclass(frozen=True)
class HttpAnswer:
    """What came back."""

    status: int
    headers: list[dict[str, str]]
    body: bytes

    def shape(self, *, has_body: bool) -> dict[str, Any]:
        """Return it as the protocol has it."""
        body = b64encode(self.body).decode() if has_body else ""
        return {"status": self.status, "headers": self.headers, "bodyBase64": body}

    def pieces(self, request_id: str) -> Iterator[dict[str, Any]]:
        """The body as notifications have it; the last one says that it is."""
        starts = range(0, len(self.body), _PIECE_BYTES)
        for seq, at in enumerate(starts, 1):
            delta = b64encode(self.body[at : at + _PIECE_BYTES]).decode()
            yield {"requestId": request_id, "seq": seq, "deltaBase64": delta, "done": False}
        yield {"requestId": request_id, "seq": len(starts) + 1, "deltaBase64": "", "done": True}


async def send(session: Session, wanted: HttpRequest, caller: Caller, agent: str) -> HttpAnswer:
    """Have the sandbox send a request. Raises Failure, and SandboxError."""
    if session.network is None:
        raise Failure(INVALID_REQUEST, "http/request: The session has no network.")
    path = f"/tmp/codex-{uuid4().hex}"  # noqa: S108  of the sandbox
    command = ["python3", "-c", _PROGRAM, wanted.method, wanted.url, path, str(MOST_ANSWER_BYTES)]
    request = CommandRequest(
        command=command, env={"REQUEST": _request_of(wanted)}, timeout=_SECONDS, agent=agent
    )
    outcome = await cells.run_command(session, request, caller)
    if outcome.error is not None:
        raise outcome.error
    execution = outcome.execution
    if execution.exit_code != 0:
        why = execution.stderr.strip()[-500:] or execution.error_message or "It was not sent."
        raise Failure(INTERNAL, f"http/request: {why}")
    try:
        body = await read_bytes(session, path, MOST_ANSWER_BYTES + 1)
    finally:
        await files.remove_file(session, path)
    if len(body) > MOST_ANSWER_BYTES:
        raise Failure(INTERNAL, f"http/request: The answer is more than {MOST_ANSWER_BYTES} bytes.")
    return _answer_of(execution.stdout, body)


def request_in(command: str) -> tuple[str, str] | None:
    """Return method and URL, where the text of a command is exactly that of such a request."""
    if not command.startswith(f"{_HEAD} "):
        return None
    words = _WORDS.fullmatch(command[len(_HEAD) + 1 :])
    return None if words is None else (words[1], words[2] or words[3])


def _request_of(wanted: HttpRequest) -> str:
    if any(each.value_env_var for each in wanted.headers):
        raise Failure(INVALID_REQUEST, "headers: valueEnvVar is not supported.")
    seconds = min((wanted.timeout_ms or 10**9) / 1000, _SECONDS)
    text = json.dumps(
        {
            "headers": [[each.name, each.value] for each in wanted.headers],
            "body": wanted.body_base64,
            "stop": wanted.redirect_policy == "stop",
            "seconds": seconds,
        }
    )
    if len(text) > MOST_REQUEST_BYTES:
        raise Failure(
            INVALID_REQUEST, f"http/request: Headers and body are more than {MOST_REQUEST_BYTES}."
        )
    if wanted.body_base64 is not None:
        _check_base64(wanted.body_base64)
    return text


def _check_base64(text: str) -> None:
    try:
        b64decode(text, validate=True)
    except ValueError:
        raise Failure(INVALID_REQUEST, "bodyBase64: Is not base64.") from None


def _answer_of(text: str, body: bytes) -> HttpAnswer:
    """What a program in the sandbox says is a claim."""
    try:
        said: Mapping[str, Any] = json.loads(text)
        headers = [{"name": str(name), "value": str(value)} for name, value in said["headers"]]
        status = said["status"]
    except (ValueError, KeyError, TypeError):
        raise Failure(INTERNAL, "http/request: The sandbox did not return an answer.") from None
    if type(status) is not int or not 100 <= status < 1000:
        raise Failure(INTERNAL, "http/request: The sandbox did not return an answer.")
    return HttpAnswer(status, headers, body)
