"""Models for benchmarks. Of GPT-2 and ResNet-50 only the modules and their tensors: no forward."""

import torch
from torch import nn


def linears(count: int) -> nn.Module:
    """Many small layers: almost all of the time is the interpreter's."""
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(count)))


def perceptron(count: int, width: int = 128) -> nn.Module:
    """Layers with some arithmetic in each."""
    layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count))
    return nn.Sequential(*(module for layer in layers for module in layer))


def gpt2(blocks: int = 12, width: int = 768, words: int = 50257, context: int = 1024) -> nn.Module:
    """GPT-2: by default the small one, 124 million parameters, with a causal mask a block."""

    def block() -> nn.Module:
        attention = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width)})
        attention["out"] = nn.Linear(width, width)
        mask = torch.ones(1, 1, context, context, dtype=torch.bool).tril()
        attention.register_buffer("mask", mask)
        mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        norms = [nn.LayerNorm(width), nn.LayerNorm(width)]
        return nn.ModuleList([norms[0], attention, norms[1], mlp])

    embeddings = [nn.Embedding(words, width), nn.Embedding(context, width)]
    return nn.ModuleList([*embeddings, *(block() for _ in range(blocks)), nn.LayerNorm(width)])


def resnet(stages: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> nn.Module:
    """ResNet of bottlenecks: by default the one of 50 layers, 25.6 million parameters."""

    def convolution(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, kernel, bias=False), nn.BatchNorm2d(outputs)]

    layers: list[nn.Module] = [nn.Sequential(*convolution(3, width, 7), nn.ReLU())]
    inputs = width
    for stage, blocks in enumerate(stages):
        inner = width << stage
        for i in range(blocks):
            block = nn.ModuleDict({"relu": nn.ReLU()})
            block["reduce"] = nn.Sequential(*convolution(inputs, inner, 1))
            block["filter"] = nn.Sequential(*convolution(inner, inner, 3))
            block["expand"] = nn.Sequential(*convolution(inner, 4 * inner, 1))
            if i == 0:
                block["shortcut"] = nn.Sequential(*convolution(inputs, 4 * inner, 1))
            inputs = 4 * inner
            layers.append(block)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Linear(inputs, 1000))
