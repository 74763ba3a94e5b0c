"""Causes in prompts and responses: templates, cut responses, formats, few distinct answers.

Right answers earn nothing in a layout, words or coordinates that the reward does not read.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from vlmrl.diagnose.run_facts import ANSWER_PARTS, Response, RunFacts
from vlmrl.diagnose.thresholds import (
    Cause,
    Level,
    again,
    learned,
    limit,
    look_again,
    onset,
    percent,
    reward_check,
    rows_of,
    sft_first,
    short,
)
from vlmrl.redaction.redact import excerpt
from vlmrl.reward_check.texts import answer_of, repeats_itself
from vlmrl.untrusted import number_of

IMAGE_MARK = re.compile(r"<\|?(?:vision|image|video|img|box|quad|object)[a-z_]*\|?>", re.IGNORECASE)
ROLE_MARK = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|</?[a-z_]{0,20}(?:turn|utterance)[a-z_]{0,20}\|?>|\[/?INST\]|<\uff5c[^\uff5c<>]{1,40}\uff5c>"
)
"""Pattern of the marks that chat templates put around turns. `IMAGE_MARK` is removed before the search."""
TURN_END = re.compile(r"(?:<\|im_end\|>|<\|eot_id\|>|<\|end\|>|<end_of_turn>|<turn\|>|<end_of_utterance>)\s*\Z")
OPEN_TAG = re.compile(r"<([A-Za-z][A-Za-z0-9_-]{0,30})>\s*\Z")
CLOSED_THINK = re.compile(r"</(think|thinking|reasoning)>\s*\Z")
TAG = re.compile(r"<([A-Za-z][A-Za-z0-9_-]{0,30})>")
CLOSED = re.compile(r"</([A-Za-z][A-Za-z0-9_-]{0,30})>")
MOST_NOTES = 3


def chat_template(facts: RunFacts) -> Iterator[Cause]:
    """Report prompts that have no marks of turns, or that end before the assistant's turn."""
    prompts = _prompts(facts)
    if not prompts:
        return
    bare = [p for p in prompts if not ROLE_MARK.search(IMAGE_MARK.sub("", p))]
    no_turn = [p for p in prompts if TURN_END.search(p)]
    if len(bare) < len(prompts) and len(no_turn) < len(prompts):
        return
    what = (
        "no prompt has the marks of a chat turn: the model has no chat template, or one without marks"
        if len(bare) == len(prompts)
        else "every prompt ends after the user's turn: the chat template opens no turn for the assistant"
    )
    # If the largest possible score is not known, the format tells whether scores are low.
    shares = [r.score / most for r in facts.responses if (most := facts.most_possible(r.source))]
    level: Level = "error" if (_mean(shares) < limit("poor_score") if shares else _format_poor(facts)) else "note"
    evidence = [f"a prompt as the model read it: {short(prompts[0])!r}", f"mean score {_mean_score(facts):.3f}"]
    yield Cause("chat_template", level, what, look_again(facts), 0.95, evidence, rows_of(facts.responses))


def prefilled_tag(facts: RunFacts) -> Iterator[Cause]:
    """Report a prompt that opens (or closes) the tag that the reward expects in the response."""
    prompts = _prompts(facts)
    opened = Counter(m.group(1) for p in prompts if (m := OPEN_TAG.search(p)))
    closed = Counter(m.group(1) for p in prompts if (m := CLOSED_THINK.search(p)))
    tags = opened or closed
    if not tags:
        return
    tag, count = tags.most_common(1)[0]
    without = [r for r in facts.responses if f"<{tag}>" not in r.text]
    if count < len(prompts) or not without or any(_well_formed(r) for r in without):
        return  # not every prompt opens the tag, or the reward accepts responses that do not open it
    writes = 1 - len(without) / len(facts.responses)
    closes = fmean(f"</{tag}>" in r.text for r in facts.responses)
    verb = "opens" if opened else "opens and closes"
    harm = writes < 0.5 or not any(_well_formed(r) for r in facts.responses)
    what = f"the chat template {verb} <{tag}> in the prompt, and the reward expects it in the response"
    evidence = [
        f"every prompt ends with {excerpt(prompts[0], 40, end=True)!r}",
        f"{percent(writes)} of the responses write <{tag}> once more, {percent(closes)} write </{tag}>; none "
        "of the others is well formed",
        "if the template ignores model.thinking, remove the tag from the model's chat_template.jinja",
    ]
    # For `thinking = "off"`, templates end the prompt with an empty, closed <think>; for "on", with an open <think>.
    now, other = facts.recipe.model.thinking if facts.recipe else "template", "on" if closed else "off"
    command = look_again(facts, *([f'model.thinking="{other}"'] if now != other else []))
    yield Cause("prefilled_tag", "error" if harm else "warning", what, command, 1.0, evidence, rows_of(without))


