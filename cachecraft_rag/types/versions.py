"""Versions of the stored layout and of the fingerprint rule."""

LAYOUT_VERSION = 3  # of stored chunk-caches: part of their files and of every fingerprint
# Of the rule that makes a fingerprint, and its first letters. Goes up whenever `LAYOUT_VERSION` does: what an older
# version stored is then set aside.
IDENTITY_VERSION = 2
