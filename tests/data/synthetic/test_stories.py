"""Stories: exact probabilities, disjoint splits, lossless tokens."""

import itertools
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.synthetic.grammar import TOKEN, Grammar, log_probability
from data.synthetic.stories import END_OF_TEXT, STORIES, TABLES, StoriesDataset, is_validation

ROOT = Path(__file__).parents[3]
GRAMMAR = STORIES.grammar
SEQ_LEN = GRAMMAR.max_tokens + 2


def draw(grammar: Grammar, rng: random.Random) -> tuple[str, float]:
    """Generate a text and return it with its log-probability, computed from the generator's choices."""
    words, counts = grammar.write(rng)
    return "".join(words), log_probability(counts)


@pytest.fixture(scope="module")
def drawn() -> list[tuple[str, float]]:
    rng = random.Random(0)
    return [draw(GRAMMAR, rng) for _ in range(20_000)]


@pytest.fixture(scope="module")
def train() -> StoriesDataset:
    return StoriesDataset("train", 5000, seed=1, seq_len=SEQ_LEN)


@pytest.fixture(scope="module")
def validation() -> StoriesDataset:
    return StoriesDataset("validation", 500, seed=1, seq_len=SEQ_LEN)


def every_text(grammar: Grammar) -> list[tuple[str, float]]:
    """Enumerate the texts of a small grammar with their probabilities."""
    texts, script = [], []  # (chosen option, number of options) of each choice
    while True:
        draws = itertools.chain([(option + 0.5) / size for option, size in script], itertools.repeat(0.0))
        words, counts = grammar.write(SimpleNamespace(random=draws.__next__))
        texts.append(("".join(words), 1 / math.prod(counts)))
        script += [(0, size) for size in counts[len(script) :]]
        while script and script[-1][0] + 1 == script[-1][1]:
            script.pop()
        if not script:
            return texts
        option, size = script.pop()
        script.append((option + 1, size))


def entropy(grammar: Grammar, rule: str | None = None) -> float:
    """Compute the entropy of a rule in nats: its own choice, plus the mean over its options of their choices."""
    options = grammar.rules[rule or grammar.start]
    draws = [
        math.log(len(grammar.tables[piece.table].weights)) for pieces in options for piece in pieces if piece.table
    ]
    inner = [entropy(grammar, piece.rule) for pieces in options for piece in pieces if piece.rule]
    return math.log(len(options)) + math.fsum(draws + inner) / len(options)


def small_grammar() -> Grammar:
    """Build a grammar with draws, nested and shared rules, forms, copies, and templates with a common prefix."""
    people = [{"": "Ann", "she": "she"}, {"": "Ben", "she": "he"}, {"": "Cy", "she": "they"}]
    things = [{"": "hat"}, {"": "top hat"}]
    rules = {
        "STORY": ["One day{MEETING}", "Once{MEETING} And{GIFT}"],
        "MEETING": [" then {hero:HERO} met {other:OTHER}.{GIFT}", " nobody met {other:OTHER}.{hero=other}"],
        "GIFT": [" {hero} and {other} sang.", " {hero} gave {other} a {thing:THING}, and {hero.she} ran."],
    }
    others = [{"": "Dee", "she": "she"}, {"": "Eve", "she": "she"}]
    return Grammar(rules, {"HERO": people, "OTHER": others, "THING": things})


def test_small_grammar_sums_to_one_with_exact_entropy():
    grammar = small_grammar()
    texts = every_text(grammar)
    assert len(texts) == len({text for text, _ in texts}) > 50
    assert math.fsum(p for _, p in texts) == pytest.approx(1, abs=1e-14)
    assert entropy(grammar) == pytest.approx(-math.fsum(p * math.log(p) for _, p in texts), abs=1e-13)
    for text, probability in texts:
        assert grammar.log_probability(text) == pytest.approx(math.log(probability), abs=1e-13)
    assert max(len(TOKEN.findall(text)) for text, _ in texts) == grammar.max_tokens
    assert sorted({token for text, _ in texts for token in TOKEN.findall(text)}) == grammar.tokens


