"""Check the receipt of an execution: offline, with nothing but Python and the public key.

    curl -s https://cofferdam.example/api/v1/ledger/keys > keys.json     (once, and keep it)
    python verify_receipt.py answer.json --keys keys.json --code program.py

`answer.json` is the answer of POST or GET /api/v1/executions, or a receipt alone; - is standard
input. Ends with 0 when all of it fits, 1 when something does not, 2 when it cannot be checked.
"""

import argparse
import base64
import hashlib
import json
import sys

DOMAIN = b"cofferdam-ledger-1\n"

# Ed25519 (RFC 8032): the curve -x^2 + y^2 = 1 + d x^2 y^2 over the field of P elements.
P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
ROOT_OF_MINUS_ONE = pow(2, (P - 1) // 4, P)


def add(one, other):
    """The sum of two points in extended coordinates (section 5.1.4)."""
    a = (one[1] - one[0]) * (other[1] - other[0]) % P
    b = (one[1] + one[0]) * (other[1] + other[0]) % P
    c = 2 * one[3] * other[3] * D % P
    d = 2 * one[2] * other[2] % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def multiply(scalar, point):
    product = (0, 1, 1, 0)
    while scalar:
        if scalar & 1:
            product = add(product, point)
        point = add(point, point)
        scalar >>= 1
    return product


def decode(data):
    """The point that 32 bytes stand for (section 5.1.3). Raises ValueError when they do not."""
    number = int.from_bytes(data, "little")
    sign, y = number >> 255, number & ((1 << 255) - 1)
    if len(data) != 32 or y >= P:
        raise ValueError("not a point")
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * ROOT_OF_MINUS_ONE % P
    if (x * x - square) % P or (x == 0 and sign):
        raise ValueError("not a point")
    if x & 1 != sign:
        x = P - x
    return x, y, 1, x * y % P


def encode(point):
    inverse = pow(point[2], -1, P)
    x, y = point[0] * inverse % P, point[1] * inverse % P
    return (y | (x & 1) << 255).to_bytes(32, "little")


BASE = decode((4 * pow(5, -1, P) % P).to_bytes(32, "little"))


def is_signed(public_key, message, signature):
    """Whether this is the key holder's signature over the message (section 5.1.7)."""
    if len(signature) != 64 or len(public_key) != 32:
        return False
    scalar = int.from_bytes(signature[32:], "little")
    if scalar >= ORDER:
        return False
    try:
        x, y, z, t = decode(public_key)
    except ValueError:
        return False
    digest = hashlib.sha512(signature[:32] + public_key + message).digest()
    challenge = int.from_bytes(digest, "little") % ORDER
    expected = add(multiply(scalar, BASE), multiply(challenge, (P - x, y, z, P - t)))
    return encode(expected) == signature[:32]


def text_hash(text):
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest() if text else None


def signature_problems(receipt, keys):
    public_keys = {key["key_id"]: base64.b64decode(key["public_key"]) for key in keys["keys"]}
    key_id = receipt.get("key_id")
    if key_id not in public_keys:
        yield f"the key {key_id} is none of those you trust"
        return
    statement = {name: value for name, value in receipt.items() if name != "signature"}
    text = json.dumps(statement, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    try:
        signature = base64.b64decode(receipt["signature"], validate=True)
    except (KeyError, TypeError, ValueError):
        signature = b""
    if not is_signed(public_keys[key_id], DOMAIN + text.encode(), signature):
        yield "the signature does not fit: the receipt was changed"
    if receipt.get("kind") != "execution":
        yield "it is no receipt of an execution"


def json_text(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def answer_problems(answer, receipt):
    if "status" in answer:
        yield from outcome_problems(answer, receipt)
        return
    found = {"subject": answer["id"], "status": "error", "error_code": answer["error"]["code"]}
    yield from differences(found, receipt)


def outcome_problems(answer, receipt):
    result = answer["result"] if answer["has_result"] else None
    error = answer["error"] or {}
    outputs = answer["outputs"]
    found = {
        "subject": answer["id"],
        "status": answer["status"],
        "language": answer["language"],
        "provider": answer["provider"] or None,
        "runtime": answer["runtime"] or None,
        "exit_code": answer["exit_code"],
        "error_code": error.get("code"),
        "result_hash": text_hash(json_text(result)) if answer["has_result"] else None,
        "outputs_hash": text_hash(json_text(outputs)) if outputs else None,
        "stdout_hash": text_hash(answer["stdout"]),
        "stderr_hash": text_hash(answer["stderr"]),
    }
    yield from differences(found, receipt)
    names = ("name", "mime_type", "size_bytes")
    listed = [[artifact[name] for name in names] for artifact in answer["artifacts"]]
    if listed != [[artifact[name] for name in names] for artifact in receipt["artifacts"]]:
        yield "artifacts: the answer lists others than the receipt"


def differences(found, receipt):
    for name, value in found.items():
        if receipt.get(name) != value:
            yield f"{name}: the answer has {value}, the receipt {receipt.get(name)}"


def file_problems(receipt, code, artifacts):
    if code is not None and receipt.get("code_hash") != file_hash(code):
        yield f"code_hash: {code} is not the code that was run"
    known = {artifact["hash"] for artifact in receipt["artifacts"]}
    for path in artifacts:
        if file_hash(path) not in known:
            yield f"artifacts: {path} is none of the artifacts"


def file_hash(path):
    with open(path, "rb") as file:
        return "sha256:" + hashlib.sha256(file.read()).hexdigest()


def read(path):
    if path == "-":
        return json.load(sys.stdin)
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answer", help="the answer or the receipt, as JSON; - is standard input")
    parser.add_argument("--keys", required=True, help="what /api/v1/ledger/keys answered")
    parser.add_argument("--code", help="the file with the code that was sent")
    parser.add_argument("--artifact", action="append", default=[], help="a downloaded artifact")
    options = parser.parse_args()
    try:
        document = read(options.answer)
        is_answer = "receipt" in document
        receipt = document["receipt"] if is_answer else document
        if receipt is None:
            raise ValueError("the answer has no receipt; a queued execution has none yet")
        problems = list(signature_problems(receipt, read(options.keys)))
        if is_answer:
            problems += answer_problems(document, receipt)
        problems += file_problems(receipt, options.code, options.artifact)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"cannot be checked: {error!r}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"NOT VALID: {problem}")
    if not problems:
        print(
            "valid: entry {sequence} of the ledger, {at}, execution {subject}, {status} with "
            "{provider} version {config_version} in {runtime}".format(**receipt)
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
