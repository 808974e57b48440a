"""Trains a small GPT-2 with the Trainer of Hugging Face on all GPUs, or on two virtual devices.

    pip install '.[frameworks]' && python examples/02_trainer.py

Copy ``ParallelTrainer``; without GPUs ``VirtualArguments`` too. See docs/frameworks.md.
"""

import argparse
import tempfile
from contextlib import AbstractContextManager
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import pyparallel

WINDOW = 64


class ParallelTrainer(Trainer):
    """Trainer on pyparallel, with mixed precision and the right loss for any number of rows."""

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        wrapped = super()._wrap_model(model, *args, **kwargs)
        if type(wrapped) is not nn.DataParallel:
            return wrapped
        count = self.args.n_gpu
        on_gpus = self.args.device.type == "cuda"
        device_ids = list(range(count)) if on_gpus else pyparallel.virtual_devices(count)
        return pyparallel.DataParallel(wrapped.module, device_ids, split="balanced")

    def autocast_smart_context_manager(self, cache_enabled: Any = True) -> AbstractContextManager:
        # Trainer leaves this to accelerate, which does not prepare models in DataParallel.
        return self.accelerator.autocast()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        by_replicas = (
            isinstance(model, pyparallel.DataParallel)
            and self.compute_loss_func is None
            and (self.label_smoother is None or "labels" not in inputs)
        )
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if num_items_in_batch is not None and self.args.n_gpu > 1:
            # Trainer takes the mean over replicas and multiplies by n_gpu. That is right for n_gpu
            # sums divided by num_items_in_batch, whose shape (n_gpu, 1) makes the losses a matrix.
            # A short batch has fewer; means, and a loss of the whole batch, are not to be added.
            is_sum = loss.dim() == 2
            if is_sum or self.args.average_tokens_across_devices:
                loss = loss * ((len(loss) if by_replicas and is_sum else 1) / self.args.n_gpu)
        return (loss, outputs) if return_outputs else loss


class VirtualArguments(TrainingArguments):
    """Two virtual devices; with GPUs, take TrainingArguments, which counts them by itself."""

    @property
    def n_gpu(self) -> int:
        return 2


def windows(text: str, vocabulary: list[str]) -> list[dict[str, torch.Tensor]]:
    ids = torch.tensor([vocabulary.index(c) for c in text])
    pieces = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    text = "".join(topics.values())[:100_000]  # Python's manual, a part of every installation
    vocabulary = sorted(set(text))
    data = windows(text, vocabulary)
    config = GPT2Config(
        vocab_size=len(vocabulary), n_positions=WINDOW, n_embd=64, n_layer=2, n_head=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    on_gpus = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (TrainingArguments if on_gpus else VirtualArguments)(
            output_dir=folder, use_cpu=not on_gpus, bf16=True, max_steps=steps, learning_rate=3e-3,
            per_device_train_batch_size=16, logging_steps=10, save_strategy="no", report_to=[],
        )  # fmt: skip
        trainer = ParallelTrainer(GPT2LMHeadModel(config), arguments, train_dataset=data[:-100],
                                  eval_dataset=data[-100:])  # fmt: skip
        trainer.train()
        print(f"{arguments.n_gpu} devices, loss of new text {trainer.evaluate()['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
