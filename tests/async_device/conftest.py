"""A small model on a device that computes late."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.late_device import Device, installed, to_device
from cachecraft_rag.model.decoder import Decoder


@pytest.fixture
def device() -> Iterator[Device]:
    """In place of `torch.cuda`: two GPUs that compute only what something waits for."""
    with installed() as made:
        yield made


@pytest.fixture
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    """The model on the CPU, to compare with."""
    return tiny_decoder("Llama")


@pytest.fixture
def decoder_on_device(decoder: Decoder, device: Device) -> Decoder:
    """The same model on `cuda:1`, which is not the current device."""
    model = copy.deepcopy(decoder.model)
    moved = Decoder(model, decoder.tokenizer, name=decoder.name, fingerprint=decoder.fingerprint)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                on_device = to_device(parameter, "cuda:1")
                module._parameters[name] = torch.nn.Parameter(on_device, requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = to_device(buffer, "cuda:1")
    moved.device = torch.device("cuda:1")
    moved.fused_layers = None
    return moved
