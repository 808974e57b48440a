"""NumPy and CuPy arrays: shared memory in, the same kind out, order of streams, refusals."""

import sys
import types

import numpy as np
import pytest
import torch

from pyparallel import comm
from pyparallel.interop import publish_output, published, to_kind_of, to_output, to_tensor

DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool", "complex64"]


@pytest.fixture
def cupy(monkeypatch):
    """A stand-in for CuPy: arrays around CPU tensors, exchanged through DLPack, with a log."""
    module = types.ModuleType("cupy")
    module.log = []

    class ndarray:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **options):
            module.log.append("exported")
            return self.tensor.__dlpack__()

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    def from_dlpack(tensor):
        module.log.append("imported")
        return ndarray(tensor)

    module.ndarray, module.from_dlpack = ndarray, from_dlpack
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_a_tensor_stays_itself():
    x = torch.ones(2)
    assert to_tensor(x) is x and to_output(x, 0) is x and to_kind_of(torch.ones(1), x) is x


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_memory_is_shared(dtype):
    array = np.zeros((3, 4), dtype)[:, 1:]
    tensor = to_tensor(array)
    tensor[1, 1] = 1
    assert array[1, 1] == 1 and tensor.shape == (3, 3)
    assert str(tensor.dtype) == f"torch.{dtype}"


def test_numpy_arrays_that_cannot_be_shared_are_copied():
    backwards = np.arange(4.0)[::-1]
    assert to_tensor(backwards).tolist() == [3, 2, 1, 0]
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    assert to_tensor(fixed).tolist() == [0, 1, 2]
    both = np.broadcast_to(np.float32(7), (2, 3))[::-1]
    assert to_tensor(both).tolist() == [[7, 7, 7]] * 2


@pytest.mark.parametrize(
    "thing", [[1.0], 3, None, np.float32(1), np.array(["a"]), np.array([None]), np.zeros(2, ">f4")]
)
def test_other_things_are_refused(thing):
    with pytest.raises((TypeError, ValueError)):
        to_tensor(thing)


def test_masked_arrays_are_refused():
    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    text = r"expected an array without a mask.*MaskedArray of shape \[2\]; pass array.filled"
    for call in (
        lambda: to_tensor(masked),
        lambda: to_output(masked, 0),
        lambda: comm.reduce_add([masked, masked]),
        lambda: comm.broadcast(np.ones(2), out=[masked]),
    ):
        with pytest.raises(TypeError, match=text):
            call()


def test_outputs_that_cannot_be_written_to_are_refused():
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="output array at index 2 is read-only"):
        to_output(fixed, 2)
    with pytest.raises(ValueError, match="negative"):
        to_output(np.zeros(3)[::-1], 0)


def test_numpy_in_numpy_out(poison):
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    names = ["cpu:0", "cpu:1"]
    first, second = comm.broadcast(x, names)
    assert first is x
    assert isinstance(second, np.ndarray) and np.array_equal(second, x)
    assert not np.shares_memory(second, x)
    pieces = comm.scatter(x, names)
    assert [type(p) for p in pieces] == [np.ndarray] * 2 and np.shares_memory(pieces[0], x)
    assert np.array_equal(comm.gather(pieces), x)
    assert np.array_equal(comm.reduce_add([x, x]), 2 * x)
    assert comm.reduce_add([x]) is x
    for total in comm.all_reduce([x, x, x]):
        assert isinstance(total, np.ndarray) and np.array_equal(total, 3 * x)
    rows = comm.broadcast_coalesced([x, x[0]], names)
    assert rows[0][0] is x and np.array_equal(rows[1][1], x[0])
    sums = comm.reduce_add_coalesced([[x, x[0]], [x, x[1]]])
    assert np.array_equal(sums[0], 2 * x) and np.array_equal(sums[1], x[0] + x[1])


def test_numpy_outputs_are_written_and_returned():
    x = np.arange(6.0).reshape(3, 2)
    outs = [np.full_like(x, np.nan) for _ in range(2)]
    result = comm.broadcast(x, out=outs)
    assert all(r is o and np.array_equal(o, x) for r, o in zip(result, outs, strict=True))
    parts = [np.full((1, 2), np.nan), np.full((2, 2), np.nan)]
    assert comm.scatter(x, out=parts)[1] is parts[1]
    assert np.array_equal(np.concatenate(parts), x)
    whole = np.full_like(x, np.nan)
    assert comm.gather(parts, out=whole) is whole and np.array_equal(whole, x)
    comm.all_reduce(outs, out=outs)
    assert np.array_equal(outs[0], 2 * x) and np.array_equal(outs[1], 2 * x)


def test_the_first_input_decides_the_kind():
    array, tensor = np.ones(2), torch.ones(2, dtype=torch.float64)
    assert isinstance(comm.reduce_add([array, tensor]), np.ndarray)
    assert isinstance(comm.reduce_add([tensor, array]), torch.Tensor)


def test_cupy_arrays_come_in_through_dlpack(cupy):
    memory = torch.arange(3.0)
    tensor = to_tensor(cupy.ndarray(memory))
    assert tensor.data_ptr() == memory.data_ptr() and cupy.log == ["exported"]


def test_results_on_the_host_are_numpy_for_cupy_callers(cupy):
    assert isinstance(to_kind_of(cupy.ndarray(torch.ones(1)), torch.ones(2)), np.ndarray)


def test_results_on_gpus_are_cupy_for_cupy_callers_and_tensors_for_numpy_callers(cupy):
    class OnGpu:
        is_cuda = True

    result = OnGpu()
    assert to_kind_of(cupy.ndarray(None), result).tensor is result
    assert to_kind_of(np.ones(1), result) is result


def test_written_cupy_outputs_are_ordered_after_torch(cupy):
    array, written = cupy.ndarray(torch.ones(1)), torch.ones(1)
    publish_output(array, written)
    assert cupy.log == ["imported"]
    assert published([array, "other"], [written, written]) == (array, "other")
    assert cupy.log == ["imported"] * 2


def test_cupy_is_not_imported():
    import subprocess

    code = (
        "import sys, torch, pyparallel; from pyparallel import comm;"
        "comm.all_reduce([torch.ones(1)] * 2); assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
