"""A probabilistic grammar that writes texts and, run the other way, scores them exactly.

A grammar is data. A rule lists templates, all equally likely; a template is plain text and, in braces:

    {RULE}        one template of another rule, which must stand further down
    {slot:TABLE}  an entry of a table, as likely as its weight says; it is written, and remembered in the slot
    {slot}        the entry in the slot once more
    {slot.form}   another form of it: a pronoun, a plural, whatever the table lists
    {slot=other}  nothing; from here on the slot holds what `other` holds

Slots last to the end of a text, so words can agree over any distance.

A reader must never guess. So the templates of one rule differ in plain text before either draws or expands anything,
and no entry of a table begins with another. At each choice then at most one option fits the text to come: no text has
two derivations, and its probability is the product of its choices. All of this is checked when a grammar is built.
"""

import functools
import math
import os.path
import random
import re
from bisect import bisect
from collections import Counter, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

# A token is a word or a punctuation mark, with the space before it: tokens put end to end are the text.
TOKEN = re.compile(r" ?[A-Za-z]+| ?[^A-Za-z ]")

_PIECE = re.compile(r"(?P<space> ?)\{(?:(?P<rule>[A-Z_]+)|(?P<slot>[a-z]+)"
                    r"(?:\.(?P<form>\w+)|:(?P<table>[A-Z_]+)|=(?P<other>[a-z]+))?)\}"
                    r"|(?P<text>[^{}]+?)(?= ?\{|$)")  # fmt: skip

Entry = Mapping[str, str]  # the forms of a table's entry; the form "" is the entry itself

Piece = namedtuple("Piece", _PIECE.groupindex)
"""A piece of a template: plain text, or a reference in braces with the space before it; absent parts are ""."""


class Rejected(Exception):
    """The grammar cannot derive the text."""


class Token(NamedTuple):
    """A token of a text with its information content, given the grammar and the text before it."""

    text: str
    nats: float
    """-log P, exactly; over a text they add up to that of the text."""
    table: str = ""
    """The table whose entry it is of; "" for plain text of a template."""
    index: int = 0
    """Index of the entry in its table."""
    form: str = ""
    """Grammatical form of the entry."""
    drawn: bool = False
    """Whether the entry is drawn here, not repeated."""


