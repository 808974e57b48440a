"""Multi-GPU training in one process: a drop-in for ``torch.nn.DataParallel``.

Importing this package makes no CUDA call and needs no driver.
"""

import importlib
import sysconfig
from pathlib import Path

from pyparallel._version import ABI, __version__


def _check_core() -> None:
    """Raises ImportError unless the compiled core is there and belongs to these sources."""
    try:
        core = importlib.import_module("pyparallel._C")
    except ModuleNotFoundError as error:
        if error.name != "pyparallel._C":
            raise
        found = sorted(path.name for path in Path(__file__).parent.glob("_C.*.so"))
        raise ImportError(
            f"pyparallel/_C was not built for this Python ({sysconfig.get_config_var('SOABI')}; "
            f"found: {', '.join(found) or 'none'}). Build it: pip install . Or "
            "leave this folder, if it is a checkout, which hides the installed package."
        ) from None
    if core.ABI != ABI or core.build_info()["version"] != __version__:
        raise ImportError(
            "pyparallel/_C was built from another version of the sources. Rebuild: pip install -e ."
        )


_check_core()

from pyparallel import comm, parallel  # noqa: E402
from pyparallel.data_parallel import DataParallel  # noqa: E402
from pyparallel.devices import virtual_devices  # noqa: E402
from pyparallel.one_forward import data_parallel  # noqa: E402
from pyparallel.patch import patched  # noqa: E402
from pyparallel.scatter_gather import ScalarGatherWarning  # noqa: E402

__all__ = [
    "DataParallel",
    "ScalarGatherWarning",
    "__version__",
    "comm",
    "data_parallel",
    "parallel",
    "patched",
    "virtual_devices",
]


def __dir__() -> list[str]:
    """The public names: completion in notebooks need not show our own modules."""
    return list(__all__)