def test_slot_keeps_word_until_reassigned():
    grammar = tiny({"S": ["{a:WORD} {b:WORD}:{T} {a} {b}"], "T": [" stay {a}", " turn{a=b}"]})
    assert {text for text, _ in every_text(grammar)} == {
        f"{a} {b}:{then}"
        for a in ("cat", "dog")
        for b in ("cat", "dog")
        for then in (f" stay {a} {a} {b}", f" turn {b} {b}")
    }


def test_small_grammar_generates_texts_at_their_probabilities():
    grammar, rng = small_grammar(), random.Random(3)
    counts = Counter(draw(grammar, rng)[0] for _ in range(50_000))
    texts = every_text(grammar)
    # Pearson's statistic has as many degrees of freedom as texts, less one, and twice that as its variance.
    statistic = sum((counts[text] - 50_000 * p) ** 2 / (50_000 * p) for text, p in texts)
    assert abs(statistic - (len(texts) - 1)) < 4 * math.sqrt(2 * (len(texts) - 1))


def test_generator_and_parser_agree_bitwise(drawn):
    for text, nats in drawn[:1000]:
        assert GRAMMAR.log_probability(text) == nats
    grammar, rng = small_grammar(), random.Random(0)
    for text, nats in (draw(grammar, rng) for _ in range(300)):
        assert grammar.log_probability(text) == nats


def test_mean_negative_log_probability_equals_entropy(drawn):
    values = torch.tensor([-nats for _, nats in drawn], dtype=torch.float64)
    standard_error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - entropy(GRAMMAR)) < 4 * standard_error
    assert standard_error < 0.001 * entropy(GRAMMAR)  # the comparison above is precise


def test_generated_stories_are_distinct(drawn):
    assert len({text for text, _ in drawn}) == len(drawn)


def test_grammar_uses_every_option():
    """No template or word is unused; a direct interpreter of the rules generates the same text from the same draws."""
    entries = {name: table.spaced for name, table in GRAMMAR.tables.items()}
    wanted = {id(option) for options in (*GRAMMAR.rules.values(), *entries.values()) for option in options}

    def choose(options):
        option = options[int(draws.random() * len(options))]
        wanted.discard(id(option))
        return option

    def follow(rule, slots):
        for text, inner, slot, form, table, other in choose(GRAMMAR.rules[rule]):
            if table:
                slots[slot] = choose(entries[table])
            if other:
                slots[slot] = slots[other]
            else:
                yield from follow(inner, slots) if inner else [text or slots[slot][form]]

    for seed in range(5000):
        draws = random.Random(seed)
        assert list(follow(GRAMMAR.start, {})) == GRAMMAR.write(random.Random(seed))[0]
    assert not wanted


def test_grammar_rejects_damaged_stories(drawn):
    rng = random.Random(1)
    for text, _ in drawn[:300]:
        tokens = TOKEN.findall(text)
        cut = rng.randrange(len(tokens))
        assert GRAMMAR.log_probability("".join(tokens[:cut])) is None
        assert GRAMMAR.log_probability("".join(tokens[:cut] + tokens[cut + 1 :])) is None
        assert GRAMMAR.log_probability(text[:-1]) is None
        for extra in (" ", ".", " The end.", "\n", text, END_OF_TEXT):
            assert GRAMMAR.log_probability(text + extra) is None
        assert GRAMMAR.log_probability(" " + text) is None
    assert GRAMMAR.log_probability("") is None


def test_grammar_rejects_inconsistent_repeated_word(drawn):
    """Replacing one of several occurrences of a word by another of its table makes a story invalid.

    A word that is drawn again later (a new toy, a new colour) is a free choice and is not tested.
    """
    rng = random.Random(2)
    tried = 0
    for text, _ in drawn[:500]:
        for table in ("GIRL", "BOY", "PET", "NICK", "PLACE", "WEATHER", "TIME", "THING", "TRAIT", "ELDER", "THIEF"):
            words = [entry[""] for entry in TABLES[table]]
            places = [match for match in re.finditer("|".join(words), text)]
            if len({match[0] for match in places}) == 1 and len(places) > 1:
                match = rng.choice(places)
                other = rng.choice([word for word in words if word != match[0]])
                assert GRAMMAR.log_probability(text[: match.start()] + other + text[match.end() :]) is None
                tried += 1
    assert tried > 1500


