"""A probabilistic grammar that generates texts and computes their exact probabilities.

A grammar is data. A rule lists templates, all equally likely; a template is plain text and, in braces:

    {RULE}        one template of another rule, which must be defined further down
    {slot:TABLE}  an entry of a table, drawn in proportion to its weight; it is written, and stored in the slot
    {slot}        the entry in the slot again
    {slot.form}   another form of it: a pronoun, a plural, whatever the table lists
    {slot=other}  writes nothing; from here on the slot holds what `other` holds

Slots last to the end of a text, so words can agree over any distance.

The grammar is unambiguous: any two templates of a rule differ in plain text before either has a choice, and no entry of
a table begins with another. So at most one option of each choice fits a given text, no text has two
derivations, and its probability is the product of the probabilities of its choices.
tests/data/synthetic/test_unambiguous.py checks all of this for the grammars of the stories.
"""

import functools
import math
import random
import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

# A token is a word or a punctuation mark, with the space before it; the tokens of a text, concatenated, are the text.
TOKEN = re.compile(r" ?[A-Za-z]+| ?[^A-Za-z ]")

_PIECE = re.compile(r"(?P<space> ?)\{(?:(?P<rule>[A-Z_]+)|(?P<slot>[a-z]+)"
                    r"(?:\.(?P<form>\w+)|:(?P<table>[A-Z_]+)|=(?P<other>[a-z]+))?)\}"
                    r"|(?P<text>[^{}]+?)(?= ?\{|$)")  # fmt: skip

Entry = Mapping[str, str]  # the forms of a table's entry; the form "" is the entry itself


class Piece(NamedTuple):
    """A piece of a template: plain text, or a reference in braces; absent parts are ""."""

    text: str
    rule: str
    slot: str
    form: str
    """The space before the word, if any, followed by the form of the slot's entry."""
    table: str
    other: str


Slots = dict[str, tuple[str, int]]
"""The table and the index of the entry in each slot."""


class Token(NamedTuple):
    """A token of a text with its information content, given the text before it."""

    text: str
    nats: float
    """-log P given the text before it, exact; the sum over a text is -log P of the text."""
    table: str = ""
    """The table that the token comes from; "" for plain text of a template."""
    index: int = 0
    """Index of the entry in its table."""
    form: str = ""
    """Grammatical form of the entry."""
    drawn: bool = False
    """True if the entry is drawn here, False if it is repeated."""