def stop_string(facts: RunFacts) -> Iterator[Cause]:
    """Report responses that end at a string of `rollout.stop` if none of them is well formed."""
    stops = tuple(facts.recipe.rollout.stop) if facts.recipe else ()
    ended = [r for r in facts.responses if stops and not r.cut and r.text.endswith(stops)]
    share = len(ended) / max(1, len(facts.responses))
    if share < limit("stopped") or any(_well_formed(r) for r in ended):
        return
    what = f"{percent(share)} of the responses end at a string of rollout.stop, and none of these is well formed"
    command, evidence = look_again(facts, "rollout.stop=[]"), [f"rollout.stop = {list(stops)}"]
    yield Cause("stop_string", "error", what, command, 0.97, evidence, rows_of(ended))


def cut_off(facts: RunFacts) -> Iterator[Cause]:
    """Report that many responses end at the token limit."""
    if not facts.responses:
        return
    cut = [r for r in facts.responses if r.cut]
    share = len(cut) / len(facts.responses)
    if share < limit("cut_warning"):
        return
    whole = [r.tokens for r in facts.responses if not r.cut]
    most = facts.recipe.rollout.max_new_tokens if facts.recipe else max(r.tokens for r in cut)
    evidence = []
    for kind, is_cut in (("cut", True), ("whole", False)):
        if scores := [r.score for r in facts.responses if r.error is None and r.cut is is_cut]:
            evidence.append(f"mean score of {kind} responses {fmean(scores):.3f}")
    if whole:
        evidence.append(f"whole responses have {median(whole):.0f} tokens (median), {max(whole)} at most")
    evidence += onset(facts, "rollout/truncated_share", lambda share: share >= limit("cut_warning"))
    loops = fmean(repeats_itself(r.text) for r in cut)
    if loops > 0.5:
        evidence.append(
            f"{percent(loops)} of the cut responses repeat themselves: the model does not stop, whatever the limit"
        )
    level: Level = "error" if share >= limit("cut_error") else "warning"
    what = f"{percent(share)} of the responses are cut off at the token limit (rollout.max_new_tokens = {most})"
    command = look_again(facts, f"rollout.max_new_tokens={4 * most}")
    yield Cause("cut_off", level, what, command, share, evidence, rows_of(cut))


def format_unmet(facts: RunFacts) -> Iterator[Cause]:
    """Report that few responses have the format that the reward reads."""
    names = [n for n in facts.part_names if "format" in n.lower()]
    values = facts.part(names[0]) if names else []
    if len(values) >= limit("few_samples"):
        met, what = fmean(v > 0 for v in values), f"the part `{names[0]}`"
        broken = [r for r in facts.responses if r.parts.get(names[0]) == 0]
    else:
        broken, lowest = [], min((r.score for r in facts.responses), default=0.0)
        broken = [r for r in facts.responses if r.note and r.score <= lowest]
        if len(facts.responses) < limit("few_samples"):
            return
        met, what = 1 - len(broken) / len(facts.responses), "the format that the reward's notes name"
    if met >= limit("format_warning"):
        return
    notes = Counter(r.note for r in broken if r.note).most_common(MOST_NOTES)
    evidence = [f"{percent(n / len(broken))}: {short(note, 120)}" for note, n in notes]
    prompts = _prompts(facts)
    note_tags = sorted({t for note, _ in notes for t in TAG.findall(note)})
    unsaid = [t for t in note_tags if prompts and not any(f"<{t}>" in p for p in prompts)]
    if unsaid:
        evidence.append(f"the prompt never shows {', '.join(f'<{t}>' for t in unsaid)}: the model cannot know of it")
    tag_counts = Counter(t for r in broken for t in set(CLOSED.findall(r.text)))
    written = [t for t, n in tag_counts.items() if n >= limit("shared_tags") * len(broken)]
    if written and not note_tags:
        shown = ", ".join(f"<{t}>" for t in sorted(written))
        evidence.append(f"the responses do write {shown}: does the reward read other tags than the prompt asks for?")
    if prompts:
        evidence.append(f"the prompt ends with {excerpt(prompts[0], 40, end=True)!r}")
    sft = facts.recipe is not None and any(d.task != "table" for d in facts.recipe.data)
    if facts.own_reward and not note_tags:
        command = reward_check(facts, "--probe")
    else:
        command = look_again(facts) if unsaid or not sft else sft_first(facts)
    level: Level = "error" if met < limit("format_error") else "warning"
    what = f"{percent(met)} of the responses meet {what}"
    yield Cause("format_unmet", level, what, command, 1 - met, evidence, rows_of(broken))


