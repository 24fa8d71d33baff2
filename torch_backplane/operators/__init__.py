"""The operators that run as kernels on bp, one file for each family of ATen's native functions, under its name.

Importing this declares them all.
"""

from importlib import import_module
from pkgutil import iter_modules

for module in sorted(found.name for found in iter_modules(__path__)):
    import_module(f"{__name__}.{module}")
