"""Index a folder and ask about it twice: the second question reuses the chunk-caches that the first one stored.

    python examples/quickstart.py [FOLDER] [QUESTION] [ANOTHER QUESTION]

The default folder is the sample handbook next to this file. Uses the bundled demo model. Chunk-caches are stored in
`chunk-caches/quickstart` in the current folder, so a second run reuses those of the first.
"""

import sys
from pathlib import Path

from cachecraft_rag import CacheCraft, SamplingParams

HANDBOOK = Path(__file__).parent / "handbook"
QUESTIONS = [
    "How often is the filter of the Willow A3 replaced?",
    "Can the filter of the Willow A3 be washed?",
]
# a small model would go on after its first sentence
SAMPLING = SamplingParams(max_new_tokens=40, stop=(". ", ".\n"))


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
            print(
                f"  first token after {stats.ttft_s:.2f} s; {stats.tokens_prompt} tokens: ", end=""
            )
            print(
                f"{stats.tokens_reused} reused, {stats.tokens_recomputed + stats.tokens_computed} computed"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
