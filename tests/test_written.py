"""Outputs that the caller gives: autograd notices the write, and shared memory is refused."""

import pytest
import torch
from tensors import values

from pyparallel import comm

pytestmark = pytest.mark.usefixtures("poison")

OPERATIONS = ["all_reduce", "broadcast", "gather", "scatter"]


@pytest.fixture(params=OPERATIONS)
def operation(request):
    return request.param


def inputs_and_outputs(operation, devices, put, dtype=torch.float32):
    """Inputs of 4 elements a rank, and poisoned outputs for them."""
    n = len(devices)
    shape = (n, 4)
    if operation == "gather":
        inputs = [put(values(dtype, 1, 4, seed=r), d) for r, d in enumerate(devices)]
        return inputs, [put(torch.full(shape, -1).to(dtype), devices[0])]
    if operation == "scatter":
        inputs = [put(values(dtype, *shape), devices[0])]
        return inputs, [put(torch.full((1, 4), -1).to(dtype), d) for d in devices]
    count = n if operation == "all_reduce" else 1
    inputs = [put(values(dtype, 4, seed=r), d) for r, d in enumerate(devices[:count])]
    return inputs, [put(torch.full((4,), -1).to(dtype), d) for d in devices]


def call(operation, inputs, outputs):
    if operation == "gather":
        comm.gather(inputs, out=outputs[0])
    elif operation == "all_reduce":
        comm.all_reduce(inputs, out=outputs)
    else:
        getattr(comm, operation)(inputs[0], out=outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16], ids=str)
def test_every_output_counts_as_written(operation, devices, put, dtype):
    """int16 sums are torch's, not the core's."""
    inputs, outputs = inputs_and_outputs(operation, devices, put, dtype)
    before = [t._version for t in (*inputs, *outputs)]
    call(operation, inputs, outputs)
    after = [t._version for t in (*inputs, *outputs)]
    count = len(inputs)
    assert after[:count] == before[:count]
    assert all(a > b for a, b in zip(after[count:], before[count:], strict=True))


def test_backward_refuses_what_was_overwritten(operation, devices, put):
    inputs, outputs = inputs_and_outputs(operation, devices, put)
    for saved in outputs:
        weight = torch.ones_like(saved, requires_grad=True)
        product = (weight * saved).sum()
        call(operation, inputs, outputs)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_a_view_tells_its_base(devices, put):
    bases = [put(torch.zeros(8), d) for d in devices]
    weight = torch.ones(8, device=bases[-1].device, requires_grad=True)
    product = (weight * bases[-1]).sum()
    comm.all_reduce([base[:4] for base in bases], out=[base[:4] for base in bases])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_outputs_that_require_gradients_are_refused(operation, devices, put):
    inputs, outputs = inputs_and_outputs(operation, devices, put)
    last = len(outputs) - 1
    good = outputs[last]
    for bad, text in (
        (good.clone().requires_grad_(), "a leaf Variable that requires grad is being used in an"),
        (
            good.clone().requires_grad_()[...],
            "a view of a leaf Variable that requires grad is being used in an in-place operation",
        ),
        (
            good.clone().requires_grad_() * 1,
            "functions with out=... arguments don't support automatic differentiation",
        ),
    ):
        outputs[last] = bad
        before = [output.detach().clone() for output in outputs]
        with pytest.raises(RuntimeError, match=f"{text}.*output tensor at index {last}"):
            call(operation, inputs, outputs)
        assert all(map(torch.equal, outputs, before))
        with torch.no_grad():
            call(operation, inputs, outputs)
        assert not torch.equal(outputs[last], before[last])


def test_inference_tensors_are_written_in_inference_mode_only(operation, devices, put):
    with torch.inference_mode():
        inputs, outputs = inputs_and_outputs(operation, devices, put)
        call(operation, inputs, outputs)
    written = [output.clone() for output in outputs]
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside Inference"):
        call(operation, inputs, outputs)
    assert all(map(torch.equal, outputs, written))


# Shared memory

INPUT = "some elements of the input tensor and the written-to tensor refer to a single memory"
OUTPUT = "more than one element of the written-to tensor refers to a single memory location"


