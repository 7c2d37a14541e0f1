"""A quick check that the Hugging Face hub is reachable, and loading from this disk without progress bars.

The hub's libraries retry each file for half a minute, and draw bars into the output of every program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_TIMEOUT_S = 5.0


def require_hub(names: Sequence[str]) -> None:
    """Raise an error if the hub cannot be reached (ConnectionError) or has none of these models (FileNotFoundError).

    Asks for the config of each of the names, one or more, in turn, 5 seconds each; downloads nothing. Returns as soon
    as the hub has one of the models, even if that requires a login, and if the hub answers with another error: the
    loader of the model can say more about that. In offline mode (`$HF_HUB_OFFLINE`) no request is made: the libraries
    then fail at once. ValueError for an impossible name.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return
    for name in names:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_TIMEOUT_S)
            return
        except GatedRepoError:  # requires a login; a subclass of the next one
            return
        except RepositoryNotFoundError as error:
            missing = error
        except HfHubHTTPError:  # the model has no such file
            return
        except ValueError:  # not a valid name on the hub
            raise
        except Exception as error:  # the HTTP client's own classes, which differ between versions
            raise ConnectionError(
                f"the Hugging Face hub cannot be reached ({type(error).__name__}: {error})"
            ) from error
    raise FileNotFoundError(f"the Hugging Face hub has no model {' or '.join(names)}") from missing


@contextmanager
def without_bars() -> Iterator[None]:
    """Switch off transformers' progress bars, for the whole process, in the block; restore them after it."""
    from transformers.utils import logging as bars

    if not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        bars.enable_progress_bar()  # type: ignore[no-untyped-call]
