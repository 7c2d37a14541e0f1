"""What all tests share: no model hub, and the demo model and handbook where a test asks for them."""

from __future__ import annotations

import copy
import importlib.util
import logging
import math
import os
import resource
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.dataset import Dataset
    from cachecraft_rag.model.decoder import Decoder
    from cachecraft_rag.prompt.builder import PromptBuilder
    from cachecraft_rag.store import ChunkCacheStore
    from cachecraft_rag.store.catalog import Catalog
    from cachecraft_rag.types.documents import Chunk

# Before any test module imports transformers: the hub's client reads these once, at its import. A test that needs the
# network would pass on one machine and hang on the next.
os.environ["HF_HUB_OFFLINE"] = "1"
# Models of a test are tiny: more threads only wait for each other, which on a busy machine takes eight times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["COLUMNS"] = "200"  # tables are as wide on every terminal, and without one
# its threads would warn at every subprocess a test starts
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The settings of the user who runs the tests are not the tests'; `CACHECRAFT_CACHE` keeps the demo model's files.
for name in [
    name for name in os.environ if name.startswith("CACHECRAFT_") and name != "CACHECRAFT_CACHE"
]:
    del os.environ[name]
# Their own settings file and what they trust are not the tests' either; commands that tests start inherit this.
_CONFIG = tempfile.TemporaryDirectory(prefix="cachecraft-tests-config-")
os.environ["XDG_CONFIG_HOME"] = _CONFIG.name
# No test may fail because the machine is busy, and Hypothesis gives an example 0.2 s.
settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machine")


# Where the tiny models run: `TESTS_DEVICE=cuda pytest tests/engine` tests the engine on a GPU (docs/guides/gpu.md).
DEVICE = os.environ.get("TESTS_DEVICE", "cpu")


def _import_benchmarks() -> None:
    """Make `benchmarks` importable, which is not installed, without the repository's other folders."""
    init = Path(__file__).parents[1] / "benchmarks" / "__init__.py"
    spec = importlib.util.spec_from_file_location("benchmarks", init)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["benchmarks"])


_import_benchmarks()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Log lines with lone surrogates, from tests of odd names, can be sent from a worker to pytest-xdist."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


class Clock:
    """Stands in for the module `time` where a test decides how time passes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.alarm_at, self.alarm = math.inf, lambda: None

    def perf_counter(self) -> float:
        """The time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Time passes; `alarm` is called once, when `alarm_at` has come."""
        self.now += seconds
        if self.now >= self.alarm_at:
            self.alarm_at = math.inf
            self.alarm()


@pytest.fixture(autouse=True)
def package_logger() -> None:
    """The package's logger as an import leaves it: a command sets its level and handlers for its process.

    Set before each test, not restored after it: a fixture of a whole module may have run a command first.
    """
    logger = logging.getLogger("cachecraft_rag")
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    logger.handlers.clear()


@pytest.fixture(scope="session", autouse=True)
def _any_cpu() -> Iterator[None]:
    """`dtype="auto"` is the checkpoint's own on whatever CPU the tests run; tests of that choice set their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cachecraft_rag.model.decoder.computes_bfloat16", lambda: False)
        yield


@pytest.fixture
def clock() -> Clock:
    """Put it in place with `monkeypatch.setattr("package.module.time", clock)`."""
    return Clock()