@pytest.mark.parametrize("pronouns", ["She He", "her his", "them it", "they it", "were was"])
def test_grammar_rejects_disagreeing_pronouns(drawn, pronouns):
    tried = 0
    for text, _ in drawn[:1000]:
        for one, other in itertools.permutations(pronouns.split()):
            for match in re.finditer(rf"\b{one}\b", text):
                if other != "was":
                    assert GRAMMAR.log_probability(text[: match.start()] + other + text[match.end() :]) is None
                    tried += 1
    assert tried > 50


def test_pronouns_match_gender_of_child(drawn):
    """The parser accepts any pronoun in the tables; these are the ones of English."""
    words = {"girl": ("She", "her", "her"), "boy": ("He", "his", "him")}
    for text, _ in drawn[:1000]:
        kid, he, his, him = next((kid, *forms) for kid, forms in words.items() if f"{kid} named" in text)
        assert set(re.findall(r"girl|boy", text)) == {kid}
        assert text.split(". ")[1].startswith(f"{he} ")
        assert set(re.findall(r"(?:with|Then) (his|her) ", text)) == {his}
        assert set(re.findall(r"called (her|him) a", text)) <= {him}


def tiny(rules: dict, words: str = "cat dog", **entry: str) -> Grammar:
    return Grammar(rules, {"WORD": [{"": word, **entry} for word in words.split()]})


