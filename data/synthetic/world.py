"""A world that stories may be about: facts that a model can only memorise.

A fact is an animal and what it does, such as "Coco the red fox likes | kites". Its frequency falls with its rank by
Zipf's law; its answer is a pseudo-random function of the fact and the seed. So the probability of a text, given the
world, stays exact, and a model approaches the entropy as it learns facts. If the fact of rank i has a probability
proportional to i ** -z, the excess loss after D facts falls as D ** -((z - 1) / z) (Hutter 2021, arXiv:2102.04074), and
with capacity for N facts as N ** -(z - 1) (Michaud et al. 2023, arXiv:2303.13506).
"""

import re

import numpy as np

from data.sampler import permute
from model.seeds import derive_seed

NAMES = """
Spot Coco Biscuit Pepper Fluffy Ginger Bubbles Lucky Pip Nutmeg Pebble Dusty Mango Olive Rusty Sunny
Waffle Ziggy Button Clover Domino Ember Freckle Gizmo Hopper Jasper Kiwi Lemon Muffin Noodle Peanut Whisker
"""
LOOKS = "red blue green yellow purple orange silver golden brown black white grey pink spotted striped tiny"
ANIMALS = """
fox crow squirrel monkey raccoon bear puppy kitten parrot pony rabbit duck goat hamster owl mouse
turtle frog hedgehog badger otter beaver lamb calf goose swan penguin lizard camel donkey panda tiger
"""
VERBS = "likes hides sells draws"
THINGS = """
kites balls drums dolls hats scarves books flutes baskets clocks crowns robots marbles boots gloves crayons
beads skates ladders lanterns puppets whistles wagons necklaces boats bells candles carpets chairs coins cups feathers
flags forks hammers keys knives lamps leaves letters maps masks mirrors nails nuts paints pans pencils
pillows plates pots ribbons rings ropes shells shoes spoons stamps stars stones tables tents towels wheels
"""
NAMES, LOOKS, ANIMALS, VERBS, THINGS = (words.split() for words in (NAMES, LOOKS, ANIMALS, VERBS, THINGS))
MAX_FACTS = len(NAMES) * len(LOOKS) * len(ANIMALS) * len(VERBS)  # 65,536
FIRST_WEIGHT = 2**32  # weights are rounded to integers, so that they are the same on every machine

_STATED_FACT = re.compile(r"\b([A-Z][a-z]+ the [a-z]+ [a-z]+ (?:%s)) ([a-z]+)" % "|".join(VERBS))  # noqa: UP031 (has braces)


class World:
    """The `num_facts` most frequent facts of a seed, by rank; a larger world of the same seed begins with them.

    `facts` are entries of a grammar's table, whose form "answer" must be memorised, and `weights` their frequencies.
    """

    def __init__(self, num_facts: int, zipf: float, seed: int):
        keys = permute(np.arange(num_facts), MAX_FACTS, derive_seed(seed, "facts"))
        answers = permute(keys, MAX_FACTS, derive_seed(seed, "answers")) % len(THINGS)
        sizes = tuple(map(len, (NAMES, LOOKS, ANIMALS, VERBS)))
        self.facts = [
            {"": f"{NAMES[name]} the {LOOKS[look]} {ANIMALS[animal]} {VERBS[verb]}", "answer": THINGS[answer]}
            for name, look, animal, verb, answer in zip(*np.unravel_index(keys, sizes), answers, strict=True)
        ]
        self.weights = [max(1, round(FIRST_WEIGHT * rank**-zipf)) for rank in range(1, num_facts + 1)]
        self._answers = {fact[""]: fact["answer"] for fact in self.facts}

    def find_facts(self, text: str) -> list[tuple[str, str | None]]:
        """Find the statements of a text that have the form of a fact.

        Returns:
            Pairs (stated, true), which are equal if the statement is a fact; true is None if there is no such animal.
        """
        return [
            (f"{key} {answer}", f"{key} {self._answers[key]}" if key in self._answers else None)
            for key, answer in _STATED_FACT.findall(text)
        ]