def few_answers(facts: RunFacts) -> Iterator[Cause]:
    """Report that the samples of a prompt are alike, or that all prompts get the same answer."""
    temperature = facts.recipe.rollout.temperature if facts.recipe else 1.0
    distinct = [(len({r.text for r in g}) - 1) / (len(g) - 1) for g in facts.groups]
    share = fmean(distinct) if distinct else 1.0
    first = [d for d, g in zip(distinct, facts.groups, strict=True) if g[0].step == facts.groups[0][0].step]
    if distinct and share <= limit("distinct"):
        cold = temperature < limit("cold")
        level: Level = "error" if share <= limit("distinct") / 4 else "warning"
        what = f"the samples of a prompt are nearly all the same text (rollout.temperature = {temperature:g})"
        if not cold and fmean(first) > limit("distinct") and (rise := learned(facts)):
            level, what = "note", f"the samples of a prompt became nearly equal while {rise}"
        name, command = "temperature_low", look_again(facts, "rollout.temperature=1.0")
        if not cold:
            name, command = "few_distinct", look_again(facts, "rollout.temperature=1.2")
        line = (
            f"{percent(fmean(d == 0 for d in distinct))} of the groups hold one text only; with all samples "
            f"different this figure is 100%, and it is {percent(share)} here: (different texts - 1) / (samples - 1)"
        )
        rows = rows_of(facts.groups[distinct.index(min(distinct))])
        yield Cause(name, level, what, command, 1 - share, [line], rows)
    elif temperature > limit("hot"):
        level, weight = ("error", 0.9) if _format_poor(facts) else ("warning", 0.3)
        what = f"rollout.temperature = {temperature:g}: sampled text is broken"
        entropies = facts.series("policy/entropy")
        evidence = [f"entropy {fmean(entropies):.2f} nats per token"] if entropies else []
        evidence.append(f"mean score {_mean_score(facts):.3f}")
        command = look_again(facts, "rollout.temperature=1.0")
        yield Cause("temperature_high", level, what, command, weight, evidence, rows_of(facts.responses))
    if facts.same_answers:
        ranked = sorted(facts.same_answers.items(), key=lambda item: -item[1].count / item[1].rows)
        (what, *others), worst = (same.words(f" of the validation {name}") for name, same in ranked), ranked[0][1]
        evidence = [f"the text: {short(worst.text, 120)}", *others]
        level, share = ("error" if worst.count == worst.rows else "warning"), worst.count / worst.rows
        yield Cause("one_answer", level, what, look_again(facts), share, evidence)
    yield from _one_answer(facts)


