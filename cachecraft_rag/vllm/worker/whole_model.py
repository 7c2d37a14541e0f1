"""vLLM's own forward over the rows of a pass: one call for all layers, compiled where vLLM compiles its model.

While it runs, `forward` of each attention's implementation is replaced by the running pass; vLLM looks it up at each
call, from compiled code too. The pass gets rotated queries and keys, and writes and attends in its own buffer: vLLM's
blocks stay as they are.

A pass with captures stores raw keys. vLLM runs all of its rows at position 0, where a rotary embedding changes nothing,
and the pass rotates queries and keys, as with layers one after the other. Rejected: to rotate keys back, which rounds
them a second time.

`WorkerStack.layer` still runs layers one after the other where that is needed:

- passes that wait for a disk or a remote between layers, or that drop rows on the way (early termination "published")
- passes with more rows than vLLM's max_num_batched_tokens, for which its code is not compiled
- passes that are expected to take longer than `LONGEST_CALL_S`, because a step cannot stop between their layers, while
  vLLM has requests to compute
- all passes, if `check_whole_model` finds a difference, and those with captures, if `check_raw_keys` finds one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.stack import AttentionSettings, LayerPass, WholeModel, WholePass
from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.model.layer_survey import in_order
from cachecraft_rag.vllm.worker.interfaces import Attention, VLLMModule
from cachecraft_rag.vllm.worker.layers import WorkerLayer
from cachecraft_rag.vllm.worker.models import text_part

if TYPE_CHECKING:
    from cachecraft_rag.vllm.worker.stack import WorkerStack

# Largest relative difference of keys and values that rounding explains, by dtype.
_TOLERANCE = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.1}
# The prompt of the check: an instruction, a stored chunk of which every fourth token is recomputed, and a question.
_BOUNDS = (0, 8, 32, 40)


class _PassEnded(Exception):  # ends a forward after its last layer; nothing failed
    """Ends the forward once all keys and values that the pass needs are written."""


class VLLMForward:
    """The `WholeModel` of a rank inside a vLLM worker.

    Args:
        model: vLLM's model.
        layers: its layers, in order.
    """

    def __init__(self, model: VLLMModule, layers: Sequence[WorkerLayer]) -> None:
        self._model = model
        self._layers = layers
        self.most_rows = int(model.vllm_config.scheduler_config.max_num_batched_tokens)
        config = model.vllm_config.model_config
        self._takes_embeddings = config.supports_multimodal_inputs or config.enable_prompt_embeds
        self._positions_per_token = config.mrope_num_dims
        self.gives_raw = False  # until `check_raw_keys` has found no difference

    def run(self, ids: Tensor, positions: Tensor, whole_pass: WholePass, layers: int) -> None:
        """Run rows through the first `layers` layers; the last one writes keys and values, and attends to nothing.

        `ids` and `positions` are int64 `[rows]`. With several ranks, all of them have to call it. After an error of the
        pass, layers continue with zeros, because other ranks wait for their sums; then it is raised.
        """

        def attend(index: int, states: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
            layer = self._layers[index]
            q, k, v = _heads_of(layer, states)
            whole_pass.write_rotated(index, q, k, v, layer.settings)
            if index < layers - 1:
                whole_pass.attend_rotated(index, q, layer.settings, output.view(q.shape))

        self._run(ids, positions, attend, layers)

    def run_raw(self, ids: Tensor, layer_pass: LayerPass, layers: int) -> None:
        """Run rows at position 0; each layer calls `attend` with raw queries and keys. Ranks, errors: as in `run`."""

        def attend(index: int, states: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
            layer = self._layers[index]
            result = layer_pass.attend(index, *_heads_of(layer, states), layer.settings)
            output.copy_(result.reshape(output.shape))

        self._run(ids, torch.zeros_like(ids), attend, layers)

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Callable[[int, tuple[Tensor, Tensor, Tensor], Tensor], None],
        layers: int,
    ) -> None:
        from vllm.forward_context import set_forward_context

        raised: list[Exception] = []

        def attended(index: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
            is_last = index == layers - 1
            try:
                if not raised:
                    attend(index, (query, key, value), output)
            except Exception as error:  # noqa: BLE001  # any: raised below, after the sums of all ranks
                raised.append(error)
            if is_last:
                raise _PassEnded
            if raised:
                output.zero_()

        try:
            with (
                _attention_of_pass(self._layers, attended),
                _without_images(self._model, len(ids)),
                # without metadata vLLM's own attention computes nothing, and without slots it writes nothing
                set_forward_context(None, self._model.vllm_config, slot_mapping={}),
            ):
                self._call(ids, positions)
        except _PassEnded:
            pass
        if raised:
            raise raised[0]

    def _call(self, ids: Tensor, positions: Tensor) -> None:
        """Call the model as vLLM does: compiled code does not check its arguments, and would compute nonsense.

        Ids are int32. A multimodal model takes embeddings, also of a text. If it has several positions per token
        (mRoPE), those of a text are equal, so that it rotates as with one.
        """
        if self._positions_per_token:
            # one more place, as in vLLM's buffer: compiled code knows the distance of its rows
            buffer = positions.new_zeros(self._positions_per_token, self.most_rows + 1)
            buffer[:, : len(ids)] = positions
            positions = buffer[:, : len(ids)]
        if self._takes_embeddings:
            embedded = text_part(self._model).embed_input_ids(ids.int())
            self._model(None, positions, None, embedded)
        else:
            self._model(ids.int(), positions, None)


@contextmanager
def _without_images(model: VLLMModule, rows: int) -> Iterator[None]:
    """Set aside what the images of vLLM's running step add to the first layers of Qwen3-VL: our rows have none."""
    step = {
        name: getattr(model, name)
        for name in ("deepstack_input_embeds", "deepstack_input_embeds_num_tokens")
        if hasattr(model, name)
    }
    features = step.get("deepstack_input_embeds")
    if not features:
        yield
        return
    nothing = [feature.new_zeros(rows, feature.shape[1]) for feature in features]
    try:
        for name, value in zip(step, (nothing, 0), strict=True):
            setattr(model, name, value)
        yield
    finally:
        for name, value in step.items():
            setattr(model, name, value)