class Grammar:
    """A grammar of `rules` (the first is the start), lists of templates, over `tables`.

    An entry of a table with integer `weights` is drawn in proportion to its weight; without weights, uniformly.
    `tokens` are all that occur in texts, sorted; no text has more than `max_tokens`.

    Raises:
        ValueError: a slot could be empty or lack a form, or a rule is defined above one that expands it; the message
            names the place.
    """

    def __init__(
        self,
        rules: Mapping[str, Sequence[str]],
        tables: Mapping[str, Sequence[Entry]],
        weights: Mapping[str, Sequence[int]] | None = None,
    ):
        self.start = next(iter(rules))
        self.tables = {name: _Table(entries, (weights or {}).get(name)) for name, entries in tables.items()}
        self.rules: dict[str, list[list[Piece]]] = {}
        for name, templates in reversed(list(rules.items())):
            options = [[_piece(**match.groupdict("")) for match in _PIECE.finditer(template)] for template in templates]
            if unknown := {piece.rule for pieces in options for piece in pieces} - {"", *self.rules}:
                raise ValueError(f"rule {name} expands {unknown}, which is not defined further down")
            self.rules[name] = options
        tokens: set[str] = set()
        self.max_tokens, _ = self._survey(self.start, {}, tokens)
        self.tokens = sorted(tokens)

    def write(self, rng: random.Random) -> tuple[list[str], list[float]]:
        """Draw a text; return it in pieces of whole tokens, and the inverse probability of each choice."""
        words, inverse_probs, slots = [], [], {}
        rules, tables = self.rules, self.tables
        draw = rng.random  # the only method of Random with the same numbers in every version of Python

        def expand(rule: str) -> None:
            options = rules[rule]
            inverse_probs.append(len(options))
            for text, inner, slot, form, table, other in options[int(draw() * len(options))]:
                if text:
                    words.append(text)
                elif inner:
                    expand(inner)
                elif other:
                    slots[slot] = slots[other]
                else:
                    if table:
                        entries = tables[table]
                        index = bisect(entries.ends, int(draw() * entries.total))
                        inverse_probs.append(entries.inverse_probs[index])
                        slots[slot] = entries.spaced[index]
                    words.append(slots[slot][form])

        expand(self.start)
        return words, inverse_probs

    def log_probability(self, text: str) -> float | None:
        """Return the exact log-probability in nats; None for a text that the grammar does not generate."""
        derivation = self._parse(text)
        return derivation and log_probability([choice.inverse_prob for choice in derivation.choices])

    def explain(self, text: str) -> list[Token] | None:
        """Return the tokens of a text; None if the grammar does not generate it."""
        if (derivation := self._parse(text)) is None:
            return None
        nats: dict[int, float] = defaultdict(float)  # by the position where the token ends
        for start, words, inverse_prob, weights_of_options in derivation.choices:
            if inverse_prob == 1:
                continue
            weights = weights_of_options()
            prefix, weight, chosen = "", weights[""], round(weights[""] / inverse_prob)
            # Each token narrows the choice to the options that start with the tokens so far.
            for token in TOKEN.findall(words):
                prefix += token
                nats[start + len(prefix)] += math.log(weight / weights[prefix])
                weight = weights[prefix]
            if weight > chosen:  # the token after "Ann" excludes the longer option "Ann, the cat"
                following = TOKEN.match(text, start + len(prefix))
                assert following is not None, "the text continues"
                nats[following.end()] += math.log(weight / chosen)
        tokens, pieces = [], iter(derivation.pieces)
        end, source = 0, ()
        for match in TOKEN.finditer(text):
            if match.end() > end:
                end, source = next(pieces)
            tokens.append(Token(match[0], nats.get(match.end(), 0.0), *source))
        return tokens

    def _parse(self, text: str) -> "_Derivation | None":
        """Find the only derivation of a text; None if there is none."""
        position, slots, derivation = 0, {}, _Derivation([], [])

        def choose_template(rule: str) -> list[Piece]:
            options, known = self.rules[rule], dict(slots)
            for option in options:
                words = self._first_words(option, slots)
                if text.startswith(words, position):

                    def weights_of_options() -> Counter[str]:
                        return _weights_of_prefixes((self._first_words(option, known), 1) for option in options)

                    derivation.choices.append(_Choice(position, words, len(options), weights_of_options))
                    return option
            raise _NoDerivation

        def choose_entry(table: str, start: int) -> int:
            entries = self.tables[table]
            for length in entries.lengths:
                words = text[start : start + length]
                if (index := entries.index.get(words)) is not None:
                    derivation.choices.append(
                        _Choice(start, words, entries.inverse_probs[index], entries.weights_of_prefixes)
                    )
                    return index
            raise _NoDerivation

        def follow(rule: str) -> None:
            nonlocal position
            for piece in choose_template(rule):
                if piece.table:
                    slots[piece.slot] = piece.table, choose_entry(piece.table, position + len(piece.form))
                if piece.rule:
                    follow(piece.rule)
                elif piece.other:
                    slots[piece.slot] = slots[piece.other]
                else:
                    words = piece.text or self._word(piece, slots)
                    if not text.startswith(words, position):
                        raise _NoDerivation
                    position += len(words)
                    source = (*slots[piece.slot], piece.form.strip(), bool(piece.table)) if piece.slot else ()
                    derivation.pieces.append((position, source))

        try:
            follow(self.start)
        except _NoDerivation:
            return None
        return derivation if position == len(text) else None

    def _word(self, piece: Piece, slots: Slots) -> str:
        table, index = slots[piece.slot]
        return self.tables[table].spaced[index][piece.form]

    def _first_words(self, pieces: Sequence[Piece], slots: Slots) -> str:
        """Return the words that a template writes before its first choice."""
        words = ""
        for piece in pieces:
            if piece.rule or piece.table or piece.other:
                return words + piece.form
            words += piece.text or self._word(piece, slots)
        return words

    def _survey(self, rule: str, before: dict[str, set[str]], vocabulary: set[str]) -> tuple[int, dict[str, set[str]]]:
        """Add the tokens of all derivations of a rule to `vocabulary`.

        Return the largest number of tokens in one derivation, and the slots that every derivation leaves filled, each
        with the tables that may have filled it. `before` holds the slots before the rule in the same form.
        """
        most, afters = 0, []
        for pieces in self.rules[rule]:
            count, slots = 0, dict(before)
            for text, inner, slot, form, table, other in pieces:
                if table:
                    slots[slot] = {table}
                if inner:
                    inner_count, slots = self._survey(inner, slots, vocabulary)
                    count += inner_count
                elif slot and (other or slot) not in slots:
                    raise ValueError(f"rule {rule}: slot {{{other or slot}}} may be empty here: {pieces}")
                elif other:
                    slots[slot] = slots[other]
                elif slot:
                    try:
                        tokens = [self.tables[table].tokens(form) for table in slots[slot]]
                    except KeyError:
                        problem = f"{slots[slot]} may fill {{{slot}}}, not all with .{form.strip()}"
                        raise ValueError(f"rule {rule}: {problem}") from None
                    vocabulary.update(*(words for words, _ in tokens))
                    count += max(length for _, length in tokens)
                else:
                    tokens = TOKEN.findall(text)
                    vocabulary.update(tokens)
                    count += len(tokens)
            most = max(most, count)
            afters.append(slots)
        filled = set.intersection(*map(set, afters))
        return most, {slot: set().union(*(after[slot] for after in afters)) for slot in filled}


