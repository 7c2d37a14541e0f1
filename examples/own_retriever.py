"""The engine alone, with a retriever of your own: here, the texts that share the most words with the question.

python examples/own_retriever.py
"""

import re

from cachecraft_rag import Chunk, Engine, SamplingParams

CHUNKS = [
    Chunk(
        "# Kettle Wren K2\n\nThe Wren K2 holds 1.7 litres. Descale it every 8 weeks with 20 grams of citric acid."
    ),
    Chunk(
        "# Vacuum Heron V5\n\nThe Heron V5 runs for 45 minutes on one charge. Charging takes 3 hours."
    ),
    Chunk(
        "# Warranty\n\nEvery appliance has a warranty of 3 years. Limescale is not covered by the warranty."
    ),
]
QUESTIONS = ["How long does the Heron V5 run on one charge?", "How much does the Wren K2 hold?"]
# a small model would go on after its first sentence
SAMPLING = SamplingParams(max_new_tokens=30, stop=(". ", ".\n"))


def retrieve(question: str, top_k: int = 2) -> list[Chunk]:
    """The chunks that share the most words with the question, best first."""
    words = set(re.findall(r"\w+", question.lower()))
    return sorted(
        CHUNKS, key=lambda chunk: -len(words & set(re.findall(r"\w+", chunk.text.lower())))
    )[:top_k]


def main() -> None:
    """Answer each question and say what happened to each chunk."""
    with Engine.from_pretrained("demo", store="chunk-caches/own-retriever") as engine:
        for question in QUESTIONS:
            answer = engine.stream(question, retrieve(question), sampling=SAMPLING)
            print(question, "".join(answer).strip(), sep="\n")
            print(
                "  "
                + ", ".join(
                    f"{chunk.outcome} ({chunk.tokens} tokens)" for chunk in answer.stats.chunks
                )
            )


if __name__ == "__main__":
    main()
