"""Large contents are encoded, encrypted and read in slices: no single call has all of them."""

from __future__ import annotations

import base64
import binascii
import json
import random
from collections.abc import Callable, Iterator
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest

from executions.doors.native.frame import RecordRenderer
from executions.runs import payloads, requests
from executions.runs.models import Execution
from executions.runs.requests import ExecutionRequest
from providers import aes_gcm, key_ring, slices
from providers.errors import ProviderUnavailable
from providers.runtime.service import messages
from providers.slices import SLICE_BYTES, JSONInSlices, json_text
from providers.values import ArtifactFile, ExecutionResult, InputFile, Job

CONTENT = random.Random(1).randbytes(4 * SLICE_BYTES + 1001)
OTHER = random.Random(2).randbytes(3 * SLICE_BYTES)
# Of base64 of a slice, and what stands around it.
MOST = SLICE_BYTES * 4 // 3 + 1000


@pytest.fixture
def wanted() -> ExecutionRequest:
    return ExecutionRequest(
        code='print("content_base64")',
        mode="async",
        arguments={"content_base64": "x" * 1000, "files": [{"content_base64": '"\\'}]},
        files=[InputFile('a"', CONTENT), InputFile("b", b""), InputFile("ö", OTHER)],
    )


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files of queued requests, by name."""
    kept: dict[str, bytes] = {}

    def save_stream(name: str, pieces: Iterator[bytes]) -> int:
        kept[name] = b"".join(pieces)
        return len(kept[name])

    def open_file(name: str) -> BytesIO:
        return BytesIO(kept[name])

    folder = SimpleNamespace(save_stream=save_stream, open=open_file, setting="DATA_DIR")
    monkeypatch.setattr(payloads, "file_store", lambda kind: folder)
    return kept


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much each call of what is written in C and has the interpreter's lock was given."""
    found: list[int] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(content: Any, *args: Any, **named: Any) -> Any:
            found.append(len(content) if isinstance(content, (str, bytes, memoryview)) else 0)
            answer = call(content, *args, **named)
            found.append(len(answer) if isinstance(answer, (str, bytes)) else 0)
            return answer

        return noting

    class Side:
        """An encryptor or decryptor."""

        def __init__(self, real: Any) -> None:
            self._real = real
            self.update = noted(real.update)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    real_cipher = aes_gcm.Cipher

    def cipher(*parts: Any) -> Any:
        real = real_cipher(*parts)
        return SimpleNamespace(
            encryptor=lambda: Side(real.encryptor()), decryptor=lambda: Side(real.decryptor())
        )

    encoding = SimpleNamespace(
        a2b_base64=noted(binascii.a2b_base64), b2a_base64=noted(binascii.b2a_base64)
    )
    text = SimpleNamespace(dumps=noted(json.dumps), loads=noted(json.loads))
    monkeypatch.setattr(slices, "binascii", encoding)
    monkeypatch.setattr(
        slices,
        "encoder",
        SimpleNamespace(
            encode_basestring=noted(slices.encoder.encode_basestring),
            encode_basestring_ascii=noted(slices.encoder.encode_basestring_ascii),
            c_make_encoder=slices.encoder.c_make_encoder,
        ),
    )
    monkeypatch.setattr(aes_gcm, "Cipher", cipher)
    for module in (payloads, requests):
        monkeypatch.setattr(module, "json", text)
    return found


def test_a_queued_request_is_kept_and_read_in_slices(
    wanted: ExecutionRequest, storage: dict[str, bytes], given: list[int]
) -> None:
    execution = Execution()
    payloads.keep(execution, wanted)
    assert len(given) > 4 * (len(CONTENT) + len(OTHER)) // SLICE_BYTES
    assert 0 < max(given) <= MOST
    given.clear()
    read = payloads.read(execution)
    assert len(given) > 4 * (len(CONTENT) + len(OTHER)) // SLICE_BYTES
    assert max(given) <= MOST
    given.clear()
    again = ExecutionRequest.from_stored(read)
    assert max(given) <= MOST
    assert (again.files, again.arguments, again.code) == (
        wanted.files,
        wanted.arguments,
        wanted.code,
    )


def test_the_former_version_reads_what_this_one_keeps(
    wanted: ExecutionRequest, storage: dict[str, bytes]
) -> None:
    execution = Execution()
    payloads.keep(execution, wanted)
    (content,) = storage.values()
    token = base64.b64decode(content.decode().removeprefix("aes256gcm:"), validate=True)
    nonce, sealed = token[8:20], token[20:]
    context = "executions_execution.pending"
    key = aes_gcm._cipher(key_ring.fernet_keys()[0], context)
    plain = key.decrypt(nonce, sealed, b"A256GCM1" + context.encode())
    assert json.loads(plain) == wanted.to_stored()


