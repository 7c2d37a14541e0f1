"""The OpenAI-compatible server over an engine in this process, without vLLM.

Import from here: `start` (serves until the process is stopped). `app` holds the routes, `fields` reads requests,
`answers` lays prompts out and asks the engine, `replies` and `response_events` write what clients read.

Never here: what a server over vLLM needs too; that is one folder up.
"""
