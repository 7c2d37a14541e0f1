"""A quick check that the Hugging Face hub is reachable: its libraries retry each file for half a minute."""

from __future__ import annotations

from collections.abc import Sequence

_TIMEOUT_S = 5.0


def require_hub(names: Sequence[str]) -> None:
    """Raise OSError or ValueError if the hub cannot be reached or has none of these models; one request per name.

    Other errors are left to the loader of the model, which can say more about them. In offline mode no request is made:
    the libraries then fail at once.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return
    for name in names:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_TIMEOUT_S)
            return
        except RepositoryNotFoundError as error:
            missing = error
        except HfHubHTTPError:  # the model has no such file, or requires a login
            return
        except ValueError:  # not a valid name on the hub
            raise
        except Exception as error:  # the HTTP client's own classes, which differ between versions
            raise ConnectionError(
                f"the Hugging Face hub cannot be reached ({type(error).__name__}: {error})"
            ) from error
    raise FileNotFoundError(f"the Hugging Face hub has no model {' or '.join(names)}") from missing
