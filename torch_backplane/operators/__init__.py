"""The operators that run as kernels on bp: one file for each family, named like its file in aten/src/ATen/native.

Importing the package declares all of them.
"""

from importlib import import_module
from pkgutil import iter_modules

for module in sorted(found.name for found in iter_modules(__path__)):
    import_module(f"{__name__}.{module}")
