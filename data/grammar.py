"""A probabilistic grammar that writes texts and, run the other way, scores them exactly.

A grammar is data. A rule lists templates, perhaps weighted; a template is plain text and, in braces:

    {RULE}        one template of another rule, which must stand further down
    {slot:TABLE}  an entry of a table, all equally likely; it is written, and remembered in the slot
    {slot}        the entry in the slot once more
    {slot.form}   another form of it: a pronoun, a plural, whatever the table lists
    {slot=other}  nothing; from here on the slot holds what `other` holds

Slots last to the end of a text, so words can agree over any distance.

A reader must never guess. So the templates of one rule differ in plain text before either draws or expands anything,
and no entry of a table begins with another. At each choice then at most one option fits the text to come: no text has
two derivations, and its probability is the product of its choices. What a slot holds never changes which choices
follow or how likely they are, so the entropy is exact too. All of this is checked when a grammar is built.
"""

import math
import os.path
import random
import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

# A token is a word or a punctuation mark, with the space before it: tokens put end to end are the text.
TOKEN = re.compile(r" ?[A-Za-z]+| ?[^A-Za-z ]")

_BRACES = re.compile(r"(?P<space> ?)\{(?:(?P<rule>[A-Z_]+)|(?P<slot>[a-z]+)"
                     r"(?:\.(?P<form>\w+)|:(?P<table>[A-Z_]+)|=(?P<other>[a-z]+))?)\}")  # fmt: skip

Entry = Mapping[str, str]  # the forms of a table's entry; the form "" is the entry itself


class Text(NamedTuple):
    text: str


class Expand(NamedTuple):
    rule: str


class Draw(NamedTuple):
    space: str
    slot: str
    table: str


class Recall(NamedTuple):
    space: str
    slot: str
    form: str


class Copy(NamedTuple):
    slot: str
    other: str


Piece = Text | Expand | Draw | Recall | Copy


class Choice:
    """Weighted options, and for each the pieces that a text must begin with where it is taken."""

    def __init__(self, options: Sequence, heads: Sequence[Sequence[Piece]], weights: Iterable[int]):
        self.options = options
        self.heads = heads
        self.cumulative = list(accumulate(weights))
        total = self.cumulative[-1]
        self.probabilities = [(b - a) / total for a, b in pairwise([0, *self.cumulative])]
        self.log_probabilities = [math.log(p) for p in self.probabilities]


class Rejected(Exception):
    """The text is none of the grammar's."""