@pytest.mark.parametrize(
    ("rules", "words", "message"),
    [
        ({"S": ["The {a}"]}, "cat", "may be empty"),
        ({"S": ["A{T}{b=a}"], "T": [" b {a:WORD}", " c"]}, "cat", "may be empty"),
        ({"S": ["The {a:WORD} {a.they}"]}, "cat", "not all with .they"),
        ({"S": ["A{T}"], "T": [" b{S}", " c"]}, "cat", "further down"),
        ({"S": ["A{S}", "B"]}, "cat", "further down"),
    ],
)
def test_grammar_refuses_invalid_rules(rules, words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny(rules, words)


def test_parser_distinguishes_space_from_comma():
    grammar = tiny({"S": ["Ann {a:WORD}", "Ann, the {a:WORD}"]})
    assert [grammar.log_probability(text) for text in ("Ann cat", "Ann, the dog")] == [-math.log(4)] * 2


def test_tokenizer_is_lossless_with_exact_vocabulary(drawn):
    tokenizer = STORIES.build_tokenizer()
    texts = [text for text, _ in drawn[:5000]]
    encoded = tokenizer.encode_batch(texts)
    assert tokenizer.decode_batch([encoding.ids for encoding in encoded]) == texts
    used = set().union(*(encoding.tokens for encoding in encoded))
    assert tokenizer.get_vocab() == {token: index for index, token in enumerate([END_OF_TEXT, *sorted(used)])}
    framed = tokenizer.encode(END_OF_TEXT + texts[0] + END_OF_TEXT).ids
    assert framed == [0, *encoded[0].ids, 0]
    assert tokenizer.decode(framed) == texts[0]
    assert 250 <= len(tokenizer.get_vocab()) <= 400


@pytest.mark.parametrize("text", ["Xylophone", "Once upon", "Once\nthere", "Once  there", "{hero}", "été"])
def test_tokenizer_refuses_unknown_text(text):
    with pytest.raises(Exception, match="UNK"):
        STORIES.build_tokenizer().encode(text)


def test_max_tokens_is_tight_bound(drawn):
    assert max(len(TOKEN.findall(text)) for text, _ in drawn) == GRAMMAR.max_tokens


def test_stories_dataset_rows(train):
    tokenizer = STORIES.build_tokenizer()
    for index in range(200):
        row = train[index]
        story = tokenizer.encode(train.text(index)).ids
        end = len(story) + 2
        assert all(tensor.shape == (SEQ_LEN,) and tensor.dtype == torch.int64 for tensor in row.values())
        assert row["input_ids"].tolist() == [0, *story, 0] + [0] * (SEQ_LEN - end)
        assert row["labels"].tolist() == [0, *story, 0] + [-100] * (SEQ_LEN - end)
    assert len(train) == 5000
    assert train.text(-1) == train.text(4999)
    with pytest.raises(IndexError):
        train[5000]


def test_stories_dataset_refuses_short_seq_len():
    StoriesDataset("train", 1, seed=0, seq_len=SEQ_LEN)
    with pytest.raises(ValueError, match=rf"data\.source.* at least {SEQ_LEN}.* is {SEQ_LEN - 1}"):
        StoriesDataset("train", 1, seed=0, seq_len=SEQ_LEN - 1)
    with pytest.raises(AssertionError, match="test"):
        StoriesDataset("test", 1, seed=0, seq_len=SEQ_LEN)


def test_splits_are_disjoint_with_eighth_for_validation(train, validation, drawn):
    assert not any(is_validation(train.text(index)) for index in range(len(train)))
    assert all(is_validation(validation.text(index)) for index in range(len(validation)))
    fraction = sum(is_validation(text) for text, _ in drawn) / len(drawn)
    assert abs(fraction - 1 / 8) < 4 * math.sqrt(1 / 8 * 7 / 8 / len(drawn))


def test_story_depends_only_on_seed_split_and_index(train):
    short = StoriesDataset("train", 10, seed=1, seq_len=SEQ_LEN + 5)
    assert [short.text(index) for index in reversed(range(10))] == [train.text(index) for index in reversed(range(10))]
    other = StoriesDataset("train", 10, seed=2, seq_len=SEQ_LEN)
    assert not {other.text(index) for index in range(10)} & {train.text(index) for index in range(5000)}


@pytest.mark.slow  # tests/runtime/distributed/test_state_hash.py has the digests of exact runs on stories
def test_another_process_generates_same_stories(train):
    program = (
        "from data.synthetic.stories import STORIES, StoriesDataset\n"
        f"dataset, tokenizer = StoriesDataset('train', 100, seed=1, seq_len={SEQ_LEN}), STORIES.build_tokenizer()\n"
        "for text in map(dataset.text, range(100)):\n"
        "    print(text, STORIES.grammar.log_probability(text), tokenizer.encode(text).ids)\n"
    )
    texts = [train.text(index) for index in range(100)]
    tokenizer = STORIES.build_tokenizer()
    expected = "".join(f"{text} {GRAMMAR.log_probability(text)} {tokenizer.encode(text).ids}\n" for text in texts)
    environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    assert subprocess.check_output([sys.executable, "-c", program], env=environment, cwd=ROOT, text=True) == expected


def test_entropy_and_bytes_match_stories(validation):
    texts = [validation.text(index) for index in range(len(validation))]
    assert validation.entropy_nats == pytest.approx(-sum(map(GRAMMAR.log_probability, texts)), rel=1e-12)
    assert validation.num_bytes == len("".join(texts).encode())
    # The split does not depend on the probabilities, so the mean is close to the entropy of the grammar.
    assert validation.entropy_nats / len(texts) == pytest.approx(entropy(GRAMMAR), rel=0.02)


def test_score_texts_counts_accepted_texts(validation):
    texts = [validation.text(0), validation.text(0) + " The", "", validation.text(1)]
    assert STORIES.score_texts(texts) == {"valid": (2, 4)}


@pytest.mark.slow
def test_bigram_model_is_far_above_entropy(train, validation):
    """Most of what there is to learn spans more than one word."""
    tokenizer = STORIES.build_tokenizer()

    def tokens(dataset: StoriesDataset) -> list[list[int]]:
        return [[0, *tokenizer.encode(dataset.text(index)).ids, 0] for index in range(len(dataset))]

    vocab_size = tokenizer.get_vocab_size()
    counts = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
    for row in tokens(train):
        counts.index_put_((torch.tensor(row[:-1]), torch.tensor(row[1:])), torch.ones((), dtype=counts.dtype), True)
    rows = tokens(validation)
    num_targets = sum(len(row) - 1 for row in rows)
    losses = []
    for smoothing in (0.001, 0.01, 0.1):
        log_probabilities = ((counts + smoothing) / (counts + smoothing).sum(1, keepdim=True)).log()
        losses.append(-sum(log_probabilities[row[:-1], row[1:]].sum().item() for row in rows) / num_targets)
    assert min(losses) > 3 * validation.entropy_nats / num_targets
