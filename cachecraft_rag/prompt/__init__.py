"""From a request's text to segments of token ids.

Import from here: `builder` (chat template, chunks and question as segments), `unmarked` (segments found in unmarked
text), `safe_tokenizer` (text without control tokens), `tools` and `output_schema` (JSON schemas that answers must
follow). Imports planning and store.

Never here: the model's layers, scheduling, or any state of a running request.
"""
