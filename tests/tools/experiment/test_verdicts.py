"""The statistics of races keep their rates: simulated with a look after every run, and runs chosen by what is known."""

import math

import numpy as np
import pytest

from tests.conftest import ROOT
from tools.experiment import verdicts
from tools.experiment.baseline import MARGIN_OF_EXCESS_LOSS, MARGIN_OF_LOSS
from tools.experiment.verdicts import BASELINE, Finding, Group, assess, best_idea, choose_next, compare, is_decided

MARGIN = math.log1p(MARGIN_OF_EXCESS_LOSS)
DEVIATION = 0.04  # of the log excess loss over seeds, in configs/lab.yaml
# As in a published screen of forty ideas: ten gain, twenty change nothing, ten harm.
GAINS = [-43.2, -19.6, -14.4, -12.3, -11.9, -11.7, -8.6, -7.2, -5.7, -4.3]
HARMS = [2.2, 3.7, 5, 7, 10, 14, 18, 23, 35, 100]
FORTY = np.log1p(np.array([*GAINS, *[0] * 20, *HARMS]) / 100)
KINDS = ["normal", "heavy tails", "skewed", "unequal"]


def noise(kind, idea, random):
    """Deviation of a run from the mean of its variant; one idea in five of `unequal` scatters three times as much."""
    if kind == "heavy tails":
        return DEVIATION * random.standard_t(3) / math.sqrt(3)
    if kind == "skewed" and idea != BASELINE:
        return DEVIATION * (random.lognormal(0, 1) - math.exp(0.5)) / 2.16
    if kind == "unequal" and idea % 5 == 0:
        return 3 * DEVIATION * random.normal()
    return DEVIATION * random.normal()


class Simulation:
    """A race until its round ends or the runs are used up, looked at after every run."""

    def __init__(self, effects, runs, random, kind="normal", late=0, failing=()):
        self.effects, self.ever_found, self.ever_missed = effects, set(), set()
        self.baseline, self.ideas = Group(), [Group() for _ in effects]
        for self.used in range(runs):
            # Late ideas join after a third of the runs.
            joined = self.ideas if 3 * self.used >= runs else self.ideas[: len(self.ideas) - late]
            self.findings = self.look(joined)
            index = choose_next(self.baseline, joined, self.findings, MARGIN)
            if index is None and len(joined) == len(self.ideas):
                break
            group = self.baseline if index in (BASELINE, None) else self.ideas[index]
            if index in failing and random.random() < 0.5:
                group.failed += 1
            else:
                mean = 0.0 if group is self.baseline else effects[index]
                group.values.append(mean + noise(kind, BASELINE if index is None else index, random))
        self.findings = self.look(self.ideas)

    def look(self, ideas):
        findings = assess(self.baseline, ideas, MARGIN)
        for index, finding in enumerate(findings):
            if finding.verdict in ("better", "worse"):
                self.ever_found.add((index, finding.verdict))
            if math.isfinite(finding.effect) and abs(finding.effect - self.effects[index]) > finding.half_width:
                self.ever_missed.add(index)
        return findings

    @property
    def false_discoveries(self):
        """Fraction of what was ever called better or worse that is not."""
        wrong = [(index, verdict) for index, verdict in self.ever_found if not self.is_true(index, verdict)]
        return len(wrong) / max(1, len(self.ever_found))

    def is_true(self, index, verdict):
        return self.effects[index] < 0 if verdict == "better" else self.effects[index] > 0


def simulate(repetitions, effects, runs, seed=0, **others):
    random = np.random.default_rng(seed)
    return [Simulation(effects, runs, random, **others) for _ in range(repetitions)]


def mean(values):
    return float(np.mean([*values]))


# Rates

MANY = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("repetitions", [30, pytest.param(600, marks=MANY)])
def test_one_idea_without_effect_is_rarely_a_discovery(repetitions, kind):
    races = simulate(repetitions, [0.0], 48, kind=kind)
    tolerated = 0.05 + 2 * math.sqrt(0.05 * 0.95 / repetitions)
    assert mean(race.false_discoveries for race in races) <= tolerated
    assert mean(len(race.ever_missed) for race in races) <= tolerated


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_forty_ideas_have_few_false_discoveries(kind):
    races = simulate(20, FORTY, 300, kind=kind)
    assert mean(race.false_discoveries for race in races) <= 0.05
    assert mean(len(race.ever_missed) / 40 for race in races) <= 0.05
    assert mean(best_idea(race.findings) == 0 for race in races) >= 0.95


