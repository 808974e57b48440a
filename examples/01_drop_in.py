"""Trains a small CNN on handwritten digits, on four devices, with one line added to plain PyTorch.

    python examples/01_drop_in.py                      # train on all devices
    python examples/01_drop_in.py --check              # train on one and on all, and compare
    python examples/01_drop_in.py --plot losses.png    # also draw the loss of every batch

Two or more GPUs are used as they are, one GPU as four ranks, and a machine without GPUs runs four
virtual devices.
"""

import argparse
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import pyparallel
from pyparallel import _C
from pyparallel.devices import Device, resolve_devices

BATCH = 32
ACCURACY_WANTED = 0.95


def choose_devices() -> list[Device]:
    """Returns the devices of the ranks: at least two ranks, on any machine."""
    devices = resolve_devices(None)  # all GPUs, or what PYPARALLEL_VIRTUAL_DEVICES says
    if devices and devices[0].kind == "cuda" and _C.cuda_device_count() == 0:
        print("pyparallel was built without CUDA: using virtual devices, not the GPU")
        devices = []
    if not devices:
        return resolve_devices(pyparallel.virtual_devices(4))
    return devices * 4 if len(devices) == 1 else devices


def digits(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Returns training images (1437, 1, 8, 8) and labels, then test images and labels."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=dtype)[order, None].to(device) / 16
    labels = torch.tensor(data.target, dtype=torch.int64)[order].to(device)
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def show_progress(text: str) -> None:
    """Rewrites the last line of a terminal; writes nothing into a file or a pipe."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)


def train_epoch(model, optimizer, images, labels, epoch: int) -> list[float]:
    """Trains on every batch once, in an order set by the epoch, and returns the losses."""
    losses = []
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for start in range(0, len(images), BATCH):
        batch = order[start : start + BATCH]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        show_progress(f"epoch {epoch:2d}  image {start}/{len(images)}  loss {losses[-1]:.4f}")
    show_progress("")
    return losses


def train(devices: list[Device], dtype: torch.dtype, epochs: int):
    """Trains a new model on the devices. Returns it, its test accuracy and its losses."""
    images, labels, test_images, test_labels = digits(dtype, devices[0].torch_device)
    model = build_model().to(devices[0].torch_device, dtype)
    if len(devices) > 1:
        model = pyparallel.DataParallel(model, device_ids=devices)  # the one line
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        losses += (of_epoch := train_epoch(model, optimizer, images, labels, epoch))
        loss, seconds = sum(of_epoch) / len(of_epoch), time.perf_counter() - start
        print(f"epoch {epoch:2d}  loss {loss:.4f}  {seconds:.1f} s", flush=True)
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).double().mean().item()
    return model, accuracy, losses


def check(devices: list[Device], epochs: int) -> bool:
    """Trains both ways and compares: weights in float64, losses of the first epoch in float32."""
    torch.backends.cudnn.allow_tf32 = False  # it rounds to 10 bits, too coarse to compare
    print("# one device, float64")
    one, _, _ = train(devices[:1], torch.float64, epochs)
    print(f"# {len(devices)} devices, float64")
    many, _, _ = train(devices, torch.float64, epochs)
    weights = (flat_weights(one) - flat_weights(many)).abs().max().item()
    print("# one device, then all, float32")
    one, many = (train(d, torch.float32, epochs=1)[2] for d in (devices[:1], devices))
    losses = (torch.tensor(one) - torch.tensor(many)).abs().max().item()
    print(f"float64: weights after {epochs} epochs differ by at most {weights:.1e} (allowed 1e-9)")
    print(f"float32: losses of the first epoch differ by at most {losses:.1e} (allowed 1e-4)")
    return weights <= 1e-9 and losses <= 1e-4


def flat_weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plot(losses: list[float], file: str) -> None:
    from matplotlib.figure import Figure  # here, because nothing else needs it

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(range(1, len(losses) + 1), losses, linewidth=0.7)
    axes.set(xlabel="batch", ylabel="loss")
    figure.savefig(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare with one device")
    what.add_argument("--plot", metavar="FILE", help="draw all losses (.png, .pdf, ...)")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    if args.plot:
        try:
            plot([1.0], args.plot)  # what is missing shows before the training
        except (ImportError, OSError, ValueError) as error:
            parser.error(f"--plot {args.plot}: {error}")
    # The layers are so small that a second CPU thread costs more than it gains, above all while
    # other programs run. A large model wants the default.
    torch.set_num_threads(1)
    start = time.perf_counter()
    devices = choose_devices()
    print("devices:", *devices)
    if args.check:
        held = check(devices, args.epochs)
        print("both ways agree" if held else "THE TWO WAYS DISAGREE")
    else:
        _, accuracy, losses = train(devices, torch.float32, args.epochs)
        if args.plot:
            plot(losses, args.plot)
        held = accuracy >= ACCURACY_WANTED
        print(f"test accuracy {accuracy:.4f} (wanted: {ACCURACY_WANTED})")
    print(f"{time.perf_counter() - start:.1f} s")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