def _one_answer(facts: RunFacts) -> Iterator[Cause]:
    answers = [(r, a) for r in facts.responses if (a := answer_of(r.text)) is not None]
    truths = {str(sorted(r.truth.items(), key=lambda kv: kv[0])) for r in facts.responses}
    prompts = {r.prompt_id for r, _ in answers}
    if len(answers) < max(limit("few_samples"), 0.5 * len(facts.responses)) or len(truths) < 2 or len(prompts) < 4:
        return
    (answer, count), *_ = Counter(a for _, a in answers).most_common(1)
    if count / len(answers) < limit("one_answer"):
        return
    what = f"{percent(count / len(answers))} of the responses answer {answer!r}, whatever the prompt"
    evidence = [f"{len(prompts)} prompts with {len(truths)} different truths; mean score {_mean_score(facts):.3f}"]
    rows = rows_of([r for r, a in answers if a == answer])
    yield Cause("one_answer", "warning", what, look_again(facts), count / len(answers), evidence, rows)


def _prompts(facts: RunFacts) -> list[str]:
    return list(dict.fromkeys(r.prompt for r in facts.responses if r.prompt))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else float("nan")


def _mean_score(facts: RunFacts) -> float:
    return _mean([r.score for r in facts.responses if r.error is None])


def _format_poor(facts: RunFacts) -> bool:
    """Return whether most responses break the format or, without a part for it, have the lowest score in the run."""
    names = [n for n in facts.part_names if "format" in n.lower()]
    if names and (values := facts.part(names[0])):
        return fmean(values) < limit("poor_score")
    scores = [r.score for r in facts.responses if r.error is None]
    return bool(scores) and (
        max(scores) == min(scores) or fmean(s == min(scores) for s in scores) > limit("poor_score")
    )


def _well_formed(r: Response) -> bool:
    """Return whether a response meets the format or, if no part measures the format, scores above 0."""
    form = next((v for n, v in r.parts.items() if "format" in n.lower()), None)
    return r.error is None and (r.score > 0 if form is None else form > 0)


FIELD = re.compile(r"<([A-Za-z][A-Za-z0-9_-]{0,30})>([^<>]{1,200})</\1>")
POSITION = re.compile(r"\b(?:image|img|picture|photo|left|right|first|second)\s*_?\d?\s*[=:]\s*", re.IGNORECASE)
PIECES = re.compile(r"[;,|/\n]+")
YES, NO = {"true", "yes", "same", "1"}, {"false", "no", "different", "0"}
TRUE_ANSWERS = ("answer", "ground_truth", "solution", "label")


def other_coordinates(facts: RunFacts) -> Iterator[Cause]:
    """Report boxes that fit the truth clearly better in another space or order than the declared one."""
    if facts.coordinates:
        name, positions = list(facts.coordinates.items())[-1]
        what = f"the boxes of the evaluation {name} have a meaning that is not declared: {positions['words']}"
        yield Cause("other_coordinates", "error", what, look_again(facts), 0.95, [str(positions["advice"])])


def other_layout(facts: RunFacts) -> Iterator[Cause]:
    """Report labels that are right but spelled in a way that the reward does not accept."""
    unpaid, hits, spelled = 0, {}, {}
    for r in facts.responses:
        for name, label, true in _labels(r):
            if (part := part_of(name, r.parts)) is None or r.cut or (r.parts.get(part) or 0.0) > 0:
                continue
            form = r.parts.get("format", 1.0)
            if form == 0 and f"<{name}>" not in r.note and r.note:
                continue  # another field breaks the format: the reward did not read this label
            unpaid += 1
            if label.strip() == true.strip():
                spelled.setdefault(name, []).append((r, label, true))
            elif why := agrees(label, true):
                hits.setdefault((name, why), []).append((r, label, true))
    for name, rows in spelled.items():  # reported only if no label at all earned this part
        if len(rows) >= limit("few_samples") and not any(facts.part(part_of(name, rows[0][0].parts) or "")):
            hits[name, "the reward compares with something else"] = rows
    num_hits = sum(map(len, hits.values()))
    if num_hits >= limit("layout_least") and num_hits >= limit("layout_share") * unpaid:
        (name, why), rows = max(hits.items(), key=lambda item: len(item[1]))
        _, label, true = rows[0]
        what = f"right labels earn nothing, because the reward expects another layout: `{name}` ({why})"
        evidence = [
            f"{num_hits} of {unpaid} unpaid labels agree with the truth if spelling is ignored",
            f"the response says {label!r}, the truth is {true!r}",
        ]
        weight, shown = 0.95 + 0.05 * min(1.0, num_hits / unpaid), rows_of([r for r, _, _ in rows])
        yield Cause("other_layout", "error", what, reward_check(facts), weight, evidence, shown)
    else:
        yield from _other_words(facts)


