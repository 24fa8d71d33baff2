"""The driver contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Device(ABC):
    """One piece of hardware (or one simulated one)."""

    @abstractmethod
    def register(self) -> None:
        """Add this device to the socket's table."""


class Driver(ABC):
    """Reaches one hardware API."""

    @abstractmethod
    def devices(self) -> Sequence[Device]:
        """The devices that this driver can use now, in a stable order."""