def log_probability(inverse_probs: Sequence[float]) -> float:
    """Return the log-probability, in nats, of a derivation, given the inverse probability of each choice."""
    return math.fsum(math.log(1 / inverse_prob) for inverse_prob in inverse_probs)


class _Table:
    """Entries with their weights, their inverse probabilities, and an index to find them in a text."""

    def __init__(self, entries: Sequence[Entry], weights: Sequence[int] | None):
        self.weights = weights or [1] * len(entries)
        self.ends, self.total = [*accumulate(self.weights)], sum(self.weights)
        self.inverse_probs = [self.total / weight for weight in self.weights]
        self.index = {entry[""]: index for index, entry in enumerate(entries)}
        self.lengths = sorted(set(map(len, self.index)))  # of entries, in characters
        # Each form also with the space before it: " " + form.
        self.spaced = [{s + form: s + word for s in ("", " ") for form, word in entry.items()} for entry in entries]

    @functools.cache  # noqa: B019 (tables live as long as their grammar)
    def weights_of_prefixes(self) -> Counter[str]:
        return _weights_of_prefixes(zip(self.index, self.weights, strict=True))

    @functools.cache  # noqa: B019
    def tokens(self, form: str) -> tuple[set[str], int]:
        """Return all tokens of a form of the entries, and the largest number in one."""
        tokens = [TOKEN.findall(entry[form]) for entry in self.spaced]
        return set().union(*tokens), max(map(len, tokens))


def _weights_of_prefixes(options: Iterable[tuple[str, int]]) -> Counter[str]:
    """Return the total weight of the options (words, weight) that start with given tokens."""
    weights: Counter[str] = Counter()
    for words, weight in options:
        for prefix in accumulate(["", *TOKEN.findall(words)]):
            weights[prefix] += weight
    return weights


class _Choice(NamedTuple):
    """A choice that the parser found in a text."""

    start: int
    words: str
    """Words that identify the choice, from `start` on."""
    inverse_prob: float
    weights_of_options: Callable[[], Mapping[str, int]]
    """Total weight of the options that start with given tokens."""


class _Derivation(NamedTuple):
    """The choices by which the grammar generates a text."""

    choices: list[_Choice]
    pieces: list[tuple[int, tuple]]
    """End of the words of each piece, with the fields of Token from `table` on."""


class _NoDerivation(Exception):
    pass


def _piece(space: str, form: str, **parts: str) -> Piece:
    return Piece(form=space + form, **parts)
