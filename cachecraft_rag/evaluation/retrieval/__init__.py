"""Whether retrieval finds what it should: hit rates on follow-up questions."""
