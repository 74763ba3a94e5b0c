"""Checkpoints: exact, all or nothing, and refused when anything in them is not what was saved."""

from __future__ import annotations

import copy
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
import warm
from checkpoint_files import contents_of, prove_items, save_checkpoint, seal

from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.checkpoint import io
from vlmrl.checkpoint.load import load_checkpoint_model
from vlmrl.checkpoint.proof import proof_gap
from vlmrl.dist.fsdp import HostCopies
from vlmrl.errors import CheckpointError
from vlmrl.model.load import prepare_model
from vlmrl.model.policy import Policy
from vlmrl.model.safetensors_blocks import read_tensors
from vlmrl.recipe.schema import Model, Optim
from vlmrl.store import checkpoints as sealed
from vlmrl.store.checkpoints import DATA, HF, MODEL, OPTIMIZER, PROOF, RNG, read_meta
from vlmrl.store.layout import COMPLETE, META, complete_checkpoints
from vlmrl.train.learner import Optimizer
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import PolicyGradient, update


def train_once(policy: Policy, optimizer: Optimizer, items) -> None:
    batch = StepBatch(items, [1.0, -1.0, 0.5, -0.5], ["x"] * 4)
    update(policy, optimizer, batch, PolicyGradient(ALGORITHMS["grpo"]), lr=1e-3, tokens_per_row=200, max_tokens=8)


def meta_of(policy: Policy, dtype: str = "float32") -> dict:
    return {"dtype": dtype, "policy": {"temperature": policy.temperature, "banned_ids": list(policy.banned_ids)}}


def trained_copy(model, banned, items) -> tuple[Policy, Optimizer]:
    """The same weights and moments every time: one update of a copy."""
    policy = Policy(copy.deepcopy(model), temperature=0.7, banned_ids=banned)
    optimizer = Optimizer(policy.model, Optim(lr=1e-3))
    train_once(policy, optimizer, items)
    return policy, optimizer


@pytest.fixture
def trained(frozen_tiny_model, tiny_banned, items):
    return trained_copy(frozen_tiny_model, tiny_banned, items)


@pytest.fixture(scope="module")
def saved_once(_tiny_model, tiny_banned, items, tiny_processor, tmp_path_factory) -> Path:
    policy, optimizer = trained_copy(_tiny_model, tiny_banned, items)
    what = io.CheckpointContent(3, meta_of(policy), {"progress": {"step": 3}}, prove_items(policy, items[1:3]))
    run = tmp_path_factory.mktemp("saved")
    return save_checkpoint(run, what, policy.model, tiny_processor, optimizer.state_tensors())


@pytest.fixture
def saved(saved_once, tmp_path) -> Path:
    """A checkpoint of `trained`, this test's own."""
    folder = tmp_path / "run" / saved_once.parent.name / saved_once.name
    shutil.copytree(saved_once, folder)
    return folder


def settings(dtype: str = "float32") -> Model:
    return Model(path="x", dtype=dtype, device="cpu")  # type: ignore[arg-type]


def test_many_files_hold_the_same(trained, tiny_processor, tmp_path, monkeypatch):
    """No file is much larger than the limit, and all together are the model and its moments."""
    policy, optimizer = trained
    monkeypatch.setattr(io, "MIN_FILE_BYTES", 100_000)
    folder = save_checkpoint(
        tmp_path, io.CheckpointContent(3, meta_of(policy), {}), policy.model, tiny_processor, optimizer.state_tensors()
    )
    largest = max(t.nbytes for t in policy.model.state_dict().values())
    for part in (MODEL, OPTIMIZER):
        sizes = [p.stat().st_size for p in (folder / part).glob("*.safetensors")]
        assert 3 < len(sizes) <= 2 * io.MAX_FILES
        assert max(sizes) < max(largest, sum(sizes) // io.MAX_FILES, 100_000) + 20_000  # and its header
    own = policy.model.state_dict()
    model = load_checkpoint_model(folder, settings())
    assert all(torch.equal(v, own[k]) for k, v in model.state_dict().items())
    moments = io.load_optimizer_tensors(folder)
    assert moments.keys() == optimizer.state_tensors().keys()
    assert all(torch.equal(torch.as_tensor(v), moments[k]) for k, v in optimizer.state_tensors().items())


def test_weights_and_optimizer_come_back_to_the_bit(trained, saved, items):
    policy, optimizer = trained
    model = prepare_model(load_checkpoint_model(saved, settings()), settings())
    own = policy.model.state_dict()
    assert model.state_dict().keys() == own.keys()
    assert all(torch.equal(v, own[k]) for k, v in model.state_dict().items())
    tensors = io.load_optimizer_tensors(saved)
    expected = optimizer.state_tensors()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(v, expected[k]) and v.dtype == expected[k].dtype for k, v in tensors.items())
    # and so does what follows
    resumed = Policy(model, temperature=policy.temperature, banned_ids=policy.banned_ids)
    again = Optimizer(model, Optim(lr=1e-3))
    again.load_state_tensors(tensors, 1)
    for p, o in ((policy, optimizer), (resumed, again)):
        train_once(p, o, items)
    assert all(torch.equal(v, own[k]) for k, v in model.state_dict().items())


