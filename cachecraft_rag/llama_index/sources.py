"""The nodes that an answer was given: their texts and chunk ids going in, their outcomes coming out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from llama_index.core.schema import MetadataMode, NodeWithScore

from cachecraft_rag.retrievers.llama_index import with_notes, without_notes, without_paths
from cachecraft_rag.types.documents import CHUNK_ID_KEY, Chunk, noted_chunk_id, outcome_notes


class DocumentOptions(TypedDict):
    """Options of `CacheCraftLLM.begin` and `chat` that name the passages.

    documents     the texts of the passages, in rank order
    document_ids  the chunk id that each node carries, empty where none is noted
    """

    documents: list[str]
    document_ids: list[str]


class Sources:
    """Copies of the nodes of an answer; the retriever's own stay as they are.

    The model sees neither a node's `file_path` nor the notes in the metadata of each copy: its chunk id, and its
    outcome with the reason. All are texts, so a vector store takes a copy back; the last two are "" until the answer
    has ended. Without `with_outcomes` the copies have no notes, and notes that a node brought are left out.

    nodes  the copies, in the order of the nodes
    texts  what the model sees of them
    noted_ids  chunk ids that a retriever noted, "" where it noted none; an edited node has another text's
    chunk_ids  node id → chunk id
    """

    def __init__(self, nodes: Iterable[NodeWithScore], *, with_outcomes: bool = True) -> None:
        self._with_outcomes = with_outcomes
        self.nodes: list[NodeWithScore] = []
        self.texts: list[str] = []
        self.noted_ids: list[str] = []
        self.chunk_ids: dict[str, str] = {}
        for scored in nodes:
            noted_id = noted_chunk_id(scored.node.metadata)
            notes = {CHUNK_ID_KEY: noted_id, **outcome_notes(None)}
            # first, because it also hides notes from the text
            node = with_notes(without_paths(scored.node), notes)
            text = node.get_content(metadata_mode=MetadataMode.LLM)
            chunk_id = Chunk(text, known_id=noted_id).chunk_id
            if with_outcomes:
                node.metadata[CHUNK_ID_KEY] = chunk_id
            else:
                node = without_notes(node)
            self.nodes.append(NodeWithScore(node=node, score=scored.score))
            self.texts.append(text)
            self.noted_ids.append(noted_id)
            self.chunk_ids[node.node_id] = chunk_id

    def documents(self) -> DocumentOptions:
        """Return options of `CacheCraftLLM.begin`: copies of `texts` and `noted_ids`."""
        return {"documents": list(self.texts), "document_ids": list(self.noted_ids)}

    def note_outcomes(self, statistics: Mapping[str, Any]) -> None:
        """Put each passage's outcome and reason, of `RequestStats.as_dict()`, into its node, or "" if it has none."""
        if not self._with_outcomes:
            return
        outcomes = {chunk["chunk_id"]: chunk for chunk in statistics.get("chunks", ())}
        for scored in self.nodes:
            chunk = outcomes.get(scored.node.metadata[CHUNK_ID_KEY])
            scored.node.metadata.update(outcome_notes(chunk))
