"""Tables that keep what was used last and forget the rest: what a process builds does not grow with its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class _Entry(Generic[Value]):
    """A value, and when it was used last."""

    __slots__ = ("used", "value")

    def __init__(self, value: Value, used: int) -> None:
        self.value, self.used = value, used


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
        self._entries: dict[Key, _Entry[Value]] = {}
        self._now = 0
        self._lock = threading.RLock()  # garbage that is collected meanwhile may ask, too

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of `key`; made where there is none."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._now = found.used = self._now + 1
                return found.value
        made = make()  # without the lock: it may take long
        with self._lock:
            self._now += 1
            found = self._entries.setdefault(key, _Entry(made, self._now))  # another thread's, if that was quicker
            found.used = self._now
            gone = self._forget()
        del gone  # without the lock: giving a kernel back may wait for the device
        return found.value

    def _forget(self) -> list[_Entry[Value]]:
        if len(self._entries) <= self._limit:
            return []
        # What was used last is not looked at: nobody may have come to hold it yet.
        in_order = sorted(self._entries.items(), key=lambda one: one[1].used)
        old = in_order[: len(in_order) - (self._most - self._most // 8)]
        gone = [self._entries.pop(key) for key, entry in old if not self._is_held(entry.value)]
        # Those that are held are looked at again when an eighth has come.
        self._limit = max(self._most, len(self._entries) + self._most // 8)
        return gone

    def clear(self) -> None:
        with self._lock:
            self._entries, gone = {}, self._entries
        del gone

    def __len__(self) -> int:
        return len(self._entries)