def _other_words(facts: RunFacts) -> Iterator[Cause]:
    """Report truths and responses whose labels come from small vocabularies that have no word in common."""
    labels: dict[str, list[str]] = {}
    true: dict[str, list[str]] = {}
    rows: dict[str, list[Response]] = {}
    for r in facts.responses:
        for name, one, other in _labels(r):
            if (part := part_of(name, r.parts)) is not None and not (r.parts.get(part) or 0.0) > 0 and not r.cut:
                labels.setdefault(name, []).extend(map(plain, split(one)))
                true.setdefault(name, []).extend(map(plain, split(other)))
                rows.setdefault(name, []).append(r)
    for name, words in labels.items():
        ours, theirs, closed = set(words), set(true[name]), limit("closed_labels")
        numbers = all(_number(w) is not None for w in ours | theirs)
        if len(words) < limit("few_samples") or len(ours) > closed or not 2 <= len(theirs) <= closed or numbers:
            continue
        is_paid = any(facts.part(part_of(name, rows[name][0].parts) or ""))
        if not ours & theirs and len(words) >= 4 * len(ours) and not is_paid:
            what = f"`{name}`: no word of the responses is among the truth's labels"
            evidence = [f"labels of the {of}: {some_of(few)}" for of, few in (("truth", theirs), ("responses", ours))]
            yield Cause("other_layout", "error", what, reward_check(facts), 0.8, evidence, rows_of(rows[name]))


def plain(text: str) -> str:
    """Return a label in lower case, without accents, spaces, punctuation, and a prefix such as "Image1="."""
    text = unicodedata.normalize("NFKD", POSITION.sub("", text)).casefold()
    return re.sub(r"[^\w.]+|_", "", text).strip(".")


def split(text: str) -> list[str]:
    return [piece.strip() for piece in PIECES.split(text) if piece.strip()]


def agrees(said: str, true: str) -> str:
    """Describe how two spellings of one label differ; "" if they are equal, or are different labels."""
    if said.strip() == true.strip() or not plain(said):
        return ""
    ours, theirs = [plain(p) for p in split(said)], [plain(p) for p in split(true)]
    if POSITION.search(said) and not POSITION.search(true) and ours == theirs:
        return "the response names the images"
    if ours == theirs:
        return "case, spaces, punctuation or separators"
    if plain(said) == plain(true):
        return "the separators differ"
    one, other = _number(plain(said)), _number(plain(true))
    if one is not None and other is not None and one == other:
        return "the number is written differently"
    if {plain(said), plain(true)} <= YES or {plain(said), plain(true)} <= NO:
        return "another word for yes or no"
    if re.sub(r"</?[a-z]+>|\\boxed\{|\}", "", true.casefold()).strip() == said.casefold().strip():
        return "the truth still has its tags"
    windows = [theirs[i : i + len(ours)] for i in range(len(theirs) - len(ours) + 1)] if len(theirs) > 2 else []
    if ours in windows or (one is not None and [one] in [[_number(w) for w in window] for window in windows]):
        return "the truth holds several values in one text"
    return ""


def _labels(r: Response) -> Iterator[tuple[str, str, str]]:
    """Yield (field, the response's label, the truth's label) for each truth field that the response answers."""
    labels = dict(FIELD.findall(r.text))
    for name, value in r.truth.items():
        true = "; ".join(map(str, value)) if isinstance(value, list) else value
        if isinstance(true, (str, int, float)) and not isinstance(true, bool):
            if name in labels:
                yield name, labels[name], str(true)
            elif name in TRUE_ANSWERS and (answer := answer_of(r.text)) is not None:
                yield "answer", answer, str(true)


def part_of(name: str, parts: Mapping[str, Any]) -> str | None:
    """Return the reward's part that scores a field; None if there is none."""
    names = (name, *ANSWER_PARTS, "reward") if name == "answer" else (name,)
    return next((one for one in names if one in parts), None)


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{1,15}(?:\.[0-9]{1,15})?", text) else None


