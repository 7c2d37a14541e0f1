"""`python -m benchmarks ttft` beside engines that a user could install instead, with the same weights in the same run.

None is a dependency; each is imported when it is asked for.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.first_token import Peer
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.fused_layers import KNOWN

Maker = Callable[[Decoder], Peer]


def maker_of(name: str) -> Maker:
    """The class of the peer of that name; ConfigError says what to do if it is unknown or, when made, not installed."""
    if name not in PEERS:
        raise ConfigError(f"unknown peer {name!r}; choose among {', '.join(PEERS)}")
    kind, install = PEERS[name]

    def made(decoder: Decoder) -> Peer:
        try:
            return kind(decoder)
        except ImportError as error:
            raise ConfigError(
                f"the peer {name} is not installed ({error}); run: {install}"
            ) from error

    return made


class OpenVino:
    """OpenVINO GenAI as it is by default: paged attention, 8-bit keys and values."""

    def __init__(self, decoder: Decoder) -> None:
        import openvino
        import openvino_genai

        self._tensor = openvino.Tensor
        self._settings = openvino_genai.GenerationConfig(
            do_sample=False, ignore_eos=True, eos_token_id=0
        )
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = (
            False,
            decoder.context_length,
        )
        properties = {
            "INFERENCE_PRECISION_HINT": "bf16" if decoder.dtype == torch.bfloat16 else "f32",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
        }
        with tempfile.TemporaryDirectory(prefix="cachecraft-openvino-") as folder:
            path = Path(folder) / "openvino_model.xml"
            openvino.save_model(_Graph(decoder).model(), path, compress_to_fp16=False)
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(
                folder, scheduler, "CPU", properties
            )

    def answer(self, ids: Sequence[int], tokens: int) -> tuple[float, float]:
        """See `Peer`."""
        self._settings.max_new_tokens = tokens
        started = time.perf_counter()
        (found,) = self._pipeline.generate([self._tensor(np.array([ids]))], [self._settings])
        return found.perf_metrics.get_ttft().mean / 1000, time.perf_counter() - started


PEERS: dict[str, tuple[Maker, str]] = {"openvino": (OpenVino, "pip install openvino-genai")}


class _Graph:
    """A decoder as OpenVINO's stateful graph, operation by operation.

    These are the forms that OpenVINO's own converters write and its optimiser fuses. A converter would pin another
    version of transformers.
    """

    def __init__(self, decoder: Decoder) -> None:
        import openvino
        from openvino import opset13

        self._decoder, self._ov, self._op = decoder, openvino, opset13
        self._base, self._layout = decoder.model.model, decoder.layout
        self._heads = decoder.model.config.num_attention_heads
        known = type(self._base.layers[0]).__name__
        if known not in KNOWN:
            raise ConfigError(
                f"the peer openvino takes layers of {', '.join(sorted(KNOWN))}, not {known}"
            )
        self._kept: list[Any] = []

    def model(self) -> Any:
        """The graph from token ids, mask, positions and beam to logits."""
        op, base = self._op, self._base
        names = ("input_ids", "attention_mask", "position_ids", "beam_idx")
        ids, mask, positions = (op.parameter([-1, -1], np.int64, name=name) for name in names[:3])
        self._beam = op.parameter([-1], np.int32, name=names[3])
        self._batch = op.gather(op.shape_of(ids), _ints(0), _ints(0))
        self._cos, self._sin = self._angles(positions)
        keys = op.range(
            np.int64(0), op.gather(op.shape_of(mask), np.int64(1), np.int64(0)), np.int64(1), "i64"
        )
        later = op.greater(op.unsqueeze(keys, _ints(0, 1)), op.unsqueeze(positions, _ints(2)))
        self._causal = op.unsqueeze(op.select(later, np.float32(-1e38), np.float32(0)), _ints(1))
        hidden = op.gather(self._weight(base.embed_tokens.weight), ids, _ints(0))
        for index, layer in enumerate(base.layers):
            hidden = op.add(
                hidden,
                self._attention(layer.self_attn, self._norm(layer.input_layernorm, hidden), index),
            )
            x, mlp = self._norm(layer.post_attention_layernorm, hidden), layer.mlp
            inner = op.multiply(
                op.swish(self._linear(mlp.gate_proj, x)), self._linear(mlp.up_proj, x)
            )
            hidden = op.add(hidden, self._linear(mlp.down_proj, inner))
        logits = self._linear(self._decoder.model.lm_head, self._norm(base.norm, hidden))
        model = self._ov.Model([op.result(logits)], self._kept, [ids, mask, positions, self._beam])
        for port, name in zip((*model.inputs, *model.outputs), (*names, "logits"), strict=True):
            port.get_tensor().set_names({name})
        return model

    def _angles(self, positions: Any) -> tuple[Any, Any]:
        op, rope = self._op, self._base.rotary_emb
        shape = op.concat([self._batch, _ints(1, 1)], 0)
        inverse = op.broadcast(
            rope.inv_freq.float().numpy()[None, :, None], shape, broadcast_spec="BIDIRECTIONAL"
        )
        half = op.matmul(
            inverse, op.convert(op.unsqueeze(positions, _ints(1)), "f32"), False, False
        )
        half = op.transpose(half, _ints(0, 2, 1))
        both, stretch = op.concat([half, half], -1), np.float32(rope.attention_scaling)
        cos, sin = (
            op.unsqueeze(op.multiply(part(both), stretch), _ints(1)) for part in (op.cos, op.sin)
        )
        return cos, sin

    def _attention(self, own: Any, x: Any, index: int) -> Any:
        op, dim = self._op, self._layout.head_dim
        q, k, v = (
            self._split(self._linear(one, x)) for one in (own.q_proj, own.k_proj, own.v_proj)
        )
        if hasattr(own, "q_norm"):
            q, k = self._norm(own.q_norm, q), self._norm(own.k_norm, k)
        q, k, v = (op.transpose(one, _ints(0, 2, 1, 3)) for one in (q, k, v))
        k, v = (
            self._with_past(self._turned(k), f"key.{index}"),
            self._with_past(v, f"value.{index}"),
        )
        out = op.scaled_dot_product_attention(
            self._turned(q), k, v, self._causal, np.float32(own.scaling)
        )
        out = op.reshape(op.transpose(out, _ints(0, 2, 1, 3)), _ints(0, 0, self._heads * dim), True)
        return self._linear(own.o_proj, out)

    def _split(self, x: Any) -> Any:
        """`[batch, rows, heads · dim]` by heads."""
        return self._op.reshape(x, _ints(0, 0, -1, self._layout.head_dim), True)

    def _turned(self, x: Any) -> Any:
        op, dim = self._op, self._layout.head_dim
        low = op.slice(x, _ints(0), _ints(dim // 2), _ints(1), _ints(3))
        high = op.slice(x, _ints(dim // 2), _ints(1 << 31), _ints(1), _ints(3))
        turned = op.concat([op.multiply(high, np.float32(-1)), low], -1)
        return op.add(op.multiply(x, self._cos), op.multiply(turned, self._sin))

    def _with_past(self, x: Any, name: str) -> Any:
        """All keys or values, kept for the next call, once for each head of queries."""
        from openvino.op import util

        op, kv_heads, dim = self._op, self._layout.kv_heads, self._layout.head_dim
        info = util.VariableInfo()
        info.data_shape, info.data_type = (
            self._ov.PartialShape([-1, kv_heads, -1, dim]),
            self._ov.Type.f32,
        )
        info.variable_id = name
        variable = util.Variable(info)
        nothing = op.broadcast(np.float32(0), op.concat([self._batch, _ints(kv_heads, 0, dim)], 0))
        whole = op.concat([op.gather(op.read_value(nothing, variable), self._beam, _ints(0)), x], 2)
        self._kept.append(op.assign(whole, variable))
        if kv_heads == self._heads:
            return whole
        first, last = (
            op.gather(op.shape_of(whole), _ints(*axes), _ints(0)) for axes in ((0, 1), (2, 3))
        )
        shape = op.concat([first, _ints(self._heads // kv_heads), last], 0)
        wide = op.broadcast(op.unsqueeze(whole, _ints(2)), shape, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(wide, _ints(0, self._heads, -1, dim), True)

    def _linear(self, module: Any, x: Any) -> Any:
        out = self._op.matmul(x, self._weight(module.weight), False, True)
        return out if module.bias is None else self._op.add(out, self._weight(module.bias))

    def _norm(self, module: Any, x: Any) -> Any:
        op = self._op
        mean = op.reduce_mean(op.power(x, np.float32(2)), _ints(-1), True)
        share = op.divide(np.float32(1), op.sqrt(op.add(mean, np.float32(module.variance_epsilon))))
        return op.multiply(self._weight(module.weight.float()), op.multiply(x, share))

    def _weight(self, tensor: Tensor) -> Any:
        tensor = tensor.detach().contiguous()
        if tensor.dtype != torch.bfloat16:
            return self._op.constant(tensor.numpy())
        bits = tensor.view(torch.uint16).numpy()
        return self._op.convert(
            self._op.constant(self._ov.Tensor(bits, bits.shape, self._ov.Type.bf16)), "f32"
        )


def _ints(*numbers: int) -> Any:
    """A constant of a graph; a list of one number, not a scalar, for one number."""
    return np.array(numbers, dtype=np.int64)
