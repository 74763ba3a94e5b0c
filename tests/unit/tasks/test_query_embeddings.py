"""Queries of agent_search that are compared by a model of sentence embeddings, read from a local folder alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmrl.errors import RewardError
from vlmrl.tasks.agent_search.grader import load_similarity, make_grader
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput

WORDS = ("mayor", "of", "paris", "rome", "river", "weather", "who", "is", "the")
STEP = {"step": "search", "query": "mayor of Paris"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with random weights and its tokenizer, in the form in which sentence transformers keep them."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("model")
    (folder / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)) + "\n")
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(WORDS) + 5, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=16, max_position_embeddings=512)  # fmt: skip
    BertModel(config).save_pretrained(folder, safe_serialization=True)
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def test_the_similarity_is_the_cosine_of_mean_states(model: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    similarity = load_similarity(str(model))
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    with torch.no_grad():
        one, other = (
            network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
            for text in ("the mayor of paris", "weather")
        )
    expected = torch.nn.functional.cosine_similarity(one, other, dim=0).item()
    assert similarity("the mayor of paris", "weather") == pytest.approx(expected, abs=1e-5)
    assert similarity("mayor", "mayor") == pytest.approx(1.0)
    assert similarity("", "") == pytest.approx(1.0) and -1.0 <= similarity("x" * 100_000, "mayor " * 9000) <= 1.001


def test_the_rewards_count_a_query_by_the_model(model: Path) -> None:
    spec = load_reward("agent_search", args={"model": str(model)})
    assert spec.worker is not None and not spec.pure
    said = "<think>t</think><search>weather of rome</search>"
    similar = load_similarity(str(model))("weather of rome", "mayor of Paris")
    parts = spec(RewardInput(said, STEP))
    assert parts["right"] == pytest.approx(max(0.0, similar)) and parts["exact"] == 0.0
    assert spec(RewardInput("<think>t</think><search>mayor of Paris</search>", STEP))["exact"] == 1.0
    published = make_grader(name="rllava_agent_search", model=str(model))(RewardInput(said, STEP))["accuracy"]
    assert published == (pytest.approx(similar) if similar >= 0.5 else 0.0)
    answer = RewardInput("<answer>red</answer>", {"answer": ["red"]})
    assert spec(answer)["right"] == 1.0, "an answer counts by its words"


def test_a_folder_without_a_model_is_an_error_in_words(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="is no folder with config") as error:
        load_reward("agent_search", args={"model": str(tmp_path)})
    assert "model.safetensors" in str(error.value.hint)
    # A pickle beside the configuration is never read.
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(RewardError, match="cannot be loaded"):
        load_similarity(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(RewardError, match="cannot be loaded"):
        load_similarity(str(tmp_path))
    for name in ("agent_search", "rllava_agent_search"):
        with pytest.raises(RewardError, match="is no folder"):
            load_reward(name, args={"model": "sentence-transformers/all-MiniLM-L6-v2"})


def test_no_model_is_loaded_for_words_alone() -> None:
    spec = load_reward("agent_search")
    assert spec.worker is None and spec(RewardInput("<search>mayor Paris</search>", STEP))["right"] == pytest.approx(
        0.8
    )