def look_after_each_seed(effects, seeds, random, kind="normal"):
    """Train every variant equally often; return the ideas ever discovered, and those whose intervals ever missed."""
    baseline, ideas, discovered, missed = Group(), [Group() for _ in effects], set(), set()
    for _ in range(seeds):
        baseline.values.append(noise(kind, BASELINE, random))
        for index, idea in enumerate(ideas):
            idea.values.append(effects[index] + noise(kind, index, random))
        for index, finding in enumerate(assess(baseline, ideas, MARGIN)):
            if finding.verdict in ("better", "worse"):
                discovered.add(index)
            if math.isfinite(finding.effect) and abs(finding.effect - effects[index]) > finding.half_width:
                missed.add(index)
    return discovered, missed


@pytest.mark.parametrize("kind", ["unequal", pytest.param("normal", marks=MANY)])
@pytest.mark.parametrize("repetitions", [40, pytest.param(300, marks=MANY)])
def test_forty_ideas_without_effect_are_rarely_discoveries(repetitions, kind):
    """Not corrected for the number of ideas, 15% to 20% of the races would discover one."""
    random = np.random.default_rng(0)
    races = [look_after_each_seed([0.0] * 40, 24, random, kind) for _ in range(repetitions)]
    assert mean(bool(found) for found, _ in races) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / repetitions)


@pytest.mark.parametrize("repetitions", [60, pytest.param(400, marks=MANY)])
def test_intervals_of_ideas_that_scatter_more_rarely_miss(repetitions):
    """With the common variance for all ideas, those of the two that scatter more would miss in 13%."""
    random = np.random.default_rng(0)
    races = [look_after_each_seed([0.0] * 8, 24, random, "unequal") for _ in range(repetitions)]
    tolerated = 0.05 + 2 * math.sqrt(0.05 * 0.95 / repetitions / 2)
    assert mean(len(missed & {0, 5}) / 2 for _, missed in races) <= tolerated


@pytest.mark.parametrize("late", [0, 4])
@pytest.mark.parametrize("kind", ["normal", pytest.param("unequal", marks=MANY)])
@pytest.mark.parametrize("repetitions", [6, pytest.param(100, marks=MANY)])
def test_eight_ideas_without_effect(repetitions, kind, late):
    """Also where half of the ideas join after a third of the runs, and where two scatter three times as much."""
    races = simulate(repetitions, [0.0] * 8, 120, kind=kind, late=late)
    tolerated = 0.05 + 2 * math.sqrt(0.05 * 0.95 / repetitions)
    assert mean(race.false_discoveries for race in races) <= tolerated
    assert mean(len(race.ever_missed) / 8 for race in races) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / repetitions / 8)


def test_discoveries_are_corrected_for_the_number_of_ideas():
    """By Benjamini and Hochberg: one small p-value among forty is no discovery, and alone it is one."""
    from scipy import stats  # takes a second, which other tests need not wait for

    assert verdicts.q_values(np.array([0.01, *[1.0] * 39]))[0] == pytest.approx(0.4)
    assert verdicts.q_values(np.array([0.01])) == pytest.approx([0.01])
    p = np.array([0.001, 0.02, 0.03, 0.9])
    assert verdicts.q_values(p) == pytest.approx(stats.false_discovery_control(p))


