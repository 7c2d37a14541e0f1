"""Options that several commands take, declared once as dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, get_type_hints

from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import nbytes, remote_of

if TYPE_CHECKING:
    from cachecraft_rag.engine.config import EngineConfig
    from cachecraft_rag.engine.sampling import SamplingParams
    from cachecraft_rag.engine.settings import Settings


def takes(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command have the fields of dataclasses as options; it gets them as one object for each parameter named.

    >>> @takes(compute=ComputeOptions)
    ... def command(question: str, *, compute: ComputeOptions) -> None:
    ...     print(question, compute.dtype)
    >>> list(inspect.signature(command).parameters)
    ['question', 'dtype', 'device', 'threads']
    >>> command(question="Why?", dtype="bfloat16")
    Why? bfloat16
    """
    names = {name: [one.name for one in fields(group)] for name, group in groups.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        parameters = [one for one in own.parameters.values() if one.name not in groups]
        for group in groups.values():
            hints = get_type_hints(group, include_extras=True)
            for one in fields(group):
                kind = inspect.Parameter.KEYWORD_ONLY
                parameters.append(inspect.Parameter(one.name, kind, default=one.default, annotation=hints[one.name]))

        @wraps(command)
        def called(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = group(**{one: given.pop(one) for one in names[name] if one in given})
            command(**given)

        del called.__wrapped__  # whose signature typer would take
        called.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        return called

    return decorate


@dataclass(frozen=True)
class ComputeOptions:
    """With what the model computes."""

    dtype: options.Dtype = "auto"
    device: options.Device = "auto"
    threads: options.Threads = None


@dataclass(frozen=True)
class CacheOptions:
    """What chunk-caches belong to, and where and how they are kept; the folder is each command's own option."""

    namespace: options.Namespace = "default"
    remote: options.Remote = None
    remote_key_file: options.RemoteKeyFile = None
    system: options.System = None
    codec: options.Codec = "raw"
    disk_mb: options.DiskMB = None
    max_variants: options.MaxVariants = None
    variants_per_chunk: options.VariantsPerChunk = None
    memory_mb: options.MemoryMB = None

    def engine_config(
        self,
        settings: Settings | None = None,
        *,
        compute: ComputeOptions | None = None,
        reuse: dict[str, Any] | None = None,
        **others: Any,
    ) -> EngineConfig:
        """The options as an `EngineConfig`, over what settings say. Raises ConfigError.

        Args:
            settings: what `cli.settings.keep` gave to the command's context.
            reuse: fields of `ReuseConfig`.
            others: options of `EngineConfig` by name.
        """
        from cachecraft_rag.engine.config import EngineConfig

        base = EngineConfig() if settings is None else settings.engine_config()
        if compute is not None:
            others |= {"dtype": compute.dtype, "device": compute.device}
        return base.with_options(
            namespace=self.namespace,
            remote=remote_of(self.remote, self.remote_key_file, base.store.remote),
            reuse=None if reuse is None else replace(base.reuse, **reuse),
            system=self.system,
            codec=self.codec,
            disk_bytes=nbytes(self.disk_mb),
            max_variants=self.max_variants,
            variants_per_chunk=self.variants_per_chunk,
            host_bytes=nbytes(self.memory_mb),
            **others,
        )


@dataclass(frozen=True)
class SamplingOptions:
    """How the tokens of an answer are drawn; how many is each command's own option."""

    temperature: options.Temperature = 0.0
    top_p: options.TopP = 1.0
    seed: options.Seed = None
    stop: options.Stop = None

    def params(self, max_new_tokens: int) -> SamplingParams:
        """For the engine. Raises ConfigError."""
        from cachecraft_rag.engine.sampling import SamplingParams

        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )
