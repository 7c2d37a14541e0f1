"""Prompt compression: the baselines that shorten the chunks instead of reusing them (Cache-Craft §5.1.4)."""