def some_of(words: set[str]) -> str:
    return ", ".join(sorted(words)[:5])


LIMIT_KEYS = {
    "turn_cut": "rollout.max_new_tokens",
    "turn_limit": "environment.turns",
    "token_limit": "environment.tokens",
    "image_limit": "environment.images",
    "time_limit": "environment.seconds",
}
"""Ending of an episode by a limit, as in the metrics -> the recipe key of the limit."""


def tool_use(facts: RunFacts) -> Iterator[Cause]:
    """Report tools that are never called, and tools that are called ever less while the reward does not fall."""
    calls = facts.series("episode/calls")
    if calls and fmean(calls) < limit("tool_calls"):
        what = f"a tool is never called: {fmean(calls):.2g} calls per episode over {number_of(len(calls), 'step')}"
        evidence = ["say in the prompt when to use the tools, or show the model calls first: `vlmrl sft` on traces"]
        level: Level = "warning" if learned(facts) else "error"
        yield Cause("tools_unused", level, what, look_again(facts), 0.8, evidence, rows_of(facts.responses))
    ends, rewards = facts.ends("episode/calls"), facts.ends("reward/mean")
    if ends is None or rewards is None or len(calls) < limit("learned_steps") or rewards[1] < rewards[0]:
        return
    first, last = ends
    if first < limit("tool_use") or last > limit("tool_use_fall") * first:
        return
    what = f"the model uses its tools ever less: {first:.2f} calls per episode, then {last:.2f}"
    evidence = [
        f"the reward does not fall with it: {rewards[0]:.3f}, then {rewards[1]:.3f}",
        "the answers do not need the tools, or the model cannot read what they return: look at episodes with calls",
    ]
    yield Cause("tools_abandoned", "warning", what, shlex.join(["vlmrl", "report", facts.key]), 0.7, evidence)


def tool_errors(facts: RunFacts) -> Iterator[Cause]:
    """Report that many calls of tools failed in the last third of the steps."""
    counts = [(line["episode/calls"], line.get("episode/tool_errors", 0.0)) for line in _late(facts)]
    share = sum(calls * errors for calls, errors in counts) / max(1e-9, sum(calls for calls, _ in counts))
    if share <= limit("tool_errors"):
        return
    steps = {line["step"] for line in _late(facts)}
    failed = [r for r in facts.responses if r.tool_errors and r.step in steps]
    lines = Counter(line for r in failed for line in r.tool_errors).most_common(MOST_NOTES)
    evidence = [f"{number_of(count, 'call')}: {short(line, 160)}" for line, count in lines]
    what = f"{percent(share)} of the calls of tools fail in the last third of the steps"
    command = shlex.join(["vlmrl", "report", facts.key])
    yield Cause("tool_errors", "warning", what, command, 0.75, evidence, rows_of(failed))


def episode_limits(facts: RunFacts) -> Iterator[Cause]:
    """Report that limits ended many episodes in the last third of the steps."""
    late = _late(facts)
    shares = {name: fmean([line.get(f"episode/ended/{name}", 0.0) for line in late] or [0.0]) for name in LIMIT_KEYS}
    if sum(shares.values()) <= limit("episode_limits"):
        return
    worst = max(shares, key=lambda name: shares[name])
    key, settings = LIMIT_KEYS[worst], list[str]()
    if facts.recipe is not None:
        table, _, name = key.partition(".")
        settings = [f"{key}={2 * getattr(getattr(facts.recipe, table), name)}"]
    what = f"limits end {percent(sum(shares.values()))} of the episodes of the last third of the steps: mostly {key}"
    evidence = [f"{percent(share)} {name.replace('_', ' ')}" for name, share in shares.items() if share]
    yield Cause("episode_limits", "warning", what, again(facts, *settings), 0.8, evidence)


def _late(facts: RunFacts) -> list[Mapping[str, Any]]:
    """Return the lines of the last third of the steps that have episodes."""
    lines = [line for line in facts.train if isinstance(line.get("episode/calls"), (int, float))]
    return lines[-max(1, len(lines) // 3) :]
