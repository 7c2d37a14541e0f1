"""The folder on disk: where a chunk-cache's file is, how it is written and read, which writers are alive, and audits.

Import the modules. The contents of a file (`store.layout`) and the rows of the catalog do not belong here.
"""
