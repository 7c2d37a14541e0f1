"""The catalog: which chunk-caches exist, and everything that is known of one without reading its file.

Import `Catalog` and its two errors from here, and the modules `variant_finder` (look-ups, on a remote too) and
`eviction_rules`. Tensors, files and decisions about a prompt do not belong here.
"""

from cachecraft_rag.store.catalog.catalog import Catalog
from cachecraft_rag.store.catalog.schema import DiskFullError, OtherVersionError

__all__ = ["Catalog", "DiskFullError", "OtherVersionError"]
