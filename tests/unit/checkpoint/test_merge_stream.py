"""Streaming: what is written tensor by tensor is what transformers would have written, for every family."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from checkpoint_files import save_checkpoint, seal
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tinyfamilies import BUILDERS, build

from vlmrl.checkpoint import io, proof
from vlmrl.checkpoint.merge_weights import CannotStreamError, Fold, make_plan, match_written, write_streaming
from vlmrl.errors import CheckpointError
from vlmrl.model import safetensors_blocks
from vlmrl.model.model_facts import quiet_transformers
from vlmrl.model.safetensors_blocks import (
    TensorSpec,
    read_tensors,
    split_shards,
    weight_files,
    write_shards,
)
from vlmrl.model.stored_weights import publishing
from vlmrl.store.checkpoints import HF, MODEL, parse_size


class NoProcessor:
    def save_pretrained(self, folder: Path) -> None:
        """The families of these tests have none."""


def save(run: Path, model, dtype: str = "float32") -> Path:
    meta = {"dtype": dtype, "policy": {"temperature": 1.0, "banned_ids": []}}
    return save_checkpoint(run, io.CheckpointContent(3, meta, {}), model, NoProcessor(), {})


def written(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in weight_files(folder) for k, v in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", BUILDERS)
def test_every_family_is_written_as_transformers_writes_it_or_says_why_not(family, tmp_path):
    model = build(family).model
    checkpoint = save(tmp_path / "run", model)
    expected, found = tmp_path / "expected", tmp_path / "found"
    with quiet_transformers():
        # As a merge without streaming does it: the architecture from the configuration, the weights put in.
        from vlmrl.checkpoint.load import load_checkpoint_model
        from vlmrl.recipe.schema import Model

        whole = load_checkpoint_model(checkpoint, Model(path="x", dtype="float32", device="cpu"))
        with publishing(whole):
            whole.save_pretrained(expected)
    found.mkdir()
    parameters = write_streaming(checkpoint, found, None, None, 200_000)
    ours, theirs = written(found), written(expected)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) and ours[k].dtype == theirs[k].dtype for k in theirs)
    assert parameters == sum(p.numel() for p in model.parameters())
    for name in ("config.json", "generation_config.json"):
        assert json.loads((found / name).read_text()) == json.loads((expected / name).read_text()), name
    assert len(weight_files(found)) > 1


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_a_merged_folder_has_the_published_names_and_a_base_is_found_under_either(family, tmp_path):
    """vLLM reads the vision tower under `vision_model.`, which transformers leaves out for a model it built itself."""
    model = build(family).model
    checkpoint = save(tmp_path / "run", model)
    (tmp_path / "out").mkdir()
    write_streaming(checkpoint, tmp_path / "out", None, None, 10**9)
    names = written(tmp_path / "out").keys()
    assert "vision_tower.vision_model.embeddings.patch_embedding.weight" in names
    assert not [n for n in names if n.startswith("vision_tower.") and ".vision_model." not in n]
    with quiet_transformers():
        model.save_pretrained(tmp_path / "plain")
        again = type(model).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[n], t) for n, t in model.state_dict().items())
    merge_plan = make_plan(checkpoint / HF, torch.float32)
    assert "vision_tower.embeddings.patch_embedding.weight" in written(tmp_path / "plain")
    first, second = (
        match_written(merge_plan, read_tensors(weight_files(tmp_path / place))) for place in ("out", "plain")
    )
    assert first.keys() == second.keys() == merge_plan.tensors.keys()
    assert all(torch.equal(first[n].whole(), second[n].whole()) for n in first)


def test_a_tensor_made_of_several_cannot_be_streamed(tmp_path, monkeypatch):
    from vlmrl.checkpoint import merge_weights

    checkpoint = save(tmp_path, build("qwen2_5_vl").model)

    def join(model, tensors):
        rest = dict(tensors)
        pair = [rest.pop(k) for k in list(rest) if ".layers.0.self_attn.q_proj.weight" in k or "k_proj.weight" in k]
        return rest | ({"qk": torch.cat(pair)} if len(pair) > 1 else {})

    monkeypatch.setattr(merge_weights, "as_published", join)
    with pytest.raises(CannotStreamError, match="several tensors"):
        make_plan(checkpoint / HF, torch.float32)


@pytest.mark.parametrize("block_bytes", [1, 256, 1 << 25])
def test_the_size_of_blocks_changes_nothing(block_bytes, tmp_path, monkeypatch):
    model = build("qwen2_5_vl").model
    checkpoint = save(tmp_path / "run", model)
    monkeypatch.setattr(safetensors_blocks, "BLOCK_BYTES", block_bytes)
    (tmp_path / "out").mkdir()
    write_streaming(checkpoint, tmp_path / "out", "bfloat16", None, 10**9)
    (stored,) = (checkpoint / MODEL).glob("*.safetensors")
    for (_, ours), (_, own) in zip(
        sorted(written(tmp_path / "out").items()), sorted(_by_written_name(checkpoint, stored).items()), strict=True
    ):
        assert torch.equal(ours, own.bfloat16())


def _by_written_name(checkpoint: Path, stored: Path) -> dict[str, torch.Tensor]:
    merge_plan = make_plan(checkpoint / HF, torch.float32)
    tensors = load_file(stored)
    return {o.name: tensors[next(n for n in merge_plan.names[o.source] if n in tensors)] for o in merge_plan.outputs}


def test_float32_masters_of_a_bfloat16_run_are_rounded_once(tmp_path):
    model = build("qwen2_5_vl").model
    checkpoint = save(tmp_path / "run", model, "bfloat16")
    (tmp_path / "out").mkdir()
    write_streaming(checkpoint, tmp_path / "out", None, None, 10**9)
    (path,) = weight_files(tmp_path / "out")
    tensors = load_file(path)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    own = dict(model.named_parameters())["model.language_model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], own.bfloat16())


def test_a_fold_is_the_sum_and_in_dora_each_row_has_its_length():
    """W = [[3, 4], [0, 2]], up @ down = [[1], [2]] @ [[0, 1]] = [[0, 1], [0, 2]], scale 2: W' = [[3, 6], [0, 6]]."""
    weight = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    down, up = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0], [2.0]])
    assert Fold("w", down, up, 2.0, None).add(weight, 0).tolist() == [[3.0, 6.0], [0.0, 6.0]]
    # Row lengths sqrt(45) and 6; magnitudes 1 and 12: the second row becomes [0, 12]. Given alone, it begins at row 1.
    dora = Fold("w", down, up, 2.0, torch.tensor([1.0, 12.0]))
    assert dora.add(weight[1:], 1).tolist() == [[0.0, 12.0]]
    assert dora.add(weight, 0)[0].tolist() == pytest.approx([3 / math.sqrt(45), 6 / math.sqrt(45)])
    with pytest.raises(CheckpointError, match="would not be finite"):
        dora.add(torch.tensor([[math.inf, 0.0]]), 0)


