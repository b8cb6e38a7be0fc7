"""Tiny English stories, any number of them, whose exact probability is known.

A grammar generates them: the characters, their belongings and feelings are drawn early and must stay consistent to the
end. With a world (data/synthetic/world.py) there is less of a plot: two children tell each other eight of its facts.
"""

import functools
import hashlib
import math
import random
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import Dataset

from data.synthetic.grammar import TOKEN, Grammar, Token, log_probability
from data.synthetic.world import World
from data.tokenizer import END_OF_TEXT
from runtime.config.errors import ConfigError


def _entries(words: str, **forms: str) -> list[dict[str, str]]:
    return [{"": word, **forms} for word in words.split()]


SHE, HE = {"He": "She", "him": "her", "his": "her"}, {"He": "He", "him": "him", "his": "his"}
IT, THEM = {"them": "it", "they": "it", "was": "was"}, {"them": "them", "they": "they", "was": "were"}
SISTERS = _entries("Ella Ruby Clara Maya Daisy Hazel", **SHE)
BROTHERS = _entries("Noah Omar Hugo Theo Felix Luca", **HE)
PLACES = """
garden roses shed,forest oak stream,beach rocks pier,park swings bench,farm barn well,market fountain stalls,
meadow fence hedge,river bridge reeds,school gate slide,castle tower stairs
"""
TABLES = {
    "GIRL": _entries("Lily Mia Anna Rosa Zoe Emma Nora Ivy", **SHE, kid="girl"),
    "BOY": _entries("Tom Ben Max Leo Sam Finn Oscar Jack", **HE, kid="boy"),
    "SISTER": SISTERS,
    "BROTHER": BROTHERS,
    "FRIEND": SISTERS + BROTHERS,
    "ELDER": _entries("grandmother mother aunt", **SHE) + _entries("grandfather father uncle", **HE),
    "TRAIT": _entries("brave kind curious clever shy funny gentle quiet"),
    "PET": _entries("puppy kitten parrot pony rabbit duck goat hamster"),
    "NICK": _entries("Spot Coco Biscuit Pepper Fluffy Ginger Bubbles Lucky"),
    "THIEF": _entries("fox crow squirrel monkey raccoon bear"),
    "COLOR": _entries("red blue green yellow purple orange silver golden"),
    "THING": _entries("kite ball drum doll hat scarf book flute basket clock crown robot", **IT)
    + _entries("marbles boots gloves crayons beads skates", **THEM),
    "PRESENT": _entries("ladder lantern puppet whistle wagon necklace", **IT),
    "FOOD": _entries("cake bread soup honey cheese popcorn jam pudding"),
    "WEATHER": _entries("sunny windy rainy cloudy snowy foggy"),
    "TIME": _entries("morning afternoon evening"),
    "PLACE": [dict(zip(("", "one", "two"), place.split(), strict=True)) for place in PLACES.split(",")],
    "SAD": _entries("sad upset unhappy lonely worried gloomy"),
    "GLAD": _entries("happy glad proud thankful cheerful pleased"),
}

