"""`cachecraft mcp`: a Model Context Protocol server, so that an agent can search and ask the user's documents.

`command` has the options and is imported without the extra `mcp`. `tools` and `server` import the official SDK.
`allowed_folders` decides which paths an agent may index, and imports nothing of either. Only the command line imports
from here; an application in Python calls `CacheCraft` itself.
"""