@st.composite
def tiled(draw):
    """A tensor and boxes that tile it, each with the file (0 to 2) that holds it."""
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    tensor = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    boxes = []
    for first, last in itertools.pairwise(cuts):
        sides = sorted({0, columns, *draw(st.lists(st.integers(0, columns), max_size=2))})
        boxes += [((first, a), (last, b)) for a, b in itertools.pairwise(sides)]
    return tensor, [(start, end, draw(st.integers(0, 2))) for start, end in boxes]


def write_boxes(folder: Path, tensor: torch.Tensor, boxes) -> list[Path]:
    """One file a process, as torch.distributed.checkpoint writes them; a process has one part of a tensor at most, so
    that further ones get files of their own."""
    paths = []
    for number, (start, end, owner) in enumerate(boxes):
        path = folder / f"shard-{owner}-{number}.safetensors"
        part = tensor[start[0] : end[0], start[1] : end[1]].contiguous()
        save_file({"w": part}, path, metadata={"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": list(start)}})})
        paths.append(path)
    return paths


@given(tiled(), st.integers(1, 64), st.data())
def test_parts_in_any_tiling_are_put_together_and_a_lost_or_doubled_one_is_noticed(
    tmp_path_factory, made, block_bytes, data
):
    tensor, boxes = made
    paths = write_boxes(tmp_path_factory.mktemp("tiles"), tensor, boxes)
    before, safetensors_blocks.BLOCK_BYTES = safetensors_blocks.BLOCK_BYTES, block_bytes
    try:
        stored = read_tensors(paths)["w"]
        assert stored.shape == tuple(tensor.shape) and torch.equal(stored.whole(), tensor)
        if len(boxes) > 1:
            lost = data.draw(st.integers(0, len(boxes) - 1))
            kept = paths[:lost] + paths[lost + 1 :]
            start, end, _ = boxes[lost]
            try:
                smaller = read_tensors(kept)["w"].shape
            except CheckpointError as error:
                assert "do not form a whole tensor" in error.message
            else:  # the lost part was the whole last row or column: the model's own shape says what is missing
                assert smaller != tuple(tensor.shape)
                assert end[0] == len(tensor) or end[1] == tensor.shape[1] or start == (0, 0)
        with pytest.raises(CheckpointError, match="do not form a whole tensor"):
            read_tensors([*paths, paths[0]])
    finally:
        safetensors_blocks.BLOCK_BYTES = before