@pytest.mark.parametrize("repetitions", [15, pytest.param(300, marks=MANY)])
def test_confirmation_may_be_extended_again_and_again(repetitions):
    """Three equal variants, compared with 4, 5, ... 32 seeds each; ordinary intervals would miss in a quarter."""
    from scipy import stats

    random, missed, would_miss = np.random.default_rng(1), 0, 0
    pairs = [(0, 1), (0, 2), (1, 2)]
    for _ in range(repetitions):
        values = random.normal(0, DEVIATION, (3, 32))
        looks = [compare([*values[:, :n]], pairs) for n in range(4, 33)]
        missed += any((np.abs(look.effects) > look.half_widths).any() for look in looks)
        one, other = values[[0, 0, 1]], values[[1, 2, 2]]  # the pairs
        p = [stats.ttest_ind(one[:, :n], other[:, :n], axis=1).pvalue.min() for n in range(4, 33)]
        would_miss += min(p) < 0.05
    assert missed / repetitions <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / repetitions)
    assert would_miss / repetitions > 0.2


# Power


def test_gain_of_a_tenth_is_found_in_few_runs():
    races = simulate(30, [math.log(0.9)], 40)
    assert mean(best_idea(race.findings) == 0 for race in races) >= 0.95
    assert mean(race.used for race in races) < 20


@pytest.mark.parametrize("repetitions", [40, pytest.param(400, marks=MANY)])
def test_four_runs_of_each_idea_find_most_gains_of_a_seventh(repetitions):
    """With the variance of each idea alone, which four runs hardly tell, they would find 13% of them."""
    random = np.random.default_rng(0)
    races = [look_after_each_seed([-0.15] * 8, 4, random) for _ in range(repetitions)]
    assert mean(len(found) / 8 for found, _ in races) >= 0.7


@pytest.mark.parametrize("deviation, gain", [(0.004, 0.012), (0.05, 0.15)])
def test_intervals_suit_the_scatter_of_seeds_and_not_the_margin(monkeypatch, deviation, gain):
    """A gain of three standard deviations is found whether seeds of a text loss differ by 0.4% or by 5%."""
    monkeypatch.setattr(f"{__name__}.DEVIATION", deviation)
    monkeypatch.setattr(f"{__name__}.MARGIN", math.log1p(0.005))
    races = simulate(30, [math.log(1 - gain)], 24)
    assert mean(best_idea(race.findings) == 0 for race in races) >= 0.95
    assert mean(race.findings[0].half_width for race in races) < 4 * deviation


@pytest.mark.parametrize(
    ("deviation", "margin"), [(DEVIATION, MARGIN_OF_EXCESS_LOSS), (0.013, MARGIN_OF_LOSS)], ids=["stories", "text"]
)
def test_no_gain_ends_a_race(monkeypatch, deviation, margin):
    """A default budget decides most ideas that change nothing, with the default margin and the scatter of our races."""
    monkeypatch.setattr(f"{__name__}.DEVIATION", deviation)
    monkeypatch.setattr(f"{__name__}.MARGIN", math.log1p(margin))
    races = simulate(40, [0.0], 48)
    assert mean(race.findings[0].verdict == "no gain" for race in races) >= 0.7


def test_best_of_many_ideas_is_found_where_seeds_scatter(monkeypatch):
    """23 ideas on top of a strong baseline, seeds that scatter by a tenth: runs go to the promising ideas."""
    monkeypatch.setattr(f"{__name__}.DEVIATION", 0.1)
    effects = [-21, -8, -5, *[0] * 9, 5, 5, 8, 8, 10, 12, 15, 20, 20, 30, 35]
    races = simulate(8, np.log1p(np.array(effects) / 100), 140)
    assert mean(best_idea(race.findings) == 0 for race in races) >= 0.75
    assert mean(len(race.ideas[0].values) for race in races) > 8 and mean(len(r.ideas[-1].values) for r in races) < 4


def test_effects_of_discoveries_are_hardly_biased():
    races = simulate(10, FORTY[:20], 200)
    found = [(race.findings[0].effect, race.effects[0]) for race in races if best_idea(race.findings) == 0]
    assert len(found) == 10 and abs(mean(effect - true for effect, true in found)) < 0.02


# The cost of tuning


