"""A custom provider for LiteLLM: `documents` of a call reach the model as documents, in this process.

pip install litellm, besides the demo model (README.md).
"""

import litellm
from litellm import CustomLLM, ModelResponse

from cachecraft_rag import Chunk, Engine, SamplingParams

TEXTS = [f"Part {number} of the kettle is cleaned every {number + 2} weeks." for number in range(4)]


class CacheCraftProvider(CustomLLM):
    """Answers `litellm.completion(model="cachecraft/…", documents=[…])`."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def completion(self, *args, **kwargs) -> ModelResponse:
        """Answer the last message; earlier ones are the history."""
        options = kwargs["optional_params"]
        *history, asked = kwargs["messages"]
        answer = self.engine.stream(
            asked["content"],
            [Chunk(text) for text in options.get("documents", ())],
            history=[(message["role"], message["content"]) for message in history],
            sampling=SamplingParams(max_new_tokens=options.get("max_tokens", 128)),
        )
        text = "".join(answer)
        stats = answer.stats
        response = ModelResponse(model=kwargs["model"])
        response.choices[0].message.content = text
        response.usage = litellm.Usage(
            prompt_tokens=stats.tokens_prompt,
            completion_tokens=stats.tokens_generated,
            total_tokens=stats.tokens_prompt + stats.tokens_generated,
            prompt_tokens_details={"cached_tokens": stats.tokens_reused},
        )
        return response


if __name__ == "__main__":
    with Engine.from_pretrained("demo", store="chunk-caches") as engine:
        provider = CacheCraftProvider(engine)
        litellm.custom_provider_map = [{"provider": "cachecraft", "custom_handler": provider}]
        engine.prime(TEXTS)
        response = litellm.completion(
            model="cachecraft/demo",
            messages=[{"role": "user", "content": "How often is part 2 cleaned?"}],
            documents=TEXTS[:3],
            max_tokens=16,
        )
        print(response.choices[0].message.content)
        print(response.usage.prompt_tokens_details.cached_tokens, "reused")
