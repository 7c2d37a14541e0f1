"""Fixtures of the vLLM backend's tests: small random models on disk, and servers over them in this process."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from cachecraft_rag.vllm.messages import Ask
    from tests.vllm.test_equality import Expected

# Read by vLLM at its first import, and by the processes that it starts.
for name, value in {
    "VLLM_PLUGINS": "cachecraft",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",  # its compiler takes longer than a test
}.items():
    os.environ[name] = value

TEXTS = (
    "Empty the kettle before you descale it with vinegar; rinse it twice. ",
    "The toaster has a crumb tray; pull it out to the left and shake it. ",
    "Set the fridge to four degrees and leave room behind it for the air. ",
    "The guarantee of two years covers parts and work, but no limescale. ",
    "Ring the workshop in Arden between nine and noon, never on a Monday. ",
    "The mill at Brook dates from 1802, and the mill at Corry from 1903. ",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM warns of much that is its own, and what it leaves open at its end is closed by Python."""
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("default"))


_set_threads = torch.set_num_threads  # vLLM replaces it


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Let vLLM's kernels take one thread, whatever libraries of earlier tests, such as numba, have set.

    In several threads, vLLM's attention on a CPU is wrong for gpt-oss.
    """
    _set_threads(1)


@pytest.fixture
def count_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counter[str]]:
    """`count_calls((owner, name), …)`: the number of calls of each of these functions from now on, by its name."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*given: Any, **named: Any) -> Any:
            counts[name] += 1
            return real(*given, **named)

        monkeypatch.setattr(owner, name, counted)

    def count_all(*functions: tuple[Any, str]) -> Counter[str]:
        for owner, name in functions:
            count(owner, name)
        return counts

    return count_all


@pytest.fixture(scope="session")
def model_folder(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: PreTrainedTokenizerFast
) -> Callable[[str], Path]:
    """`model_folder("Llama")`: a checkpoint of a small random model, made once. `demo`: the demo model's."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family == "demo":
            from cachecraft_rag.model.demo_model import demo_model_folder

            return demo_model_folder()
        if family not in made:
            import torch
            import transformers

            shape: dict[str, Any] = {
                "vocab_size": 512,
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 6,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "max_position_embeddings": 8192,
                "pad_token_id": 0,
                "bos_token_id": None,
                "eos_token_id": 256,
                "tie_word_embeddings": False,
            }
            if family == "Mistral":
                shape["sliding_window"] = None
            if family == "Qwen2":
                del shape["head_dim"]
            torch.manual_seed(0)
            config = getattr(transformers, f"{family}Config")(**shape)
            model = getattr(transformers, f"{family}ForCausalLM")(config).float()
            # the usual initialisation is so small that every token would look alike
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(3)
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            byte_tokenizer.save_pretrained(folder)
            made[family] = folder
        return made[family]

    return make


@pytest.fixture(scope="session")
def primed_cases(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Path], tuple[dict[str, Expected], int]]:
    """`primed_cases("Llama", folder)`: `test_equality.expected_cases`, made once, with a copy of their store."""
    made: dict[str, tuple[Path, tuple[dict[str, Expected], int]]] = {}

    def copy(family: str, store: Path) -> tuple[dict[str, Expected], int]:
        from tests.vllm.test_equality import expected_cases

        if family not in made:
            root = tmp_path_factory.mktemp("primed") / "caches"
            made[family] = root, expected_cases(model_folder(family), root)
        root, cases = made[family]
        shutil.copytree(root, store)
        return cases

    return copy


@dataclass
class Served:
    """Greedy token ids of a request, their log-probabilities, and the server's report; `likeliest` first tokens."""

    tokens: list[int]
    logprobs: list[float]
    report: dict[str, Any]
    likeliest: dict[int, float] = field(default_factory=dict)


class Server:
    """vLLM in this process, with the connector."""

    key, namespace = "the tests' key", "default"

    def __init__(
        self,
        model: Path,
        store: Path,
        *,
        caches: dict[str, Any] | None = None,
        beside: Sequence[dict[str, Any]] = (),
        **options: Any,
    ) -> None:
        import torch
        from vllm import LLM

        from cachecraft_rag.engine.config import EngineConfig
        from cachecraft_rag.store import StoreConfig
        from cachecraft_rag.vllm.options import VLLMOptions
        from cachecraft_rag.vllm.served_model import VLLMModel
        from cachecraft_rag.vllm.settings import ConnectorSettings

        served = VLLMModel.load(
            str(model),
            dtype=options.get("dtype", "float32"),
            options=VLLMOptions.from_values(options),
        )
        identity = served.identity
        config = EngineConfig(namespace=self.namespace, store=StoreConfig(**caches or {}))
        settings = ConnectorSettings(str(store), identity, config, self.key)
        given: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 2048,
            "enforce_eager": True,
            "max_num_seqs": 8,
            "block_size": 32,
            "enable_prefix_caching": False,
            "seed": 0,
            "kv_transfer_config": settings.transfer_config(beside),
            "disable_log_stats": True,
        }
        if torch.cuda.is_available():
            given |= {"gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 1 << 30}
        self.llm: Any = LLM(model=str(model), **(given | served.arguments | options))

    def ask(
        self,
        asks: list[Ask | list[int]],
        *,
        tokens: int = 16,
        adapters: list[Any] | None = None,
        **options: Any,
    ) -> list[Served]:
        """Serve these at once; token ids alone are a plain prompt. `adapters` has a LoRA request or None for each."""
        from vllm import SamplingParams

        from cachecraft_rag.vllm.messages import FIELD

        prompts, params = [], []
        for ask in asks:
            how: dict[str, Any] = {
                "temperature": 0,
                "max_tokens": tokens,
                "ignore_eos": True,
                "logprobs": 0,
            } | options
            if isinstance(ask, list):
                prompts.append({"prompt_token_ids": ask})
            else:
                salt = ask.cache_salt(self.namespace)
                prompts.append({"prompt_token_ids": ask.prompt.token_ids, "cache_salt": salt})
                how["extra_args"] = {"kv_transfer_params": {FIELD: ask.message(self.key)}}
            params.append(SamplingParams(**how))
        outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        found = []
        for output in outputs:
            best = output.outputs[0]
            logprobs = [next(iter(one.values())).logprob for one in best.logprobs or ()]
            found.append(
                Served(
                    list(best.token_ids),
                    logprobs,
                    (output.kv_transfer_params or {}).get(FIELD, {}),
                    {token: entry.logprob for token, entry in (best.logprobs or [{}])[0].items()},
                )
            )
        return found

    def close(self) -> None:
        """End it; vLLM's process group is of this process, and the next server needs another one."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()
        # vLLM's drafts from tokens import numba. A later server of this process would fail: as it starts, vLLM's CPU
        # build reads the attributes of everything in every loaded module, and llvmlite's library (numba's compiler)
        # returns a function for each.
        for name in list(sys.modules):
            if name.partition(".")[0] in ("llvmlite", "numba"):
                del sys.modules[name]


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    """Makes servers; the one before is closed first."""
    made: list[Server] = []

    def make(*arguments: Any, **options: Any) -> Server:
        while made:
            made.pop().close()
        made.append(Server(*arguments, **options))
        return made[-1]

    yield make
    while made:
        made.pop().close()