def test_buffers_that_are_not_saved_are_made_again_the_same(trained, saved):
    model = prepare_model(load_checkpoint_model(saved, settings()), settings())
    own = dict(trained[0].model.named_buffers())
    assert own and all(torch.equal(v, own[k]) for k, v in model.named_buffers())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_in_either_dtype_equals_a_cast_of_what_was_saved(trained, saved, dtype):
    model = load_checkpoint_model(saved, settings(dtype))
    own = trained[0].model.state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, own[name].to(tensor.dtype)), name


def test_bfloat16_with_its_masters_comes_back_to_the_bit(tiny_model, tiny_processor, items, tmp_path):
    model = tiny_model.to(torch.bfloat16)
    policy, optimizer = Policy(model), Optimizer(model, Optim(lr=1e-3))
    train_once(policy, optimizer, items)
    what = io.CheckpointContent(1, meta_of(policy, "bfloat16"), {})
    folder = save_checkpoint(tmp_path, what, model, tiny_processor, optimizer.state_tensors())
    other = load_checkpoint_model(folder, settings("bfloat16"))
    own = model.state_dict()
    assert all(torch.equal(v, own[k]) for k, v in other.state_dict().items())
    again = Optimizer(other, Optim(lr=1e-3))
    again.load_state_tensors(io.load_optimizer_tensors(folder), 1)
    theirs = again.state_tensors()
    assert any(k.startswith("master.") for k in theirs)
    assert all(torch.equal(v, theirs[k]) for k, v in optimizer.state_tensors().items())


def test_tied_weights_are_saved_once_and_stay_tied(saved):
    names = read_tensors(io.weight_files_of(saved, MODEL)).keys()
    assert len([n for n in names if "embed_tokens" in n or "lm_head" in n]) == 1
    model = load_checkpoint_model(saved, settings())
    assert model.lm_head.weight.data_ptr() == model.model.language_model.embed_tokens.weight.data_ptr()


def test_the_optimizer_folder_is_missing_when_no_step_was_taken(tiny_model, tiny_processor, tmp_path):
    what = io.CheckpointContent(0, meta_of(Policy(tiny_model)), {})
    narrow = {"model.language_model.norm.weight": torch.bfloat16}
    folder = save_checkpoint(tmp_path, what, tiny_model, tiny_processor, {}, dtypes=narrow)
    assert not (folder / OPTIMIZER).exists()
    assert io.load_optimizer_tensors(folder) == {}
    assert io.load_proof(folder) == {}
    stored = read_tensors(io.weight_files_of(folder, MODEL))
    assert {n: t.dtype for n, t in stored.items() if t.dtype != torch.float32} == narrow


def test_data_and_random_state_come_back(saved):
    assert io.load_data(saved) == {"progress": {"step": 3}}
    state = torch.random.get_rng_state()
    torch.manual_seed(12)
    io.load_rng(saved)
    assert torch.equal(torch.random.get_rng_state(), io.load_file(saved / RNG)["torch"])
    torch.random.set_rng_state(state)


def test_the_proof_is_reproduced_and_shows_another_model(trained, saved):
    policy, _ = trained
    assert proof_gap(policy, io.load_proof(saved)) < 1e-5
    with torch.no_grad():
        policy.model.model.language_model.norm.weight.mul_(1.01)
    assert proof_gap(policy, io.load_proof(saved)) > 1e-3


def test_a_proof_of_a_broken_model_is_not_a_gap_of_zero(trained, saved):
    policy, _ = trained
    with torch.no_grad():
        policy.model.model.language_model.norm.weight.fill_(float("nan"))
    assert not proof_gap(policy, io.load_proof(saved)) < 1e9


def everything(folder: Path, model) -> None:
    """All that resume and merge read."""
    load_checkpoint_model(folder, settings())
    io.load_optimizer_tensors(folder)
    io.load_data(folder)
    io.load_rng(folder)
    io.load_proof(folder)


