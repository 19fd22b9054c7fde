"""What every language's runner does with a job before the program starts."""

import os
import resource

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


def enter_folder(path: str) -> None:
    """Be in a folder, which is made where it is not there; "" is where we are. Raises OSError."""
    if not path:
        return
    os.makedirs(path, exist_ok=True)
    os.chdir(path)
    # Of two names of one folder a shell takes the one that it is told.
    os.environ["PWD"] = path if path.startswith("/") else os.getcwd()


def free_name(name: str, parts: "dict[str, bytes]") -> str:
    """The name for a program's file: `name`, or one like it where an input file has that."""
    stem, _, ending = name.rpartition(".")
    number = 1
    while any(part == f"file:{name}" or part.startswith(f"file:{name}/") for part in parts):
        number += 1
        name = f"{stem}_{number}.{ending}"
    return name


def lend_artifacts() -> None:
    """Have `os.mkdir("artifacts")` work once in this process, though the folder is there already.

    Programs that make it themselves are as right as those that rely on it. One with something in
    it stays, and to make it is an error as of any other folder.
    """
    make = os.mkdir
    try:
        lent = [_identity(os.lstat("artifacts"))]
    except OSError:
        return

    def mkdir(
        path: "str | bytes | os.PathLike[str]", mode: int = 0o777, *, dir_fd: "int | None" = None
    ) -> None:
        try:
            make(path, mode, dir_fd=dir_fd)
        except FileExistsError:
            status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
            if _identity(status) not in lent:
                raise
            lent.clear()
            os.rmdir(path, dir_fd=dir_fd)
            make(path, mode, dir_fd=dir_fd)

    # A traceback shows it as it shows what else of `os` is in Python.
    mkdir.__code__ = mkdir.__code__.replace(co_filename="<frozen os>")
    mkdir.__doc__, mkdir.__qualname__, mkdir.__module__ = make.__doc__, "mkdir", make.__module__
    os.supports_dir_fd.add(mkdir)
    os.mkdir = mkdir  # type: ignore[assignment]


def _identity(status: os.stat_result) -> "tuple[int, int]":
    return status.st_dev, status.st_ino


def limit_cpu_time(timeout: float) -> None:
    """A backstop behind the deadline: all cores for the whole time, per process."""
    seconds = int(timeout * _CPUS) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
