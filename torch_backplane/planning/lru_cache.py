"""A cache that drops the least recently used values, so that memory does not grow with the number of calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class _Entry(Generic[Value]):
    """A value and the time of its last use, as a counter."""

    __slots__ = ("used", "value")

    def __init__(self, value: Value, used: int) -> None:
        self.value, self.used = value, used


class LruCache(Generic[Key, Value]):
    """A thread-safe cache of at most `most` values. When it is full, it drops the least recently used eighth.

    A dropped value lives on while something else refers to it.

    Args:
        most: the capacity.
        is_held: whether something else keeps a value alive. Such a value is not dropped, even beyond the capacity, so
            that `get` does not create a second one.
    """

    def __init__(self, most: int, is_held: Callable[[Value], bool] = lambda value: False) -> None:
        self._most = self._limit = most
        self._is_held = is_held
        self._entries: dict[Key, _Entry[Value]] = {}
        self._now = 0
        self._lock = threading.RLock()  # reentrant: a destructor that garbage collection runs may call `get`

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Returns the value of `key`, created by `make` if the cache has none."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._now = found.used = self._now + 1
                return found.value
        made = make()  # without the lock, as this can be slow
        with self._lock:
            self._now += 1
            found = self._entries.setdefault(key, _Entry(made, self._now))  # another thread may have been faster
            found.used = self._now
            gone = self._forget()
        del gone  # without the lock, as releasing a kernel can wait for the device
        return found.value

    def _forget(self) -> list[_Entry[Value]]:
        if len(self._entries) <= self._limit:
            return []
        # The most recently used entries stay: their users may not hold them yet.
        in_order = sorted(self._entries.items(), key=lambda one: one[1].used)
        old = in_order[: len(in_order) - (self._most - self._most // 8)]
        gone = [self._entries.pop(key) for key, entry in old if not self._is_held(entry.value)]
        # If held entries keep the cache above its capacity, look again when it has grown by an eighth.
        self._limit = max(self._most, len(self._entries) + self._most // 8)
        return gone

    def clear(self) -> None:
        with self._lock:
            self._entries, gone = {}, self._entries
        del gone

    def __len__(self) -> int:
        return len(self._entries)
