"""The GPU benchmark at a toy size on a CPU: its cases, its counts, its models' shapes, and that it stands alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_flops import counted
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3_5Config, Qwen3Config

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import gpu  # noqa: E402
import gpu_world  # noqa: E402
from flops import alone_work, forked_work, padded_work, prime_rl_flops, shared_work, training_flops  # noqa: E402
from gpu_world import MODELS, Case, World, batches, make_config, make_model, one_pass, rank_of, shape_of  # noqa: E402

from vlmrl.model.families import part_of  # noqa: E402
from vlmrl.setup.memory_sizes import parse_gpu  # noqa: E402

MISSING = """
import builtins
real = builtins.__import__

def without(name, *args, **kwargs):
    if name.split(".")[0] in ("pydantic", "datasets", "vllm", "typer", "rich", "pyarrow", "bitsandbytes", "cairosvg"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return real(name, *args, **kwargs)

builtins.__import__ = without
"""
PUBLISHED = {
    "Qwen2.5-VL-3B": 3_754_622_976,
    "Qwen2.5-VL-7B": 8_292_166_656,
    "Qwen3-VL-4B": 4_437_815_808,
}
"""Parameters in the published safetensors."""


def case(path: str, model: str = "Qwen2.5-VL-3B", **more) -> Case:
    return Case("update", more.pop("work", "taxon"), model, path, "sdpa", **more)


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(make_config(name, smoke=False))
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


def test_the_hybrid_is_what_transformers_calls_its_default():
    ours, default = make_config("Qwen3.5-9B", smoke=False), Qwen3_5Config()
    for part, names in (
        (
            "text_config",
            "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
            " head_dim vocab_size linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"
            " layer_types",
        ),
        ("vision_config", "depth hidden_size intermediate_size num_heads patch_size"),
    ):
        for name in names.split():
            assert getattr(getattr(ours, part), name) == getattr(getattr(default, part), name), name
    assert ours.vision_config.out_hidden_size == ours.text_config.hidden_size


def test_the_groups_are_those_of_the_two_works():
    """800 pixels: 58 patches of 14 (812 pixels), 841 tokens an image; 50 of 16, 625 tokens."""
    taxon, other, vfig = (
        shape_of(case("shared", m, work=w), smoke=False)
        for m, w in (("Qwen2.5-VL-7B", "taxon"), ("Qwen3-VL-4B", "taxon"), ("Qwen3-VL-4B", "vfig"))
    )
    assert taxon.grids == ((58, 58),) * 2 and taxon.prompt == 300 + 2 * 843 and taxon.responses == (300,) * 16
    assert other.grids == ((50, 50),) * 2 and other.prompt == 300 + 2 * 627
    assert vfig.prompt == 9000 and len(vfig.responses) == 8 and (vfig.responses[0], vfig.responses[-1]) == (1062, 8500)


def test_the_text_case_has_the_shape_and_the_count_that_prime_rl_published():
    """The text model has Qwen3-4B's parameters; 6,229 tokens/s are 21.7% of an H100 by the count here."""
    [case] = [c for c in gpu.plan(False) if c.work == "text"]
    shape = shape_of(case, smoke=False)
    assert (case.rank, shape.grids, shape.prompt + sum(shape.responses)) == (16, (), 16_384)
    dimensions = Qwen3Config(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(dimensions)
        ours = AutoModelForImageTextToText.from_config(make_config(case.model, smoke=False))
    text = sum(p.numel() for n, p in ours.named_parameters() if part_of(n) in ("language", "embeddings"))
    assert text == sum(p.numel() for p in theirs.parameters()) == 4_022_468_096
    model = make_model(case, torch.device("meta"), torch.bfloat16, smoke=False)
    assert 6_229 * prime_rl_flops(model, 16_384) / 16_384 / gpu.PEAKS["NVIDIA H100 80GB HBM3"] == pytest.approx(
        0.217, abs=5e-4
    )
    assert "6,229 tokens/s, MFU 21.7%, 23.3 GiB" in gpu.TEXT_NOTE and "no image" in gpu.TEXT_NOTE


@pytest.mark.parametrize(("name", "trained"), [("H100", "LoRA64"), ("H200", "adamw_bf16_kahan")])
def test_the_7b_case_is_the_first_that_fits_the_gpu_by_the_memory_plan(name, trained):
    by_name = {c.name: c for c in gpu.plan(False)}
    cases = [by_name[f"taxon/Qwen2.5-VL-7B/{way}/shared-varlen"] for way in ("adamw_bf16_kahan", "LoRA64")]
    chosen, words = gpu.first_that_fits(cases, False, parse_gpu(name))
    assert chosen.name == f"taxon/Qwen2.5-VL-7B/{trained}/shared-varlen"
    assert words.endswith({"H100": " of 79 GiB", "H200": " of 140 GiB"}[name])


def test_the_day_measures_the_case_that_fits_and_says_why(monkeypatch):
    monkeypatch.setattr(gpu, "run_case", lambda case, smoke: {"case": case.name, "note": "slow"})
    monkeypatch.setattr(gpu, "first_that_fits", lambda cases, smoke: (cases[1], "28 of 79 GiB"))
    names = [f"taxon/Qwen2.5-VL-7B/{way}/shared-varlen" for way in ("adamw_bf16_kahan", "LoRA64")]
    [row] = gpu.measure_first_that_fits(False, names)
    assert (row["case"], row["note"]) == (names[1], "slow; 28 of 79 GiB")


@pytest.mark.slow
@pytest.mark.parametrize("budget", [10_000, 80])
@pytest.mark.parametrize(("work", "rank"), [("taxon", 0), ("vfig", 4)])
@pytest.mark.parametrize("model", MODELS)
def test_every_path_says_the_same_and_counts_its_tokens(model, work, rank, budget):
    """Log-probs of all paths agree, whole or split over rows; the work of each is what is asked of it."""
    shape = shape_of(case("shared", model, work=work), smoke=True)
    facts = (shape.prompt, shape.responses, shape.grids)
    expected = {"padded": padded_work, "packed": alone_work, "shared": shared_work}
    said = {}
    for path in ("padded", "packed", "shared"):
        if path == "packed" and model.startswith("Qwen3.5-9B"):
            continue
        world = World(case(path, model, work=work, rank=rank, tokens_per_row=budget), smoke=True)
        hybrid = world.policy.sharing == "forked" and path == "shared"
        with torch.no_grad():
            said[path], works = one_pass(path, world.policy, world.items, budget, backward=False)
        assert sum(w.targets for w in works) == sum(shape.responses) == len(said[path])
        if budget == 10_000:
            (found,), wanted = works, forked_work(*facts) if hybrid else expected[path](*facts)
            assert (found.spans, found.images) == (wanted.spans, wanted.images)
        else:
            assert len(works) > 1 and (hybrid or all(w.tokens <= max(budget, *map(sum, w.spans)) for w in works))
    for path in said:
        assert float((said[path] - said["padded"]).abs().max()) <= 1e-5, path


def test_an_update_with_kernels_that_are_not_installed_is_skipped(monkeypatch):
    monkeypatch.setattr(gpu, "has_kernels", lambda name: False)
    monkeypatch.setattr(gpu, "run_case", lambda case, smoke: pytest.fail("it was run"))
    [row] = gpu.measure_cases(False, "*/fa3")
    assert row["outcome"] == "skipped: needs flash_attn_interface" and row["case"].endswith("recompute-False/fa3")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["padded", "packed", "shared"])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("model", ["Qwen2.5-VL-3B", "Qwen3-VL-4B"])
def test_flops_of_every_path_are_what_torch_counts(model, rank, path, monkeypatch):
    """Matrix products one for one but for the head's extra row of each batch. SDPA's operations are at least the pairs
    of the formula, and at most all pairs of a batch's sequences, masked or not."""
    monkeypatch.setattr(gpu_world, "checkpoint_gradients", lambda model, setting: None)
    world = World(case(path, model, rank=rank, tokens_per_row=160), smoke=True)
    one_pass(path, world.policy, world.items, 160)  # positions are kept from here on
    world.model.zero_grad()
    works: list = []
    ops = counted(lambda: works.extend(one_pass(path, world.policy, world.items, 160)[1]))
    parts = [training_flops(world.model, work) for work in works]
    total = {name: sum(p.forward[name] + p.backward[name] for p in parts) for name in parts[0].forward}
    products = sum(ops.get(op, 0) for op in ("mm", "addmm", "convolution", "convolution_backward"))
    asked = 2 * 64 * 320 * len(works)
    assert products == sum(total[p] for p in ("vision", "connector", "language", "embeddings")) + asked
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    forward = sum(p.forward["attention"] + p.forward["vision attention"] for p in parts)
    assert forward <= ops[attention] <= 2 * forward and ops[f"{attention}_backward"] <= 2.5 * ops[attention]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16_kahan"])
@pytest.mark.parametrize("rank", [0, 4])
def test_states_of_a_rank_are_the_bytes_that_an_update_leaves(optimizer, rank):
    world = World(Case("parity", "taxon", "Qwen2.5-VL-3B", "shared", "sdpa", optimizer, rank), smoke=True)
    world.optimizer = gpu_world.make_optimizer(world.policy, optimizer)
    world.gradients()
    masters = world.optimizer.masters.values()
    held = sum(p.numel() * p.element_size() for p in world.model.parameters())
    held += sum(m.grad.numel() * m.grad.element_size() for m in masters)
    world.optimizer.step(1e-6)
    states = world.optimizer.state_tensors()
    held += sum(t.numel() * t.element_size() for name, t in states.items() if not name.startswith("step."))
    whole, half = (rank_of(world.model, optimizer, n) for n in (1, 2))
    assert whole.states == whole.needs == held
    assert half.needs == held / 2 + half.gathered


def test_a_layer_and_the_embeddings_are_gathered():
    """3B: embeddings of 151,936 x 2,048 once (tied) and three times a decoder layer, two bytes each. A layer: q, o
    2,048 x 2,048; k, v 2,048 x 256; biases of q, k, v; MLP 3 x 2,048 x 11,008; two norms."""
    config = make_config("Qwen2.5-VL-3B", smoke=False)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    layer = 2 * 2048 * 2048 + 2 * 2048 * 256 + 2048 + 512 + 3 * 2048 * 11008 + 2 * 2048
    assert rank_of(model, "adamw", 4).gathered == 2 * (151_936 * 2048 + 3 * layer)


def test_devices_are_matched_by_their_whole_name():
    assert gpu.PEAKS["NVIDIA H200"] == 989.4e12 and gpu.PEAKS["NVIDIA H20"] == 148e12
    assert "NVIDIA H2" not in gpu.PEAKS
    assert "not in the table" in gpu._note("NVIDIA H300", True) and gpu._note("NVIDIA H200", True) == ""


def test_out_of_memory_is_a_result(monkeypatch):
    def full(case, smoke):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate | 2 GiB")

    monkeypatch.setitem(gpu.MEASURES, "update", full)
    result = gpu.run_case(case("shared"), True)
    assert result["outcome"] == "OOM at 0.0 GiB"
    assert f"| {result['case']} | OOM at 0.0 GiB | - | - | - | - | - | 0.0 |" in gpu.table([result])


def test_a_case_that_fails_or_takes_too_long_is_a_result_too(tmp_path, monkeypatch):
    script = tmp_path / "case.py"
    monkeypatch.setattr(gpu, "__file__", str(script))
    script.write_text("import time; time.sleep(60)")
    assert gpu.run_apart(case("shared"), 0.4)["outcome"] == "not done in 0 s"
    script.write_text("raise ValueError('no kernel')")
    failed = gpu.run_apart(case("shared"), 60)
    assert (failed["outcome"], failed["note"]) == ("failed, exit code 1", "ValueError: no kernel")
    script.write_text("import sys; print('noise'); print('{\"case\": \"' + sys.argv[2] + '\"}')")
    assert gpu.run_apart(case("shared"), 60) == {"case": case("shared").name}


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path, monkeypatch, capsys):
    """A case that its own limit stops is a result; one that the run's end stops is left for the next run."""
    out, ran = tmp_path / "gpu.jsonl", []

    def apart(chosen, limit):
        ran.append(chosen.name)
        outcome = "not done in 1 s" if len(ran) == 3 else "done"
        return {"case": chosen.name, "kind": "update", "smoke": False, "outcome": outcome, "note": ""}

    monkeypatch.setattr(gpu, "run_apart", apart)
    command = ["gpu.py", "--out", str(out), "--cases", "taxon/*-VL-?B/adamw/*", "--json"]
    monkeypatch.setattr(sys, "argv", [*command, "--minutes", "3"])
    gpu.main()
    assert len(ran) == 3 and len(out.read_text().splitlines()) == 2
    monkeypatch.setattr(sys, "argv", [*command, "--minutes", "30"])
    capsys.readouterr()
    gpu.main()
    names = [
        c.name
        for c in gpu.plan(False)
        if c.kind == "update" and c.work == "taxon" and c.optimizer == "adamw" and not c.rank
    ]
    assert ran == [*names[:3], *names[2:]]
    assert [r["case"] for r in json.loads(capsys.readouterr().out)["results"]] == names


