"""Threads that ask something of the service, again and again, until they are told to stop."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence


class Driver(ABC):
    """So many threads; what they note of their work is written under `_lock`.

    `longest` is how many seconds a piece of work takes at most, `patience` how many each thread
    has to end once it was told to stop.
    """

    def __init__(
        self,
        urls: Sequence[str],
        keys: Mapping[str, str],
        *,
        threads: int,
        seed: int,
        longest: float,
        patience: float,
    ) -> None:
        self._urls = urls
        self._keys = keys
        self._longest = longest
        self._patience = patience
        self._goes_on = True
        self._lock = threading.Lock()
        # By name: a number and its negative are one seed, and two kinds must not do alike.
        chances = [random.Random(f"{type(self).__name__} {seed} {n}") for n in range(threads)]
        # Each tenant has as many threads as any other, so that their shares can be compared.
        names = list(keys)
        self._threads = [
            threading.Thread(target=self._work, args=(chance, names[n % len(names)]), daemon=True)
            for n, chance in enumerate(chances)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Nothing new is begun. Waits until each thread has ended or its patience is over."""
        self._goes_on = False
        for thread in self._threads:
            thread.join(self._patience)

    def _work(self, chance: random.Random, tenant: str) -> None:
        while self._goes_on:
            self._work_once(chance, tenant)

    @abstractmethod
    def _work_once(self, chance: random.Random, tenant: str) -> None:
        """One piece of work, from its beginning until nothing more is to be known of it."""
