"""LlamaIndex's metadata filters as the `where` of our index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
)
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

from cachecraft_rag.retrievers.index.filters import Where, accepts, check_depth
from cachecraft_rag.types.documents import Metadata

NODE = "_node_content"  # LlamaIndex's own key for a whole node as JSON


def where_of(
    filters: MetadataFilters | None,
    *,
    node_ids: Sequence[str] | None = None,
    doc_ids: Sequence[str] | None = None,
) -> Where | None:
    """Return filters and ids, all of which must hold, as a `where` of `FaissStore.search`; None if nothing filters.

    Filters without a condition filter nothing at the top, of whatever kind. Nested, such an "or" passes no chunk, and
    the others pass every chunk. Values that cannot be compared raise LlamaIndex's own TypeError or ValueError, later,
    in the search.

    Args:
        filters: LlamaIndex's filters, which may be nested.
        node_ids: ids of nodes; an empty list filters nothing, because LlamaIndex's indexes send one. A chunk that
            LlamaIndex did not add has no node id, and passes no list of ids.
        doc_ids: ids of documents (`ref_doc_id`, or `source` of a chunk without one); empty: as above.
    """
    parts: list[Where] = [_group(filters)] if filters is not None and filters.filters else []
    nodes = frozenset(node_ids or ())
    documents = frozenset(doc_ids or ())
    if nodes:
        parts.append(lambda metadata: _node(metadata).get("id_") in nodes)
    if documents:
        parts.append(
            lambda metadata: metadata.get("ref_doc_id", metadata.get("source")) in documents
        )
    return {"$and": parts} if parts else None


def has_empty_group(filters: MetadataFilters, *, depth: int = 0) -> bool:
    """Return True if the filters, or filters nested in them, have no condition; callers leave `depth` out."""
    check_depth(depth)
    nested = [part for part in filters.filters if isinstance(part, MetadataFilters)]
    return not filters.filters or any(has_empty_group(part, depth=depth + 1) for part in nested)


def _group(filters: MetadataFilters, *, depth: int = 0) -> Where:
    """Return filters that may be nested; LlamaIndex's own function supports no nesting."""
    check_depth(depth)
    parts: list[Where] = []
    for part in filters.filters:
        nested = (
            _group(part, depth=depth + 1) if isinstance(part, MetadataFilters) else _condition(part)
        )
        parts.append(nested)
    if filters.condition == FilterCondition.NOT:
        return lambda metadata: not any(accepts(part, metadata) for part in parts)
    group = "$or" if filters.condition == FilterCondition.OR else "$and"
    return {group: parts} if parts else lambda _: group == "$and"


def _condition(condition: MetadataFilter) -> Where:
    """Return a single condition: equality of texts as a value, which needs no parsing of rows, others as functions."""
    is_equality = condition.operator == FilterOperator.EQ and isinstance(condition.value, str)
    if is_equality and not condition.key.startswith("$"):
        return {condition.key: condition.value}
    filters = MetadataFilters(filters=[condition])

    def passes(metadata: Metadata) -> bool:
        whole = {**_node(metadata).get("metadata", {}), **metadata}
        return bool(build_metadata_filter_fn(lambda _: whole, filters)(""))

    return passes


def _node(metadata: Metadata) -> dict[str, Any]:
    """Return the node in a row's metadata; an empty one for a chunk that LlamaIndex did not add."""
    node: dict[str, object] = json.loads(str(metadata[NODE])) if NODE in metadata else {}
    return node
