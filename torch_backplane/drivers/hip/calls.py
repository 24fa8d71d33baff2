"""Functions of C libraries as cuda-bindings has them: a call returns the status, and what the function stores."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any


class Stored:
    """A parameter that points to where the function stores a result. Calls do not pass it."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


class Text:
    """A pointer to a text that the function stores, and the bytes that it has space for. Calls pass the bytes."""


class Function:
    """A function.

    Args:
        name: for messages.
        address: returns its address, at the first call.
        status: the class of statuses.
        parameters: the types of its parameters.
    """

    def __init__(self, name: str, address: Callable[[], int], status: Callable[[int], Any], *parameters: Any) -> None:
        self.__name__ = name
        self._address, self._status, self._parameters = address, status, parameters
        self._function: Any = None

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        if self._function is None:
            self._function = ctypes.CFUNCTYPE(ctypes.c_int)(self._address())
        values = iter(given)
        passed: list[Any] = []
        stored: list[Any] = []
        for parameter in self._parameters:
            if isinstance(parameter, Stored):
                stored.append(parameter.kind())
                passed.append(ctypes.byref(stored[-1]))
            elif parameter is Text:
                stored.append(ctypes.create_string_buffer(next(values)))
                passed += [stored[-1], ctypes.c_int(len(stored[-1]))]
            else:
                passed.append(_passed(parameter, values))
        status = self._function(*passed)
        return self._status(status), *(one.raw if isinstance(one, ctypes.Array) else one.value for one in stored)


def _passed(parameter: Any, values: Iterator[Any]) -> Any:
    value = next(values)
    if isinstance(value, memoryview):
        return ctypes.c_void_p(_address_of(value))
    if isinstance(value, bytes):
        return ctypes.c_char_p(value)
    if isinstance(value, ctypes.Structure):
        return ctypes.byref(value)
    if isinstance(value, list):  # of structures or texts
        return (parameter * len(value))(*value)
    return parameter(value)


class _Buffer(ctypes.Structure):
    """Py_buffer."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("owner", ctypes.py_object),
        ("others", ctypes.c_size_t * 9),
    )


def _address_of(memory: memoryview) -> int:
    """Return the address of memory, which can be read-only. It is valid while the memory is."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(buffer), 0)
    start = int(buffer.start or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return start
