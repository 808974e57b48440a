"""The version of the package and of the interface of its compiled core.

setuptools, CMake and the check in ``pyparallel/__init__.py`` all read this file.
"""

__version__ = "0.1.0"

#: Grows with every change of pyparallel/_C.pyi, so that an old compiled core is recognised.
ABI = 1
