"""Sample documents for `cachecraft demo`: the handbook of a fictional appliance maker, with questions about it.

Installed as `cachecraft_rag.handbook`, so that the demo also runs from a wheel.
"""
