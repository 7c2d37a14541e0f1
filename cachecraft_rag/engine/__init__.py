"""The engine on Hugging Face models: prompts, decoding, scheduling, statistics."""