@pytest.fixture
def sqlite_steps() -> Callable[[Catalog], AbstractContextManager[list[int]]]:
    """`with sqlite_steps(catalog) as steps:` counts the steps of SQLite's machine, which no other program slows down.

    A query that scans a table takes several for each of its rows.
    """

    @contextmanager
    def counted(catalog: Catalog) -> Iterator[list[int]]:
        steps = [0]

        def step() -> int:
            steps[0] += 1
            return 0

        connections = (catalog._db._reader, catalog._db._writer)
        for connection in connections:
            connection.set_progress_handler(step, 1)
        try:
            yield steps
        finally:
            for connection in connections:
                connection.set_progress_handler(None, 1)

    return counted


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model; the first test on a machine waits for its conversion (about 20 seconds)."""
    from cachecraft_rag.model.demo_model import demo_model_folder

    return demo_model_folder()


@pytest.fixture(scope="session")
def handbook() -> Path:
    """Folder of the sample handbook."""
    from cachecraft_rag.model.demo_model import handbook_folder

    return handbook_folder()


@pytest.fixture
def full_disk() -> Callable[[], AbstractContextManager[None]]:
    """`with full_disk():` no file of this process can grow, as on a full disk."""

    @contextmanager
    def full() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full


@pytest.fixture(scope="session")
def squad_article() -> Callable[..., dict[str, Any]]:
    """`squad_article("mill", {"Arden": 1701})`: an article in SQuAD's published form, with a paragraph for each town.

    The paragraph says when the mill of Arden was built, and that is its question; `asked` leaves out questions.
    """

    def article(
        name: str, towns: Mapping[str, int], asked: Callable[[int], bool] = bool
    ) -> dict[str, Any]:
        paragraphs = []
        for town, year in towns.items():
            context = f"The {name} of {town} was built in {year} and stands beside the river."
            answers = [{"text": str(year), "answer_start": 0}]
            question = {
                "id": f"{name}{year}",
                "question": f"When was the {name} of {town} built?",
                "answers": answers,
            }
            paragraphs.append({"context": context, "qas": [question] if asked(year) else []})
        return {"title": name, "paragraphs": paragraphs}

    return article


@pytest.fixture
def front_is_late(monkeypatch: pytest.MonkeyPatch) -> Callable[[PromptBuilder, Chunk], None]:
    """`front_is_late(prompts, chunk)`: the next prompt begins with this chunk, and Cake's front computes it.

    It and the instruction come from the disk only after that, and all that follows them in time.
    """
    from cachecraft_rag.compute import overlapped
    from cachecraft_rag.compute.balance.load_split import Cake, LoadingConstants
    from cachecraft_rag.store.layout import StoredVariant

    def arrange(prompts: PromptBuilder, chunk: Chunk) -> None:
        front = len(prompts.system.token_ids) + len(prompts.chunk_segment(chunk).token_ids)
        late, computed = {prompts.system.segment_id, chunk.chunk_id}, threading.Event()
        pieces = iter([(float(front), False), (0.0, True)])
        read = StoredVariant.read

        def next_piece(*_: object) -> tuple[float, bool]:
            piece = next(pieces)
            if piece[1]:
                computed.set()
            return piece

        def read_late(self: StoredVariant, *args: Any, **kwargs: Any) -> None:
            if self.variant.key.chunk_id in late:
                computed.wait(60.0)
            read(self, *args, **kwargs)

        monkeypatch.setattr(StoredVariant, "read", read_late)
        monkeypatch.setattr(Cake, "next_piece", next_piece)
        # However slow this machine is: nothing more is computed instead of loaded.
        monkeypatch.setattr(overlapped.OverlappedPrefill, "_take_over", lambda *_: [])
        monkeypatch.setattr(overlapped, "LOADING_CONSTANTS", LoadingConstants(stall_s=60.0))

    return arrange


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A real tokenizer that needs no file: a token for each byte, and the four of its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"]}
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_decoder(byte_tokenizer: PreTrainedTokenizerFast) -> Callable[..., Decoder]:
    """Makes small random decoders: `tiny_decoder("Llama")`, with settings of its config by name; each made once."""
    made: dict[str, Decoder] = {}

    def make(family: str, *, dtype: str = "float32", seed: int = 0, **settings: object) -> Decoder:
        import torch
        import transformers

        from cachecraft_rag.model.decoder import Decoder

        name = f"tiny {family} {dtype} {seed} {sorted(settings.items(), key=str)}"
        if name not in made:
            shape: dict[str, object] = {
                "vocab_size": 260,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 2048,
                "pad_token_id": 0,
                "bos_token_id": None,
                "eos_token_id": 256,
            }
            if family == "Gemma2":  # its defaults are for a head of 256
                shape |= {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 512}
            config = getattr(transformers, f"{family}Config")(**(shape | settings))
            torch.manual_seed(seed)
            model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).to(
                getattr(torch, dtype)
            )
            # the usual initialisation is so small that every token would look alike
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(4)
            made[name] = Decoder(model.to(DEVICE), byte_tokenizer, name=name)
        return made[name]

    return make


@pytest.fixture(scope="session")
def decoder_of_letters(tiny_decoder: Callable[..., Decoder]) -> Callable[..., Decoder]:
    """Makes a tiny Llama that prefers to write letters: half of what a random one writes is no text at all.

    `gain` multiplies its projections: with 3 another question has another answer.
    """

    def make(gain: float = 1.0) -> Decoder:
        import torch

        from cachecraft_rag.model.decoder import Decoder

        random = tiny_decoder("Llama")
        model, tokenizer = copy.deepcopy(random.model), random.tokenizer
        texts = [tokenizer.decode([token]) for token in range(260)]
        letters = [len(text) == 1 and text.isascii() and text.isprintable() for text in texts]
        with torch.no_grad():
            model.lm_head.weight[~torch.tensor(letters)] = 0.0
            for name, parameter in model.named_parameters():
                if "proj" in name:
                    parameter.mul_(gain)
        return Decoder(model, tokenizer, name=f"tiny Llama of letters, gain {gain}")

    return make


@pytest.fixture(scope="session")
def town_dataset() -> Dataset:
    """Six questions over two documents of four short passages, three in each prompt, with gold answers."""
    from cachecraft_rag.evaluation.dataset import Dataset, EvaluationQuestion
    from cachecraft_rag.types.documents import Chunk

    documents = tuple(
        tuple(Chunk(f"The {thing} of {town} dates from {year} and leaks.") for town, year in towns)
        for thing in ("mill", "bridge")
        for towns in [(("Arden", 1701), ("Brook", 1802), ("Corry", 1903), ("Dunmore", 1664))]
    )
    picks = [
        (0, (2, 0, 1)),
        (1, (0, 1, 2)),
        (0, (3, 1, 0)),
        (1, (3, 2, 1)),
        (0, (0, 1, 2)),
        (1, (1, 3, 0)),
    ]
    questions = tuple(
        EvaluationQuestion(
            f"q{place}",
            f"When was {place} built?",
            tuple(documents[number][i] for i in order),
            ("1802", "in 1802"),
        )
        for place, (number, order) in enumerate(picks)
    )
    return Dataset("town", documents, questions)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkCacheStore]:
    """An empty store."""
    from cachecraft_rag.store import ChunkCacheStore

    with ChunkCacheStore.open(tmp_path / "caches") as opened:
        yield opened


@pytest.fixture
def evaluation_engine(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> Iterator[Engine]:
    """A tiny engine that lays passages out in the given order, over an empty store."""
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.store import ChunkCacheStore

    with (
        ChunkCacheStore.open(tmp_path / "evaluation-caches", variants_per_chunk=1000) as store,
        Engine(tiny_decoder("Llama"), store, best_last=False) as engine,
    ):
        yield engine


@pytest.fixture(scope="module")
def as_loud_as_before() -> Iterator[None]:
    """The command silences transformers; other tests of this process may listen to it."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    yield
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()
