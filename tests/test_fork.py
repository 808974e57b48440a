"""Forked children: before and after the first step, while others step, in a DataLoader."""

import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, os, threading, torch, pyparallel
from torch import nn
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 400), nn.Linear(400, 40))
dp = pyparallel.DataParallel(net, pyparallel.virtual_devices(4), dispatch=DISPATCH)
x = torch.ones(8, 4)

def right():
    with torch.enable_grad():
        gradients = [
            torch.autograd.grad(module(x).pow(2).sum(), list(net.parameters()))
            for module in (dp, net)
        ]
    pairs = [(dp(x), net(x)), *zip(*gradients)]
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs)

def forked(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]

statuses = [forked(right)]  # before the first step
assert right()
statuses.append(forked(right))

# While other threads are in the middle of steps.
stop = threading.Event()
def step_until_told():
    while not stop.is_set():
        right()
threads = [threading.Thread(target=step_until_told) for _ in range(2)]
for thread in threads:
    thread.start()
statuses += [forked(right) for _ in range(5)]
stop.set()
for thread in threads:
    thread.join()

# With gradients that wait for their sum, and with a graph that both processes use.
with dp.no_sync():
    dp(x).sum().backward()
statuses.append(forked(right))
net.zero_grad()
out = dp(x).pow(2).sum()
def finish():
    net.zero_grad()
    out.backward()
    got = net[0].weight.grad
    net.zero_grad()
    net(x).pow(2).sum().backward()
    return torch.allclose(got, net[0].weight.grad, rtol=1e-3, atol=1e-3)
statuses.append(forked(finish))
assert finish()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.tensor(float(right()))
loader = torch.utils.data.DataLoader(Data(), num_workers=2, timeout=60)
statuses += [1 - int(value) for value in loader]

context = multiprocessing.get_context("fork")
process = context.Process(target=lambda: os._exit(0 if right() else 3))
process.start()
process.join(60)
statuses.append(process.exitcode)
assert right()
print(statuses)
"""


@pytest.mark.parametrize("dispatch", ["sequential", "threads"])
def test_children_step_as_their_parent_does(dispatch):
    script = SCRIPT.replace("DISPATCH", repr(dispatch))
    run = subprocess.run(
        # Python 3.12 warns of every fork where there are threads.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (run.stdout.strip(), run.stderr) == (str([0] * 14), "")


SPAWNED = """
import multiprocessing, torch, pyparallel
def output(wrapper, x, results):
    results.put(wrapper(x).tolist())
if __name__ == "__main__":
    wrapper = pyparallel.DataParallel(torch.nn.Linear(4, 2), pyparallel.virtual_devices(2))
    x = torch.ones(4, 4)
    expected = wrapper(x).tolist()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=output, args=(wrapper, x, results))
    process.start()
    assert results.get(timeout=100) == expected
    process.join(60)
    print(process.exitcode)
"""


def test_a_spawned_child_gets_the_wrapper(tmp_path):
    path = tmp_path / "spawned.py"
    path.write_text(SPAWNED)
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=200)
    assert (run.stdout.strip(), run.stderr) == ("0", "")