# Each line is a template of the rule named on it, or of the rule named last.
RULES = """
STORY          |There was a {trait:TRAIT}{HERO}.{HOME}{OUTING}{PLOT}
               |Meet a {trait:TRAIT}{HERO}.{HOME}{OUTING}{PLOT}
               |Here lived a {trait:TRAIT}{HERO}.{HOME}{OUTING}{PLOT}
HERO           | girl named {hero:GIRL}
               | boy named {hero:BOY}
HOME           | {hero.He} had{BELONGINGS} of {hero.his} {elder:ELDER}.
               | {hero.He} loved{BELONGINGS} from {hero.his} {elder:ELDER}.
BELONGINGS     | a {pet:PET} called {nick:NICK} and the {color:COLOR} {thing:THING}
OUTING         | One {weather:WEATHER} {time:TIME}, {hero} went to the {place:PLACE} with {hero.his}{COMPANION}.
               | That {weather:WEATHER} {time:TIME}, {hero} played near the {place:PLACE} with {hero.his}{COMPANION}.
COMPANION      | sister {friend:SISTER}
               | brother {friend:BROTHER}
               | friend {friend:FRIEND}
PLOT           | Later, the {thing} {thing.was} gone.{SADNESS}{SEARCH}
               | After lunch, {friend} asked for the {thing}.{ANSWER}
               | Then {friend} dropped the {thing} in the mud.{SADNESS}{REPAIR}
               | Suddenly, a {thief:THIEF} took the {thing}.{SADNESS}{CHASE}
SADNESS        | The {trait} {hero.kid} felt {sad:SAD}.
               | The {trait} {hero.kid} looked {sad:SAD}.
               | The {trait} {hero.kid} was {sad:SAD}.
SEARCH         | {hero.He} looked by the {place.one}, {friend} by the {place.two}.{FOUND}
               | {hero.He} went back with {nick} to look.{FOUND_LATE}
FOUND          | Soon {friend} found {thing.them} by the {place.two}.{owner=hero}{REWARD_FRIEND}
               | At the {place.one}, {hero} found {thing.them}.{owner=hero}{GLAD}
               | But {thing.they} {thing.was} not there.{NEW}
FOUND_LATE     | Soon the {pet} found {thing.them} by the {place.two}.{owner=hero}{REWARD_PET}
               | By the {place.one}, {hero} found {thing.them}.{owner=hero}{GLAD}
               | But {thing.they} {thing.was} lost.{NEW}
ANSWER         | {hero} said yes and gave {thing.them} to {friend.him}.{owner=friend}{THANKS}
               | {hero} said no, and {friend} felt {sad:SAD}.{SECOND_THOUGHT}
               | {hero} swapped {thing.them} for a new {shade:COLOR} {gift:PRESENT}.{SWAPPED}
SECOND_THOUGHT | But in the end {hero} let {friend.him} have {thing.them}.{owner=friend}{THANKS}
               | So {friend} went home, and {hero} kept {thing.them}.{owner=hero}{NIGHT}
THANKS         | {friend.He} was {glad:GLAD} and shared some {food:FOOD} with {hero.him}.{NIGHT}
               | {friend.He} thanked {hero} and gave {nick} some {food:FOOD}.{NIGHT}
SWAPPED        | So {friend} liked the {thing}, and {hero} liked the {gift}.{owner=hero}{color=shade}{thing=gift}{NIGHT}
               | But {hero} missed the {thing}, so they swapped again.{owner=hero}{NIGHT}
REPAIR         | But {friend} said sorry and washed {thing.them} with care.{owner=hero}{GLAD}
               | At first {hero} was angry, but {friend} said sorry.{owner=hero}{REWARD_FRIEND}
               | So {friend} ran home and brought a new {color:COLOR} {thing:PRESENT}.{owner=hero}{GLAD}
CHASE          | Then {nick} the {pet} chased the {thief} and got {thing.them} back.{owner=hero}{REWARD_PET}
               | But {friend} gave the {thief} some {food:FOOD} and got {thing.them} back.{owner=hero}{GLAD}
               | The {thief} ran away and did not come back.{NEW}
NEW            | So {hero.his} {elder} made a new {color:COLOR} {thing:PRESENT}.{owner=hero}{NIGHT}
REWARD_FRIEND  | {hero} thanked {friend} with some {food:FOOD}.{NIGHT}
               | {hero} shared some {food:FOOD} with {friend}.{NIGHT}
REWARD_PET     | {hero} thanked {nick} with some {food:FOOD}.{NIGHT}
               | {hero} gave the {pet} some {food:FOOD}.{NIGHT}
GLAD           | Now {hero} was not {sad} anymore.{NIGHT}
               | This made the {sad} {hero.kid} {glad:GLAD} again.{NIGHT}
NIGHT          | That night, {owner} hugged the {color} {thing}.{MORAL}
               | Today {owner} still has the {color} {thing}.{MORAL}
               | And so the {color} {thing} stayed with {owner}.{MORAL}
MORAL          | Then {hero.his} {elder} called {hero.him} a {trait} {hero.kid}.
               | Even {nick} the {pet} liked that {weather} {time}.
               | And {friend} and {hero} stayed friends forever.
"""

