"""Responses for the probe of a pair reward, in the task's own answer form: honest answers, blind guesses, known tricks.

A near miss has a single error: if it earns as much as the right answer, the reward ignores this error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlmrl.tasks.attack import IGNORED, LONG, THOUGHT, Attack, Belief, Make, Probe, ProbeRows, says, void_attacks
from vlmrl.tasks.pairs.answer import AnswerForm, FormField, Pair, four
from vlmrl.types import RewardInput


def pair_attacks(form: AnswerForm, rows: Sequence[RewardInput], echo: str) -> list[Attack]:
    """Return all attacks for an answer form. `echo`: prompt template, used when a row has no stored prompt."""
    attacks = [*void_attacks(echo), *_answer_attacks(form), *_guesses(), *_fair(form)]
    if form.fields:
        fields = "".join(f"<{f.tag}></{f.tag}>" for f in form.fields)
        empty = f"<think>{fields}</think><answer></answer>"
        attacks += [
            Attack("empty fields", "every tag of the form, all empty", "void", says(empty)),
            *_field_attacks(form, rows, echo),
        ]
    return attacks


def right(x: RewardInput) -> str:
    return four(1.0 if x.truth.get("same") else 0.0)


def wrong(x: RewardInput) -> str:
    return four(0.0 if x.truth.get("same") else 1.0)


ANSWER_TRICKS = (
    ("both answers", "yes and no, in two answers", "{head}<answer>{wrong}</answer><answer>{right}</answer>"),
    ("taken back", "the right answer, then the wrong one", "{head}<answer>{right}</answer><answer>{wrong}</answer>"),
    ("answer in think", "the right answer inside, the wrong one at the end",
     "<think>{tags}<answer>{right}</answer></think><answer>{wrong}</answer>"),
    ("two thinks", "junk between two think blocks", "<think>a{tags}</think>junk<think>b</think>{answer}"),
    ("bare number", "the right answer without any tag", "{right}"),
    ("out of range", "a probability of 7", "{head}<answer>7.0000</answer>"),
    ("below zero", "a probability of -1", "{head}<answer>-1.0000</answer>"),
    ("other digits", "Arabic digits", "{head}<answer>{arabic}</answer>"),
    ("Python number", "a number as only a programming language writes it", "{head}<answer>{right[0]}_0e-1</answer>"),
    ("not a number", "the float that equals nothing", "{head}<answer>nan</answer>"),
    ("infinite", "a number beyond all bounds", "{head}<answer>1e999</answer>"),
    ("beyond squaring", "a number whose square no float holds", "{head}<answer>1e300</answer>"),
    ("either number", "both answers in one tag", "{head}<answer>{wrong} or {right}</answer>"),
    ("words", "true or false for a number", "{head}<answer>{is_same}</answer>"),
    ("more after it", "text after the answer", "{head}{answer} Or is it {wrong}?"),
    ("no answer", "right names and nothing else", "<think>{tags_or_thought}</think>"),
    ("empty think", "the right answer without a thought", "<think></think>{tags}{answer}"),
    ("unseen think", "the right answer after a thought that cannot be seen", "<think>\u200b</think>{tags}{answer}"),
    ("never closed", "opening tags where closing ones belong", "<think>{thought}{tags}<think><answer>{right}<answer>"),
    ("escaped tags", "backslashes before the brackets", "{escaped}"),
    ("cut off", "all of it, ended by the token limit before the answer", "<think>{thought}{tags}"),
    ("cut off late", "all of it, ended by the token limit", "{whole}"),
)  # fmt: skip
"""Name and idea of an attack, and its text, with the pieces that `_answer_attacks` makes."""


def _answer_attacks(form: AnswerForm) -> list[Attack]:
    """Return attacks on the answer tag. Their names are right, so that only the trick is wrong."""

    def pieces(x: RewardInput) -> dict[str, Any]:
        names, answer = form.names_of(x), right(x)
        tags = form.tags(names)
        texts = {"thought": THOUGHT, "tags": tags, "tags_or_thought": tags or THOUGHT, "right": answer}
        texts |= {"wrong": wrong(x), "is_same": bool(x.truth.get("same")), "answer": f"<answer>{answer}</answer>"}
        texts |= {"head": f"<think>{THOUGHT}{tags}</think>", "whole": form.write(names, answer)}
        arabic = answer.translate({ord("0") + i: 0x660 + i for i in range(10)})
        return {**texts, "arabic": arabic, "escaped": "{head}{answer}".format_map(texts).replace("<", "\\<")}

    def attack(name: str, idea: str, text: str) -> Attack:
        return Attack(name, idea, "broken", lambda x: text.format_map(pieces(x)), cut=name.startswith("cut off"))

    both, taken_back, *others = (attack(*trick) for trick in ANSWER_TRICKS)
    return [replace(both, turned=taken_back.make), taken_back, *others]


def _field_attacks(form: AnswerForm, rows: Sequence[RewardInput], echo: str) -> list[Attack]:
    """Return attacks on the tags with names, agreements or labels."""

    def tags(x: RewardInput) -> str:
        return form.tags(form.names_of(x))

    def false_tags(x: RewardInput) -> str:
        return form.tags(form.others(x, rows))

    def stated(text: str) -> Make:
        """Return a function that writes this text for each stated field: its pair of names, and a guess at it."""

        def make(x: RewardInput) -> str:
            other = form.others(x, rows)
            fields = ((f, pair, other[f.name] or pair) for f, pair in form.stated(form.names_of(x)))
            return "".join(text.format(tag=f.tag, value=form.value(p), pair=p, guess=guess) for f, p, guess in fields)

        return make

    def contradicting(x: RewardInput) -> str | None:
        """Return an answer that the true names contradict; None where they do not: at no level do they differ."""
        decides = any(f.level and pair[0] != pair[1] for f, pair in form.stated(form.names_of(x)))
        return form.write(form.names_of(x), wrong(x)) if decides else None

    def prompted(x: RewardInput) -> str | None:
        prompt = x.prompt or echo
        shows_tags = any(f"<{f.tag}>" in prompt for f in form.fields)
        return f"<think>{THOUGHT}{prompt}{tags(x)}</think><answer>{right(x)}</answer>" if shows_tags else None

    def around(inside: Make, after: Make = says("")) -> Make:
        return lambda x: f"<think>{THOUGHT}{inside(x)}</think>{after(x)}<answer>{right(x)}</answer>"

    broken: list[tuple[str, str, Make]] = [
        ("silence", "the right answer, nothing that was asked for before it", around(says(""))),
        ("names outside", "right names after the thought", around(says(""), tags)),
        ("right, then wrong", "right names, then false ones", around(lambda x: tags(x) + false_tags(x))),
        ("wrong, then right", "an echoed example, then right names", around(lambda x: false_tags(x) + tags(x))),
        ("surplus names", "names that could be right, all in one tag",
         around(stated("<{tag}>{value}; {guess[0]}; {guess[1]}</{tag}>"))),
        ("names repeated", "right names, each twice in its tag", around(stated("<{tag}>{value}; {value}</{tag}>"))),
        ("tags crossed", "each tag closed by another's end", around(lambda x: _crossed(form, x))),
        ("prompt and answer", "the prompt's own tags inside think, then right names", prompted),
    ]  # fmt: skip
    attacks = [Attack(name, idea, "broken", make) for name, idea, make in broken]
    if any(f.level for f in form.fields):
        idea = "names that differ, and the answer that they are the same"
        attacks.append(Attack("contradiction", idea, "guess", contradicting))
    if form.kind in ("labels", "named_labels"):
        every = "".join(f"<{f.tag}>{' '.join(f.labels)}; {' '.join(f.labels)}</{f.tag}>" for f in form.fields)
        denied = around(stated("<{tag}>not {guess[0]} but {pair[0]}; unlike {guess[1]}, {pair[1]}</{tag}>"))
        attacks.append(Attack("every label", "all labels in both places", "guess", around(says(every))))
        attacks.append(Attack("labels denied", "not one but the other, both ways", "broken", denied))
    return attacks


def _guesses() -> list[Attack]:
    """Return guesses that use no knowledge and break the form: missing answers, constants and hedges."""
    each = "".join(f"<answer>{i / 20:.4f}</answer>" for i in range(21))
    alone = "<think></think><answer>{}</answer>"
    at_length = f"<think>{'so ' * (LONG // 3)}</think><answer>0.5000</answer>"
    return [
        *(
            Attack(f"only {p}", f"nothing but {p} in an answer tag", "guess", says(alone.format(p)))
            for p in ("0.0000", "0.5000", "1.0000")
        ),
        Attack("hedge at length", "0.5 after a long thought", "guess", says(at_length)),
        Attack(
            "many answers",
            "every probability from 0 to 1, each in an answer",
            "guess",
            says(f"<think>{THOUGHT}</think>{each}"),
        ),
    ]


def _fair(form: AnswerForm) -> list[Attack]:
    """Return right answers in other spellings."""

    def spelt(change: Callable[[str], str]) -> Make:
        def make(x: RewardInput) -> str:
            names = {k: (change(v[0]), change(v[1])) if v is not None else None for k, v in form.names_of(x).items()}
            return form.write(names, confident(x))

        return make

    def with_ranks(x: RewardInput) -> str:
        stated = form.stated(form.names_of(x))
        return form.write({f.name: (f"{f.name} {p[0]}", f"{f.name} {p[1]}") for f, p in stated}, confident(x))

    attacks = [
        Attack(
            "blanks between",
            "blank lines between the parts",
            "fair",
            lambda x: form.write(form.names_of(x), confident(x)).replace("</think>", "\n\n</think>\n\n"),
        ),
    ]
    if form.kind in ("names", "labels", "named_labels"):
        attacks += [
            Attack("upper case", "names in capitals", "fair", spelt(str.upper)),
            Attack("blanks in names", "blanks around the names", "fair", spelt(lambda name: f" {name} ")),
        ]
    if form.kind == "names":
        attacks += [
            Attack("rank words", "`order Boletales` for `Boletales`", "fair", with_ranks),
            Attack("full stops", "a full stop after each name", "fair", spelt(lambda name: f"{name}.")),
        ]
    if form.kind == "labels":
        idea = "`Sub-Adult` for `SubAdult`, `Adult-female` for `Adult female`"
        hyphens = spelt(lambda name: "-".join(name.replace("SubAdult", "Sub Adult").split()))
        attacks.append(Attack("hyphens", idea, "fair", hyphens))
    return attacks


def confident(x: RewardInput) -> str:
    """Return the text of a right answer with high confidence that is still below certainty."""
    return "0.9000" if x.truth.get("same") else "0.1000"


def _crossed(form: AnswerForm, x: RewardInput) -> str:
    ends = [f.tag for f in form.fields[1:]] + [
        form.fields[0].tag + "s" if len(form.fields) == 1 else form.fields[0].tag
    ]
    known = {"type": "age-group", "age-group": "type"}
    stated = form.stated(form.names_of(x))
    return "".join(
        f"<{f.tag}>{form.value(pair)}</{known.get(f.tag, end)}>" for (f, pair), end in zip(stated, ends, strict=False)
    )


COMPOSITE = "1;sameSpecies;Corvus;Corvidae;Passeriformes;Corvus;Corvidae;Passeriformes"


def broken_truths(x: RewardInput) -> dict[str, Callable[[RewardInput], Mapping[str, Any]]]:
    """Return name -> function that changes a row's truth into one that no reward should score."""
    raw = x.truth.get("ground_truth")
    makers: dict[str, Callable[[RewardInput], Mapping[str, Any]]] = {
        "an answer without content": lambda x: {**x.truth, "same": "maybe", "ground_truth": "maybe"}
    }
    if raw is None or isinstance(raw, (int, float)) or (isinstance(raw, str) and ";" not in raw):
        makers["a composite where a number is wanted"] = lambda x: {"ground_truth": COMPOSITE}
    else:
        makers["a number where a composite is wanted"] = lambda x: {"ground_truth": "0.5"}
    return makers


