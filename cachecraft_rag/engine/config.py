"""Options of an engine: one object for Python, the command line and the frameworks."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Self

from cachecraft_rag.checks import (
    MOST_SECONDS,
    check_flag,
    check_kind,
    check_names,
    check_number,
    check_text,
    check_whole,
    refuses_other_names,
)
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.prompt.builder import DEFAULT_SYSTEM
from cachecraft_rag.serving.audits.controller import QualityTarget
from cachecraft_rag.serving.config import Audits, NewVariants, When
from cachecraft_rag.store import StoreConfig
from cachecraft_rag.store.config import StoreTuning

_PAPER_VARIANTS = 500  # N × M, 100 chunks and 5 variants of each (Cache-Craft §5.1.2)
_PER_QUESTION = "sampling=SamplingParams({}=…) with each question"
_OF_REUSE = "reuse=ReuseConfig({}=…)"
_OFTEN_TRIED = MappingProxyType(
    dict.fromkeys(("system_prompt", "system_message", "instruction", "instructions"), "system")
    | {
        name: _PER_QUESTION.format("max_new_tokens" if name == "max_tokens" else name)
        for name in ("max_tokens", "max_new_tokens", "temperature", "top_p", "seed", "stop")
    }
    | {
        setting.name: _OF_REUSE.format(setting.name)
        for setting in fields(ReuseConfig)
        if setting.name != "reuse"
    }
    | {
        setting.name: f"reuse=ReuseConfig().with_method({setting.name}=…)"
        for setting in fields(ReuseMethod)
    }
)


@refuses_other_names(what="setting of the tuning")
@dataclass(frozen=True, slots=True)
class EngineTuning:
    """Tuned settings of how requests share an engine. Change them only after a measurement.

    An engine over vLLM refuses them: vLLM has its own queue.

    decode_rows     most answers that a decode step computes together; 1 = each separately
    max_waiting     most requests that wait while another request has its turn; further ones get BusyError
    preload_bytes   most bytes of chunk-caches that waiting requests load before their turn, besides the next one, which
                    always loads; 0 = only the next one
    wait_timeout_s  longest time that a request waits for its turn, then WaitTimeoutError; None = no limit
    """

    decode_rows: int = 8
    max_waiting: int = 256
    preload_bytes: int = 0
    wait_timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        check_whole("decode_rows", self.decode_rows, least=1)
        check_whole("max_waiting", self.max_waiting)
        check_whole("preload_bytes", self.preload_bytes)
        check_number("wait_timeout_s", self.wait_timeout_s, most=MOST_SECONDS, optional=True)


_TUNING_NAMES = tuple(setting.name for setting in fields(EngineTuning))
_STORE_TUNING_NAMES = tuple(setting.name for setting in fields(StoreTuning))
_IN_TUNING = MappingProxyType(
    {name: f"tuning=EngineTuning({name}=…)" for name in _TUNING_NAMES}
    | {name: f"store=StoreConfig().with_tuning({name}=…)" for name in _STORE_TUNING_NAMES}
)
_WITH_TUNING = MappingProxyType(
    {
        name: f"config=EngineConfig().with_tuning({name}=…)"
        for name in (*_TUNING_NAMES, *_STORE_TUNING_NAMES)
    }
)


@refuses_other_names(hints=_OFTEN_TRIED | _IN_TUNING)
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of `from_pretrained` besides the model and the store's folder.

    dtype           number format of the model: float32, bfloat16, float16 or auto (that of the checkpoint, or, except
                    over vLLM, bfloat16 on a CPU that computes it); see `Decoder.load`
    device          device of the model: cpu, cuda, cuda:1 … or auto
    namespace       tenant; no other tenant uses its chunk-caches. The retrieval index is shared
    system          instruction before every prompt. Chunk-caches that were captured after another instruction are
                    reused approximately, so prime and ask with the same one
    private_system  whether `system` holds one user's text: captures after it are then private to the session; without
                    one no chunk is captured. On a server, also whether system messages and tools of its clients do
    best_last       whether the best chunk is the last, directly before the question; see `PromptBuilder`
    reuse           settings of the reuse of chunk-caches
    new_variants    when chunks that were reused and fixed are captured after the prefix they had: idle (while no
                    answer is under way), always or off; or a `NewVariants` with a budget. An engine over vLLM refuses
                    always
    audit           which answers are compared with full prefill while no answer is under way: off, idle (every answer
                    with reuse) or a share from 0 to 1; or an `Audits` with limits
    audit_text      whether the text of audited answers is kept with their results, see `Audits`. An engine over vLLM
                    refuses it
    quality_target  agreement with full prefill (`Audit.agreement`, near-ties counted as agreement) that answers should
                    have, such as 0.98: more than 0 and less than 1; None = no target. Audits then raise and lower the
                    recompute ratio of requests that set neither a ratio nor α. Needs `audit`
    min_ratio       smallest recompute ratio that a quality target chooses, 0 to 1
    max_ratio       largest recompute ratio that a quality target chooses, 0 to 1; not below `min_ratio`
    store           budgets, codec and remote of the chunk-caches
    tuning          how requests share the engine: an `EngineTuning`; see `with_tuning`

    Words and numbers become objects: `new_variants` is kept as a `NewVariants`, and `audit` as an `Audits`. An unknown
    dtype or device is noticed when the model is loaded.
    """

    dtype: str = "auto"
    device: str = "auto"
    namespace: str = "default"
    system: str = DEFAULT_SYSTEM
    private_system: bool = False
    best_last: bool = True
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    new_variants: NewVariants | When = "idle"
    audit: Audits | str | float = "off"
    audit_text: bool = False
    quality_target: float | None = None
    min_ratio: float = 0.0
    max_ratio: float = 1.0
    store: StoreConfig = field(default_factory=StoreConfig)
    tuning: EngineTuning = field(default_factory=EngineTuning)

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        for name in ("dtype", "device", "namespace", "system"):
            check_text(name, getattr(self, name))
        check_flag("private_system", self.private_system)
        check_flag("best_last", self.best_last)
        check_kind(
            "reuse",
            self.reuse,
            ReuseConfig,
            advice="write ReuseConfig(reuse=False) to switch it off",
        )
        check_kind(
            "new_variants",
            self.new_variants,
            (NewVariants, str),
            advice='write "idle" or NewVariants(share=…)',
        )
        if isinstance(self.new_variants, str):
            object.__setattr__(self, "new_variants", NewVariants(self.new_variants))
        check_kind(
            "audit",
            self.audit,
            (Audits, str, int, float),
            advice='write "idle", a share such as 0.1, or Audits()',
        )
        if not isinstance(self.audit, Audits):
            object.__setattr__(self, "audit", Audits.of(self.audit))
        check_flag("audit_text", self.audit_text)
        if self.audit_text:
            object.__setattr__(self, "audit", replace(self.audit, keep_text=True))  # type: ignore[type-var]
        check_number("quality_target", self.quality_target, most=1.0, optional=True)
        check_number("min_ratio", self.min_ratio, most=1.0)
        check_number("max_ratio", self.max_ratio, most=1.0)
        self.target()
        check_kind("store", self.store, StoreConfig, advice="write StoreConfig(host_bytes=…)")
        check_kind(
            "tuning",
            self.tuning,
            EngineTuning,
            advice="write EngineTuning(max_waiting=…), or use with_tuning",
        )

    @classmethod
    def paper(cls, **options: object) -> Self:
        """Return the options of Cache-Craft and Cake as published, with these changes (see `with_options`).

        At most N × M = 100 × 5 variants are stored, as in the paper's evaluation (§5.1.2). docs/results/papers.md says
        what still differs, and why.

        >>> config = EngineConfig.paper(host_bytes=1 << 30)
        >>> config.reuse == ReuseConfig.paper(), config.best_last, config.store.eviction, config.store.host_bytes
        (True, False, 'f_r', 1073741824)
        """
        store = StoreConfig(
            eviction="f_r", max_variants=_PAPER_VARIANTS, variants_per_chunk=_PAPER_VARIANTS
        )
        published = cls(
            reuse=ReuseConfig.paper(), best_last=False, new_variants="always", store=store
        )
        preload_bytes = options.get("host_bytes") or store.host_bytes
        return published.with_tuning(preload_bytes=preload_bytes).with_options(**options)

    def require_usable_target(self) -> None:
        """Raise ConfigError for a quality target without audits, or with a fixed ratio or α: it would have no effect.

        Also for its limits without a target, and for `audit_text` without audits. Engines call this when they are
        created, because their options may be given in several places.
        """
        if self.audit_text and not self.audit.share:  # type: ignore[union-attr]
            raise ConfigError(
                'audit_text has no effect without audits: add audit="idle", or a share, or set audit_text to false'
            )
        if self.quality_target is None:
            if (self.min_ratio, self.max_ratio) != (0.0, 1.0):
                raise ConfigError(
                    "min_ratio and max_ratio limit a quality target: add quality_target, or set them to 0 and 1"
                )
            return
        if not self.audit.share:  # type: ignore[union-attr]
            raise ConfigError(
                'quality_target needs audits of answers: add audit="idle", or a share such as 0.2'
            )
        if self.reuse.recompute_ratio is not None or self.reuse.method.alpha is not None:
            raise ConfigError(
                "quality_target chooses how much is recomputed: leave recompute_ratio and alpha out"
            )

    def target(self) -> QualityTarget | None:
        """Return the quality target with its limits, or None without one."""
        if self.quality_target is None:
            return None
        return QualityTarget(self.quality_target, self.min_ratio, self.max_ratio)

    @classmethod
    def option_names(cls) -> frozenset[str]:
        """Return the names that `with_options` takes: fields of this class but `store`, and of `StoreConfig`."""
        return frozenset(_own_names(cls) | {setting.name for setting in fields(StoreConfig)})

    def with_options(self, **options: Any) -> Self:
        """Return a copy with these fields of this class or of `StoreConfig`; None keeps the present value.

        `device` and `tuning` are those of the engine. A `reuse` replaces all settings of reuse.

        >>> EngineConfig().with_options(namespace="acme", host_bytes=1 << 30).store.host_bytes
        1073741824
        """
        check_names(options, self.option_names(), hints=_OFTEN_TRIED | _WITH_TUNING)
        given = {name: value for name, value in options.items() if value is not None}
        own_names = _own_names(type(self))
        own = {name: value for name, value in given.items() if name in own_names}
        if own.get("audit_text") is False and self.audit_text:  # `audit` has kept it
            own.setdefault("audit", replace(self.audit, keep_text=False))  # type: ignore[type-var]
        of_store = {name: value for name, value in given.items() if name not in own_names}
        return replace(self, store=replace(self.store, **of_store), **own)

    def with_tuning(self, **changes: Any) -> Self:
        """Return a copy with these fields of its tuning, or of its store's tuning, changed; None is a value here.

        >>> config = EngineConfig().with_tuning(max_waiting=32, readers=8)
        >>> config.tuning.max_waiting, config.store.tuning.readers
        (32, 8)
        """
        check_names(changes, (*_TUNING_NAMES, *_STORE_TUNING_NAMES), what="setting of the tuning")
        own = {name: value for name, value in changes.items() if name in _TUNING_NAMES}
        of_store = {name: value for name, value in changes.items() if name not in own}
        return replace(
            self,
            tuning=replace(self.tuning, **own),
            store=self.store.with_tuning(**of_store),
        )


def _own_names(config: type[EngineConfig]) -> set[str]:
    return {setting.name for setting in fields(config)} - {"store"}
