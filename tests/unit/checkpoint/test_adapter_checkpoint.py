"""Checkpoints that hold an adapter: small, exact, tied to their base model, and merged with proof."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_files import prove_items, save_checkpoint, seal, write_meta

from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.checkpoint import io, load
from vlmrl.checkpoint import merge as merges
from vlmrl.checkpoint.load import fingerprint, load_saved
from vlmrl.checkpoint.merge import merge
from vlmrl.checkpoint.merge_weights import CannotStreamError
from vlmrl.checkpoint.proof import proof_gap
from vlmrl.errors import CheckpointError
from vlmrl.model.load import load_model
from vlmrl.model.lora import attach_adapter
from vlmrl.model.policy import Policy
from vlmrl.model.safetensors_blocks import weight_files
from vlmrl.recipe.schema import Lora, Model, Optim
from vlmrl.store.checkpoints import ADAPTER, MODEL
from vlmrl.train.learner import Optimizer
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import PolicyGradient, update

LORA = Lora(rank=4, alpha=8)


def trained(folder: Path, items, banned, lora: Lora) -> tuple[Policy, Optimizer, str]:
    """An adapter after two updates, its optimizer and its base's checksum."""
    model = load_model(settings(folder))
    checksum = fingerprint(model)
    torch.manual_seed(0)
    policy = Policy(attach_adapter(model, lora), temperature=0.7, banned_ids=banned)
    optimizer = Optimizer(model, Optim(lr=1e-2))
    for _ in range(2):
        batch = StepBatch(items, [1.0, -1.0, 0.5, -0.5], ["x"] * 4)
        update(policy, optimizer, batch, PolicyGradient(ALGORITHMS["grpo"]), lr=1e-2, tokens_per_row=200, max_tokens=8)
    return policy, optimizer, checksum


def settings(folder: Path | str = "x", **more) -> Model:
    return Model(path=str(folder), dtype="float32", device="cpu", **more)


def save(run: Path, base: str, made, items, processor, lora: Lora) -> Path:
    policy, optimizer, checksum = made
    meta = {
        "dtype": "float32",
        "policy": {"temperature": 0.7, "banned_ids": list(policy.banned_ids)},
        "freeze": [],
        "lora": lora.model_dump(mode="json"),
        "quantize": None,
        "base": {"path": base, "revision": None, "fingerprint": checksum},
    }
    what = io.CheckpointContent(2, meta, {}, prove_items(policy, items))
    return save_checkpoint(run, what, policy.model, processor, optimizer.state_tensors())


@pytest.fixture(scope="module", params=[LORA, Lora(rank=2, rslora=True, dora=True, vision=True)], ids=["lora", "dora"])
def lora(request) -> Lora:
    return request.param


@pytest.fixture(scope="module")
def made(small_folder, items, tiny_banned, lora):
    return trained(small_folder, items, tiny_banned, lora)


@pytest.fixture(scope="module")
def saved_once(made, items, tiny_processor, small_folder, tmp_path_factory, lora) -> tuple[Path, Path]:
    """(checkpoint, folder of its base model); the base is named relative to a folder that is not the current one."""
    place = tmp_path_factory.mktemp("adapter")
    shutil.copytree(small_folder, place / "models" / "tiny")
    return save(place / "runs" / "one", "models/tiny", made, items, tiny_processor, lora), place


