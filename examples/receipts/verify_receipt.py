"""Check the receipt of an execution: offline, with nothing but Python and the public key.

    curl -s https://cofferdam.example/api/v1/ledger/keys > keys.json     (once, and keep it)
    python verify_receipt.py answer.json --keys keys.json --code program.py --artifact plot.png

`answer.json` is the answer of POST or GET /api/v1/executions, or a receipt alone; - is standard
input. Prints the differences, and the fields of the answer that the receipt does not bind. Exits
with 0 if all else matches, 1 if something differs, 2 if the receipt cannot be checked.
"""

import argparse
import base64
import datetime
import decimal
import hashlib
import json
import json.encoder
import math
import os
import sys

FORMAT = 1
# What is signed starts with it.
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


def canonical(value):
    """JSON as RFC 8785 has it."""
    if isinstance(value, str):
        return json.encoder.encode_basestring(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return canonical_number(value)
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
        return (
            "{" + ",".join(canonical(name) + ":" + canonical(value[name]) for name in names) + "}"
        )
    return "[" + ",".join(canonical(child) for child in value) + "]"


def canonical_number(value):
    """As ECMAScript writes it: the shortest digits that are this double (section 3.2.2.3)."""
    double = float(value)
    if double != value or not math.isfinite(double):
        raise ValueError("a number that no double is")
    if double == 0:
        return "0"
    sign, numbers, exponent = decimal.Decimal(repr(double)).as_tuple()
    digits = "".join(map(str, numbers))
    point = len(digits) + exponent
    digits = digits.rstrip("0")
    if len(digits) <= point <= 21:
        text = digits.ljust(point, "0")
    elif 0 < point <= 21:
        text = digits[:point] + "." + digits[point:]
    elif -6 < point <= 0:
        text = "0." + "0" * -point + digits
    else:
        fraction = "." + digits[1:] if len(digits) > 1 else ""
        text = f"{digits[0]}{fraction}e{point - 1:+d}"
    return "-" * sign + text


def signed_message(receipt):
    statement = {name: value for name, value in receipt.items() if name != "signature"}
    if receipt["ledger"] != FORMAT:
        raise ValueError("format {!r} is not known here".format(receipt["ledger"]))
    digest = hashlib.sha256(canonical(statement).encode()).hexdigest()
    return DOMAIN + "{}\n{}".format(receipt["sequence"], digest).encode()


def signature_problems(receipt, keys):
    public_keys = {key["key_id"]: base64.b64decode(key["public_key"]) for key in keys["keys"]}
    key_id = receipt.get("key_id")
    if key_id not in public_keys:
        yield f"the key {key_id} is not one of the keys that you trust"
        return
    try:
        message = signed_message(receipt)
        signature = base64.b64decode(receipt["signature"], validate=True)
    except (KeyError, TypeError, ValueError):
        message = signature = b""
    if not is_signed(public_keys[key_id], message, signature):
        yield "the signature does not match: the receipt was changed"
    if receipt.get("kind") != "execution":
        yield "it is not the receipt of an execution"


def json_text(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# The fields whose words are others in the receipt. What is not here is compared by its own name.
HANDLED = {"id", "receipt", "error", "result", "outputs", "stdout", "stderr", "artifacts"} | {
    "exception",
    "on_behalf_of",
}
# No text and an empty one have the same hash: none.
TYPES = {"stdout": str, "stderr": str, "outputs": list, "artifacts": list, "has_result": bool}
# One hash in the receipt is over all of these together.
DETAILS = ("created_at", "cost", "hops", "timings")


def answer_problems(answer, receipt):
    """Problems, and the names of fields that the receipt says nothing of."""
    if "status" in answer:
        return outcome_problems(answer, receipt)
    error = answer["error"]
    found = {"subject": answer["id"], "status": "error", "error_code": error["code"]}
    unbound = [name for name in answer if name not in {"id", "error", "receipt"}]
    unbound += error_details(error, receipt, found)
    return list(differences(found, receipt)), unbound


def outcome_problems(answer, receipt):
    found = {
        "subject": answer["id"],
        "error_code": None,
        "result_hash": text_hash(json_text(answer["result"])) if answer["has_result"] else None,
        "outputs_hash": text_hash(json_text(answer["outputs"])) if answer["outputs"] else None,
        "stdout_hash": text_hash(answer["stdout"]),
        "stderr_hash": text_hash(answer["stderr"]),
    }
    unbound = []
    if "on_behalf_of_hash" in receipt and "on_behalf_of" in answer:
        person = answer["on_behalf_of"]
        found["on_behalf_of_hash"] = text_hash(person) if isinstance(person, str) else person
    elif answer.get("on_behalf_of"):
        unbound.append("on_behalf_of")
    exception = answer.get("exception")
    if "exception_hash" in receipt and "exception" in answer:
        found["exception_hash"] = None if exception is None else text_hash(json_text(exception))
    elif exception is not None:
        unbound.append("exception")
    problems = [
        f"{name}: it has the wrong type"
        for name, kind in TYPES.items()
        if type(answer[name]) is not kind
    ]
    if answer["error"] is not None:
        found["error_code"] = answer["error"]["code"]
        unbound += error_details(answer["error"], receipt, found)
    elif "error_hash" in receipt:
        found["error_hash"] = None
    if not answer["has_result"] and answer["result"] is not None:
        problems.append("result: has_result is false, but the answer has a result")
    for name in answer:
        if name in HANDLED or (name in DETAILS and "details_hash" in receipt):
            continue
        if name == "policy" and "policy_hash" in receipt:
            continue
        if name in receipt:
            found[name] = answer[name] if answer[name] != "" else None
        elif name != "has_result":
            unbound.append(name)
    if "details_hash" in receipt and details_hash(answer) != receipt["details_hash"]:
        problems.append("{}: one of these was changed".format(", ".join(DETAILS)))
    if "policy_hash" in receipt and policy_hash(answer["policy"]) != receipt["policy_hash"]:
        problems.append("policy: it was changed")
    problems += differences(found, receipt)
    more, names = artifact_problems(answer["artifacts"], receipt)
    return problems + more, unbound + names


def error_details(error, receipt, found):
    """Add what the receipt says of an error to `found`; the names of what it does not say."""
    bound = {"code"}
    if "error_hash" in receipt:
        bound |= {"message", "field"}
        found["error_hash"] = text_hash(error["message"])
        if "field" in error:
            found["error_field"] = error["field"]
    return ["error." + name for name in error if name not in bound]


def details_hash(answer):
    created = datetime.datetime.fromisoformat(answer["created_at"])
    created = created.astimezone(datetime.timezone.utc)  # noqa: UP017, Python 3.8 has no other
    created = created.isoformat(timespec="microseconds")
    cost = answer["cost"]
    details = {
        "created_at": created,
        "cost": None if cost is None else format(decimal.Decimal(cost), "f"),
        "hops": answer["hops"],
        "timings": answer["timings"],
    }
    return text_hash(canonical(details))


def policy_hash(policy):
    return None if policy is None else text_hash(canonical(policy))


def artifact_problems(artifacts, receipt):
    names = ("name", "mime_type", "size_bytes")
    problems = []
    listed = [[artifact[name] for name in names] for artifact in artifacts]
    if listed != [[artifact[name] for name in names] for artifact in receipt["artifacts"]]:
        problems.append("artifacts: the answer and the receipt list different ones")
    others = {name for artifact in artifacts for name in artifact if name not in names}
    return problems, ["artifacts[]." + name for name in sorted(others)]


def differences(found, receipt):
    for name, value in found.items():
        if name not in receipt or type(receipt[name]) is not type(value) or receipt[name] != value:
            yield f"{name}: the answer has {value}, the receipt {receipt.get(name)}"


def file_problems(receipt, code, artifacts):
    """Problems of the files that were given, and what could be compared with one that was not.

    A file is a path, or bytes; `artifacts` are pairs of a name and a file.
    """
    problems, missing = [], []
    if code is None:
        missing.append("the code (--code FILE)")
    elif receipt.get("code_hash") != file_hash(code):
        problems.append(f"code_hash: {told(code)} is not the code that was run")
    hashes = {artifact["name"]: artifact["hash"] for artifact in receipt["artifacts"]}
    given = set()
    for name, file in artifacts:
        given.add(name)
        if name not in hashes:
            problems.append(f"artifacts: there is no artifact named {name}")
        elif hashes[name] != file_hash(file):
            problems.append(f"artifacts: {told(file)} is not the artifact {name}")
    missing += [f"the artifact {name} (--artifact FILE)" for name in hashes if name not in given]
    return problems, missing


def artifact_name(argument, receipt):
    """The name and path of NAME=FILE, or of a file that is called as the artifact is."""
    names = [artifact["name"] for artifact in receipt["artifacts"]]
    name, equals, path = argument.partition("=")
    if equals and name in names:
        return name, path
    base = os.path.basename(argument)
    ends = [name for name in names if name == argument or os.path.basename(name) == base]
    return (ends[0] if len(ends) == 1 else argument), argument


def file_hash(file):
    if not isinstance(file, bytes):
        with open(file, "rb") as opened:
            file = opened.read()
    return "sha256:" + hashlib.sha256(file).hexdigest()


def told(file):
    return "the given file" if isinstance(file, bytes) else file


def receipt_in(document):
    """The receipt of an answer, or the one that the document is. Raises ValueError for none."""
    receipt = document.get("receipt", document)
    if receipt is None:
        raise ValueError("the answer has no receipt; a queued execution does not have one yet")
    return receipt


def check(document, keys, code=None, artifacts=()):
    """What does not fit, what the receipt does not bind, and what could be compared but was not.

    `document` is an answer or a receipt alone. Raises one of CANNOT where it is neither.
    """
    receipt = receipt_in(document)
    problems, unbound = list(signature_problems(receipt, keys)), []
    if "receipt" in document:
        more, unbound = answer_problems(document, receipt)
        problems += more
    more, missing = file_problems(receipt, code, artifacts)
    return problems + more, sorted(set(unbound)), missing


CANNOT = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError)


def read(path):
    if path == "-":
        return json.load(sys.stdin)
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def main(arguments=None, prog=None):
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("answer", help="the answer or the receipt, as JSON; - is standard input")
    parser.add_argument("--keys", required=True, help="the saved answer of /api/v1/ledger/keys")
    parser.add_argument("--code", help="the file with the code that was sent")
    parser.add_argument(
        "--artifact",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="a downloaded artifact; give NAME if the file has another name",
    )
    options = parser.parse_args(arguments)
    try:
        document = read(options.answer)
        receipt = receipt_in(document)
        artifacts = [artifact_name(argument, receipt) for argument in options.artifact]
        problems, unbound, missing = check(document, read(options.keys), options.code, artifacts)
    except CANNOT as error:
        print(f"cannot be checked: {error!r}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"NOT VALID: {problem}")
    if not problems:
        print(
            "valid: entry {sequence} of the ledger, {at}, execution {subject}, {status} with "
            "{provider} version {config_version} in {runtime}".format(**receipt)
        )
        if receipt.get("found"):
            print("entered in the ledger later than it ended, when the service noticed its end")
    if unbound:
        print("not bound by the receipt: " + ", ".join(unbound))
    if missing:
        print("not compared: " + ", ".join(missing))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
