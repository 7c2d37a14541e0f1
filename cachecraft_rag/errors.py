"""The one exception tree of the package.

    CacheCraftError
    ├── ConfigError            a setting is missing, unknown or out of range; MissingPackageError: a package is
    ├── UnsupportedModelError  the model has no raw keys to store, or failed its self-check
    ├── ModelNotFoundError     the model (or the embedded demo model) is not installed
    ├── DocumentError          a document cannot be read
    ├── IndexStoreError        the retrieval index is missing, or was made with another embedding model
    ├── StoreError             the chunk-cache store cannot be opened or written at all
    ├── UnsupportedCallError   a framework's call that has no meaning for a local model without tools
    ├── ForkError              an engine, store or index was used in a fork of the process that opened it
    ├── ServerError            a server does not answer, or is not the one that was meant
    ├── BusyError              as many requests are waiting as may; WaitTimeoutError: one waited too long
    └── ContextLengthError     the prompt does not fit the model's context

Every message says what to do next. A missing or corrupt chunk-cache is never an exception: it is a miss with a reason.

Docstrings name the errors that a public function raises. One that names none raises only ConfigError for an argument of
a wrong type, ForkError in a forked process, and, where its object was closed, the error that its class names for that.
"""

_NO_MEMORY = ("allocate memory", "not enough memory", "out of memory")  # in torch's messages


def says_no_memory(error: BaseException) -> bool:
    """Return True for a MemoryError, and for a RuntimeError whose message says that memory is short, as torch's does.

    Returns False for any other exception.

    >>> says_no_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    True
    >>> says_no_memory(RuntimeError("shapes do not fit"))
    False
    """
    text = str(error).lower()
    is_named = any(words in text for words in _NO_MEMORY)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and is_named)


class CacheCraftError(Exception):
    """Base class of every error this package raises on purpose."""


class ConfigError(CacheCraftError, ValueError):
    """A setting is missing, unknown or out of range."""


class MissingPackageError(ConfigError, ImportError):
    """A package that an extra brings is not installed; the message names the extra."""


class UnsupportedModelError(CacheCraftError):
    """The model cannot be served from chunk-caches; the message names the model and the reason."""


class ModelNotFoundError(CacheCraftError):
    """The model's weights or the package that carries them cannot be found."""


class DocumentError(CacheCraftError):
    """A document cannot be read or holds no text."""


class IndexStoreError(CacheCraftError):
    """The retrieval index is missing, or does not match the embedding model in use."""


class StoreError(CacheCraftError):
    """The chunk-cache store as a whole cannot be opened or written."""


class UnsupportedCallError(CacheCraftError, NotImplementedError):
    """A framework's call that this package does not support; the message says what to do instead."""


class ForkError(CacheCraftError):
    """An engine, store or index was used in a fork of the process that opened it; open one in each child."""


class ServerError(CacheCraftError):
    """A server of this package does not answer, or what answers is another one; the message says what to do."""


class BusyError(CacheCraftError):
    """As many requests are waiting for the engine as may; ask again later."""


class WaitTimeoutError(BusyError, TimeoutError):
    """A request waited longer for its turn than it may; ask again later."""


class ContextLengthError(CacheCraftError):
    """The prompt does not fit the model's context, even after trimming by the stated rule."""
