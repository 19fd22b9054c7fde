"""A conversation with a session: a table goes in, six cells explore it, a picture comes out.

Usage: API_KEY=cfd_... [URL=http://127.0.0.1:8000] [OUT=folder] python3 conversation.py
"""

import json
import os
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

HERE = Path(__file__).resolve().parent
CELLS = sorted((HERE / "cells").glob("*.py"))
BREAK_BEFORE = "5-furthest.py"
URL = os.environ.get("URL", "http://127.0.0.1:8000")
OUT = Path(os.environ.get("OUT", "."))


def ask(method, path, body=None, kind="application/json"):
    """The bytes of an answer. Ends the program with what a refusal says."""
    headers = {"X-API-Key": os.environ["API_KEY"], "Content-Type": kind}
    request = Request(f"{URL}/api/v1/sessions{path}", body, headers, method=method)
    try:
        with urlopen(request, timeout=120) as answer:
            return answer.read()
    except HTTPError as error:
        sys.exit(f"{method} {path}: {error.code} {error.read().decode()}")


def run(session, cell):
    """Run one cell and show what came of it."""
    body = json.dumps({"code": cell.read_text()}).encode()
    answer = json.loads(ask("POST", f"/{session}/executions", body))
    print(f"{cell.name}: {answer['status']}")
    print(answer["stdout"], end="")
    for output in answer["outputs"]:
        print(output.get("text/plain", "(a picture)"))
    if answer["stderr"]:
        print(answer["stderr"].splitlines()[-1])
    return answer


def main():
    session = json.loads(ask("POST", "", json.dumps({"metadata": {"about": "zones"}}).encode()))[
        "id"
    ]
    table = (HERE / "zones.csv").read_bytes()
    ask("PUT", f"/{session}/files/content?path=zones.csv", table, "application/octet-stream")
    for number, cell in enumerate(CELLS):
        if cell.name == BREAK_BEFORE:
            print("The service may be restarted now. Enter goes on.", flush=True)
            sys.stdin.readline()
        if run(session, cell).get("restored"):
            print("The sandbox was gone: its files are back, its variables are not.")
            for again in CELLS[: number + 1]:
                run(session, again)
    for name in ("furthest.json", "zones.png"):
        (OUT / name).write_bytes(ask("GET", f"/{session}/files/content?path={name}"))
        print(f"written: {OUT / name}")
    ask("DELETE", f"/{session}")


main()
