"""Looking up: the own catalog first, then the remote; what cannot be what it says is no answer, and goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.catalog_records import FileRef
from cachecraft_rag.store.durable import DurableVariants
from cachecraft_rag.store.expected import Expected, Found
from cachecraft_rag.store.layout import STORED_BY_OLDER
from cachecraft_rag.store.remote import RemoteTier
from cachecraft_rag.types import LoadFailure, Payload


class Finder:
    """The look-ups of one store. Every method may be called from any thread.

    Args:
        discard: removes row and file in the background; gets file, chunk id, and the reason as a code and in words.
        warn: gets the kind of a problem, and the problem in words.
    """

    def __init__(
        self,
        durable: DurableVariants,
        remote: RemoteTier | None,
        *,
        discard: Callable[[FileRef, str, LoadFailure, str], None],
        warn: Callable[[str, str], None],
    ) -> None:
        self._durable, self._remote = durable, remote
        self._discard, self._warn = discard, warn

    def find(
        self,
        namespace: str,
        fingerprint: str,
        chunk_ids: Sequence[str],
        *,
        session: str | None,
        expected: Expected | None,
        gone: bool = False,
    ) -> Found:
        """See `ChunkCacheStore.find`; `gone`: there is no catalog any more."""
        nothing = Found({chunk_id: [] for chunk_id in chunk_ids})
        found = nothing if gone else self._here(namespace, fingerprint, chunk_ids, session=session, expected=expected)
        found = (
            found if self._remote is None else self._with_remote(self._remote, found, namespace, fingerprint, expected)
        )
        missing = [name for name, offers in found.variants.items() if not offers]
        if missing and not gone:
            self._tidy_older(found, namespace, fingerprint, missing, session=session)
        return found

    @staticmethod
    def _with_remote(
        remote: RemoteTier, found: Found, namespace: str, fingerprint: str, expected: Expected | None
    ) -> Found:
        """What was found here, and on the remote where that was little."""
        # After the catalog, not beside it: the catalog takes a millisecond, and what it has need not be asked for.
        few = [name for name, here in found.variants.items() if len(here) < remote.config.ask_below]
        there = remote.find(namespace, fingerprint, few, expected) if few else Found({})
        for chunk_id, offers in there.variants.items():  # a variant that is here too stays as it is
            here = {variant.variant_id for variant in found.variants[chunk_id]}
            found.variants[chunk_id] += [variant for variant in offers if variant.variant_id not in here]
        found.refused.update(there.refused)
        return replace(found, remote=remote.last_outcome if few else None)

    def _tidy_older(
        self, found: Found, namespace: str, fingerprint: str, missing: Sequence[str], *, session: str | None
    ) -> None:
        """Discard what an older version of the package stored of these chunks, and name that as the reason."""
        try:
            older = self._durable.catalog.of_older_versions(namespace, fingerprint, missing, session=session)
        except StoreError:  # the look-up before has said so
            return
        for row in older:
            self._discard(row.file, row.chunk_id, LoadFailure.OLDER_VERSION, STORED_BY_OLDER)
            if row.visible:
                found.refused.setdefault(row.chunk_id, STORED_BY_OLDER)

    def _here(
        self,
        namespace: str,
        fingerprint: str,
        chunk_ids: Sequence[str],
        *,
        session: str | None,
        expected: Expected | None,
    ) -> Found:
        """What the catalog has. Where it cannot be read: nothing, and one warning."""
        payload = Payload(expected.layout if expected is not None else None)
        try:
            variants, damaged = self._durable.catalog.find(
                namespace, fingerprint, chunk_ids, session=session, payload=payload
            )
        except StoreError as error:
            self._warn("lookup", f"Nothing can be reused: {error}")
            return Found({chunk_id: [] for chunk_id in chunk_ids})
        refused = {}
        for row in damaged:
            refused[row.chunk_id] = row.reason
            self._discard(row.file, row.chunk_id, LoadFailure.DAMAGED, row.reason)
        if expected is None:
            return Found(variants, refused)
        found, flawed = expected.sift(variants)
        for variant, flaw in flawed:
            file = FileRef(variant.variant_id, variant.created)
            self._discard(file, variant.key.chunk_id, LoadFailure.DAMAGED, flaw)
        found.refused.update(refused)
        return found
