"""A run as a request to the API, written out for a shell, for Python and for JavaScript.

What is quoted may be anybody's code. Whatever cannot be seen, or would act when it is pasted, is
written as an escape of the language that it is written in.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from executions.runs.requests import ExecutionRequest

# The variable that the key is taken from.
KEY = "API_KEY"


def body_of(request: ExecutionRequest) -> dict[str, Any]:
    """What a caller with a key would send, without files. A chosen provider is not among it."""
    body: dict[str, Any] = {"code": request.code}
    if request.session is None:
        body["language"] = request.language
    elif request.context:
        body["context"] = request.context
    if request.arguments is not None:
        body["arguments"] = dict(request.arguments)
    if request.entrypoint != "auto":
        body["entrypoint"] = request.entrypoint
    if request.timeout is not None:
        body["timeout"] = request.timeout
    return body


def snippets_of(request: ExecutionRequest, url: str) -> dict[str, str]:
    """By the name of what it is for. Files are read where the snippet is run."""
    body, files = body_of(request), [file.path for file in request.files]
    return {
        "curl": _curl(url, body, files),
        "Python": _python(url, body, files),
        "JavaScript": _javascript(url, body, files),
    }


def _curl(url: str, body: Mapping[str, Any], files: Sequence[str]) -> str:
    call = (
        f'curl -sS {shlex.quote(url)} -H "X-API-Key: ${KEY}"'
        " -H 'Content-Type: application/json' --data-binary @-"
    )
    if not files:
        # No line of it can be the mark that ends it: each begins with a brace or with spaces.
        return f"{call} <<'JSON'\n{_json(body, indent=2)}\nJSON\n"
    # By pieces, and not as one argument, which a system takes only up to some size.
    start = _json(body)[:-1] + ', "files": ['
    lines = [f"printf '%s' {shlex.quote(start)}"]
    for number, name in enumerate(files):
        head = ("" if number == 0 else ", ") + f'{{"path": {_json(name)}, "content_base64": "'
        lines.append(
            f"printf '%s' {shlex.quote(head)}; base64 < {shlex.quote(name)} | tr -d '\\n';"
            " printf '%s' '\"}'"
        )
    lines.append("printf '%s' ']}'")
    return "{\n" + "".join(f"  {line}\n" for line in lines) + f"}} | {call}\n"


def _python(url: str, body: Mapping[str, Any], files: Sequence[str]) -> str:
    fields = "".join(
        f"    {name!r}: {_lines(value) if name == 'code' else repr(value)},\n"
        for name, value in body.items()
    )
    reading = (
        'body["files"] = [\n'
        '    {"path": name, "content_base64": '
        'base64.b64encode(open(name, "rb").read()).decode()}\n'
        f"    for name in {list(files)!r}\n]\n"
    )
    return (
        ("import base64\n" if files else "") + "import json\nimport os\nimport urllib.request\n\n"
        f"body = {{\n{fields}}}\n"
        + (reading if files else "")
        + f"request = urllib.request.Request(\n    {url!r},\n"
        "    data=json.dumps(body).encode(),\n"
        f'    headers={{"X-API-Key": os.environ["{KEY}"], "Content-Type": "application/json"}},\n'
        ")\n"
        "with urllib.request.urlopen(request) as answer:\n"
        "    print(json.dumps(json.load(answer), indent=2))\n"
    )


def _lines(code: str) -> str:
    """Line by line, as a program is read."""
    parts = code.splitlines(keepends=True)
    if len(parts) < 2:
        return repr(code)
    return "(\n" + "".join(f"        {part!r}\n" for part in parts) + "    )"


def _javascript(url: str, body: Mapping[str, Any], files: Sequence[str]) -> str:
    fields = "".join(f"  {name}: {_script(name, value)},\n" for name, value in body.items())
    reading = (
        f"body.files = await Promise.all({_json(list(files))}.map(async (path) => ({{\n"
        "  path,\n"
        '  content_base64: (await readFile(path)).toString("base64"),\n'
        "})));\n"
    )
    return (
        ('import { readFile } from "node:fs/promises";\n\n' if files else "")
        + f"const body = {{\n{fields}}};\n"
        + (reading if files else "")
        + f"const answer = await fetch({_json(url)}, {{\n"
        '  method: "POST",\n'
        f'  headers: {{ "X-API-Key": process.env.{KEY}, "Content-Type": "application/json" }},\n'
        "  body: JSON.stringify(body),\n"
        "});\n"
        "console.log(await answer.json());\n"
    )


def _script(name: str, value: Any) -> str:
    if name == "code" and len(parts := value.splitlines(keepends=True)) > 1:
        return "[\n" + "".join(f"    {_json(part)},\n" for part in parts) + '  ].join("")'
    text = _json(value)
    # In a literal this name would set what the object inherits from.
    return f"JSON.parse({_json(text)})" if "__proto__" in text else text


def _json(value: Any, *, indent: int | None = None) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return "".join(
        character if character.isprintable() or character == "\n" else json.dumps(character)[1:-1]
        for character in text
    )
