"""What every language's runner does with a job before the program starts."""

import os
import resource


def write_files(parts: "dict[str, bytes]") -> None:
    """Put the input files into the workspace. The host has checked their paths."""
    for name, content in parts.items():
        if name.startswith("file:"):
            path = name[5:]
            folder = path.rpartition("/")[0]
            if folder:
                os.makedirs(folder, exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)


def limit_cpu_time(timeout: float) -> None:
    """A backstop behind the deadline: all cores for the whole time, per process."""
    seconds = int(timeout * (os.cpu_count() or 1)) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
