"""Given to a container's interpreter as text: takes the guest's modules from the channel.

Nothing of the host is mounted into a container, so the guest comes over descriptor 0 before the
first frame: its modules as the image's own interpreter compiled them, then the seccomp program,
each with its length in 4 bytes.
"""

import marshal
import os
import sys

PACKAGE = "_cofferdam"


def _take() -> bytes:
    return _exactly(int.from_bytes(_exactly(4), "big"))


def _exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(0, size - len(data))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


class Modules:
    """Finder and loader of the guest's modules. The package itself is the empty one."""

    def __init__(self, codes: "dict[str, bytes]") -> None:
        self.codes = codes

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        package, _, module = name.rpartition(".")
        if name != PACKAGE and (package != PACKAGE or module not in self.codes):
            return None
        return type(sys.__spec__)(name, self, is_package=name == PACKAGE)  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: object) -> None:
        name = module.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
        if name in self.codes:
            code = marshal.loads(self.codes[name])
            module.__file__ = code.co_filename  # type: ignore[attr-defined]
            exec(code, module.__dict__)


sys.meta_path.append(Modules(marshal.loads(_take())))  # type: ignore[arg-type]
__import__(f"{PACKAGE}.container")
sys.modules[f"{PACKAGE}.container"].main(_take())
