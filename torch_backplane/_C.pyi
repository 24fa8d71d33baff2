# The compiled part (csrc/), for type checkers: everything in it is Any. Its docstrings say what there is.
from typing import Any

def __getattr__(name: str) -> Any: ...
