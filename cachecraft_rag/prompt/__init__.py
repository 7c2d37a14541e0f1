"""How does a request's text become segments of token ids?

Import from here: `builder` (chat template, chunks and question as segments), `unmarked` (segments found in text that
arrives as one piece), `safe_tokenizer` (text without control tokens), `tools` and `output_schema` (JSON schemas that
answers must follow). Imports planning and store.

Never here: the model's layers, scheduling, or any state of a running request.
"""