def _heads_of(
    layer: WorkerLayer, states: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values `[rows, heads, head_dim]`, the first two in the order of all models."""
    width = layer.attention.head_size
    q, k, v = (part.reshape(part.shape[0], -1, width) for part in states)
    return in_order(q, layer.order), in_order(k, layer.order), v


@contextmanager
def _attention_of_pass(
    layers: Sequence[WorkerLayer], attend: Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
) -> Iterator[None]:
    """Replace the forward of each attention's implementation by `attend`."""

    def forward(
        index: int,
        attention: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_unused: object,
        output: Tensor,
        output_scale: Tensor | None = None,
        **_named: object,
    ) -> Tensor:
        if output_scale is not None:
            raise UnsupportedModelError("its attention writes quantised output")
        if query.dtype != key.dtype:  # vLLM has rounded it to FP8 for its own kernel
            query = query.to(key.dtype) * attention._q_scale.to(key.dtype)
        attend(index, query, key, value, output)
        return output

    with ExitStack() as replaced:
        for index, layer in enumerate(layers):
            implementation = layer.attention.impl
            implementation.forward = partial(forward, index)
            replaced.callback(delattr, implementation, "forward")
        yield


@torch.inference_mode()
def check_whole_model(stack: WorkerStack, model: WholeModel) -> str:
    """Compute a small prompt with and without the model's own forward; return how they differ on this rank, or "".

    Also returns a reason if a call takes too few rows for the prompt, which has a stored chunk with drift correction.
    All ranks have to call it. Unsets `stack.whole_model`.
    """
    if model.most_rows < _BOUNDS[-1]:  # the checks would run layer by layer, too
        return (
            f"its calls take {model.most_rows} rows (--max-num-batched-tokens), too few for a check"
        )
    job = _job_of_check(stack)
    expected = prefill(stack, job).buffer.kv
    stack.whole_model = model
    try:
        computed = prefill(stack, job).buffer.kv
    finally:
        stack.whole_model = None
    rows = torch.from_numpy(job.rows.open()).to(stack.device)
    is_stale = torch.ones(_BOUNDS[-1], dtype=torch.bool, device=stack.device)
    is_stale[rows] = False
    pairs = [(expected[:, :, tokens], computed[:, :, tokens]) for tokens in (~is_stale, is_stale)]
    return _difference(stack, pairs, "its keys and values")


@torch.inference_mode()
def check_raw_keys(stack: WorkerStack, model: WholeModel, *, last: int) -> str:
    """Compute and capture a small prompt with and without the model's own forward; return how they differ, or "".

    Also returns a reason if something other than the rotary embedding depends on positions, which are all 0 there;
    `last` is the model's last position. All ranks have to call it. Unsets `stack.whole_model` and `model.gives_raw`.
    """
    reason = _dependence_on_positions(stack, last)
    reasons = stack.ranks.agree(frozenset((reason,) if reason else ()))
    if reasons:
        return min(reasons)
    job = PrefillJob(range(_BOUNDS[-1]), Rows.of(_BOUNDS, new=range(_BOUNDS[-1])), captures=[1])
    expected = prefill(stack, job)
    stack.whole_model = model
    model.gives_raw = True
    try:
        computed = prefill(stack, job)
    finally:
        stack.whole_model = None
        model.gives_raw = False
    pairs = [(expected.buffer.kv, computed.buffer.kv)]
    captures = (expected.recorder.captures, computed.recorder.captures)
    pairs += [(one.kv, other.kv) for one, other in zip(*captures, strict=True)]
    return _difference(stack, pairs, "the keys and values of captures")


class _Stop(Exception):  # ends a layer at its attention; nothing failed
    """Ends a layer that was run for its queries and keys only."""


def _dependence_on_positions(stack: WorkerStack, last: int) -> str:
    """Return why raw queries and keys differ between position 0 and the last one; "" if they do not."""
    positions = torch.tensor([last, last], device=stack.device)
    start = torch.zeros_like(positions)
    for kind in sorted(set(stack.rotary_kinds)):
        cos, sin = stack.rope(start, kind)
        if not (torch.all(cos == 1.0) and torch.all(sin == 0.0)):
            return "its rotary embedding changes keys at position 0"
    depends = False
    for layer in range(stack.layout.layers):  # all of them, as on the other ranks
        pairs = zip(_seen(stack, layer, start), _seen(stack, layer, positions), strict=True)
        depends |= not all(torch.equal(*pair) for pair in pairs)
    return "its queries or keys depend on positions besides the rotary embedding" if depends else ""


def _seen(stack: WorkerStack, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the raw queries and keys of a layer for some tokens at these positions."""
    seen: list[tuple[Tensor, Tensor]] = []

    class Watching:
        def attend(
            self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings
        ) -> Tensor:
            seen.append((q.clone(), k.clone()))
            raise _Stop

    hidden = stack.embed(torch.arange(len(positions), device=positions.device))
    # the layer goes on with zeros, because other ranks wait for its sums
    with suppress(_Stop):
        stack.layer(layer, hidden, positions=positions, layer_pass=Watching())
    return seen[0]


def _difference(stack: WorkerStack, pairs: Sequence[tuple[Tensor, Tensor]], what: str) -> str:
    """Say how tensors `[layers, 2, tokens, kv_heads, head_dim]` differ from the expected ones; "" if they agree."""
    largest = 0.0
    for expected, computed in pairs:
        wanted = expected.float().flatten(2)
        difference = computed.float().flatten(2) - wanted
        relative = difference.norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-6)
        # NaN is not larger than anything, and must not pass
        largest = max(largest, float(torch.nan_to_num(relative, nan=float("inf")).max()))
    if largest <= _TOLERANCE[stack.layout.dtype]:
        return ""
    return f"{what} differ by up to {largest:.2g} of their size"


def _job_of_check(stack: WorkerStack) -> PrefillJob:
    chunk = range(_BOUNDS[1], _BOUNDS[2])
    generator = torch.Generator().manual_seed(0)
    # the heads of all ranks: each takes its own ones
    heads = stack.layout.kv_heads * stack.ranks.size
    shape = (stack.layout.layers, 2, len(chunk), heads, stack.layout.head_dim)
    stored = torch.randn(shape, generator=generator).to(stack.dtype)
    new = [*range(_BOUNDS[1]), *range(_BOUNDS[2], _BOUNDS[3])]
    return PrefillJob(
        range(_BOUNDS[-1]),
        Rows.of(_BOUNDS, new=new, recomputed=chunk[::4]),
        resident=[ResidentKV(chunk.start, stored)],
        reused=[1],
        drift=0.5,
    )
