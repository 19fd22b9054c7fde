"""Check an auditor's report: offline, with nothing but Python and the public key.

    curl -s https://cofferdam.example/api/v1/ledger/keys > keys.json     (once, and keep it)
    python verify_report.py report.json report.pdf --keys keys.json

Of a JSON report every receipt in it is checked as well. Ends with 0 when everything fits, 1 when
something does not, 2 when it cannot be checked. A valid report may say that something is
not intact: read what is printed.
"""

import argparse
import base64
import hashlib
import json
import sys

from verify_receipt import canonical, is_signed, signature_problems

DOMAIN = b"cofferdam-ledger-1\n"
JSON_START, JSON_END = b'{"report":', b',"signature":{'
PDF_END = b"\n%cofferdam-report "


def parts(data):
    """What is signed, what the signature is of, and what the end says of it."""
    if data.startswith(JSON_START):
        at = data.rindex(JSON_END)
        said = json.loads(data[at + len(JSON_END) - 1 : -1])
        end = JSON_END[:-1] + canonical(said).encode() + b"}"
        return data[len(JSON_START) : at], "report", said, data[at:] == end
    if not data.startswith(b"%PDF-"):
        raise ValueError("it is not a report")
    at = data.rindex(PDF_END)
    said = json.loads(data[at + len(PDF_END) :])
    end = PDF_END + canonical(said).encode() + b"\n"
    return data[:at], "report pdf", said, data[at:] == end


def problems(data, keys):
    signed, what, said, is_whole = parts(data)
    public_keys = {key["key_id"]: base64.b64decode(key["public_key"]) for key in keys["keys"]}
    digest = hashlib.sha256(signed).hexdigest()
    message = DOMAIN + f"{what}\n{said['report']}\n{digest}".encode()
    if not is_whole or digest != said["digest"]:
        yield "it was changed after it was signed"
    elif said["key_id"] not in public_keys:
        yield f"the key {said['key_id']} is none of those you trust"
    elif not is_signed(public_keys[said["key_id"]], message, base64.b64decode(said["signature"])):
        yield "its signature is forged"
    if what == "report":
        report = json.loads(signed)
        if report["id"] != said["report"]:
            yield "it is signed as another report"
        for run in (*report["gone"], *report["runs"], *report.get("runs_gone", ())):
            if run["receipt"] is not None:
                for problem in (*signature_problems(run["receipt"], keys), *differences(run)):
                    yield f"the receipt of {run['id']}: {problem}"


def differences(run):
    """Where a run is told otherwise than in its receipt, but for one that is told to differ."""
    receipt = run["receipt"]
    if receipt.get("subject") != run["id"]:
        yield "it is of another run"
    elif not run.get("problem"):
        for name, said in (("tenant_slug", "tenant"), ("status",) * 2, ("code_hash",) * 2):
            # A run whose record is gone has but some of these.
            if name in run and run[name] != receipt.get(said):
                yield f"its {said} is another one"


def told(data):
    """What a valid report says of itself, in ASCII."""
    signed, what, said, _ = parts(data)
    if what != "report":
        yield f"the PDF of report {json.dumps(said['report'])}"
        yield "its first page says what it is of, and whether that is intact"
        return
    report = json.loads(signed)
    asked, found = report["asked"], report["verification"]
    asked = {**asked, "executions": len(asked["executions"]) or "all"}
    yield f"report {json.dumps(report['id'])} of {json.dumps(report['made_at'])}"
    yield f"of {json.dumps(asked)}"
    number = len(found["findings"]) + found["more_findings"]
    yield "INTACT" if found["intact"] and not number else f"NOT INTACT: {number} findings"
    if report["truncated"]:
        yield f"INCOMPLETE: it ends after {report['truncated']} runs"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", nargs="+", help="a report, .json or .pdf")
    parser.add_argument("--keys", required=True, help="what /api/v1/ledger/keys answered")
    options = parser.parse_args()
    worst = 0
    for path in options.report:
        try:
            with open(options.keys, encoding="utf-8") as file:
                keys = json.load(file)
            with open(path, "rb") as file:
                data = file.read()
            found = list(problems(data, keys))
            lines = [] if found else list(told(data))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            print(f"{path}: cannot be checked: {error!r}", file=sys.stderr)
            worst = 2
            continue
        for problem in found[:20]:
            print(f"{path}: NOT VALID: {problem}")
        if not found:
            print("\n".join(f"{path}: {line}" for line in ("valid", *lines)))
        elif worst == 0:
            worst = 1
    return worst


if __name__ == "__main__":
    sys.exit(main())