def test_batches_hold_every_response_once():
    world = World(case("padded", tokens_per_row=160), smoke=True)
    for path in ("padded", "packed", "shared"):
        order = [i.trajectory for b in batches(path, world.policy, world.items, 160) for i in b.items]
        assert order == list(range(4))


@pytest.mark.slow
def test_every_case_runs_with_torch_and_transformers_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "sitecustomize.py").write_text(MISSING)
    out = tmp_path / "gpu.jsonl"
    command = [sys.executable, str(BENCH / "gpu.py"), "--smoke", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["case"] for r in results] == [c.name for c in gpu.plan(True)]
    assert {r["outcome"] for r in results} == {"done"}
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == len(results) + 3 * 2 and len({row.count("|") for row in rows}) <= 3
    for r in results:
        if r["kind"] == "parity":
            assert r["ours_logp_max"] <= 2 * r["stock_logp_max"] and r["ours_logp_mean"] <= 1.5 * r["stock_logp_mean"]
            assert r["ours_gradient"] is None or r["ours_gradient"] <= 1.5 * r["stock_gradient"]
    by = {r["case"]: r for r in results}
    text = by["text/Qwen3-VL-4B/LoRA16/shared-sdpa"]
    assert text["computed_tokens"] == 32 and text["response_tokens"] == 24 and gpu.TEXT_NOTE in text["note"]
    shared, packed, padded = (by[f"taxon/Qwen2.5-VL-3B/adamw/{p}-sdpa"] for p in ("shared", "packed", "padded"))
    assert (shared["computed_tokens"], packed["computed_tokens"], padded["computed_tokens"]) == (90, 288, 288)
    assert shared["tflop_worth"] == padded["tflop_worth"] == pytest.approx(padded["tflop_done"])
    assert shared["tflop_done"] < packed["tflop_done"] == pytest.approx(padded["tflop_done"])

    monkeypatch.setattr(sys, "argv", [*command[1:], "--json"])
    gpu.main()
    assert json.loads(capsys.readouterr().out)["results"] == results, "what is there is not run again"
    assert len(out.read_text().splitlines()) == len(results)
