"""Stories about the facts of a world: exact probabilities, and the excess loss by kind of token."""

import hashlib
import itertools
import math
import random
from collections import Counter, defaultdict
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from data.corpus import load_corpus
from data.synthetic.excess import build_excess_loss_score
from data.synthetic.grammar import TOKEN, Grammar, log_probability
from data.synthetic.stories import StoriesDataset, StoryGenerator, get_story_generator
from data.synthetic.world import MAX_FACTS, THINGS, World
from model.config import GPTConfig
from model.gpt import GPTModel
from runtime.config.errors import RunError
from runtime.config.schema import TrainConfig
from tests.conftest import TINY_STORIES, metrics, train
from trainer import evaluation

SEQ_LEN = 96  # as in configs/stories.yaml
FACTS = ["--data.facts", 300, "--seq_len", SEQ_LEN]
ONE_PROCESS = SimpleNamespace(  # an Accelerator
    process_index=0, num_processes=1, device=torch.device("cpu"), unwrap_model=lambda model: model
)


@pytest.fixture(scope="module")
def generator() -> StoryGenerator:
    return get_story_generator(300, 1.5, 7)


@pytest.fixture(scope="module")
def validation(generator) -> StoriesDataset:
    return StoriesDataset("validation", 50, 7, SEQ_LEN, generator)


@pytest.fixture(scope="module")
def small() -> tuple[Grammar, dict[str, Fraction]]:
    """A grammar of 130 texts about a small world, and the probability of each, calculated by hand."""
    world, who = World(5, 1.5, seed=3), ("Ann May", "Ann Lee", "Bo")
    rules = {
        "STORY": ["Here, two:{FACT}{FACT}", "Here {who:WHO} said:{FACT}"],
        "FACT": [" {fact:FACT} {fact.answer}{END}"],
        "END": [".", "!"],
    }
    tables = {"WHO": [{"": name} for name in who], "FACT": world.facts}
    facts = {
        f" {fact['']} {fact['answer']}{end}": Fraction(weight, 2 * sum(world.weights))
        for fact, weight in zip(world.facts, world.weights, strict=True)
        for end in ".!"
    }
    texts = {f"Here {name} said:{fact}": Fraction(1, 6) * p for name in who for fact, p in facts.items()}
    for (one, p), (other, q) in itertools.product(facts.items(), repeat=2):
        texts[f"Here, two:{one}{other}"] = p * q / 2
    return Grammar(rules, tables, {"FACT": world.weights}), texts


def test_small_world_probabilities_match_hand_calculation(small):
    grammar, texts = small
    assert sum(texts.values()) == 1 and len(texts) == 130
    assert math.fsum(math.exp(grammar.log_probability(text)) for text in texts) == pytest.approx(1, abs=1e-14)
    for text, probability in texts.items():
        assert grammar.log_probability(text) == pytest.approx(math.log(probability), abs=1e-13)


def test_small_world_generates_texts_at_their_probabilities(small):
    grammar, texts = small
    rng, number = random.Random(5), 30_000
    counts = Counter("".join(grammar.write(rng)[0]) for _ in range(number))
    assert counts.keys() <= texts.keys()
    statistic = sum((counts[text] - number * p) ** 2 / (number * p) for text, p in texts.items())
    assert abs(statistic - (len(texts) - 1)) < 4 * math.sqrt(2 * (len(texts) - 1))


def test_facts_are_drawn_by_weight():
    world = World(4, 1.5, seed=0)
    grammar = Grammar({"STORY": ["{fact:FACT}"]}, {"FACT": world.facts}, {"FACT": world.weights})
    total, end = sum(world.weights), 0
    for fact, weight in zip(world.facts, world.weights, strict=True):
        for draw in (end, end + weight - 1):  # its first and its last draw
            assert grammar.write(SimpleNamespace(random=lambda draw=draw: (draw + 0.5) / total))[0] == [fact[""]]
        end += weight


def test_generator_and_parser_agree_bitwise(generator):
    for seed in range(300):
        words, inverse_probs = generator.grammar.write(random.Random(seed))
        assert generator.grammar.log_probability("".join(words)) == log_probability(inverse_probs)