@pytest.mark.slow
@pytest.mark.parametrize("gain", [0.01, 0.02, 0.03, 0.05])
def test_gains_that_few_runs_find_are_those_of_the_page(monkeypatch, gain):
    monkeypatch.setattr(f"{__name__}.DEVIATION", 0.009)
    monkeypatch.setattr(f"{__name__}.MARGIN", MARGIN_ON_TEXT)
    cells = []
    for runs in (8, 16, 48):
        races = simulate(100, [math.log1p(-gain)], runs)
        cells.append(f"{sum((0, 'better') in race.ever_found for race in races)}")
    assert f"| {100 * gain:.0f}% | {' | '.join(cells)} |" in PAGE


# Forty ideas on text, of which at most the first one gains. Each has a best learning rate, half of the baseline's, the
# same or twice as much, and loses RATE_COST for each factor of two from it. Most lose more in runs of 400 steps.
DEVIATION_ON_TEXT, MARGIN_ON_TEXT, RATE_COST = 0.013, math.log1p(MARGIN_OF_LOSS), 0.02
FACTORS = (0, -1, 1)  # powers of two
AT_ONCE = 4  # runs that are chosen before the results of the first one are known
PAGE = (ROOT / "docs" / "experiment_statistics.md").read_text()


def run_round(effects, limit, random, baseline):
    """Run a round of a race on text; return the last findings, the runs, and the runs before each first discovery."""
    ideas, used, discovered = [Group() for _ in effects], 0, {}
    while True:
        findings = assess(baseline, ideas, MARGIN_ON_TEXT)
        for index, finding in enumerate(findings):
            if finding.verdict in ("better", "worse"):
                discovered.setdefault((index, finding.verdict), used)
        chosen = []
        for _ in range(min(AT_ONCE, limit - used)):
            if (index := choose_next(baseline, ideas, findings, MARGIN_ON_TEXT)) is None:
                break
            chosen.append((baseline, 0.0) if index == BASELINE else (ideas[index], effects[index]))
            chosen[-1][0].pending += 1
        for group, effect in chosen:
            group.values.append(effect + DEVIATION_ON_TEXT * random.normal())
            group.pending -= 1
        used += len(chosen)
        if not chosen:
            return findings, used, discovered


def race_on_text(gain, best_rate, is_tuned, random):
    """Race forty ideas; return all runs, those until an arm of the first is `better`, and whether another ever was."""
    factors, baseline, used = FACTORS if is_tuned else FACTORS[:1], Group(), 0
    limit = 8 * (40 * len(factors) + len(factors) - 1) + 40
    if is_tuned:
        findings, used, _ = run_round([RATE_COST] * 2, limit, random, baseline)
        assert best_idea(findings) is None, "the baseline has its best rate"
    best_rates = [best_rate, *random.choice(FACTORS, 39)]
    gains = [math.log1p(-gain), *[0.0] * 39]
    effects = [
        gain + RATE_COST * abs(factor - best)
        for gain, best in zip(gains, best_rates, strict=True)
        for factor in factors
    ]
    _, more, discovered = run_round(effects, limit - used, random, baseline)
    found = [
        runs for (index, verdict), runs in discovered.items() if verdict == "better" and index < len(factors) and gain
    ]
    is_wrong = any(verdict == "better" and effects[index] >= 0 for index, verdict in discovered)
    return used + more, used + min(found) if found else None, is_wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gain", "best_rate", "repetitions"),
    [
        ("5%, at the baseline's learning rate", 0.05, 0, 100),
        ("5% at half of it, and 3% at the baseline's", 0.05, -1, 100),
        ("3%, at the baseline's learning rate", 0.03, 0, 100),
        ("3% at half of it, and 1% at the baseline's", 0.03, -1, 100),
        ("nothing, 20 races", 0.0, 0, 20),
    ],
)
def test_cost_of_tuning_is_that_of_the_page(name, gain, best_rate, repetitions):
    cells = []
    for is_tuned in (False, True):
        races = [race_on_text(gain, best_rate, is_tuned, np.random.default_rng(seed)) for seed in range(repetitions)]
        found = [runs for _, runs, _ in races if runs is not None]
        runs = round(mean(runs for runs, *_ in races), -1)
        cells.append(f"{np.median(found):.0f}, in {len(found)} races" if gain else f"about {runs:.0f}")
        assert not any(is_wrong for *_, is_wrong in races)
    assert f"| {name} | {' | '.join(cells)} |" in PAGE


