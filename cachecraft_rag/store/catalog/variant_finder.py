"""Look-ups: which variants of a prompt's chunks exist, in the catalog and on a remote, and may be served."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.catalog import Catalog
from cachecraft_rag.store.catalog_records import DamagedRow, FileRef
from cachecraft_rag.store.remote import RemoteTier
from cachecraft_rag.store.row_checks import LookupResult, RowBounds
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.variants import PayloadFacts, Variant

T = TypeVar("T")


class VariantFinder:
    """Finds variants by chunk, from metadata alone. A catalog that cannot be read means that nothing is found.

    Args:
        remote: asked for chunks of which the catalog has few variants.
        is_usable: returns False if the folder is gone; raises StoreError once the store is closed.
        discard: removes a refused row in the background; gets its file, the chunk id and the reason.
        warn_once: called with the kind of a problem and a message.
    """

    def __init__(
        self,
        catalog: Catalog,
        remote: RemoteTier | None,
        *,
        is_usable: Callable[[], bool],
        discard: Callable[[FileRef, str, str], None],
        warn_once: Callable[[str, str], None],
    ) -> None:
        self._catalog = catalog
        self._remote = remote
        self._is_usable = is_usable
        self._discard = discard
        self._warn_once = warn_once

    def find(
        self,
        namespace: str,
        fingerprint: str,
        chunk_ids: Sequence[str],
        *,
        session: str | None,
        bounds: RowBounds | None,
    ) -> LookupResult:
        """Return the variants within `bounds`, if given, shared or of `session`; see `ChunkCacheStore.find`."""
        lookup = LookupResult({chunk_id: [] for chunk_id in chunk_ids})
        self._find_here(lookup, namespace, fingerprint, session=session, bounds=bounds)
        if self._remote is not None:
            # After the catalog, not at the same time: the catalog takes a millisecond, and the remote need not be asked
            # for chunks that it has.
            lookup = self._find_there(self._remote, lookup, namespace, fingerprint, bounds)
        return self._without_removed(lookup, namespace)

    def find_here(
        self, namespace: str, fingerprint: str, chunk_ids: Sequence[str], *, session: str | None
    ) -> LookupResult:
        """Return the variants in the catalog, shared or of `session`; damaged rows are removed, no remote is asked."""
        lookup = LookupResult({chunk_id: [] for chunk_id in chunk_ids})
        self._find_here(lookup, namespace, fingerprint, session=session, bounds=None)
        return self._without_removed(lookup, namespace)

    def token_scores(self, variant_ids: Sequence[str]) -> dict[str, TokenScores]:
        """Return variant id → token scores, with `inter` None if unknown; see `ChunkCacheStore.token_scores`."""
        known: dict[str, TokenScores] = self.ask(
            "No token scores", lambda catalog: catalog.token_scores(variant_ids), instead={}
        )
        scores = {variant_id: known.get(variant_id, TokenScores()) for variant_id in variant_ids}
        if self._remote is not None:
            unknown = [
                variant_id
                for variant_id, variant_scores in scores.items()
                if variant_scores.inter is None
            ]
            scores |= self._remote.token_scores(unknown)
        return scores

    def ask(self, problem: str, question: Callable[[Catalog], T], *, instead: T) -> T:
        """Return `question(catalog)`; `instead`, with a warning, if it fails (`problem`) or the folder is gone."""
        is_usable = self._is_usable()
        try:
            return question(self._catalog) if is_usable else instead
        except StoreError as error:
            self._warn_once(problem, f"{problem}: {error}")
            return instead

    def _find_there(
        self,
        remote: RemoteTier,
        lookup: LookupResult,
        namespace: str,
        fingerprint: str,
        bounds: RowBounds | None,
    ) -> LookupResult:
        """Return the look-up with the remote's variants; of those in both places the catalog's row is kept."""
        few = [
            name
            for name, here in lookup.variants.items()
            if len(here) < remote.config.tuning.ask_below
        ]
        there = remote.find(namespace, fingerprint, few, bounds) if few else LookupResult({})
        for chunk_id, offers in there.variants.items():
            here = {variant.variant_id for variant in lookup.variants[chunk_id]}
            lookup.variants[chunk_id] += [
                variant for variant in offers if variant.variant_id not in here
            ]
        lookup.refused.update(there.refused)
        return replace(lookup, remote=there.remote)

    def _find_here(
        self,
        lookup: LookupResult,
        namespace: str,
        fingerprint: str,
        *,
        session: str | None,
        bounds: RowBounds | None,
    ) -> None:
        """Fill in the variants of the catalog."""
        payload_facts = PayloadFacts(bounds.layout if bounds is not None else None)

        def find(catalog: Catalog) -> tuple[dict[str, list[Variant]], list[DamagedRow]]:
            return catalog.find(
                namespace,
                fingerprint,
                list(lookup.variants),
                session=session,
                payload_facts=payload_facts,
            )

        nothing: tuple[dict[str, list[Variant]], list[DamagedRow]] = ({}, [])
        variants, damaged = self.ask("Nothing can be reused", find, instead=nothing)
        flawed = [(row.file, row.chunk_id, row.reason) for row in damaged]
        for variant in itertools.chain.from_iterable(variants.values()):
            if bounds is not None and (flaw := bounds.flaw(variant)):
                flawed.append(
                    (FileRef(variant.variant_id, variant.created), variant.key.chunk_id, flaw)
                )
            else:
                lookup.variants[variant.key.chunk_id].append(variant)
        for file, chunk_id, reason in flawed:
            lookup.refused[chunk_id] = reason
            self._discard(file, chunk_id, reason)

    def _without_removed(self, lookup: LookupResult, namespace: str) -> LookupResult:
        """Return the look-up without variants that hold or were shaped by a removed chunk.

        Those on the remote are removed there: other engines may have sent them. So are inexact ones that are older than
        the latest removal, because a remote does not say what has shaped them beside their origin prefix. Rows in the
        catalog are there only if a removal was interrupted. While it is not known what was removed, none of the
        remote's are left.
        """
        names = set(lookup.variants)
        for variant in itertools.chain.from_iterable(lookup.variants.values()):
            names.update(variant.key.origin_prefix)

        def removals_in(catalog: Catalog) -> tuple[frozenset[str], float] | None:
            latest = catalog.removals.latest(namespace) if self._remote is not None else 0.0
            return catalog.removals.among(names, namespace), latest

        known = self.ask("Removed chunks are not known", removals_in, instead=None)
        if known is None:
            here = {
                chunk_id: [variant for variant in variants if variant.home == "disk"]
                for chunk_id, variants in lookup.variants.items()
            }
            return replace(lookup, variants=here)
        removed, latest = known
        if not removed and not latest:
            return lookup
        kept: dict[str, list[Variant]] = {}
        for chunk_id, variants in lookup.variants.items():
            kept[chunk_id] = []
            for variant in variants:
                on_remote = variant.home == "remote"
                is_unknown = on_remote and variant.exact_share < 1.0 and variant.created <= latest
                if not variant.key.holds(removed) and not is_unknown:
                    kept[chunk_id].append(variant)
                elif self._remote is not None and on_remote:
                    self._remote.remove_shared([variant])
        return replace(lookup, variants=kept, removed=removed.intersection(kept))
