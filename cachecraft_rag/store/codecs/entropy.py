"""`entropy`: quantise coarsely, subtract an anchor, and let a kept entropy coder take what is left (CacheGen's manner).

Each layer's keys and values are rounded to multiples of a step, one per head: a share of the head's spread, which is
the root mean square of its values around each channel's mean. What is coded is the difference to an anchor, the mean of
each channel over the chunk's tokens, rounded to the same step.

Where this departs from CacheGen (Liu et al., SIGCOMM 2024), measured on captures of the demo model:

* The anchor is the chunk's mean, not the first token of every ten. Raw keys carry no rotation: a channel's mean is most
  of their size, and beyond it neighbours have little in common. Deltas to an anchor token take 0.45 bits per value more
  at the same step, deltas to the token before 0.3.
* Steps get coarser with depth for values only. The keys of later layers do most of the damage when they are coarse.
* The coder is zstandard, not an arithmetic one. Its Huffman stage comes within a percent of the entropy of such deltas,
  its matches win more than that back where a chunk repeats words, and it decodes 30 times as fast as `constriction`.

A block: steps, float32 `[2, kv_heads]`; anchor, int16 `[2, kv_heads, head_dim]`; the length of the keys' frame, uint32;
one zstandard frame with the keys' deltas, one with the values', int8 `[tokens, kv_heads, head_dim]`. Little-endian.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cachecraft_rag.checks import from_extra
from cachecraft_rag.store.codecs.base import Codec, finish, stretches
from cachecraft_rag.types.kv_layout import KVLayout

if TYPE_CHECKING:
    from torch import Tensor

_KEY_STEP = 0.25  # of the head's spread
_VALUE_STEPS = (0.3, 0.4, 0.4)  # the same in the first, middle and last third of the layers
_LARGEST_DELTA = 126  # and one to spare, because value and anchor are rounded each on its own
_LARGEST_ANCHOR = 32767
_SMALLER = 4.0  # than bfloat16, measured
_LEVEL = 1  # higher ones look for matches where there are none: slower, and larger by up to a tenth


class Entropy(Codec):
    """A value's error is at most half its head's step in float32; see `Codec`. Needs the package zstandard.

    A decoded value is then rounded to the dtype of the model. In bfloat16 and float16 the error can be a whole step.
    """

    name = "entropy"

    def __init__(self) -> None:
        """Raises ConfigError when zstandard is not installed."""
        with from_extra("codecs", "The codec entropy"):
            import zstandard
        self._zstandard = zstandard

    def block_bytes(self, layout: KVLayout, tokens: int) -> None:
        """Return None: the size depends on the values."""
        return

    @classmethod
    def typical_bytes(cls, layout: KVLayout, tokens: int) -> int:
        """Return a quarter of the bytes of a layer in bfloat16, whatever its dtype: the ratio that was measured."""
        values = 2 * tokens * layout.kv_heads * layout.head_dim
        return round(values * 2 / _SMALLER)

    def most_bytes(self, layout: KVLayout, tokens: int) -> int:
        """Return an upper bound of a block's bytes: those of steps, anchor and length, and of two frames of noise.

        zstandard makes noise longer by less than a 128th and 1 KiB.
        """
        deltas = tokens * layout.kv_heads * layout.head_dim
        return (
            2 * layout.kv_heads * (4 + 2 * layout.head_dim)
            + 4
            + 2 * (deltas + deltas // 128 + 1024)
        )

    def encode(self, kv: Tensor, *, layer: int, layers: int) -> Tensor:
        """Return the block, uint8 `[bytes]`, of `kv` `[2, tokens, kv_heads, head_dim]`; see `Codec.encode`.

        Refuses infinities, NaN, and values that are too large to be squared (beyond 1e18).
        """
        import torch

        values = kv.float()
        mean = values.mean(1, keepdim=True)  # [2, 1, kv_heads, head_dim]
        step = _steps(
            values,
            mean,
            torch.tensor([_KEY_STEP, _VALUE_STEPS[layer * len(_VALUE_STEPS) // layers]]),
        )
        anchor = (mean / step).round_()
        deltas = (values / step.expand_as(anchor).contiguous()).round_().sub_(anchor).to(torch.int8)
        compress = self._zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress
        frames = [compress(part.numpy()) for part in deltas]
        start = (
            step.numpy().tobytes(),
            anchor.to(torch.int16).numpy().tobytes(),
            len(frames[0]).to_bytes(4, "little"),
        )
        return torch.from_numpy(np.frombuffer(bytearray().join((*start, *frames)), dtype=np.uint8))

    def decode(self, block: Tensor, *, out: Tensor) -> None:
        """Fill `out` `[2, tokens, kv_heads, head_dim]` from a block; see `Codec.decode`."""
        import torch

        _, _, kv_heads, head_dim = out.shape
        steps = 2 * kv_heads * 4
        anchors = 2 * kv_heads * head_dim * 2
        frames = memoryview(block.numpy())[steps + anchors + 4 :]  # type: ignore[arg-type]  # as in `disk.memory_of`
        if not len(frames):
            raise ValueError(f"block has only {len(block)} bytes")
        step = block[:steps].view(torch.float32).view(2, 1, kv_heads, 1)
        anchor = (
            block[steps : steps + anchors].view(torch.int16).view(2, 1, kv_heads, head_dim).float()
        )
        keys = int.from_bytes(
            block[steps + anchors : steps + anchors + 4].numpy().tobytes(), "little"
        )
        deltas = torch.empty(out.shape, dtype=torch.int8)
        self._decompress((frames[:keys], frames[keys:]), deltas.view(2, -1).numpy())
        steps_each = step.expand_as(anchor).contiguous()  # twice as fast as a step per head
        for run in stretches(out):
            part = out[:, run]
            work = part if out.dtype == torch.float32 else torch.empty(part.shape)
            work.copy_(deltas[:, run]).add_(anchor).mul_(steps_each)
            finish(work, part)

    def _decompress(self, frames: tuple[memoryview, ...], deltas: np.ndarray) -> None:
        # serves one thread only, so it is not kept
        decompressor = self._zstandard.ZstdDecompressor()
        try:
            for frame, part in zip(frames, deltas, strict=True):
                # Checked first: a frame of 1 KB that claims to hold 2 GB would make the decoder allocate 2 GB. The
                # claimed size limits the decoder's window too.
                if self._zstandard.frame_content_size(frame) != len(part):
                    raise ValueError("a frame holds other than the deltas")
                content = decompressor.decompress(
                    frame, max_output_size=len(part), allow_extra_data=False
                )
                if len(content) != len(part):
                    raise ValueError("a frame ends early")
                part[:] = np.frombuffer(content, dtype=np.int8)
        except self._zstandard.ZstdError as error:
            raise ValueError(f"not a zstandard frame: {error}") from error


def _steps(values: Tensor, mean: Tensor, shares: Tensor) -> Tensor:
    """Return each head's step, `[2, 1, kv_heads, 1]`: a share of its spread, or more to fit the numbers."""
    import torch

    rest = values - mean
    spread = rest.square().mean((1, 3), keepdim=True).sqrt_()
    step = spread * shares.view(2, 1, 1, 1)
    step = torch.maximum(step, rest.abs_().amax((1, 3), keepdim=True) / _LARGEST_DELTA)
    step = torch.maximum(step, mean.abs().amax(3, keepdim=True) / _LARGEST_ANCHOR)
    if not torch.isfinite(step).all():
        raise ValueError(
            "it holds infinities, NaN or numbers beyond 1e18, which the codec entropy cannot"
        )
    # instead of 0, so that nothing is ever divided by 0
    return step.clamp_min_(torch.finfo(torch.float32).tiny)