# Variances


def test_variances_are_shrunk_toward_the_common_one():
    groups = np.random.default_rng(3).normal(0, [[1.0], [2.0], [3.0]], (3, 5))  # 4 degrees of freedom each
    shrunk, freedom, total = verdicts.moderate_variances([*groups, [7.0]])
    variances = np.var(groups, axis=1, ddof=1)
    common = variances.mean()
    assert shrunk == pytest.approx([*(0.6 * common + 0.4 * variances), common])
    assert freedom == pytest.approx([10, 10, 10, 6]) and total == 12


def test_interval_of_few_runs_does_not_depend_on_the_scatter_of_variances():
    """Of 36 ideas with two runs each, whose sample variances differ by much."""
    random = np.random.default_rng(0)
    widths = []
    for _ in range(50):
        ideas = [group(*random.normal(0, DEVIATION, 2)) for _ in range(36)]
        widths += [found.half_width for found in assess(group(*random.normal(0, DEVIATION, 6)), ideas, MARGIN)]
    assert np.quantile(widths, 0.99) < 3 * np.median(widths)


def test_equal_variances_are_pooled():
    groups = [[0.0, 1.0, 2.0], [5.0, 6.0, 7.0], [1.0, 2.0, 3.0]]
    shrunk, freedom, total = verdicts.moderate_variances(groups)
    assert shrunk == pytest.approx([1.0] * 3) and freedom == pytest.approx([6.0] * 3) and total == 6


def test_equal_values_of_a_coarse_metric_settle_nothing():
    """Nothing tells how much runs scatter; one run that differs does, for all variants."""
    equal = [group(*[value] * 6) for value in (0.1, -0.4, 0.1, 0.6)]  # the mean of 0.1 six times is not exactly 0.1
    findings = assess(equal[0], equal[1:], MARGIN)
    assert [finding.effect for finding in findings] == pytest.approx([-0.5, 0.0, 0.5])
    assert {(finding.verdict, finding.half_width, finding.q) for finding in findings} == {("unknown", math.inf, 1.0)}
    chosen = {choose_next(group(*[0.1] * 12), [*equal[1:], group(0.1)], [*findings, findings[0]], MARGIN)}
    assert chosen == {3}, "the one with the fewest runs"
    one_differs = assess(equal[0], [*equal[1:], group(0.1, 0.1, 0.1, 0.11)], MARGIN)
    assert [finding.verdict for finding in one_differs] == ["better", "no gain", "worse", "no gain"]
    assert min(finding.half_width for finding in one_differs) > 0.002


# Verdicts and allocation


def group(*values, failed=0):
    return Group(list(values), failed)


BASE = group(*np.random.default_rng(0).normal(0, 0.01, 20))


def test_verdicts_of_clear_ideas():
    random = np.random.default_rng(1)
    ideas = [group(*random.normal(mean, 0.01, 20)) for mean in (-0.2, 0.2, 0.0)]
    findings = assess(BASE, [*ideas, group(), group(0.0)], MARGIN)
    assert [finding.verdict for finding in findings] == ["better", "worse", "no gain", "unknown", "unknown"]
    assert math.isnan(findings[3].effect)
    assert findings[4].half_width > 2 * findings[2].half_width, "the interval of one run is wide"
    assert best_idea(findings) == 0 and best_idea(findings[1:]) is None


def test_same_runs_are_no_discovery_among_many_ideas():
    noise = np.random.default_rng(1).normal(0, DEVIATION, (8, 8))
    idea = group(*(noise[0] - noise[0].mean() - 0.06))
    base = group(*np.random.default_rng(0).normal(0, DEVIATION, 20))
    alone = assess(base, [idea], MARGIN)[0]
    assert alone.verdict == "better" and 0.05 / 8 < alone.p < 0.05
    others = [group(*(values - values.mean())) for values in noise[1:]]
    assert assess(base, [idea, *others], MARGIN)[0].verdict == "unknown"


