"""Test set of pages that are easily confused: `cachecraft eval --data lookalikes`.

Four invented domains of twelve short pages each. `.questions.json` has the questions: each has one right fact on its
own page, and other values of the same kind on pages of the same domain. Installed as `cachecraft_rag.lookalikes`.
"""