class Grammar:
    """A grammar of `rules` (the first is the start), lists of templates, over `tables`.

    An entry of a table with integer `weights` is drawn in proportion to its weight; without weights, uniformly.
    `tokens` are all that texts are made of, sorted; no text has more of them than `max_tokens`.
    Raises ValueError, naming the place, where a text could have two derivations, a slot could be empty or lack a
    form, or a rule stands above one that expands it.
    """

    def __init__(
        self,
        rules: Mapping[str, Sequence[str]],
        tables: Mapping[str, Sequence[Entry]],
        weights: Mapping[str, Sequence[int]] | None = None,
    ):
        self.tables, self.start, self.weights = tables, next(iter(rules)), weights or {}
        for name, entries in tables.items():
            for word, following in pairwise(sorted(entry[""] for entry in entries)):
                if following.startswith(word):
                    raise ValueError(f"table {name}: {following!r} begins with {word!r}: a reader would have to guess")
        self.rules: dict[str, list[list[Piece]]] = {}
        for name, templates in reversed(list(rules.items())):
            _check_templates(name, templates, is_start=name == self.start)
            options = [[Piece(*match.groups("")) for match in _PIECE.finditer(template)] for template in templates]
            if unknown := {piece.rule for pieces in options for piece in pieces} - {"", *self.rules}:
                raise ValueError(f"rule {name} expands {unknown}, which does not stand further down")
            self.rules[name] = options
        tokens: set[str] = set()
        self.max_tokens, _ = self._survey(self.start, {}, tokens)
        self.tokens = sorted(tokens)

    def write(self, rng: random.Random) -> tuple[list[str], list[float]]:
        """Draw a text; return it in pieces of whole tokens, and 1 / probability of each choice."""
        words, odds = [], []
        # Of all of Random's methods the only one with the same numbers in every version of Python.
        self._write(rng.random, words, odds.append, {})
        return words, odds

    @functools.cached_property
    def _write(self) -> Callable[..., None]:
        """The rules as one function of Python each: less than a third of the time of a loop over their pieces."""
        lines = []
        for name, options in self.rules.items():
            size = len(options)
            lines += [f"def {name}(draw, words, count, slots):", f" count({size}); option = int(draw() * {size})"]
            for number, pieces in enumerate(options):
                lines += [f" if option == {number}:", "  pass"]
                for space, inner, slot, form, table, other, text in pieces:
                    if table in self.weights:
                        total = sum(self.weights[table])
                        lines.append(f"  index = bisect(ends[{table!r}], int(draw() * {total}))")
                        lines.append(f"  count(odds[{table!r}][index]); slots[{slot!r}] = tables[{table!r}][index]")
                    elif table:
                        size = len(self.tables[table])
                        lines.append(f"  count({size}); slots[{slot!r}] = tables[{table!r}][int(draw() * {size})]")
                    if inner:
                        lines.append(f"  {inner}(draw, words, count, slots)")
                    elif other:
                        lines.append(f"  slots[{slot!r}] = slots[{other!r}]")
                    else:
                        if not lines[-1].startswith("  words += "):
                            lines.append("  words += ")
                        lines[-1] += f"{text!r}, " if text else f"slots[{slot!r}][{space + form!r}], "
        # With the space before it each word is one object, made and hashed once.
        spaced = {name: [_spaced(entry) for entry in table] for name, table in self.tables.items()}
        ends = {table: [*accumulate(weights)] for table, weights in self.weights.items()}
        functions = {"tables": spaced, "bisect": bisect, "ends": ends, "odds": self._odds}
        exec("\n".join(lines), functions)
        return functions[self.start]

    def log_probability(self, text: str) -> float | None:
        """Return the exact log-probability in nats; None for a text that the grammar does not generate."""
        reading = self._read(text)
        return reading and log_probability([choice.odds for choice in reading.choices])

    def explain(self, text: str) -> list[Token] | None:
        """Return the tokens of a text with what the grammar knows of each; None if it does not generate the text."""
        if (reading := self._read(text)) is None:
            return None
        nats: dict[int, float] = defaultdict(float)  # by where a token ends
        for start, words, odds, masses_of_options in reading.choices:
            if odds == 1:
                continue
            masses = masses_of_options()
            prefix, mass, least = "", masses[""], round(masses[""] / odds)
            # A choice is generated token by token; the options that start with the tokens so far remain.
            for token in TOKEN.findall(words):
                prefix += token
                nats[start + len(prefix)] += math.log(mass / masses[prefix])
                mass = masses[prefix]
            if mass > least:  # "Ann ran" is not "Ann, the cat" because no comma comes next
                following = TOKEN.match(text, start + len(prefix))
                assert following is not None, "the text continues"
                nats[following.end()] += math.log(mass / least)
        tokens, pieces = [], iter(reading.pieces)
        end, source = 0, ()
        for match in TOKEN.finditer(text):
            if match.end() > end:
                end, source = next(pieces)
            tokens.append(Token(match[0], nats.get(match.end(), 0.0), *source))
        return tokens

    def _read(self, text: str) -> "_Reading | None":
        """Find the only derivation of a text; None if there is none."""
        position, slots, reading = 0, {}, _Reading([], [])

        def word(slot: str, form: str) -> str:
            table, index = slots[slot]
            return self.tables[table][index][form]

        def choose_template(rule: str) -> list[Piece]:
            options, known = self.rules[rule], dict(slots)
            for option in options:
                words = self._beginning(option, slots)
                if text.startswith(words, position):
                    masses = functools.partial(self._masses_of_templates, rule, known)
                    reading.choices.append(_Choice(position, words, len(options), masses))
                    return option
            raise Rejected

        def choose_entry(table: str, start: int) -> int:
            for length in self._lengths[table]:
                words = text[start : start + length]
                if (index := self._places[table].get(words)) is not None:
                    masses = functools.partial(self._masses_of_entries.__getitem__, table)
                    reading.choices.append(_Choice(start, words, self._odds[table][index], masses))
                    return index
            raise Rejected

        def follow(rule: str) -> None:
            nonlocal position
            for space, inner, slot, form, table, other, words in choose_template(rule):
                if table:
                    slots[slot] = table, choose_entry(table, position + len(space))
                if inner:
                    follow(inner)
                elif other:
                    slots[slot] = slots[other]
                elif text.startswith(words or (words := space + word(slot, form)), position):
                    position += len(words)
                    source = (*slots[slot], form, bool(table)) if slot else ()
                    reading.pieces.append((position, source))
                else:
                    raise Rejected

        try:
            follow(self.start)
        except Rejected:
            return None
        return reading if position == len(text) else None

    def _beginning(self, pieces: Sequence[Piece], slots: Mapping[str, tuple[str, int]]) -> str:
        """Return what a template writes up to its first open choice."""
        known = ""
        for piece in pieces:
            known += piece.text or piece.space
            if piece.rule or piece.table or piece.other:
                break
            if piece.slot:
                table, index = slots[piece.slot]
                known += self.tables[table][index][piece.form]
        return known

    def _masses_of_templates(self, rule: str, slots: Mapping[str, tuple[str, int]]) -> Counter[str]:
        return _masses((self._beginning(pieces, slots), 1) for pieces in self.rules[rule])

    @functools.cached_property
    def _masses_of_entries(self) -> dict[str, Counter[str]]:
        return {
            table: _masses(zip((entry[""] for entry in entries), self._weights_of(table), strict=True))
            for table, entries in self.tables.items()
        }

    def _weights_of(self, table: str) -> Sequence[int]:
        return self.weights.get(table) or [1] * len(self.tables[table])

    @functools.cached_property
    def _odds(self) -> dict[str, list[float]]:
        """Odds, 1 / probability, of each entry by table."""
        return {
            table: [sum(weights) / weight for weight in weights]
            for table, weights in ((table, self._weights_of(table)) for table in self.tables)
        }

    @functools.cached_property
    def _places(self) -> dict[str, dict[str, int]]:
        """Index of an entry by table and words."""
        return {t: {entry[""]: index for index, entry in enumerate(entries)} for t, entries in self.tables.items()}

    @functools.cached_property
    def _lengths(self) -> dict[str, list[int]]:
        """Possible lengths of an entry in characters, by table."""
        return {table: sorted(set(map(len, places))) for table, places in self._places.items()}

    @functools.cache  # noqa: B019 (it is asked while the grammar is built)
    def _tokens_of(self, table: str, form: str, space: str) -> tuple[set[str], int]:
        """All tokens of a form of a table's entries, and the most that one has."""
        tokens = [TOKEN.findall(space + entry[form]) for entry in self.tables[table]]
        return set().union(*tokens), max(map(len, tokens))

    def _survey(self, rule: str, before: dict[str, set[str]], found: set[str]) -> tuple[int, dict[str, set[str]]]:
        """Add the tokens of all derivations of a rule to `found`; return the most that one has, and the slots after it.

        Slots map to the tables that may have filled them.
        """
        most, afters = 0, []
        for pieces in self.rules[rule]:
            count, slots = 0, dict(before)
            for space, inner, slot, form, table, other, text in pieces:
                if table:
                    slots[slot] = {table}
                if inner:
                    inner_count, slots = self._survey(inner, slots, found)
                    count += inner_count
                elif slot and (other or slot) not in slots:
                    raise ValueError(f"rule {rule}: slot {{{other or slot}}} may be empty here: {pieces}")
                elif other:
                    slots[slot] = slots[other]
                elif slot:
                    try:
                        tokens = [self._tokens_of(table, form, space) for table in slots[slot]]
                    except KeyError:
                        problem = f"{slots[slot]} may fill {{{slot}}}, not all with .{form}"
                        raise ValueError(f"rule {rule}: {problem}") from None
                    found.update(*(words for words, _ in tokens))
                    count += max(most for _, most in tokens)
                else:
                    tokens = TOKEN.findall(text)
                    found.update(tokens)
                    count += len(tokens)
            most = max(most, count)
            afters.append(slots)
        filled = set.intersection(*map(set, afters))
        return most, {slot: set().union(*(after[slot] for after in afters)) for slot in filled}


