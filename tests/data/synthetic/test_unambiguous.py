"""The grammars of the stories are unambiguous, so that the probability of a text is that of its only derivation."""

import os.path
import re
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from data.synthetic.grammar import _PIECE
from data.synthetic.stories import RULES, TABLES, WORLD_RULES, _rules
from data.synthetic.world import World

PLAIN = _rules(RULES)
GRAMMARS = {
    "plain stories": (PLAIN, TABLES),
    "a world": (
        _rules(WORLD_RULES) | {name: PLAIN[name] for name in ("HERO", "OUTING", "COMPANION")},
        TABLES | {"FACT": World(4096, 1.3, seed=0).facts},
    ),
}


def problems(rules: dict[str, list[str]], tables: dict[str, list[dict[str, str]]]) -> Iterator[str]:
    for name, entries in tables.items():
        for word, following in pairwise(sorted(entry[""] for entry in entries)):
            if following.startswith(word):
                yield f"table {name}: {following!r} begins with {word!r}"
    for name, templates in rules.items():
        is_start = name == next(iter(rules))
        yield from (f"rule {name}: {problem}" for problem in template_problems(templates, is_start))


def template_problems(templates: list[str], is_start: bool) -> Iterator[str]:
    for template in templates:
        if "".join(match[0] for match in _PIECE.finditer(template)) != template:
            yield f"cannot parse the braces of {template!r}"
        # Every piece must consist of whole tokens, or a token of a text could span two pieces.
        written = re.sub(r"\{[a-z]+=[a-z]+\}", "", template)
        if re.search(r"[\w}]\{[a-z]| \{[A-Z]| $", written) or re.search(r"\}\w| \{\w+=", template):
            yield f"put a space before each word, also a word in braces, and nowhere else: {template!r}"
        if not is_start and re.match(r"\w|\{[a-z]", written):
            yield f"only the first rule may begin without a space: {template!r}"
    for one, other in combinations(templates, 2):
        same = os.path.commonprefix([one, other])
        one, other = one[len(same) :], other[len(same) :]
        inside = same.count("{") > same.count("}") or re.search(r"\{([A-Z]|\w+[:=])", same)
        if inside or not one or not other or "{" in (one[0], other[0]):
            yield f"plain text must distinguish {same + one!r} from {same + other!r} before their first choice"


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_grammar_of_stories_is_unambiguous(grammar):
    assert [*problems(*GRAMMARS[grammar])] == []


@pytest.mark.parametrize(
    ("rules", "words", "problem"),
    [
        ({"S": ["Ann", "Ann and Ben"]}, "a", "plain text must distinguish"),
        ({"S": ["{a:WORD} ran", "{a:WORD} slept"]}, "a", "plain text must distinguish"),
        ({"S": ["The {a:WORD} ran", "The cat ran"]}, "a", "plain text must distinguish"),
        ({"S": ["A{T} ran", "A{T} slept"], "T": [" b"]}, "a", "plain text must distinguish"),
        ({"S": ["{a:WORD} {b:WORD}{T}"], "T": [" {a} ran", " {b} slept"]}, "a", "plain text must distinguish"),
        ({"S": ["Ann", "Ann"]}, "a", "plain text must distinguish"),
        ({"S": ["The {a:WORD}"]}, "ball bat balloon", "'balloon' begins with 'ball'"),
        ({"S": ["The {a:WORD}"]}, "cat cat", "'cat' begins with 'cat'"),
        ({"S": ["The{a:WORD}"]}, "cat", "put a space before each word"),
        ({"S": ["The {a:WORD}s"]}, "cat", "put a space before each word"),
        ({"S": ["The {T}"], "T": [" a"]}, "cat", "put a space before each word"),
        ({"S": ["The{T}"], "T": ["a"]}, "cat", "begin without a space"),
        ({"S": ["The {a.b.c}"]}, "cat", "cannot parse"),
        ({"S": ["The {Word}"]}, "cat", "cannot parse"),
    ],
)
def test_ambiguous_rules_are_found(rules, words, problem):
    assert problem in " ".join(problems(rules, {"WORD": [{"": word} for word in words.split()]}))
