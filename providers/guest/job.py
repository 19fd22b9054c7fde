"""What every language's runner does with a job before the program starts."""

import os
import resource

# The file that a program is written to. node_runner.js has its own, and another for modules.
PROGRAMS = {"python": "main.py", "bash": "main.sh", "nodejs": "main.js"}

_CPUS = os.cpu_count() or 1


def write_files(parts: "dict[str, bytes]") -> None:
    """Put the input files into the workspace. The host has checked their paths.

    They are taken out of `parts`, so that they do not stay in memory. Ends the process when they
    cannot be written, as the program could not run without them.
    """
    try:
        for name in [name for name in parts if name.startswith("file:")]:
            path = name[5:]
            folder = path.rpartition("/")[0]
            if folder:
                os.makedirs(folder, exist_ok=True)
            with open(path, "wb") as file:
                file.write(parts.pop(name))
    except OSError as error:
        os.write(2, f"The input files cannot be written: {error}\n".encode())
        os._exit(1)


def free_name(name: str, parts: "dict[str, bytes]") -> str:
    """The name for a program's file: `name`, or one like it where an input file has that."""
    stem, _, ending = name.rpartition(".")
    number = 1
    while any(part == f"file:{name}" or part.startswith(f"file:{name}/") for part in parts):
        number += 1
        name = f"{stem}_{number}.{ending}"
    return name


def limit_cpu_time(timeout: float) -> None:
    """A backstop behind the deadline: all cores for the whole time, per process."""
    seconds = int(timeout * _CPUS) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