def test_without_complete_a_checkpoint_does_not_exist(saved, tiny_model):
    (saved / COMPLETE).unlink()
    assert complete_checkpoints(saved.parent.parent) == []
    with pytest.raises(CheckpointError, match="not complete"):
        everything(saved, tiny_model)


NAMES = [
    f"{MODEL}/model-00001-of-00001.safetensors",
    f"{OPTIMIZER}/model-00001-of-00001.safetensors",
    f"{HF}/config.json",
    f"{HF}/tokenizer.json",
    DATA,
    RNG,
    PROOF,
    META,
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [0.02, 0.5, 0.98])
def test_one_changed_byte_anywhere_is_refused(saved, tiny_model, name, where):
    everything(saved, tiny_model)
    path = saved / name
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="was changed since it was saved") as caught:
        everything(saved, tiny_model)
    assert str(saved) in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_missing_is_refused(saved, tiny_model, name):
    (saved / name).unlink()
    with pytest.raises(CheckpointError):
        everything(saved, tiny_model)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_cut_short_is_refused(saved, tiny_model, name):
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="was changed since it was saved"):
        everything(saved, tiny_model)


def test_another_schema_is_refused_by_number(saved):
    seal(saved, schema=99)
    with pytest.raises(CheckpointError, match="schema 99"):
        read_meta(saved)


def test_a_tensor_that_is_missing_is_named(saved, trained):
    weights = saved / NAMES[0]
    tensors = io.load_file(weights)
    lost = sorted(tensors)[3]
    io.save_file({k: v for k, v in tensors.items() if k != lost}, weights)
    seal(saved)
    with pytest.raises(CheckpointError, match="1 tensors missing") as caught:
        io.load_weights(saved, trained[0].model)
    assert lost in (caught.value.hint or "")


def test_a_tensor_of_another_shape_is_an_error_in_words(saved, trained):
    weights = saved / NAMES[0]
    tensors = io.load_file(weights)
    name = "model.language_model.norm.weight"
    io.save_file(tensors | {name: torch.zeros(7)}, weights)
    seal(saved)
    before = copy.deepcopy(trained[0].model.state_dict())
    with pytest.raises(CheckpointError):
        io.load_weights(saved, trained[0].model)
    assert all(torch.equal(v, before[k]) for k, v in trained[0].model.state_dict().items())


def test_saving_a_step_again_replaces_it(trained, saved, tiny_processor):
    policy, optimizer = trained
    with torch.no_grad():
        policy.model.model.language_model.norm.weight.mul_(2)
    what = io.CheckpointContent(3, meta_of(policy), {"progress": {"step": 4}})
    save_checkpoint(saved.parent.parent, what, policy.model, tiny_processor, optimizer.state_tensors())
    assert io.load_data(saved) == {"progress": {"step": 4}}
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


SCRIPT = """
import sys
from pathlib import Path
from vlmrl.checkpoint import io
from vlmrl.model.load import load_model, load_processor
from vlmrl.recipe.schema import Model
settings = Model(path=sys.argv[1], dtype="float32", device="cpu")
model, processor = load_model(settings), load_processor(settings)
import torch
for step in (1, 2):
    meta = {"dtype": "float32", "policy": {"temperature": 1.0, "banned_ids": []}}
    content = io.CheckpointContent(step, meta, {"step": step})
    io.write_staged(io.stage(Path(sys.argv[2]), content, model, processor, {"a": torch.ones(3)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", ["mid-save:2", "before-complete:2"])
def test_killed_while_saving_the_older_checkpoint_stays_and_the_new_one_does_not_exist(tiny_folder, tmp_path, point):
    run = tmp_path / "run"
    env = os.environ | {"VLMRL_CRASH_AT": point}
    died = warm.run([sys.executable, "-c", SCRIPT, str(tiny_folder), str(run)], env=env, capture_output=True)
    assert died.returncode == 137, died.stderr.decode()
    (left,) = complete_checkpoints(run)
    assert left.name == "step-000001"
    assert io.load_data(left) == {"step": 1}
    load_checkpoint_model(left, settings())
    # the same save afterwards succeeds over what the kill left
    done = warm.run([sys.executable, "-c", SCRIPT, str(tiny_folder), str(run)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert [p.name for p in complete_checkpoints(run)] == ["step-000001", "step-000002"]


@pytest.fixture
def full_disk():
    """No file may grow past 3,000 bytes: what a full disk does, to this process, in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int = 3_000) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [3_000, 1_000_000 + 500_000])
