"""A language model for DSPy in this process: passages that a program repeats in its prompts are reused.

DSPy writes prompts itself, so passages are found by their content: a passage is reused from the third prompt on
(docs/guides/any_application.md). pip install "dspy<3.5", which has this interface, besides the demo model (README.md).
"""

from types import SimpleNamespace

import dspy

from cachecraft_rag import Engine, SamplingParams


class CacheCraftLM(dspy.BaseLM):
    """An engine as a DSPy `LM`; what DSPy writes as a system message is the beginning of the user's."""

    def __init__(self, engine: Engine, *, max_tokens: int = 128) -> None:
        super().__init__(model=engine.decoder.name, max_tokens=max_tokens, cache=False)
        self.engine = engine

    def forward(self, prompt=None, messages=None, **kwargs):
        """Return the answer in OpenAI's form, which DSPy reads."""
        messages = messages or [{"role": "user", "content": prompt}]
        text = "\n\n".join(message["content"] for message in messages)
        limit = kwargs.get("max_tokens") or self.kwargs["max_tokens"]
        answer = self.engine.stream_text(text, sampling=SamplingParams(max_new_tokens=limit))
        said = "".join(answer)
        self.engine.settle()  # a program in batches: passages that were seen again are stored
        stats = answer.stats
        return SimpleNamespace(
            model=self.model,
            choices=[
                SimpleNamespace(
                    message=SimpleNamespace(content=said, tool_calls=None), finish_reason="stop"
                )
            ],
            usage={
                "prompt_tokens": stats.tokens_prompt,
                "completion_tokens": stats.tokens_generated,
                "total_tokens": stats.tokens_prompt + stats.tokens_generated,
                "cached_tokens": stats.tokens_reused,
            },
        )


if __name__ == "__main__":
    subjects = ("kettle", "grinder", "toaster")
    pages = [
        " ".join(f"Part {n} of the {name} is cleaned every {n + 2} weeks." for n in range(20))
        for name in subjects
    ]
    with Engine.from_pretrained("demo", store="chunk-caches") as engine:
        lm = CacheCraftLM(engine, max_tokens=16)
        for name in subjects:
            question = f"How often is part 7 of the {name} cleaned?"
            print(lm("\n\n".join([*pages, question])))
            print(lm.history[-1]["usage"]["cached_tokens"], "reused")
