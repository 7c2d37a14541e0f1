"""Question sets: a reader for each published format, and the passages drawn for each question.

`registry` lists the formats; `dataset` turns a file into questions with chunks.
"""
