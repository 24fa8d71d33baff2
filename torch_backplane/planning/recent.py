"""Tables that keep what was used last and forget the rest: what a process builds does not grow with its calls."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """At most `most` values: where another one comes, those that were used the longest time ago go, an eighth at once.

    Args:
        is_held: of a value, whether somebody holds it anyway. Then it stays, beyond `most`, too, so that who asks for
            it gets that one and makes no second.

    Thread-safe. A value that is forgotten lives as long as anybody has it.
    """

    def __init__(self, most: int, is_held: Callable[[Value], bool] = lambda value: False) -> None:
        self._most = self._limit = most
        self._is_held = is_held
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.RLock()  # garbage that is collected meanwhile may ask, too

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of `key`; made where there is none."""
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                self._values.move_to_end(key)
                return found
        made = make()  # without the lock: it may take long
        with self._lock:
            found = self._values.setdefault(key, made)  # another thread's, if that was quicker
            self._values.move_to_end(key)
            gone = self._forget()
        del gone  # without the lock: giving a kernel back may wait for the device
        return found

    def _forget(self) -> list[Value]:
        if len(self._values) <= self._limit:
            return []
        # What was used last is not looked at: nobody may have come to hold it yet.
        old = islice(self._values.items(), len(self._values) - (self._most - self._most // 8))
        gone = [self._values.pop(key) for key, value in list(old) if not self._is_held(value)]
        # Those that are held are looked at again when an eighth has come.
        self._limit = max(self._most, len(self._values) + self._most // 8)
        return gone

    def clear(self) -> None:
        with self._lock:
            self._values, gone = OrderedDict(), self._values
        del gone

    def __len__(self) -> int:
        return len(self._values)