def test_idea_that_fails_more_often_is_not_better():
    values = np.random.default_rng(1).normal(-0.5, 0.01, 20)
    assert assess(BASE, [group(*values)], MARGIN)[0].verdict == "better"
    assert assess(BASE, [group(*values, failed=1)], MARGIN)[0].verdict == "failed"
    # Where the baseline fails too, a somewhat higher rate is not significant, but the idea is not better either.
    often = Group(BASE.values, failed=5)
    assert assess(often, [group(*values, failed=7)], MARGIN)[0].verdict == "unknown"
    assert assess(often, [group(*values, failed=4)], MARGIN)[0].verdict == "better"
    assert assess(often, [group(*values, failed=60)], MARGIN)[0].verdict == "failed"


def test_one_failure_settles_an_idea():
    races = simulate(20, [math.log(0.8)], 48, failing=[0])
    assert {race.findings[0].verdict for race in races if race.ideas[0].failed} == {"failed"}
    assert {race.ideas[0].failed for race in races} <= {0, 1}, "no more runs are spent on it"


def test_two_runs_are_no_discovery():
    """They do not show whether the idea scatters more than the others."""
    random, number = np.random.default_rng(1), verdicts.MIN_RUNS_OF_DISCOVERY
    values = random.normal(-0.5, 0.01, number)
    assert assess(BASE, [group(*values[:-1])], MARGIN)[0].verdict == "unknown"
    assert assess(BASE, [group(*values)], MARGIN)[0].verdict == "better"


def test_first_runs_are_of_all_variants():
    baseline, ideas, order = Group(), [Group(), Group()], []
    while len(order) < 6:
        index = choose_next(baseline, ideas, assess(baseline, ideas, MARGIN), MARGIN)
        order.append(index)
        (baseline if index == BASELINE else ideas[index]).pending += 1
    assert order == [BASELINE] * 4 + [0, 1]


def test_pending_runs_are_not_planned_twice():
    baseline = group(-0.05, 0.05, -0.04, 0.04)
    ideas = [group(mean - 0.05, mean + 0.05) for mean in (-0.06, -0.055, -0.05)]
    findings, chosen = assess(baseline, ideas, MARGIN), []
    for _ in range(12):
        index = choose_next(baseline, ideas, findings, MARGIN)
        chosen.append(index)
        (baseline if index == BASELINE else ideas[index]).pending += 1
    assert len(set(chosen)) == 4, "as more runs of one idea are pending, another one may be the best"


def test_settled_ideas_get_no_runs():
    random = np.random.default_rng(1)
    settled = [group(*random.normal(0.1, 0.01, 20)), group(*random.normal(0, 0.01, 20)), group(failed=1)]
    findings = [*assess(BASE, settled, MARGIN), Finding("identical")]
    assert [finding.verdict for finding in findings] == ["worse", "no gain", "failed", "identical"]
    assert choose_next(BASE, [*settled, group(0.0, 0.0)], findings, MARGIN) is None


def test_round_goes_on_while_another_idea_may_be_better():
    better = Finding("better", -0.2, 0.05, 0.001, 0.001, 0.01)
    rival = Finding("unknown", -0.1, 0.3, 0.5, 0.5, 0.1)
    assert not is_decided([better, rival], MARGIN) and not is_decided([rival], MARGIN)
    assert is_decided([better, Finding("unknown", -0.1, 0.3, 0.5, 0.5, 0.01)], MARGIN)
    assert is_decided([better, Finding("worse", 0.1, 0.05, 0.001, 0.001, 0.1)], MARGIN)


def test_two_ideas_with_equal_gains_end_a_round():
    races = simulate(10, [math.log(0.8)] * 2, 200)
    assert all(is_decided(race.findings, MARGIN) and race.used < 40 for race in races)


def test_run_that_diverged_does_not_hide_another_gain():
    """An idea with one good and one very bad run: the common variance hardly follows it."""
    random = np.random.default_rng(0)
    base, good = (group(*random.normal(mean, DEVIATION, 8)) for mean in (0, -0.3))
    alone, beside = assess(base, [good], MARGIN)[0], assess(base, [good, group(-0.35, 2.0)], MARGIN)[0]
    assert alone.verdict == beside.verdict == "better" and beside.half_width < 2 * alone.half_width
