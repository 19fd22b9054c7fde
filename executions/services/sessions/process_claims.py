"""What a provider says of processes, checked before anything is made of it."""

from __future__ import annotations

from typing import Any

from providers.errors import ProviderUnavailable
from providers.sandbox import Process

MOST_PID = 2**53
MOST_PROCESSES = 1000


def checked_pid(answer: Any) -> int:
    """The number of what is said to be a process. Raises ProviderUnavailable."""
    if not isinstance(answer, Process) or type(answer.pid) is not int:
        raise ProviderUnavailable("The provider did not return a process.")
    if not 0 < answer.pid < MOST_PID:
        raise ProviderUnavailable("The provider returned a process without a number.")
    return answer.pid


def checked_processes(answer: Any) -> list[Process]:
    """The processes there are said to be. Raises ProviderUnavailable."""
    if not isinstance(answer, list | tuple):
        raise ProviderUnavailable("The provider did not return a list.")
    if len(answer) > MOST_PROCESSES:
        raise ProviderUnavailable("The provider returned more processes than possible.")
    for each in answer:
        checked_pid(each)
        if each.exit_code is not None and type(each.exit_code) is not int:
            raise ProviderUnavailable("The provider did not return a process.")
    return list(answer)
