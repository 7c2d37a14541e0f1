"""The one exception tree of the package, and which error is raised when.

    CacheCraftError
    ├── ConfigError            an argument, option or setting cannot be used; MissingPackageError: a package is missing
    ├── UnsupportedModelError  the model has no raw keys to store, or failed its self-check
    ├── ModelNotFoundError     the model (or the embedded demo model) is not installed
    ├── DocumentError          a document cannot be read
    ├── IndexStoreError        the retrieval index is missing, or was made with another embedding model
    ├── StoreError             the chunk-cache store cannot be opened or written at all
    ├── UnsupportedCallError   a call that this engine does not support
    ├── ForkError              an engine, store or index was used in a fork of the process that opened it
    ├── ServerError            a server does not answer, or is not the one that was meant
    ├── BusyError              as many requests are waiting as may; WaitTimeoutError: one waited too long
    └── ContextLengthError     the prompt does not fit the model's context

Every message says what to do next. A missing or corrupt chunk-cache is never an exception: it is a miss with a reason.

| situation | raised |
| --- | --- |
| an argument, option, setting or schema cannot be used | `ConfigError`, before a model runs where that is possible |
| a package is not installed | `MissingPackageError`, whose message names the extra |
| the store or the index was closed | `StoreError`, `IndexStoreError`; a second `close` does nothing |
| an engine over HTTP was closed | `ServerError` |
| an engine over vLLM was closed | `RuntimeError`; `CancelledError` if it was closed meanwhile |
| the process was forked | `ForkError`; `close` does nothing in a fork |
| the prompt does not fit the context | `ContextLengthError` |
| the model fails | `UnsupportedModelError`, torch's `RuntimeError`, `MemoryError`; over vLLM its own exceptions |
| the store fails | `StoreError`; during an answer a warning is logged, and the answer is computed without reuse |
| a capture cannot be stored | nothing: it is dropped, logged and counted in the store's statistics |
| a remote of the store fails | nothing: the statistics say so |
| a server fails | `ServerError` |
| a server refuses a request | `ConfigError`, or `ContextLengthError` if its code or message names the context |
| too many requests wait | `BusyError`, `WaitTimeoutError` |
| the engine does not support a call | `UnsupportedCallError` |
| the task is cancelled | `CancelledError`; the answer ends |
| vLLM does not start or end in time | `TimeoutError` after ten minutes, and by `close` after 30 seconds |
| a file outside the store cannot be written | `OSError` |
| a function of yours raises (a filter, a reader, `progress`) | that exception |
| an iterator of documents raises in `prime`, `remove` or `sync` | that exception, before anything changes |
| one of their documents is of another kind, or has no text | `ConfigError`, before anything changes |
| a chunk is too long for `prime` | nothing: `skipped` gets a sentence, and the other chunks are captured |
| `prime` fails midway | that error; what was captured stays, and the next call goes on from there |
| `sync` gets no documents | `ConfigError`, because a database that cannot be read looks empty |
| `remove` or `sync` cannot delete a file | `StoreError`, once the rows are removed; repeat the call |

A streamed answer runs while it is read: an unusable question is refused by the call, and all that happens once the
model runs is raised by a piece. `async` calls raise everything there.

A docstring names an error only if it is particular to its function; the rest is here.
"""

_NO_MEMORY = ("allocate memory", "not enough memory", "out of memory")  # in torch's messages


def says_no_memory(error: BaseException) -> bool:
    """Return True for a MemoryError, and for a RuntimeError whose message says that memory is short, as torch's does.

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
    """An argument, option or setting is missing, unknown, of a wrong type or out of range.

    Also options that do not fit each other, text that is not valid Unicode, a dtype, device or package that is missing,
    a chat template or schema that cannot be used, and a request that a server refuses.
    """


class MissingPackageError(ConfigError, ImportError):
    """A package that an extra brings is not installed; the message names the extra."""


class UnsupportedModelError(CacheCraftError):
    """The model cannot be served from chunk-caches; the message names the model and the reason.

    It has no raw keys to store, or failed the self-check while it was loaded; or a request met a layer that does
    something that the survey of the model did not show.
    """


class ModelNotFoundError(CacheCraftError):
    """The model's weights or the package that carries them cannot be found.

    The name is unknown, the hub cannot be reached, or a file is missing or damaged. The same for the embedding model.
    """


class DocumentError(CacheCraftError):
    """A document cannot be read or holds no text.

    While a folder is indexed, an unreadable file is a problem in the report instead. A malformed file of questions is
    an error of this class too.
    """


class IndexStoreError(CacheCraftError):
    """The retrieval index is missing, or does not match the embedding model in use.

    Also if it holds no documents, is closed, damaged, of a newer version or locked by another process, or if the
    embedding model gives a vector that is not finite.
    """


class StoreError(CacheCraftError):
    """The chunk-cache store as a whole cannot be opened or written.

    Raised by opening it and by the administrator's methods, and after `close` also by look-ups, loads and questions: by
    the call or by the first piece.
    """


class UnsupportedCallError(CacheCraftError, NotImplementedError):
    """A call that this engine does not support, see its `capabilities`; the message says what to do instead."""


class ForkError(CacheCraftError):
    """An engine, store or index was used in a fork of the process that opened it; open one in each child."""


class ServerError(CacheCraftError):
    """A server of this package does not answer, or what answers is another one; the message says what to do.

    Also if it asks for a key, is of another version or model, sends a malformed reply, or the connection was closed.
    """


class BusyError(CacheCraftError):
    """As many requests are waiting for the engine as may (`EngineTuning.max_waiting`); ask again later.

    Raised by the first piece of an answer.
    """


class WaitTimeoutError(BusyError, TimeoutError):
    """A request waited longer for its turn than it may (`EngineTuning.wait_timeout_s`); ask again later."""


class ContextLengthError(CacheCraftError):
    """The prompt does not fit the model's context, even after trimming by the stated rule.

    Question, history and answer together are too long, or for priming a chunk with the instruction. Raised by the call,
    or by a piece if a server finds it.
    """