def test_a_full_disk_is_an_error_in_words_and_leaves_the_older_checkpoint_alone(
    trained, saved, tiny_processor, full_disk, size
):
    policy, optimizer = trained
    what = io.CheckpointContent(4, meta_of(policy), {})
    full_disk(size)
    with pytest.raises(CheckpointError, match="could not be saved"):
        save_checkpoint(saved.parent.parent, what, policy.model, tiny_processor, optimizer.state_tensors())
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]
    everything(saved, policy.model)


def test_a_folder_that_cannot_be_written_is_an_error_in_words(trained, tiny_processor, tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="could not be saved"):
        save_checkpoint(tmp_path, io.CheckpointContent(1, {}, {}), trained[0].model, tiny_processor, {})


def test_a_checkpoint_can_be_moved(saved, tmp_path, tiny_model):
    moved = tmp_path / "elsewhere"
    shutil.move(saved, moved)
    everything(moved, tiny_model)


def test_what_was_copied_is_written_whatever_training_does_meanwhile(trained, items, tiny_processor, tmp_path):
    policy, optimizer = trained
    what = io.CheckpointContent(3, meta_of(policy), {"step": 3}, prove_items(policy, items[1:3]))
    given = policy.model, tiny_processor
    at_once = save_checkpoint(tmp_path / "once", what, *given, optimizer.state_tensors())
    staged = io.stage(tmp_path / "beside", what, *given, optimizer.state_tensors(), copies=HostCopies())
    lying = io.stage(tmp_path / "lying", what, *given, optimizer.state_tensors())
    assert not complete_checkpoints(tmp_path / "beside")
    train_once(policy, optimizer, items)
    torch.rand(3)
    beside, changed = io.write_staged(staged), io.write_staged(lying)
    assert contents_of(beside) == contents_of(at_once)
    differing = {n.split("/")[0] for n, content in contents_of(changed).items() if content != contents_of(at_once)[n]}
    assert differing == {"model", "optimizer"}, "without copies it would be another checkpoint"


class OfTwo:
    """The first of two processes, the second of which says `other`."""

    size = 2

    def __init__(self, other: Exception | None = None) -> None:
        self.other = other

    def mine(self, count: int) -> range:
        return range(0, count, 2)

    def gather(self, mine):
        return [mine, self.other]


def test_several_processes_read_each_file_once_between_them(saved, monkeypatch):
    hashed: list[str] = []
    real = sealed.sha256_of
    monkeypatch.setattr(sealed, "sha256_of", lambda path: hashed.append(path.name) or real(path))
    count = len(io.check_files(saved))
    assert len(hashed) == count
    hashed.clear()
    with io.compared_once(saved, OfTwo()):
        io.check_files(saved)
        assert len(hashed) == -(-count // 2)
        (saved / "data.json").write_text("{}")
        with pytest.raises(CheckpointError, match=r"data.json was changed"):
            io.check_files(saved, "data.json")  # its size is still looked at
    with pytest.raises(CheckpointError, match=r"data.json was changed"):
        io.check_files(saved, "data.json")
    hashed.clear()
    with io.compared_once(saved, io.ALONE):
        io.check_files(saved, "hf")
    assert hashed


def test_a_damaged_file_is_named_by_all_whoever_has_read_it(saved):
    name = sorted(read_meta(saved)["files"])[0]
    good = (saved / name).read_bytes()
    (saved / name).write_bytes(bytes(len(good)))
    with pytest.raises(CheckpointError, match=f"{name} was changed"), io.compared_once(saved, OfTwo()):
        pass
    (saved / name).write_bytes(good)
    other = OfTwo(CheckpointError("the other"))
    with pytest.raises(CheckpointError, match="the other"), io.compared_once(saved, other):
        pass
    (saved / name).write_bytes(bytes(len(good)))
    io.check_files(saved, "hf")
    with pytest.raises(CheckpointError, match=f"{name} was changed"):
        io.check_files(saved)  # nothing is remembered of a comparison that failed


def test_a_disk_that_is_full_when_the_tokenizer_is_written_is_told_in_words(trained, tmp_path):
    class Full:
        def save_pretrained(self, folder):
            raise Exception("No space left on device (os error 28)")

    with pytest.raises(CheckpointError, match="step 1 could not be saved: No space left"):
        save_checkpoint(tmp_path, io.CheckpointContent(1, {}, {}), trained[0].model, Full(), {})
    assert not list(tmp_path.rglob(".tmp-*"))

    class Broken:
        def save_pretrained(self, folder):
            raise Exception("a bug")

    with pytest.raises(Exception, match=r"^a bug$"):
        save_checkpoint(tmp_path, io.CheckpointContent(1, {}, {}), trained[0].model, Broken(), {})
