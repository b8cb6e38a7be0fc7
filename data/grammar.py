"""A probabilistic grammar that writes texts and, run the other way, scores them exactly.

A grammar is data. A rule lists templates, all equally likely; a template is plain text and, in braces:

    {RULE}        one template of another rule, which must stand further down
    {slot:TABLE}  an entry of a table, all equally likely; it is written, and remembered in the slot
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
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise

# A token is a word or a punctuation mark, with the space before it: tokens put end to end are the text.
TOKEN = re.compile(r" ?[A-Za-z]+| ?[^A-Za-z ]")

_PIECE = re.compile(r"(?P<space> ?)\{(?:(?P<rule>[A-Z_]+)|(?P<slot>[a-z]+)"
                    r"(?:\.(?P<form>\w+)|:(?P<table>[A-Z_]+)|=(?P<other>[a-z]+))?)\}"
                    r"|(?P<text>[^{}]+?)(?= ?\{|$)")  # fmt: skip

Entry = Mapping[str, str]  # the forms of a table's entry; the form "" is the entry itself

Piece = namedtuple("Piece", _PIECE.groupindex)
"""Of a template: plain text, or what stands in braces, with the space before it; "" is what it has not."""

Option = Entry | list[Piece]


class Rejected(Exception):
    """The text is none of the grammar's."""


class Grammar:
    """A grammar of `rules` (the first is the start), lists of templates, over `tables`.

    `tokens` are all that texts are made of, sorted; no text has more of them than `max_tokens`.
    Raises ValueError, naming the place, where a text could have two derivations, a slot could be empty or lack a
    form, or a rule stands above one that expands it.
    """

    def __init__(self, rules: Mapping[str, Sequence[str]], tables: Mapping[str, Sequence[Entry]]):
        self.tables, self.start = tables, next(iter(rules))
        for name, entries in tables.items():
            for word, following in pairwise(sorted(entry[""] for entry in entries)):
                if following.startswith(word):
                    raise ValueError(f"table {name}: {following!r} begins with {word!r}: a reader would have to guess")
        self.rules: dict[str, list[list[Piece]]] = {}
        for name, templates in reversed(rules.items()):
            _check_templates(name, templates, is_start=name == self.start)
            options = [[Piece(*match.groups("")) for match in _PIECE.finditer(template)] for template in templates]
            if unknown := {piece.rule for pieces in options for piece in pieces} - {"", *self.rules}:
                raise ValueError(f"rule {name} expands {unknown}, which does not stand further down")
            self.rules[name] = options
        tokens: set[str] = set()
        self.max_tokens, _ = self._survey(self.start, {}, tokens)
        self.tokens = sorted(tokens)

    def write(self, rng: random.Random) -> tuple[list[str], list[int]]:
        """A text drawn from the grammar, in pieces of whole tokens, and how many options each choice had."""
        words, counts = [], []
        # Of all of Random's methods the only one with the same numbers in every version of Python.
        self._write(rng.random, words, counts.append, {})
        return words, counts

    @functools.cached_property
    def _write(self) -> Callable[..., None]:
        """The rules as functions of Python, which take less than a third of a loop over their pieces."""
        lines = []
        for name, options in self.rules.items():
            size = len(options)
            lines += [f"def {name}(draw, words, count, slots):", f" count({size}); option = int(draw() * {size})"]
            for number, pieces in enumerate(options):
                lines += [f" if option == {number}:", "  pass"]
                for space, inner, slot, form, table, other, text in pieces:
                    if table:
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
        functions = {"tables": spaced}
        exec("\n".join(lines), functions)
        return functions[self.start]

    def log_probability(self, text: str) -> float | None:
        """The exact log-probability of the text in nats; None if the grammar never writes it."""
        position, counts, slots = 0, [], {}

        def choose(options: Sequence[Option], space: str) -> Option:
            counts.append(len(options))
            for option in options:
                if text.startswith(space + _beginning(option, slots), position):
                    return option
            raise Rejected

        def follow(rule: str) -> None:
            nonlocal position
            for space, inner, slot, form, table, other, words in choose(self.rules[rule], ""):
                if table:
                    slots[slot] = choose(self.tables[table], space)
                if inner:
                    follow(inner)
                elif other:
                    slots[slot] = slots[other]
                elif text.startswith(words or (words := space + slots[slot][form]), position):
                    position += len(words)
                else:
                    raise Rejected

        try:
            follow(self.start)
        except Rejected:
            return None
        return log_probability(counts) if position == len(text) else None

    def _survey(self, rule: str, before: dict[str, set[str]], found: set[str]) -> tuple[int, dict[str, set[str]]]:
        """Add the tokens of all derivations of a rule to `found`; return the most that one has, and the slots after it.

        Slots map to the tables that may have filled them.
        """
        most, afters = 0, []
        for pieces in self.rules[rule]:
            count, slots = 0, dict(before)
            for space, inner, slot, form, table, other, text in pieces:
                words = [text]
                if inner:
                    inner_count, slots = self._survey(inner, slots, found)
                    count += inner_count
                elif table:
                    slots[slot] = {table}
                    words = [space + entry[""] for entry in self.tables[table]]
                elif slot and (other or slot) not in slots:
                    raise ValueError(f"rule {rule}: slot {{{other or slot}}} may be empty here: {pieces}")
                elif other:
                    slots[slot] = slots[other]
                elif slot:
                    entries = [entry for table in slots[slot] for entry in self.tables[table]]
                    if not all(form in entry for entry in entries):
                        raise ValueError(f"rule {rule}: {slots[slot]} may fill {{{slot}}}, not all with .{form}")
                    words = [space + entry[form] for entry in entries]
                tokens = [TOKEN.findall(word) for word in words]
                found.update(*tokens)
                count += max(map(len, tokens))
            most = max(most, count)
            afters.append(slots)
        filled = set.intersection(*map(set, afters))
        return most, {slot: set().union(*(after[slot] for after in afters)) for slot in filled}


def _spaced(entry: Entry) -> Entry:
    return {space + form: space + word for space in ("", " ") for form, word in entry.items()}


def log_probability(counts: Sequence[int]) -> float:
    """Of a derivation whose choices had so many options each, in nats."""
    return math.fsum(math.log(1 / count) for count in counts)


def _beginning(option: Option, slots: Mapping[str, Entry]) -> str:
    """What a text goes on with where this option is taken, as far as nothing more is chosen."""
    if isinstance(option, Mapping):
        return option[""]
    known = ""
    for piece in option:
        known += piece.text or piece.space
        if piece.rule or piece.table or piece.other:
            break
        if piece.slot:
            known += slots[piece.slot][piece.form]
    return known


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
