"""Devices for the tests: virtual ones, or the ranks of PYPARALLEL_TEST_DEVICES=cuda:0,cuda:0,..."""

import os
import signal
from collections.abc import Callable, Iterator

# Before torch is imported, which reads it once. Tests compute little, and on a busy machine torch's
# threads wait for each other: two take many times longer than one. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from pyparallel.communicator import Communicator, get_communicator
from pyparallel.data_parallel import DataParallel
from pyparallel.devices import resolve_devices
from pyparallel.replicate import replicate

# A rank that never arrives fails its test long before the limit of the test.
os.environ.setdefault("PYPARALLEL_TIMEOUT_MS", "20000")
# A replica that uses another rank's memory fails, as it would on GPUs.
os.environ.setdefault("PYPARALLEL_CHECK_DEVICES", "1")
# A shell script starts what it puts in the background with interrupts ignored. Tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _test_devices(n: int) -> list[str]:
    named = os.environ.get("PYPARALLEL_TEST_DEVICES")
    if not named:
        return [f"cpu:{i}" for i in range(n)]
    # Fewer names than ranks: they are used again, since ranks may share a GPU.
    names = named.split(",")
    return [names[i % len(names)] for i in range(n)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that need a GPU run where PYPARALLEL_TEST_DEVICES names some."""
    if item.get_closest_marker("cuda") and not _test_devices(1)[0].startswith("cuda"):
        pytest.skip("PYPARALLEL_TEST_DEVICES names no GPUs")


@pytest.fixture
def make_devices() -> Callable[[int], list[str]]:
    """Returns a function from a number of ranks to their devices."""
    return _test_devices


@pytest.fixture
def wrap() -> Callable[..., DataParallel]:
    """Returns a function that wraps a module, for three ranks if not told otherwise."""
    return lambda module, n=3, **options: DataParallel(module, _test_devices(n), **options)


@pytest.fixture
def replicas_of() -> Callable[..., list[torch.nn.Module]]:
    """Returns a function that makes fresh replicas of a module, for three ranks as ``wrap``."""
    return lambda module, n=3, **options: replicate(
        module, resolve_devices(_test_devices(n)), **options
    )


@pytest.fixture
def on_the_first_device() -> Iterator[None]:
    """Seeds, and makes tensors on the device of rank 0."""
    torch.manual_seed(0)
    with resolve_devices(_test_devices(1))[0].torch_device:
        yield


@pytest.fixture(params=[1, 2, 3, 4, 5], ids=lambda n: f"ranks{n}")
def ranks(request: pytest.FixtureRequest) -> int:
    """The number of ranks of a test."""
    return int(request.param)


@pytest.fixture
def devices(ranks: int) -> list[str]:
    """The devices of the test's ranks."""
    return _test_devices(ranks)


@pytest.fixture
def put() -> Callable[[torch.Tensor, str], torch.Tensor]:
    """Returns a function that copies a tensor to the device of a rank, keeping its strides."""

    def copy(tensor: torch.Tensor, device: str) -> torch.Tensor:
        where = "cpu" if device.startswith("cpu") else device
        moved = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=where
        )
        return moved.copy_(tensor)

    return copy


@pytest.fixture(autouse=True)
def no_virtual_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests say themselves what PYPARALLEL_VIRTUAL_DEVICES is."""
    monkeypatch.delenv("PYPARALLEL_VIRTUAL_DEVICES", raising=False)


@pytest.fixture
def poison() -> Iterator[None]:
    """Makes torch fill new memory with NaN or the largest integer: nothing is right by luck."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def comm(devices: list[str]) -> Communicator:
    """The communicator of the devices of the test."""
    return get_communicator(resolve_devices(devices))


@pytest.fixture(params=["first", "last"])
def root(request: pytest.FixtureRequest, ranks: int) -> int:
    """The first or the last rank."""
    return 0 if request.param == "first" else ranks - 1
