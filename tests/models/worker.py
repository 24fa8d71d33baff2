"""A process that tries the models of one library, one after another. If it crashes or hangs, a new one continues."""

from __future__ import annotations

import contextlib
import importlib.metadata
import multiprocessing
import os
import warnings
from multiprocessing.connection import Connection
from typing import Any

STARTUP_SECONDS, EXIT_SECONDS = 120, 30


def _serve(connection: Connection, library: str, compiled: bool) -> None:
    """Sends the library's version and the names of its models, then a row for each name that it gets."""
    os.dup2(2, 1)  # stdout is for the report
    warnings.simplefilter("ignore")
    from models.check import check
    from models.model import models_of

    if compiled:
        import torch._inductor.config

        torch._inductor.config.force_disable_caches = True
    models = models_of(library)
    connection.send((importlib.metadata.version(library), list(models)))
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        connection.send(check(models[name], compiled))


class Worker:
    """The process.

    Attributes:
        version: Of the library.
        names: Of its models.

    Raises:
        RuntimeError: the process ended, or did not answer in time.
    """

    def __init__(self, library: str, compiled: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, library, compiled), daemon=True)
        self._process.start()
        other.close()
        self.version, self.names = self._answer(STARTUP_SECONDS)

    def try_model(self, name: str, seconds: float) -> dict[str, Any]:
        """Returns the model's row of the report.

        Raises:
            RuntimeError: the process ended, or did not answer within this number of seconds.
        """
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which the answer tells
            self._connection.send(name)
        return self._answer(seconds)

    def _answer(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            self._process.kill()
            raise RuntimeError(f"not done after {seconds:g} seconds")
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise RuntimeError(f"the process ended with exit code {self._process.exitcode}") from None

    def close(self) -> None:
        """Ends the process: it exits when it finds no further requests, or is killed."""
        self._connection.close()
        self._process.join(EXIT_SECONDS)
        self._process.kill()
        self._process.join()