class Writer:
    """Takes the choices at random."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.parts: list[str] = []
        self.log_probabilities: list[float] = []

    def say(self, text: str) -> None:
        self.parts.append(text)

    def choose(self, choice: Choice, slots: Mapping[str, Entry]):
        # Of all of Random's methods only random() draws the same numbers in every version of Python.
        index = bisect(choice.cumulative, self.rng.random() * choice.cumulative[-1])
        self.log_probabilities.append(choice.log_probabilities[index])
        return choice.options[index]


class Reader:
    """Takes the choices that a given text was made by."""

    def __init__(self, text: str):
        self.text = text
        self.position = 0
        self.log_probabilities: list[float] = []

    def say(self, text: str) -> None:
        if not self.text.startswith(text, self.position):
            raise Rejected
        self.position += len(text)

    def choose(self, choice: Choice, slots: Mapping[str, Entry]):
        for option, head, log_probability in zip(choice.options, choice.heads, choice.log_probabilities, strict=True):
            if self.text.startswith(_write(head, slots), self.position):
                self.log_probabilities.append(log_probability)
                return option
        raise Rejected


class Grammar:
    """A grammar of `rules` (the first is the start) over `tables`.

    A rule is a list of equally likely templates, or a dict from template to integer weight.
    Raises ValueError, naming the place, where a text could have two derivations, a slot could be empty or lack a
    form, or a rule stands above one that expands it.
    """

    def __init__(self, rules: Mapping[str, Sequence[str] | Mapping[str, int]], tables: Mapping[str, Sequence[Entry]]):
        self.tables = {}
        for name, entries in tables.items():
            _check_entries(name, entries)
            heads = [[Text(entry[""])] for entry in entries]
            self.tables[name] = Choice(entries, heads, [1] * len(entries))
        self.rules = {}
        self.start = next(iter(rules))
        for name, templates in rules.items():
            _check_templates(name, templates, is_start=name == self.start)
            options = [_parse(template) for template in templates]
            weights = templates.values() if isinstance(templates, Mapping) else [1] * len(options)
            self.rules[name] = Choice(options, [_head(pieces) for pieces in options], weights)
        self._order = list(rules)
        self._tokens: set[str] = set()
        self._max_tokens, _ = self._survey(self.start, {})

    @property
    def tokens(self) -> list[str]:
        """All tokens that texts are made of, sorted."""
        return sorted(self._tokens)

    @property
    def max_tokens(self) -> int:
        """No text has more tokens than this."""
        return self._max_tokens

    def write(self, rng: random.Random) -> tuple[str, float]:
        """A text drawn from the grammar, and its log-probability in nats."""
        writer = Writer(rng)
        self.tell(writer)
        return "".join(writer.parts), math.fsum(writer.log_probabilities)

    def log_probability(self, text: str) -> float | None:
        """The exact log-probability of the text in nats; None if the grammar never writes it."""
        reader = Reader(text)
        try:
            self.tell(reader)
        except Rejected:
            return None
        return math.fsum(reader.log_probabilities) if reader.position == len(text) else None

    def entropy(self) -> float:
        """The exact entropy of a text in nats."""
        return self._entropy(self.start)

    def tell(self, teller) -> None:
        """Go through one derivation: `teller` takes each choice and is told the text (see Writer and Reader)."""
        self._expand(self.start, teller, {})

    def _expand(self, rule: str, teller, slots: dict[str, Entry]) -> None:
        # By type, not by `match`, which takes twice as long: training waits for this.
        for piece in teller.choose(self.rules[rule], slots):
            kind = type(piece)
            if kind is Text:
                teller.say(piece.text)
            elif kind is Recall:
                teller.say(piece.space + slots[piece.slot][piece.form])
            elif kind is Draw:
                teller.say(piece.space)
                slots[piece.slot] = teller.choose(self.tables[piece.table], slots)
                teller.say(slots[piece.slot][""])
            elif kind is Copy:
                slots[piece.slot] = slots[piece.other]
            else:
                self._expand(piece.rule, teller, slots)

    def _entropy(self, rule: str) -> float:
        choice = self.rules[rule]
        entropy = 0.0
        for pieces, p, log_p in zip(choice.options, choice.probabilities, choice.log_probabilities, strict=True):
            draws = [math.log(len(self.tables[piece.table].options)) for piece in pieces if isinstance(piece, Draw)]
            expansions = [self._entropy(piece.rule) for piece in pieces if isinstance(piece, Expand)]
            entropy += p * (math.fsum(draws + expansions) - log_p)
        return entropy

    def _survey(self, rule: str, before: dict[str, set[str]]) -> tuple[int, dict[str, set[str]]]:
        """Collect the tokens of all derivations of a rule; return the most tokens one has, and the slots after it.

        Slots map to the tables that may have filled them.
        """
        most, afters = 0, []
        for pieces in self.rules[rule].options:
            count, slots = 0, dict(before)
            for piece in pieces:
                words: list[str] = []
                match piece:
                    case Text(text):
                        words = [text]
                    case Draw(space, slot, table):
                        slots[slot] = {table}
                        words = [space + entry[""] for entry in self.tables[table].options]
                    case Recall(_, slot, _) | Copy(_, slot) if slot not in slots:
                        raise ValueError(f"rule {rule}: slot {{{slot}}} may be empty here: {pieces}")
                    case Recall(space, slot, form):
                        entries = [entry for table in slots[slot] for entry in self.tables[table].options]
                        if not all(form in entry for entry in entries):
                            raise ValueError(f"rule {rule}: {slots[slot]} may fill {{{slot}}}, not all with .{form}")
                        words = [space + entry[form] for entry in entries]
                    case Copy(slot, other):
                        slots[slot] = slots[other]
                    case Expand(inner):
                        if self._order.index(inner) <= self._order.index(rule):
                            raise ValueError(f"rule {rule} expands {inner}, which does not stand further down")
                        inner_count, slots = self._survey(inner, slots)
                        count += inner_count
                tokens = [TOKEN.findall(word) for word in words]
                self._tokens.update(*tokens)
                count += max(map(len, tokens), default=0)
            most = max(most, count)
            afters.append(slots)
        filled = set.intersection(*map(set, afters))
        return most, {slot: set().union(*(after[slot] for after in afters)) for slot in filled}


def _parse(template: str) -> list[Piece]:
    pieces: list[Piece] = []
    position = 0
    for match in _BRACES.finditer(template):
        if text := template[position : match.start()]:
            pieces.append(Text(text))
        space, name, slot, form, table, other = match.groups()
        if name:
            pieces.append(Expand(name))
        elif table:
            pieces.append(Draw(space, slot, table))
        elif other:
            pieces.append(Copy(slot, other))
        else:
            pieces.append(Recall(space, slot, form or ""))
        position = match.end()
    if text := template[position:]:
        pieces.append(Text(text))
    return pieces


def _head(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces whose text is known before anything more is chosen."""
    head: list[Piece] = []
    for piece in pieces:
        match piece:
            case Text() | Recall():
                head.append(piece)
            case Draw(space):
                return [*head, Text(space)]
            case _:
                return head
    return head


def _write(head: Sequence[Piece], slots: Mapping[str, Entry]) -> str:
    return "".join(
        [piece.text if isinstance(piece, Text) else piece.space + slots[piece.slot][piece.form] for piece in head]
    )


def _check_entries(name: str, entries: Sequence[Entry]) -> None:
    words = sorted(entry[""] for entry in entries)
    for word, following in pairwise(words):
        if following.startswith(word):
            raise ValueError(f"table {name}: {following!r} begins with {word!r}; a reader could not tell them apart")


def _check_templates(name: str, templates: Iterable[str], is_start: bool) -> None:
    for template in templates:
        if set("{}") & set(_BRACES.sub("", template)):
            raise ValueError(f"rule {name}: cannot read the braces of {template!r}")
        # Every piece must be whole tokens, or the tokens of a text would not be those of its pieces.
        written = re.sub(r"\{[a-z]+=[a-z]+\}", "", template)
        if re.search(r"[\w}]\{[a-z]| \{[A-Z]| $", written) or re.search(r"\}\w| \{\w+=", template):
            raise ValueError(
                f"rule {name}: a space stands before each word, in braces too, not elsewhere: {template!r}"
            )
        if not is_start and re.match(r"\w|\{[a-z]", written):
            raise ValueError(f"rule {name}: only the first rule may begin without a space: {template!r}")
    for one, other in combinations(templates, 2):
        same = os.path.commonprefix([one, other])
        one, other = one[len(same) :], other[len(same) :]
        inside = same.count("{") > same.count("}") or re.search(r"\{([A-Z]|\w+[:=])", same)
        if inside or not one or not other or "{" in (one[0], other[0]):
            raise ValueError(f"rule {name}: no plain text tells {same + one!r} from {same + other!r} soon enough")