@pytest.fixture
def saved(saved_once, tmp_path, monkeypatch) -> Path:
    """A checkpoint of `made`, this test's own, its base model beside it in the current directory."""
    shutil.copytree(saved_once[1], tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place" / saved_once[0].relative_to(saved_once[1])


def test_frozen_weights_are_left_out_and_nothing_says_where_the_machine_keeps_things(saved, saved_once, made):
    assert not (saved / MODEL).exists()
    assert {p.name for p in (saved / ADAPTER).iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((saved / ADAPTER / "adapter_config.json").read_text())["base_model_name_or_path"] == "models/tiny"
    for path in saved.rglob("*.json"):
        assert str(saved_once[1]) not in path.read_text(), path.name
    tensors = io.load_optimizer_tensors(saved)
    assert tensors and all(".lora_" in name for name in tensors)
    assert sum(p.stat().st_size for p in (saved / ADAPTER).iterdir()) < 200_000


def test_it_comes_back_to_the_bit_and_goes_on_the_same(saved, made, items):
    policy, optimizer, _ = made
    model = load_saved(saved, settings())
    own = policy.model.state_dict()
    assert model.state_dict().keys() == own.keys()
    assert all(torch.equal(t, own[n]) for n, t in model.state_dict().items())
    again = Optimizer(model, Optim(lr=1e-2))
    again.load_state_tensors(io.load_optimizer_tensors(saved), 2)
    ours, theirs = optimizer.state_tensors(), again.state_tensors()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    resumed = Policy(model, temperature=policy.temperature, banned_ids=policy.banned_ids)
    assert proof_gap(resumed, io.load_proof(saved)) == 0.0


def test_merged_by_default_it_is_a_plain_model_proven_equal(saved, made, items, tmp_path):
    from transformers import AutoModelForImageTextToText

    merged = merge(saved, tmp_path / "out")
    assert merged.logp_gap is not None and merged.logp_gap < 1e-4
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert not [n for n in loaded.state_dict() if "lora" in n or "base_layer" in n]
    assert merged.parameters == sum(p.numel() for p in loaded.parameters())
    base = load_model(settings("models/tiny"))
    layer = "model.language_model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(loaded.state_dict()[layer], base.state_dict()[layer])
    assert torch.equal(loaded.lm_head.weight, base.lm_head.weight)
    assert not list((tmp_path / "out").glob("adapter_*"))


@pytest.mark.slow
def test_kept_as_an_adapter_peft_loads_it_and_it_is_proven_too(saved, made, items, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, AutoProcessor

    kept = merge(saved, tmp_path / "out", adapter=True)
    assert kept.logp_gap is not None and kept.logp_gap < 1e-4
    assert kept.parameters == sum(p.numel() for n, p in made[0].model.named_parameters() if ".lora_" in n)
    assert not list((tmp_path / "out").glob("model*"))
    base = AutoModelForImageTextToText.from_pretrained("models/tiny", dtype=torch.float32).eval()
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    policy = Policy(loaded.get_base_model(), temperature=0.7, banned_ids=made[0].banned_ids, shared_prefix=False)
    assert proof_gap(policy, io.load_proof(saved)) < 1e-4
    AutoProcessor.from_pretrained(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_an_adapter_that_is_not_the_proven_one_is_refused(saved, tmp_path, adapter):
    """Sound files, but not those whose log-probs were written down."""
    weights = saved / ADAPTER / "adapter_model.safetensors"
    tensors = io.load_file(weights)
    io.save_file({k: v * 1.5 for k, v in tensors.items()}, weights)
    seal(saved)
    with pytest.raises(CheckpointError, match="not the trained one"):
        merge(saved, tmp_path / "out", adapter=adapter)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_damaged_adapter_is_refused(saved, tmp_path, name):
    path = saved / ADAPTER / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for adapter in (False, True):
        with pytest.raises(CheckpointError, match="was changed"):
            merge(saved, tmp_path / "out", adapter=adapter)
    with pytest.raises(CheckpointError, match="was changed"):
        load_saved(saved, settings())


def test_a_missing_base_model_is_an_error_with_a_way_out(saved, tmp_path):
    shutil.move("models/tiny", "elsewhere")
    with pytest.raises(
        CheckpointError, match="the base model `models/tiny` of this adapter cannot be loaded"
    ) as caught:
        load_saved(saved, settings())
    assert "--base" in str(caught.value.hint)
    assert merge(saved, tmp_path / "out", base="elsewhere").logp_gap is not None


def test_a_base_model_with_one_number_changed_is_an_error(saved, tmp_path):
    (weights,) = Path("models/tiny").glob("*.safetensors")
    tensors = io.load_file(weights)
    name = next(n for n in tensors if "visual" in n and tensors[n].numel() > 100)
    tensors[name].view(-1)[7] += 1e-6
    io.save_file(tensors, weights, metadata={"format": "pt"})
    for work in (lambda: load_saved(saved, settings()), lambda: merge(saved, tmp_path / "out", adapter=True)):
        with pytest.raises(CheckpointError, match="its weights differ") as caught:
            work()
        assert "base model" in str(caught.value.hint)


def test_the_checksum_sees_values_places_and_names_and_nothing_else(frozen_tiny_model, monkeypatch):
    first = fingerprint(frozen_tiny_model)
    same = copy.deepcopy(frozen_tiny_model)
    assert fingerprint(same) == first
    with torch.no_grad():
        weight = same.model.language_model.norm.weight
        weight.copy_(weight.flip(0) if not torch.equal(weight, weight.flip(0)) else weight)
        weight[0], weight[1] = 2.0, 3.0
        one = fingerprint(same)
        weight[0], weight[1] = 3.0, 2.0
        assert len({first, one, fingerprint(same)}) == 3
    assert fingerprint(copy.deepcopy(frozen_tiny_model).bfloat16()) != first
    monkeypatch.setattr(load, "CHECKSUM_ELEMENTS", 1000)
    assert fingerprint(frozen_tiny_model) == first


@pytest.mark.parametrize(
    ("options", "told"),
    [({"adapter": True, "dtype": "bfloat16"}, "--dtype has no meaning"), ({"adapter": True}, None)],
)
def test_options_that_contradict_each_other(saved, tmp_path, options, told):
    if told:
        with pytest.raises(CheckpointError, match=told):
            merge(saved, tmp_path / "out", **options)
        return
    meta = json.loads((saved / "meta.json").read_text())
    del meta["lora"]
    write_meta(saved, meta)
    with pytest.raises(CheckpointError, match="has no adapter"):
        merge(saved, tmp_path / "out", **options)


def rewrite(checkpoint: Path, change) -> None:
    """Other adapter tensors, with a table that says so: what a faulty save would leave."""
    weights = checkpoint / ADAPTER / "adapter_model.safetensors"
    tensors = io.load_file(weights)
    change(tensors)
    io.save_file(tensors, weights)
    seal(checkpoint)


def lose(tensors) -> None:
    del tensors[next(k for k in sorted(tensors) if k.endswith("o_proj.lora_B.weight"))]


def add(tensors) -> None:
    tensors["base_model.model.model.language_model.layers.9.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 64)


def reshape(tensors) -> None:
    name = next(k for k in sorted(tensors) if k.endswith("o_proj.lora_B.weight"))
    tensors[name] = tensors[name][:-1].contiguous()


@pytest.mark.parametrize(
    ("change", "told"), [(lose, "lora_B.weight is missing"), (add, "is on no layer"), (reshape, "has shape")]
)
def test_an_adapter_with_a_module_missing_or_too_many_is_refused(saved, tmp_path, change, told):
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match=f"the adapter does not fit the model: .*{told}"):
        merge(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_folding_row_by_row_is_folding_the_whole_model(saved, tmp_path, dtype, monkeypatch):
    def whole(*_):
        raise CannotStreamError("a test asks for it")

    streamed = merge(saved, tmp_path / "streamed", dtype=dtype)
    monkeypatch.setattr(merges, "write_streaming", whole)
    loaded = merge(saved, tmp_path / "whole", dtype=dtype)
    assert (streamed.whole, loaded.whole) == (None, "a test asks for it")
    ours, theirs = (
        {k: v for p in weight_files(m.folder) for k, v in io.load_file(p).items()} for m in (streamed, loaded)
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (streamed.folder / name).read_bytes() == (loaded.folder / name).read_bytes()


@pytest.mark.slow
def test_a_base_that_is_the_checkpoint_of_a_run_is_streamed_too(
    made, items, tiny_processor, small_folder, tmp_path, lora
):
    base = tmp_path / "runs" / "sft" / "checkpoints" / "step-000007"
    saved = save_checkpoint(
        tmp_path / "runs" / "sft",
        io.CheckpointContent(7, {"dtype": "float32", "policy": {"temperature": 1.0, "banned_ids": []}}, {}),
        load_model(settings(small_folder)),
        tiny_processor,
        {},
    )
    assert saved == base
    checkpoint = save(tmp_path / "runs" / "rl", str(base), made, items, tiny_processor, lora)
    done = merge(checkpoint, tmp_path / "out")
    assert done.whole is None and done.logp_gap is not None and done.logp_gap < 1e-4
