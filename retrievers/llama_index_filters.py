"""LlamaIndex's metadata filters as the `where` of our index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

from cachecraft_rag.retrievers.filters import Where
from cachecraft_rag.types import Metadata

NODE = "_node_content"  # LlamaIndex's own key for a whole node as JSON


def where_of(
    filters: MetadataFilters | None, *, node_ids: Sequence[str] | None = None, doc_ids: Sequence[str] | None = None
) -> Where | None:
    """LlamaIndex's filters as a `where` of `FaissStore.search`; an empty list of ids means any id in LlamaIndex."""
    if not (node_ids or doc_ids or (filters and filters.filters)):
        return None
    exact = _exact(filters) if filters is not None and not (node_ids or doc_ids) else None
    if exact is not None:
        return exact
    allowed_nodes, allowed_documents = set(node_ids or ()), set(doc_ids or ())

    def where(metadata: Metadata) -> bool:
        node = json.loads(str(metadata[NODE])) if NODE in metadata else {}
        if allowed_nodes and node.get("id_") not in allowed_nodes:
            return False
        if allowed_documents and metadata.get("ref_doc_id", metadata.get("source")) not in allowed_documents:
            return False
        return filters is None or _passes(filters, {**node.get("metadata", {}), **metadata})

    return where


def _exact(filters: MetadataFilters) -> dict[str, str] | None:
    """Filters that only compare texts for equality, as a mapping that needs no parsing of rows; else None."""
    wanted: dict[str, str] = {}
    for condition in filters.filters:
        if isinstance(condition, MetadataFilters) or condition.operator != FilterOperator.EQ:
            return None
        if not isinstance(condition.value, str) or condition.key in wanted:
            return None
        wanted[condition.key] = condition.value
    return wanted if filters.condition in (None, FilterCondition.AND) else None


def _passes(filters: MetadataFilters, metadata: Mapping[str, Any]) -> bool:
    """True if metadata passes the filters, which may be nested (LlamaIndex's own function supports no nesting)."""

    def one(condition: MetadataFilter | MetadataFilters) -> bool:
        if isinstance(condition, MetadataFilters):
            return _passes(condition, metadata)
        return build_metadata_filter_fn(lambda _: metadata, MetadataFilters(filters=[condition]))("")

    results = [one(condition) for condition in filters.filters]
    if filters.condition == FilterCondition.OR:
        return any(results)
    if filters.condition == FilterCondition.NOT:
        return not any(results)
    return all(results)