FALSE = ("Falsum", "Errorum")
"""Invented names, which no dataset contains."""


def name_misses(form: AnswerForm) -> list[Attack]:
    """Return near misses for a form with names or labels in its tags. The answer is right, and agrees with the tags."""
    if form.kind not in ("names", "labels", "named_labels"):
        return []

    def miss(name: str, idea: str, change: Callable[[FormField, Pair], Pair]) -> Attack:
        def make(x: RewardInput) -> str | None:
            true = form.names_of(x)
            said = {f.name: change(f, pair) for f, pair in form.stated(true)}
            return form.write(said, confident(x)) if said and any(said[n] != true[n] for n in said) else None

        return Attack(name, idea, "miss", make)

    def each(change: Callable[[str], str]) -> Callable[[FormField, Pair], Pair]:
        return lambda field, pair: (change(pair[0]), change(pair[1]))

    return [
        miss(IGNORED, "names of nothing, or of others, in every tag", _false),
        miss("longer names", "right names with letters after them", each(lambda name: f"{name}oides")),
        miss("cut names", "the first half of each right name", each(lambda name: name[: max(1, len(name) // 2)])),
        miss("one of several", "each right name with a slash and another", _among("{} / {}")),
        miss("either or", "`right or false` for each name", _among("{} or {}")),
        miss("names denied", "`not` before each right name", each(lambda name: f"not {name}")),
        miss("any text", "a pattern that matches everything", lambda f, p: (".*", ".*")),
        miss("no letters", "a dash for each name", lambda f, p: ("-", "-")),
        miss("only the first", "the second name of each tag is false", lambda f, p: (p[0], _false(f, p)[1])),
        miss("only the second", "the first name of each tag is false", lambda f, p: (_false(f, p)[0], p[1])),
        miss("swapped", "right names, those of the images swapped", lambda f, p: (p[1], p[0])),
    ]


def _false(field: FormField, pair: Pair) -> Pair:
    """Return false names for a pair: the same false name twice if the true names are equal, else two different ones."""
    free = [*(label for label in field.labels if label not in pair), *FALSE]
    return (free[0], free[0]) if pair[0] == pair[1] else (free[0], free[1])


def _among(form: str) -> Callable[[FormField, Pair], Pair]:
    """Return a function that puts a false name beside each right name, as in `{} or {}`."""

    def change(field: FormField, pair: Pair) -> Pair:
        false = _false(field, pair)
        return form.format(pair[0], false[0]), form.format(pair[1], false[1])

    return change


def every_name(form: AnswerForm, rows: Sequence[RewardInput]) -> list[Attack]:
    """Return attacks with all names of the dataset in both places of every tag; their answer is always 0.5."""
    if form.kind != "names" or not form.fields:
        return []
    known = {f.name: sorted({name for x in rows for name in form.names_of(x)[f.name] or ()}) for f in form.fields}

    def joined(mark: str) -> Make:
        pairs = {name: (mark.join(names), mark.join(names)) for name, names in known.items() if names}
        return lambda x: form.write(pairs, 0.5) if pairs else None

    return [
        Attack("every name", "all names of the dataset in every place", "guess", joined(" ")),
        Attack("every name, or", "the same, joined by `or`", "guess", joined(" or ")),
        Attack("every name, listed", "the same, joined by commas", "guess", joined(", ")),
    ]


def pair_probe(form: AnswerForm, rows_tried: ProbeRows) -> Probe:
    """Return the answers and tricks for pairs. If no tag has a weight, there are no tricks with false names.

    Such a reward does not score the names, so false names may earn as much as right ones.
    """
    rows = rows_tried.rows
    guess = form.commonest(rows)
    prior = sum(bool(x.truth.get("same")) for x in rows) / len(rows)
    thoughts = {"": dict.fromkeys(guess), **({" and the commonest names": guess} if form.fields else {})}
    guesses = [
        Attack(f"always {four(p)}{more}", "a constant, well-formed answer", "guess", says(form.write(names, p)))
        for more, names in thoughts.items()
        for p in dict.fromkeys((0.5, 0.0, 1.0, round(prior, 4)))
    ]
    informed = Attack(
        "honest", "right names, a confident answer", "fair", lambda x: form.write(form.names_of(x), confident(x))
    )
    wrong = Attack(
        "honest, wrong",
        "false names, a wrong answer",
        "fair",
        lambda x: form.write(form.others(x, rows), four(1 - float(confident(x)))),
    )
    has_paid_tags = any(f.name not in rows_tried.unpaid for f in form.fields)
    attacks = [
        *pair_attacks(form, rows, rows_tried.echo),
        *(name_misses(form) if has_paid_tags else ()),
        *every_name(form, rows),
    ]
    return Probe(
        informed,
        wrong,
        guesses,
        attacks,
        right_answer=lambda x: x.truth.get("same"),
        broken_truths=broken_truths(rows[0]),
        belief=_belief(form),
    )


def _belief(form: AnswerForm) -> Belief:
    """Return the `Belief` of pairs: the question "the same?", and a function that writes an answer to it.

    The written names always differ, so that all answers from 0 to 0.5 agree with them. The names then earn the same for
    all of these answers.
    """
    names = {f.name: ((f.labels[0], f.labels[1]) if len(f.labels) > 1 else ("Prima", "Secunda")) for f in form.fields}
    return Belief(lambda x: bool(x.truth.get("same")), lambda p: form.write(names, p))