def on_one_device(device, *sizes):
    """A block of numbers, and one contiguous piece of it a size, each one element further."""
    where = "cpu" if device.startswith("cpu") else device
    block = torch.arange(64.0, device=where)
    return block, [block[k : k + size] for k, size in enumerate(sizes)]


def test_outputs_that_overlap_are_refused(make_devices, put):
    (name,) = make_devices(1)
    for operation in ("all_reduce", "broadcast", "scatter"):
        inputs, _ = inputs_and_outputs(operation, [name, name], put)
        block, outputs = on_one_device(name, 4, 4)
        if operation == "scatter":
            outputs = [output[None] for output in outputs]
        before = block.clone()
        for pair in (outputs, outputs[::-1], [outputs[0], outputs[0]]):
            with pytest.raises(RuntimeError, match=f"{OUTPUT}.*{operation}.*indices 0 and 1"):
                call(operation, inputs, pair)
        assert torch.equal(block, before)


def test_gather_refuses_inputs_in_its_output(make_devices, put):
    (name,) = make_devices(1)
    block, (first, second) = on_one_device(name, 4, 4)
    apart = block[32:36]
    before = block.clone()
    for inputs, index in (([first, apart], 0), ([apart, first], 1), ([apart, second], 1)):
        with pytest.raises(RuntimeError, match=f"{INPUT}.*at index {index} and output.*index 0"):
            comm.gather(inputs, out=block[:8])
    assert torch.equal(block, before)
    comm.gather([first, apart], out=block[4:12])  # next to each other is not overlapping
    assert block[4:12].tolist() == before[:4].tolist() + before[32:36].tolist()


def test_all_reduce_in_place_is_exact_or_refused(make_devices, put):
    (name,) = make_devices(1)
    block, (first, second) = on_one_device(name, 4, 4)
    apart, target = block[32:36], block[40:44]
    before = block.clone()
    for inputs, outputs in (
        ([first, apart], [second, target]),
        ([first, apart], [apart, target]),
        ([first, apart], [target, first]),
        ([first, first], [first, target]),
    ):
        with pytest.raises(RuntimeError, match=INPUT):
            comm.all_reduce(inputs, out=outputs)
    assert torch.equal(block, before)
    comm.all_reduce([first, apart], out=[first, target])
    expected = (before[:4] + before[32:36]).tolist()
    assert first.tolist() == target.tolist() == expected
    assert torch.equal(apart, before[32:36])


def test_broadcast_and_scatter_may_leave_the_root_its_own(make_devices, put):
    (name,) = make_devices(1)
    block, (source, shifted) = on_one_device(name, 4, 4)
    target = block[32:36]
    comm.broadcast(source, out=[source, target])
    assert source.tolist() == target.tolist() == [0, 1, 2, 3]
    for outputs in ([shifted, target], [target, source]):
        with pytest.raises(RuntimeError, match=f"{INPUT}.*broadcast"):
            comm.broadcast(source, out=outputs)
    comm.scatter(source, out=[source[:2], block[40:42]])
    assert block[40:42].tolist() == [2, 3]
    for outputs in ([source[1:3], block[40:42]], [block[40:42], source[2:]]):
        with pytest.raises(RuntimeError, match=f"{INPUT}.*scatter"):
            comm.scatter(source, out=outputs)


def test_a_strided_input_is_copied_before_its_memory_is_written(make_devices, put):
    (name,) = make_devices(1)
    block, _ = on_one_device(name)
    source = block[:8:2]
    comm.broadcast(source, out=[block[20:24], block[:4]])
    assert block[20:24].tolist() == block[:4].tolist() == [0, 2, 4, 6]
    block.copy_(torch.arange(64.0))
    comm.scatter(source, out=[block[20:22], block[:2]])
    assert block[20:22].tolist() == [0, 2] and block[:2].tolist() == [4, 6]
    block.copy_(torch.arange(64.0))
    comm.gather([source, block[32:36]], out=block[:8])
    assert block[:8].tolist() == [0, 2, 4, 6, 32, 33, 34, 35]


def test_numpy_arrays_share_memory_too():
    numpy = pytest.importorskip("numpy")
    block = numpy.arange(16.0)
    with pytest.raises(RuntimeError, match=INPUT):
        comm.gather([block[:4], block[8:12]], out=block[2:10])