# No story about a world is longer than the longest plain story, so the same seq_len fits both.
WORLD_RULES = """
STORY          |There was a {trait:TRAIT}{HERO}.{OUTING}{TELLING}
               |Meet a {trait:TRAIT}{HERO}.{OUTING}{TELLING}
               |Here lived a {trait:TRAIT}{HERO}.{OUTING}{TELLING}
TELLING        | {friend} said:{FACT}{FACT}{FACT}{FACT} {hero} said:{FACT}{FACT}{FACT}{FACT}{PARTING}
FACT           | {fact:FACT} {fact.answer}.
PARTING        | Then {friend} called {hero.him} a {trait} {hero.kid}.
               | So {hero} thanked {friend} for that {weather} {time}.
               | And {friend} and {hero} stayed friends forever.
"""


def _rules(lines: str) -> dict[str, list[str]]:
    rules: dict[str, list[str]] = {}
    for line in lines.strip().splitlines():
        name, _, template = line.partition("|")
        rules.setdefault(name.strip() or next(reversed(rules)), []).append(template)
    return rules


class StoryGenerator:
    """The grammar of the stories, or of stories about the facts of a `world`, and their tokenizer and scores."""

    def __init__(self, world: World | None = None):
        self.world, rules = world, _rules(RULES)
        if world is None:
            self.grammar = Grammar(rules, TABLES)
        else:
            shared = {name: rules[name] for name in ("HERO", "OUTING", "COMPANION")}
            rules = _rules(WORLD_RULES) | shared
            self.grammar = Grammar(rules, TABLES | {"FACT": world.facts}, {"FACT": world.weights})
        self.vocabulary = {token: index for index, token in enumerate([END_OF_TEXT, *self.grammar.tokens])}
        self.token_cache = TokenCache(self.vocabulary)

    def build_tokenizer(self) -> Tokenizer:
        """Build a word-level tokenizer for the stories: lossless, with `<|endoftext|>` as token 0.

        Encoding a word that no story contains raises an Exception, because such a text has no known probability.
        """
        tokenizer = Tokenizer(models.WordLevel(self.vocabulary))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN.pattern), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens([END_OF_TEXT])
        return tokenizer

    def describe_text(self, text: str) -> str:
        """Describe a text: its log-probability if the grammar accepts it, else which facts in it are false."""
        if (nats := self.grammar.log_probability(text)) is not None:
            return f"accepted, log-probability {nats:.2f} nats"
        reasons = [
            f"{stated}, which is false: {true}" if true else f"{stated}, about which the world has no fact"
            for stated, true in (self.world.find_facts(text) if self.world else [])
            if stated != true
        ]
        return "; ".join(["not accepted by the grammar", *reasons])

    def score_texts(self, texts: list[str]) -> dict[str, tuple[Any, Any]]:
        """Count the valid stories and the true facts in generated texts.

        `valid`: (stories that the grammar accepts, texts); `true_facts`: (true facts, stated facts).
        """
        scores = {"valid": (sum(self.grammar.log_probability(text) is not None for text in texts), len(texts))}
        if self.world:
            facts = [fact for text in texts for fact in self.world.find_facts(text)]
            scores["true_facts"] = (sum(stated == true for stated, true in facts), len(facts))
        return scores

    @functools.cached_property
    def kinds(self) -> list[str]:
        """Kinds of tokens for which the excess loss is reported."""
        decades = range(len(str(len(self.world.facts)))) if self.world else ()
        fact_kinds = ["fact_keys", *map(_decade, decades)] if self.world else []
        return ["names", "agreement", "plot", "endings", *fact_kinds]

    def kind(self, token: Token) -> str:
        """Return the kind of a token, one of `kinds`.

        names: an entry drawn here; agreement: one drawn before; endings: the end of a sentence; plot: all other words;
        fact_keys: a fact without its answer; facts_from_10: the answer of a fact of rank 10 to 99, and so on.
        """
        if token.table == "FACT":
            return "fact_keys" if token.drawn else _decade(len(str(token.index + 1)) - 1)
        if token.table:
            return "names" if token.drawn else "agreement"
        return "endings" if token.text == "." else "plot"


def _decade(power: int) -> str:
    return f"facts_from_{10**power}"


@functools.cache
def get_story_generator(facts: int = 0, zipf: float = 0.0, seed: int = 0) -> StoryGenerator:
    """Return the generator of stories about a world of `facts` facts, or of plain stories if there are 0."""
    return StoryGenerator(World(facts, zipf, seed)) if facts else STORIES