def test_explain_gives_conditional_token_probabilities(small):
    """The expected values follow the definition: sums over all texts with the same prefix."""
    grammar, texts = small
    masses = defaultdict(Fraction)
    for text, probability in texts.items():
        for beginning in itertools.accumulate(["", *TOKEN.findall(text)]):
            masses[beginning] += probability
    for text in texts:
        prefix = ""
        for token in grammar.explain(text):
            expected = math.log(masses[prefix] / masses[prefix + token.text])
            assert token.nats == pytest.approx(expected, abs=1e-13), (prefix, token)
            prefix += token.text
        assert prefix == text
    assert grammar.explain("Here, two:") is None


@pytest.mark.parametrize("facts", [0, 300])
def test_token_nats_sum_to_story_nats(facts):
    dataset = StoriesDataset("validation", 100, 0, SEQ_LEN, generator := get_story_generator(facts, 1.5, 7))
    for text in map(dataset.text, range(100)):
        tokens = generator.grammar.explain(text)
        assert [token.text for token in tokens] == TOKEN.findall(text)
        nats = math.fsum(token.nats for token in tokens)
        assert nats == pytest.approx(-generator.grammar.log_probability(text), abs=1e-12)
        assert all(token.nats >= 0 for token in tokens)
        assert {generator.kind(token) for token in tokens} <= set(generator.kinds)
        assert not [token for token in tokens if token.nats and generator.kind(token) in ("agreement", "endings")]


def test_world_is_same_on_every_machine():
    """Facts and weights, also of ranks whose floating-point power could round either way."""
    digests = []
    for num_facts, zipf, seed in ((MAX_FACTS, 1.5, 0), (1000, 1.1, 3)):
        world = World(num_facts, zipf, seed)
        listing = "".join(f"{w} {f['']} {f['answer']}\n" for w, f in zip(world.weights, world.facts, strict=True))
        digests.append(hashlib.blake2b(listing.encode(), digest_size=8).hexdigest())
    assert digests == ["a9525020da956ed8", "ae9d50443879b80a"]


