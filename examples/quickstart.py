"""Index a folder and ask about it twice: the second question finds the chunk-caches that the first one left behind.

    python examples/quickstart.py [FOLDER] [QUESTION] [ANOTHER QUESTION]

Without a folder it reads the sample handbook beside this file. Uses the embedded demo model; chunk-caches go to
`chunk-caches/quickstart` below the current folder, so run it a second time and nothing is computed twice.
"""

import sys
from pathlib import Path

from cachecraft_rag import CacheCraft, SamplingParams

HANDBOOK = Path(__file__).parent / "handbook"
QUESTIONS = ["How often is the filter of the Willow A3 replaced?", "How large a room can the Willow A3 clean?"]
SAMPLING = SamplingParams(max_new_tokens=40, stop=(". ", ".\n"))  # a small model goes on after its first sentence


def main(folder: str | Path = HANDBOOK, *questions: str) -> None:
    """Index the folder, answer the questions, print what was reused."""
    with CacheCraft.from_pretrained("demo", store="chunk-caches/quickstart") as rag:
        report = rag.add_documents(folder)
        print(f"{len(report.added)} documents added, {len(report.unchanged)} unchanged")
        for question in questions or QUESTIONS:
            answer = rag.ask(question, sampling=SAMPLING)
            sources = dict.fromkeys(str(source.metadata["source"]) for source in answer.sources)
            stats = answer.stats
            print(f"\n{question}\n{answer.text.strip()}\n  from {', '.join(sources)}")
            print(f"  first token after {stats.ttft_s:.2f} s; {stats.tokens_prompt} tokens: ", end="")
            print(f"{stats.tokens_reused} reused, {stats.tokens_recomputed + stats.tokens_computed} computed")


if __name__ == "__main__":
    main(*sys.argv[1:])