def test_a_part_that_is_there_twice_does_not_make_up_for_one_that_is_missing(tmp_path):
    """Rows 0-1 twice and 4-5, of 6: as many numbers as the whole."""
    tensor = torch.arange(12.0).view(6, 2)
    first, last = ((0, 0), (2, 2), 0), ((4, 0), (6, 2), 1)
    with pytest.raises(CheckpointError, match="do not form a whole tensor"):
        read_tensors(write_boxes(tmp_path, tensor, [first, first, last]))


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 80))
def test_shards_hold_everything_in_order_and_none_is_too_large(sizes, limit):
    specs = [TensorSpec(str(i), torch.uint8, (n,)) for i, n in enumerate(sizes)]
    cut = split_shards(specs, limit)
    assert [s for shard in cut for s in shard] == specs
    assert all(sum(s.bytes for s in shard) <= limit or len(shard) == 1 for shard in cut)


def test_files_are_what_safetensors_reads_with_every_tensor_at_a_multiple_of_its_width(tmp_path):
    tensors = {
        "odd": torch.arange(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "wide": torch.arange(6, dtype=torch.int64).view(2, 3),
        "flags": torch.tensor([True, False, True]),
    }
    specs = [TensorSpec(k, v.dtype, tuple(v.shape)) for k, v in tensors.items()]
    weight_map = write_shards(tmp_path, specs, lambda name: iter([tensors[name]]), 10**6)
    assert set(weight_map.values()) == {"model-00001-of-00001.safetensors"}
    (path,) = weight_files(tmp_path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
    stored = read_tensors([path])
    assert all(s.pieces[0].position % s.dtype.itemsize == 0 for s in stored.values())
    assert all(torch.equal(stored[k].whole(), v) for k, v in tensors.items())
    index = json.loads((tmp_path / safetensors_blocks.WEIGHTS_INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(s.bytes for s in specs), "total_parameters": 3 + 1 + 6 + 3}


def test_what_was_announced_must_be_written(tmp_path):
    spec = TensorSpec("w", torch.float32, (4,))
    with pytest.raises(ValueError, match="8 bytes were written"):
        write_shards(tmp_path, [spec], lambda _: iter([torch.zeros(2)]), 100)
    with pytest.raises(ValueError, match="the header says"):
        write_shards(tmp_path, [spec], lambda _: iter([torch.zeros(4, dtype=torch.float64)]), 100)


@pytest.mark.parametrize("keep", [4, 20, -1])
def test_a_file_cut_short_is_named(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is (cut short|damaged)"):
        read_tensors([path])


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500mb", 500 * 10**6), ("2 GiB", 2**31), ("0.5KiB", 512), ("7B", 7)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5", "GB", "-1GB", "0GB", "5iB", "five GB", "5GB of"])
def test_what_is_no_size(text):
    with pytest.raises(CheckpointError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(("family", "mapped"), [("qwen2_5_vl", True), ("qwen3_5_moe", False)])
def test_a_model_larger_than_the_memory_is_proven_from_mapped_files_or_says_why_not(
    family, mapped, tmp_path, monkeypatch
):
    checkpoint = save(tmp_path / "run", build(family).model)
    (tmp_path / "out").mkdir()
    write_streaming(checkpoint, tmp_path / "out", None, None, 10**9)
    asked = proof.ProofRequest(str(checkpoint), str(tmp_path / "out"), "float32")
    io.save_file({"count": torch.tensor(0)}, checkpoint / "proof.safetensors")
    seal(checkpoint, policy={"temperature": 1.0, "banned_ids": []})
    assert proof.prove(asked).skipped is None
    monkeypatch.setattr(proof, "usable_memory", lambda: 1000)
    why = proof.prove(asked).skipped
    assert why is None if mapped else why is not None and "does not fit in memory (1,000)" in why


def test_loading_what_was_written_maps_the_files(tmp_path):
    """The memory that the proof's process needs of its own does not hold the weights, however large."""
    from transformers import AutoModelForImageTextToText

    checkpoint = save(tmp_path / "run", build("qwen2_5_vl").model)
    (tmp_path / "out").mkdir()
    write_streaming(checkpoint, tmp_path / "out", "bfloat16", None, 100_000)
    with quiet_transformers():
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    assert len(ranges) > 1
    unmapped = [n for n, p in model.named_parameters() if not any(a <= p.data_ptr() < b for a, b in ranges)]
    assert unmapped == []