def _spaced(entry: Entry) -> Entry:
    return {space + form: space + word for space in ("", " ") for form, word in entry.items()}


def log_probability(odds: Sequence[float]) -> float:
    """Return the log-probability, in nats, of a derivation whose choices had these odds (1 / probability)."""
    return math.fsum(math.log(1 / each) for each in odds)


class _Choice(NamedTuple):
    """A choice that the parser found in a text."""

    start: int
    words: str
    """Words that identify the choice, from `start` on."""
    odds: float
    masses: Callable[[], Mapping[str, int]]
    """Total weight of the options that start with given tokens."""


class _Reading(NamedTuple):
    """A derivation of a text by the grammar."""

    choices: list[_Choice]
    pieces: list[tuple[int, tuple]]
    """End of the words of each piece, with (table, entry, form, whether it was drawn there)."""


def _masses(options: Iterable[tuple[str, int]]) -> Counter[str]:
    masses: Counter[str] = Counter()
    for words, weight in options:
        prefix = ""
        masses[prefix] += weight
        for token in TOKEN.findall(words):
            prefix += token
            masses[prefix] += weight
    return masses


def _check_templates(name: str, templates: Sequence[str], is_start: bool) -> None:
    for template in templates:
        if "".join(match[0] for match in _PIECE.finditer(template)) != template:
            raise ValueError(f"rule {name}: cannot read the braces of {template!r}")
        # Every piece must be whole tokens, or the tokens of a text would not be those of its pieces.
        written = re.sub(r"\{[a-z]+=[a-z]+\}", "", template)
        if re.search(r"[\w}]\{[a-z]| \{[A-Z]| $", written) or re.search(r"\}\w| \{\w+=", template):
            problem = "a space stands before each word, in braces too, not elsewhere"
            raise ValueError(f"rule {name}: {problem}: {template!r}")
        if not is_start and re.match(r"\w|\{[a-z]", written):
            raise ValueError(f"rule {name}: only the first rule may begin without a space: {template!r}")
    for one, other in combinations(templates, 2):
        same = os.path.commonprefix([one, other])
        one, other = one[len(same) :], other[len(same) :]
        inside = same.count("{") > same.count("}") or re.search(r"\{([A-Z]|\w+[:=])", same)
        if inside or not one or not other or "{" in (one[0], other[0]):
            raise ValueError(f"rule {name}: no plain text tells {same + one!r} from {same + other!r} soon enough")
