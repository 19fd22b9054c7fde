"""Given to an image's interpreter as text, once per image: what is in there, the guest compiled.

Its argument is a JSON object of the commands that each language may have.
The sources come over descriptor 0 as a JSON object of [file name for tracebacks, text] by module,
after its length in 4 bytes: not every engine can close the input alone.
The compiled modules go back as this very interpreter marshals them, so that later containers of
the image need not compile them again; for the host they are bytes without a meaning.
"""

import base64
import ctypes
import json
import marshal
import os
import resource
import shutil
import subprocess
import sys


def _kernel_messages() -> bytes:
    buffer = ctypes.create_string_buffer(4096)
    count = ctypes.CDLL(None).klogctl(3, buffer, len(buffer))
    return buffer.raw[: max(count, 0)]


def _version(path: str) -> str:
    """What the interpreter says of itself, empty when it says nothing in time."""
    try:
        asked = subprocess.run([path, "--version"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout[:1000].decode("utf-8", "replace")


def main() -> None:
    size = int.from_bytes(sys.stdin.buffer.read(4), "big")
    sources = json.loads(sys.stdin.buffer.read(size))
    modules = {
        name: marshal.dumps(compile(text, file, "exec", dont_inherit=True))
        for name, (file, text) in sources.items()
    }
    interpreters = {}
    for language, names in json.loads(sys.argv[1]).items():
        interpreters[language] = next(filter(None, map(shutil.which, names)), None)
    interpreters["python"] = sys.executable
    answer = {
        "machine": os.uname().machine,
        "version": ".".join(map(str, sys.version_info[:3])),
        "interpreters": interpreters,
        "versions": {name: _version(path) for name, path in interpreters.items() if path},
        "user_processes": resource.getrlimit(resource.RLIMIT_NPROC)[1],
        # Only gVisor's own kernel says so, whatever the engine calls the runtime.
        "gvisor": b"gVisor" in _kernel_messages(),
        "modules": base64.b64encode(marshal.dumps(modules)).decode(),
    }
    print(json.dumps(answer))


main()