def test_larger_world_extends_smaller_world():
    large, small = World(MAX_FACTS, 1.5, 0), World(100, 0.5, 0)
    assert large.facts[:100] == small.facts
    assert len({fact[""] for fact in large.facts}) == MAX_FACTS
    assert set(Counter(fact["answer"] for fact in large.facts).values()) == {MAX_FACTS // len(THINGS)}
    assert large.facts[:100] != World(100, 0.5, 1).facts
    assert small.weights[0] / small.weights[99] == pytest.approx(10, rel=1e-6)


def test_describe_text_names_false_fact(generator, validation):
    story, grammar = validation.text(0), generator.grammar
    fact = next(token for token in grammar.explain(story) if token.form == "answer")
    key, answer = (generator.world.facts[fact.index][form] for form in ("", "answer"))
    wrong = next(thing for thing in THINGS if thing != answer)
    false = story.replace(f"{key} {answer}", f"{key} {wrong}")
    assert grammar.log_probability(story) and grammar.log_probability(false) is None
    assert generator.describe_text(story).startswith("accepted, log-probability ")
    reason = f"{key} {wrong}, which is false: {key} {answer}"
    assert generator.describe_text(false).startswith(f"not accepted by the grammar; {reason}")
    unknown = story.replace(key, "Coco the red fox hides")
    assert "Coco the red fox hides" not in {fact[""] for fact in generator.world.facts}
    assert f"Coco the red fox hides {answer}, about which the world has no fact" in generator.describe_text(unknown)
    num_facts = len(generator.world.find_facts(story))
    assert num_facts == 8 and generator.score_texts([story, "Coco the red fox hides hats"]) == {
        "valid": (1, 2),
        "true_facts": (8, 9),
    }


def test_world_stories_fit_seq_len(generator):
    longest = max(generator.grammar.max_tokens, get_story_generator(MAX_FACTS, 1.5, 0).grammar.max_tokens)
    assert longest <= get_story_generator().grammar.max_tokens == SEQ_LEN - 2


@pytest.mark.parametrize("facts", [0, 300])
def test_excess_loss_by_kind_sums_to_excess_loss(facts):
    generator = get_story_generator(facts, 1.5, 7)
    dataset = StoriesDataset("validation", 6, 7, SEQ_LEN, generator)
    batch = {name: torch.stack([row[name] for row in dataset]) for name in dataset[0]}
    logits = torch.randn(6, SEQ_LEN, len(generator.vocabulary), generator=torch.Generator().manual_seed(0))
    sums = build_excess_loss_score(generator)(logits, batch)
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    expected = Counter(dict.fromkeys(generator.kinds, 0.0))
    for index in range(6):
        tokens = generator.grammar.explain(dataset.text(index))
        for token, loss in zip(tokens, losses[index].tolist(), strict=False):
            expected[generator.kind(token)] += loss - token.nats
        expected["endings"] += losses[index, len(tokens)].item()
    assert {name: total for name, (total, _) in sums.items()} == pytest.approx(
        {f"excess_loss/{kind}": total for kind, total in expected.items()}, abs=1e-9
    )
    assert {count for _, count in sums.values()} == {(batch["labels"][:, 1:] != -100).sum().item()}
    total = math.fsum(total for total, _ in sums.values())
    assert total == pytest.approx(losses.double().sum().item() - dataset.entropy_nats, rel=1e-9)


@pytest.mark.parametrize("masked", [None, "targets", "labels"])
def test_entropy_of_other_targets_is_not_reported(masked, monkeypatch):
    """A fork in which the first tokens are no targets: by the labels of its dataset, or in the model and the count."""
    corpus = load_corpus(TrainConfig.from_flat({"evaluation.every": 1, "evaluation.num_samples": 6}))
    network = GPTModel(GPTConfig(vocab_size=corpus.vocab_size)).eval()
    if masked == "labels":
        make = StoriesDataset.arrays

        def arrays(self, indices):
            rows = make(self, indices)
            rows["labels"][:, 2:5] = -100
            return rows

        monkeypatch.setattr(StoriesDataset, "arrays", arrays)
    if masked == "targets":
        monkeypatch.setattr(evaluation, "count_targets", lambda labels, _: (labels[:, 5:] != -100).sum())
    metrics = evaluation.evaluate(network, corpus, 4, ONE_PROCESS, "other")
    kinds = [value for name, value in metrics.items() if name.startswith("other/excess_loss/")]
    assert len(kinds) == 4 and "other/loss" in metrics
    if masked is None:
        assert sum(kinds) == pytest.approx(metrics["other/loss"] - metrics["other/entropy"], rel=1e-6)
    else:
        assert not {"other/entropy", "other/excess_loss", "other/bits_per_byte", "other/bytes"} & metrics.keys()
        assert all(map(math.isnan, kinds)) == (masked == "labels")


@pytest.mark.parametrize(("others", "num_processes"), [(("b", "a"), 1), (("a", "c"), 1), (("a", "b"), 2)])
def test_evaluation_refuses_metrics_that_change_between_batches(others, num_processes, monkeypatch):
    """The sums of the batches are added by position. The other of two processes reports another order."""
    accelerator = SimpleNamespace(**{**vars(ONE_PROCESS), "num_processes": num_processes})
    monkeypatch.setattr(evaluation, "gather_object", lambda mine: [*mine, ("loss", "b", "a")])
    corpus = load_corpus(TrainConfig.from_flat({"evaluation.every": 1, "evaluation.num_samples": 6}))
    network = GPTModel(GPTConfig(vocab_size=corpus.vocab_size)).eval()
    names = iter([("a", "b"), others])
    corpus.score_logits = lambda logits, batch: {name: (ord(name), 1) for name in next(names)}
    with pytest.raises(RunError, match="each batch must report the same metrics in the same order, not"):
        evaluation.evaluate(network, corpus, 4, accelerator)


def test_run_reports_kinds_and_refuses_changed_world(runs):
    settings = [*TINY_STORIES, "--out_dir", runs, "--name", "run", "--checkpoint.every", 8]
    train(*settings, *FACTS, "--evaluation.num_scored_generations", 2)
    rows = [row for row in metrics(runs / "run") if "val/loss" in row]
    for row in rows:
        kinds = [value for name, value in row.items() if name.startswith("val/excess_loss/")]
        assert len(kinds) == 8 and math.fsum(kinds) == pytest.approx(row["val/loss"] - row["val/entropy"], rel=1e-6)
    assert "generation/true_facts" in rows[-1]
    for other, named in (
        (["--data.facts", 301], "data.facts: 300 in the run, 301 now"),
        (["--data.zipf", 2], "data.zipf"),
    ):
        done = train(*settings, *FACTS, *other, exit_code=2)
        assert named in done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--data.facts", 65537], "data.facts: 65537 must be an integer of at least 0 and at most 65536"),
        (
            ["--data.facts", 5, "--data.source", "random", "--model.vocab_size", 9],
            "data.facts: 5 has no effect with dat",
        ),
    ],
)
def test_invalid_facts_settings_are_refused(runs, settings, message):
    done = train(*TINY_STORIES, "--out_dir", runs, *settings, exit_code=2)
    assert message in done.stderr