def test_this_version_reads_what_the_former_one_kept(
    wanted: ExecutionRequest, storage: dict[str, bytes]
) -> None:
    execution = Execution(pending=wanted.to_stored())
    dumped = Execution._meta.get_field("pending").value_to_string(execution)
    storage[execution.pk.hex] = dumped.encode()
    execution.pending = {"in_file": True}
    assert payloads.read(execution) == wanted.to_stored()


@pytest.mark.parametrize("place", [200, 4 * SLICE_BYTES, -3])
def test_a_file_that_was_changed_is_not_read(
    place: int, wanted: ExecutionRequest, storage: dict[str, bytes]
) -> None:
    execution = Execution()
    payloads.keep(execution, wanted)
    changed = bytearray(storage[execution.pk.hex])
    changed[place] = ord("A") if changed[place] != ord("A") else ord("B")
    storage[execution.pk.hex] = bytes(changed)
    with pytest.raises(ProviderUnavailable, match="is lost"):
        payloads.read(execution)


def test_contents_are_replaced_in_files_and_texts_alike(storage: dict[str, bytes]) -> None:
    """Wherever a caller puts what looks like a file, he has it back."""
    long = "A" * 4 * SLICE_BYTES
    texts = {
        "arguments": {"content_base64": long, "more": [{"content_base64": long + "\\"}]},
        "code": f'x = {{"content_base64":"{long}"}}',
        "files": [{"path": '","content_base64":"', "content_base64": long + "="}],
    }
    text = json.dumps(texts, separators=(",", ":")).encode()
    assert payloads._value_of(text) == texts


@pytest.mark.parametrize("length", [0, 1, 2, SLICE_BYTES - 1, SLICE_BYTES, 2 * SLICE_BYTES + 2])
def test_base64_of_slices_is_base64_of_all(length: int) -> None:
    content = (CONTENT + OTHER)[:length]
    pieces = [content[:7], content[7 : length // 2], content[max(7, length // 2) :]]
    if length > 14:
        assert b"".join(slices.encoded(pieces)) == base64.b64encode(content)
    assert b"".join(slices.encoded(slices.slices(content))) == base64.b64encode(content)
    assert slices.decoded(base64.b64encode(content)) == content
    assert slices.decoded(b"before:" + base64.b64encode(content), 7) == content
    assert slices.decoded(base64.b64encode(content).decode()) == content


@pytest.mark.parametrize("where", [5, SLICE_BYTES - 1, SLICE_BYTES + 5, -7, -1])
@pytest.mark.parametrize("what", ["=", "\n", "é", "-"])
def test_what_is_no_base64_is_none_in_slices_either(where: int, what: str) -> None:
    text = list(base64.b64encode(CONTENT[: 2 * SLICE_BYTES + 3]).decode())
    text[where] = what
    sent = "".join(text)
    try:
        expected: bytes | None = base64.b64decode(sent, validate=True)
    except ValueError:
        expected = None
    try:
        found: bytes | None = slices.decoded(sent)
    except ValueError:
        found = None
    assert found == expected


def test_long_texts_of_an_answer_are_written_in_slices(given: list[int]) -> None:
    long = '\x01ä\u2028\U0001f600\ud800"' * SLICE_BYTES
    body = {"stdout": long, "outputs": [{"text/plain": long}], "n": [1, None, True, 0.5], "": {}}
    text = json_text(body)
    assert len(given) >= 2 * len(long) // SLICE_BYTES
    # A character of control takes six.
    assert 0 < max(given) <= 6 * SLICE_BYTES + 2
    assert json.loads(text) == body
    assert not {"\u2028", "\u2029", "\x85"} & set(text)
    given.clear()
    storable = long.replace("\ud800", "")
    assert json.loads(RecordRenderer().render({"stdout": storable})) == {"stdout": storable}
    assert 0 < max(given) <= 6 * SLICE_BYTES + 2


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_what_is_no_json_is_refused_as_everywhere(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        json.dumps({"a": value}, cls=JSONInSlices, ensure_ascii=False, allow_nan=False)
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="Circular"):
        json_text(circle)


def test_a_run_is_sent_to_a_pool_service_in_slices(given: list[int]) -> None:
    job = Job("1", "python", 1.0, files=[InputFile("a", CONTENT)], arguments={"a": "\U0001f600ä"})
    text = messages.dumps(messages.job_to_json(job))
    assert len(given) >= 4 * len(CONTENT) // SLICE_BYTES
    assert 0 < max(given) <= MOST
    assert json.loads(text)["arguments"] == job.arguments
    again = messages.job_from_json(json.loads(text), 1.0)
    assert (again.files, again.arguments) == (job.files, job.arguments)
    artifact = ArtifactFile("a", "text/plain", OTHER)
    result = ExecutionResult("", "", 0, 0.1, artifacts=[artifact])
    told = json.loads(messages.dumps(messages.result_to_json(result)))
    assert messages.result_from_json(told).artifacts == [artifact]
    assert max(given) <= MOST
