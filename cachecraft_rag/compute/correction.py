"""A learned correction of chunk-caches that were captured alone, behind the instruction and nothing else.

What other chunks before it would have changed in a chunk's keys and values can be predicted in part, without computing
anything: in each layer by a linear map from a token's own stale key and value to the change of both, times the share
of what stands before the token now that it has not seen yet. The map is fitted without labels (`correction_fit`), is of
low rank, and reads each token through a few directions that are cut off at what was usual when it was fitted; so no
token moves further than tokens did there.

A capture that was made behind other chunks is left as it is: its error depends on those chunks. Gains are in
docs/fidelity.md, failed attempts in docs/log.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import xxhash
from torch import Tensor

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.small_file import replace_file
from cachecraft_rag.types import KVLayout

CORRECTIONS_FOLDER = "corrections"  # inside the folder that a user names as the store
FORMAT_VERSION = 1
_LONGEST_FILE = 1 << 30  # a larger file is not a correction
_TENSORS = ("down", "offset", "up", "shift")

logger = logging.getLogger("cachecraft_rag")


class UnusableCorrectionError(ValueError):
    """A file holds no correction for this model; the message is the reason."""


@dataclass(frozen=True, eq=False)
class Correction:
    """Change of the keys and values of a chunk captured alone when it stands behind other chunks, layer by layer.

    A token's keys and values of all heads are one row `x` `[width]`, width = 2 · kv_heads · head_dim, keys first. Its
    change is `unseen · (shift + clamp(x @ down + offset, ±limit) @ up)`; `x @ down + offset` has mean 0 and variance 1
    over the tokens it was fitted on, each counted by the square of `unseen`. See `unseen_share`.

    fingerprint  of the model
    down         float32 `[layers, width, rank]`
    offset       float32 `[layers, rank]`
    up           float32 `[layers, rank, width]`
    shift        float32 `[layers, width]`
    limit        in standard deviations
    """

    fingerprint: str
    down: Tensor
    offset: Tensor
    up: Tensor
    shift: Tensor
    limit: float

    @property
    def checksum(self) -> str:
        """Checksum of the tensors as a file keeps them."""
        return _checksum(self._as_stored())

    def fits(self, layout: KVLayout) -> bool:
        """True if the shapes are those of a model with this layout."""
        layers, rank, width = self.up.shape
        return (layers, width) == (layout.layers, 2 * layout.kv_heads * layout.head_dim) and (
            self.down.shape == (layers, width, rank)
            and self.offset.shape == (layers, rank)
            and self.shift.shape == (layers, width)
        )

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        down, offset, up, shift = (getattr(self, name).to(device) for name in _TENSORS)
        return type(self)(self.fingerprint, down, offset, up, shift, self.limit)

    def apply(self, kv: Tensor, unseen: Tensor, first_layer: int = 0) -> Tensor:
        """Raw keys and values as they would be behind other chunks.

        Args:
            kv: `[layers, 2, tokens, kv_heads, head_dim]`, of all heads; some layers of the model, from `first_layer`
                on. It is not written to.
            unseen: float32 `[tokens]`, see `unseen_share`.
        """
        layers, _, tokens, heads, dim = kv.shape
        own = slice(first_layer, first_layer + layers)
        x = kv.transpose(1, 2).reshape(layers, tokens, -1).float()
        z = torch.baddbmm(self.offset[own, None], x, self.down[own]).clamp_(-self.limit, self.limit)
        change = torch.baddbmm(self.shift[own, None], z, self.up[own])
        change *= unseen[:, None]
        return kv + change.view(layers, tokens, 2, heads, dim).transpose(1, 2).to(kv.dtype)

    # -- files --------------------------------------------------------------------------------------------------------

    def write(self, path: Path) -> None:
        """Write it as a safetensors file in bfloat16, in place of an earlier one.

        Raises:
            StoreError: the folder cannot be written to.
        """
        from safetensors.torch import save

        tensors = self._as_stored()
        fields = {
            "format": str(FORMAT_VERSION),
            "fingerprint": self.fingerprint,
            "limit": repr(self.limit),
            "xxh3": _checksum(tensors),
        }
        try:
            replace_file(path, save(tensors, metadata=fields))
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror}. Name a folder you may write to.") from error

    def _as_stored(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).cpu().to(torch.bfloat16).contiguous() for name in _TENSORS}

    @classmethod
    def read(cls, path: Path, fingerprint: str, layout: KVLayout) -> Self:
        """Read and verify a file.

        The file is read into memory first: the library would map it, and a file cut short meanwhile would end the
        process.

        Raises:
            UnusableCorrectionError: it is damaged, of another model or of a newer version. FileNotFoundError.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            if path.stat().st_size > _LONGEST_FILE:
                raise UnusableCorrectionError("too large to be a correction")
            data = path.read_bytes()
            length = int.from_bytes(data[:8], "little")
            fields = json.loads(data[8 : 8 + length])["__metadata__"]
            if int(fields["format"]) > FORMAT_VERSION:
                raise UnusableCorrectionError("written by a newer version of cachecraft-rag")
            if fields["fingerprint"] != fingerprint:
                raise UnusableCorrectionError("fitted for another model, tokenizer or dtype")
            tensors = load(data)
            if _checksum(tensors) != fields["xxh3"]:
                raise UnusableCorrectionError("damaged: its checksum does not match")
            down, offset, up, shift = (tensors[name].float() for name in _TENSORS)
            made = cls(fingerprint, down, offset, up, shift, float(fields["limit"]))
        except (FileNotFoundError, UnusableCorrectionError):
            raise
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UnusableCorrectionError(f"damaged: {error}") from error
        if made.up.dim() != 3 or not made.fits(layout):
            raise UnusableCorrectionError("its shapes are not those of the model")
        if not all(bool(getattr(made, name).isfinite().all()) for name in _TENSORS) or not made.limit > 0:
            raise UnusableCorrectionError("damaged: a number is not finite")
        return made


def unseen_share(positions: Tensor, behind: int) -> Tensor:
    """Share of the tokens before each token that were not there when its chunk was captured alone.

    Args:
        positions: int64 `[tokens]`, of the chunk in the prompt.
        behind: tokens of the chunks before it.

    >>> unseen_share(torch.tensor([128, 160, 640]), behind=80).tolist()  # behind an instruction of 48 tokens
    [0.625, 0.5, 0.125]
    """
    return behind / positions.clamp_min(1).float()


def correction_path(store: Path, fingerprint: str) -> Path:
    """Path of the correction for a model, below the folder that a user names as the store."""
    return store / CORRECTIONS_FOLDER / f"{fingerprint}.safetensors"


def load_correction(store: Path, fingerprint: str, layout: KVLayout) -> Correction | None:
    """Correction fitted for this model, or None; an unusable file counts as missing, with a warning."""
    path = correction_path(store, fingerprint)
    try:
        return Correction.read(path, fingerprint, layout)
    except FileNotFoundError:
        return None
    except UnusableCorrectionError as error:
        logger.warning("%s is not used (%s); run cachecraft calibrate again", path, error)
        return None


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """xxh3 over the tensors' bytes, in the order of their names."""
    state = xxhash.xxh3_64()
    for name in sorted(tensors):
        state.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
