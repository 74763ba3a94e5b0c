"""Packing: every item in exactly one row, groups together, budgets kept; rows say what to predict from where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.model import packing
from vlmrl.model.packing import PromptTokens, Span, TrainItem, make_row, pack, plan_row
from vlmrl.train.rehearsal import full_row
from vlmrl.types import Segment


@st.composite
def worlds(draw) -> list[TrainItem]:
    """Items of up to five groups: prompts of 1 to 9 tokens; responses of up to three segments, some untrained, some
    empty. Every token id is unique, so that a token in a wrong place shows.
    """
    items: list[TrainItem] = []
    fresh = iter(range(10_000))

    def take(n: int) -> tuple[int, ...]:
        return tuple(next(fresh) for _ in range(n))

    for group in range(draw(st.integers(1, 5))):
        ids = take(draw(st.integers(1, 9)))
        prompt = PromptTokens(ids, tuple(i % 2 for i in ids), {}, 0)
        for _ in range(draw(st.integers(1, 6))):
            lengths = draw(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=3))
            segments = tuple(Segment("x", take(n), trained) for n, trained in lengths)
            items.append(TrainItem(prompt, group, segments, len(items)))
    return draw(st.permutations(items))


@pytest.mark.slow
@given(worlds(), st.integers(1, 60))
def test_every_item_is_in_exactly_one_row_and_rows_keep_the_budget(items: list[TrainItem], budget: int):
    rows = pack(items, budget)
    assert sorted(i.trajectory for row in rows for i in row) == sorted(i.trajectory for i in items)
    for row in rows:
        prompts = {i.group: len(i.prompt.ids) for i in row}
        size = sum(prompts.values()) + sum(i.num_tokens for i in row)
        assert size <= budget or len(row) == 1
        groups = [i.group for i in row]
        assert groups == sorted(groups, key=groups.index), "a group is interleaved with another"


@pytest.mark.slow
@given(worlds(), st.integers(1, 60))
def test_packing_is_a_function_of_the_items_alone(items: list[TrainItem], budget: int):
    assert pack(items, budget) == pack(list(items), budget)


@pytest.mark.slow
@given(worlds(), st.integers(1, 200))
def test_a_row_holds_its_prompts_and_responses_and_predicts_each_trained_token_from_the_one_before(
    items: list[TrainItem], budget: int
):
    for row_items in pack(items, budget):
        row = make_row(row_items)
        ids = row.input_ids_N.tolist()
        prompts = [s for s in row.layout if s.response == -1]
        responses = [s for s in row.layout if s.response >= 0]
        assert [s.start for s in row.layout] == [0, *(s.end for s in row.layout)][:-1] and row.layout[-1].end == len(
            ids
        )
        assert len(prompts) == len({i.group for i in row_items})
        assert [row.trajectories[row.layout.index(s)] for s in responses] == [i.trajectory for i in row_items]
        expected_targets, expected_sources, expected_owner = [], [], []
        for item, span in zip(row_items, responses, strict=True):
            prompt = next(p for p in prompts if p.group == span.group)
            assert tuple(ids[prompt.start : prompt.end]) == item.prompt.ids
            assert row.kinds_N.tolist()[prompt.start : prompt.end] == list(item.prompt.kinds)
            whole = [t for s in item.segments for t in s.ids]
            assert ids[span.start : span.end] == whole and not any(row.kinds_N.tolist()[span.start : span.end])
            trained = [s.trained for s in item.segments for _ in s.ids]
            story = [*item.prompt.ids, *whole]
            for place, use in enumerate(trained):
                if use:
                    expected_targets.append(whole[place])
                    expected_sources.append(story[len(item.prompt.ids) + place - 1])
                    expected_owner.append(item.trajectory)
        assert row.target_K.tolist() == expected_targets
        assert [ids[i] for i in row.predict_at_K.tolist()] == expected_sources
        assert [row.trajectories[i] for i in row.span_K.tolist()] == expected_owner


@pytest.mark.slow
@settings(max_examples=20)
@given(worlds(), st.sampled_from([None, 1, 3, 7]), st.booleans(), st.sampled_from([1, 6, 1024]))
def test_a_token_sees_its_own_story_and_nothing_else(items: list[TrainItem], window, blocks, chunk):
    """By the rule, token by token: its past in [prompt][own response], images both ways, within the window."""
    row = make_row(pack(items, 10_000)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "CHUNK_TOKENS", chunk)
        plan = plan_row(
            row.layout, torch.device("cpu"), kinds_N=row.kinds_N, bidirectional="always" if blocks else "never"
        )
    story: dict[int, list[int]] = {}  # token -> the tokens of its story, in order
    prompt: list[int] = []
    for span in row.layout:
        own = list(range(span.start, span.end))
        prompt = own if span.response == -1 else prompt
        story |= dict.fromkeys(own, own if span.response == -1 else prompt + own)
    kinds = row.kinds_N.tolist()

    def one_image(i: int, j: int) -> bool:
        run = range(min(i, j), max(i, j) + 1)
        same_span = any(s.start <= run[0] and run[-1] < s.end for s in row.layout)
        return blocks and same_span and all(kinds[t] == 1 for t in run)

    seen = 0
    for piece in plan.pieces:
        queries = list(range(piece.start, piece.end))
        keys = queries if piece.prompt is None else [*range(*piece.prompt), *queries]
        mask = plan.mask(piece, window)
        for a, i in enumerate(queries):
            place = {t: n for n, t in enumerate(story[i])}
            for b, j in enumerate(keys):
                sees = j in place and (place[j] <= place[i] or one_image(i, j))
                if window is not None and j in place:
                    sees = sees and place[i] - place[j] < window
                assert (a >= b if mask is None else bool(mask[a, b])) == sees, (i, j)
                assert bool(plan.tokens.sees(torch.tensor(i), torch.tensor(j), window, blocks)) == sees
        seen += len(queries)
    assert seen == len(kinds), "every token attends exactly once"


def test_a_layout_that_is_not_whole_groups_is_refused():
    prompt, response = Span(0, -1, 0, 3), Span(0, 0, 3, 5)
    plan_row([prompt, response], torch.device("cpu"))
    for layout, why in [
        ([prompt, Span(0, 0, 4, 5)], "gap"),
        ([prompt, Span(0, 0, 2, 5)], "gap or an overlap"),
        ([Span(0, 0, 0, 3)], "does not begin with its prompt"),
        ([prompt, Span(0, -1, 3, 5)], "two prompts"),
    ]:
        with pytest.raises(ValueError, match=why):
            plan_row(layout, torch.device("cpu"))


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 6), st.integers(1, 5), st.integers(1, 80))
def test_the_rehearsed_row_is_one_that_packing_makes_and_as_full_as_its_prompts_allow(
    prompt: int, longest: int, responses: int, groups: int, budget: int
):
    item = TrainItem(
        PromptTokens((1,) * prompt, (0,) * prompt, {}, 0), 0, (Segment("x", tuple(range(longest)), True),), 0
    )
    row = full_row(item, responses=responses, groups=groups, tokens_per_row=budget)
    assert pack(row, budget) == [row]
    size = len({i.group for i in row}) * prompt + sum(i.num_tokens for i in row)
    whole = groups * (prompt + responses * longest)
    # Full, or everything there is, or what is left has no room for a prompt and a token.
    assert size == min(whole, max(budget, prompt + longest)) or budget - prompt <= size <= budget
    assert row[0].num_tokens == longest and all(0 < i.num_tokens <= longest for i in row)
