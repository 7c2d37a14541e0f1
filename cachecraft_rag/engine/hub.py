"""Whether the Hugging Face hub can be asked at all: its libraries find out by retrying each file for half a minute."""

from __future__ import annotations

from collections.abc import Sequence

_PATIENCE_S = 5.0


def require_hub(names: Sequence[str]) -> None:
    """Raise OSError or ValueError where the hub cannot be reached, or has none of these models. Asks once for each.

    Anything else that may be wrong is left to whoever loads the model, who can say more about it. Where the libraries
    were told to stay offline nothing is asked: they then give up at once.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return
    for name in names:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_PATIENCE_S)
            return
        except RepositoryNotFoundError as error:
            missing = error
        except HfHubHTTPError:  # no such file in it, or not without a login
            return
        except ValueError:  # no name the hub could have
            raise
        except Exception as error:  # the client's own classes, which differ from version to version
            raise ConnectionError(
                f"the Hugging Face hub cannot be reached ({type(error).__name__}: {error})"
            ) from error
    raise FileNotFoundError(f"the Hugging Face hub has no model {' or '.join(names)}") from missing