class TokenCache(dict[str, bytes]):
    """Maps a piece of a story to its tokens, the bytes of an int64 array. A piece is tokenised when first looked up."""

    def __init__(self, vocabulary: dict[str, int]):
        super().__init__()
        self.vocabulary = vocabulary

    def __missing__(self, words: str) -> bytes:
        self[words] = np.array([self.vocabulary[token] for token in TOKEN.findall(words)]).tobytes()
        return self[words]


STORIES = StoryGenerator()


class StoriesDataset(Dataset):
    """`num_stories` stories, one a row, each between two end-of-text tokens and padded to `seq_len`.

    Story i is a function of (seed, split, i), generated when it is read. A hash of its text decides which split a story
    belongs to, so no story is in both, whatever the sizes and seeds. The hash cannot be learned, so the best model of
    either split is the grammar itself, and its loss is the entropy.

    Raises:
        ConfigError: `seq_len` is too short for the longest story.
    """

    def __init__(self, split: str, num_stories: int, seed: int, seq_len: int, generator: StoryGenerator = STORIES):
        assert split in ("train", "validation"), split
        min_seq_len = generator.grammar.max_tokens + 2
        if seq_len < min_seq_len:
            wanted = f"at least {min_seq_len}, the longest story and two end-of-text tokens"
            problem = f"data.source: stories needs seq_len of {wanted}, but it is {seq_len}"
            raise ConfigError(f"{problem}; set it to {min_seq_len}")
        self.split, self.num_stories, self.seed, self.seq_len = split, num_stories, seed, seq_len
        self.grammar, self.encode = generator.grammar, generator.token_cache.__getitem__
        self._drawn: list[tuple[list[str], list[float]]] = []

    def __len__(self) -> int:
        return self.num_stories

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return the row of story `index`: `input_ids` and `labels`, both int64 [seq_len].

        The labels are the inputs, not shifted, with -100 at the padding.
        """
        return {name: torch.from_numpy(rows[0]) for name, rows in self.arrays([index]).items()}

    def arrays(self, indices: list[int]) -> dict[str, np.ndarray]:
        """Generate the rows of these stories, each array int64 [B, seq_len]."""
        stories = [b"".join(map(self.encode, self._draw(index)[0])) for index in indices]
        # End-of-text is token 0. Joining bytes is faster than filling each row through numpy.
        rows = bytearray().join([(bytes(8) + story).ljust(8 * self.seq_len, b"\0") for story in stories])
        input_ids = np.frombuffer(rows, np.int64).reshape(len(indices), self.seq_len)
        lengths = np.array([len(story) // 8 + 2 for story in stories])
        labels = np.where(np.arange(self.seq_len) < lengths[:, None], input_ids, -100)
        return {"input_ids": input_ids, "labels": labels}

    def text(self, index: int) -> str:
        """Return the text of story `index`."""
        return "".join(self._draw(index)[0])

    @functools.cached_property
    def entropy_nats(self) -> float:
        """The sum of -log P of these stories in nats: the summed loss of the grammar itself."""
        return -math.fsum(log_probability(inverse_probs) for _, inverse_probs in self._stories)

    @functools.cached_property
    def num_targets(self) -> int:
        """The tokens of these stories, each with its end."""
        return sum(1 + sum(len(self.encode(piece)) // 8 for piece in words) for words, _ in self._stories)

    @functools.cached_property
    def num_bytes(self) -> int:
        """The UTF-8 bytes of these stories, without the end-of-text tokens."""
        return sum(len("".join(words).encode()) for words, _ in self._stories)

    @property
    def _stories(self) -> list[tuple[list[str], list[float]]]:
        """All stories, drawn once for the three sums above."""
        self.draw_until(self.num_stories)
        return self._drawn

    def draw_until(self, end: int) -> None:
        """Draw the stories before `end` for these sums, so that not all are drawn at once."""
        self._drawn += [self._draw(index) for index in range(len(self._drawn), end)]

    def _draw(self, index: int) -> tuple[list[str], list[float]]:
        index = range(self.num_stories)[index]
        attempt = 0
        while True:
            words, inverse_probs = self.grammar.write(random.Random(f"{self.seed} {self.split} {index} {attempt}"))
            if is_validation("".join(words)) == (self.split == "validation"):
                return words, inverse_probs
            attempt += 1


def is_validation(text: str) -> bool:
    """Return whether a story belongs to the eighth that is reserved for validation."""
    return hashlib.blake2b(text.encode()).digest()[0] % 8 == 0
