"""The commands of docs/experiments.md run in its order; published figures follow from the raw rows of their runs."""

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from typing import Any

import pytest
from scipy.stats import spearmanr

from data.prepare.prepare import PrepareConfig, prepare
from tests.conftest import ROOT, commands, environment
from tests.data.prepare.test_prepare import make_documents, write_jsonl
from tools.experiment import confirm, report, verdicts
from tools.experiment.record import Record
from tools.experiment.report import interval, percent
from tools.experiment.runs import SEEDS_OF_CONFIRMATIONS, group_of, read_results, runs_of

PAGE = (ROOT / "docs" / "experiments.md").read_text()
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "experiment_statistics.md").read_text().partition("## Results\n")[2]
RAW = ROOT / "benchmarks" / "results" / "experiments"
SHORT = "--steps 20 --schedule.warmup_steps 2 --evaluation.num_samples 20 --runs 7"


@pytest.mark.slow
def test_commands_of_page_run(tmp_path):
    """On a small text in place of Python's library."""
    source, text = write_jsonl(tmp_path / "text.jsonl", make_documents(300)), tmp_path / "corpus"
    prepare(PrepareConfig(source=str(source), tokenizer="byte", validation="hash:0.2", out=str(text)))
    own = [command for command in commands(PAGE) if "tools.experiment" in command]
    assert len(own) >= 4 and any(" confirm" in command for command in own)
    for command in own:
        is_report = command.startswith("python -m tools.experiment report")
        is_race = not is_report and not command.startswith("python -m tools.experiment confirm")
        command = command.replace("python -m tools.experiment", f"{sys.executable} -m tools.experiment")
        command += f" --folder {tmp_path / 'lab'}" + ("" if is_report else f" --data.path {text}")
        command += f" {SHORT}" if is_race else ""
        done = subprocess.run(command, shell=True, cwd=ROOT, env=environment(), capture_output=True, text=True)
        if " confirm" in command and "no race" in done.stderr:  # so short a race finds nothing
            assert done.returncode == 2
            continue
        assert done.returncode == 0, command + done.stdout + done.stderr
    shutil.rmtree(tmp_path / "lab")


# Published figures

MUON, QK_NORM = "--optimizer.name muon --optimizer.lr 2e-2", "--model.qk_norm true"
BOTH = f"{MUON} + {QK_NORM}"
SWIGLU = "--model.mlp swiglu --model.d_ff 168"
HALF_BATCH = "--global_batch_size 8 --micro_batch_size 8 --steps 800 --schedule.warmup_steps 80"
IDEAS_ON_TEXT = {
    "Muon": MUON,
    "SOAP": "docs/patches/optimizer_soap.patch --optimizer.name soap",
    "half the batch, twice the steps": HALF_BATCH,
    "the MLP before the attention": "ideas/mlp_first.patch",
    "parallel blocks": "docs/patches/block_parallel.patch --model.parallel true",
    "SwiGLU": SWIGLU,
    "QK-norm": QK_NORM,
    "a second norm behind each sublayer": "ideas/sandwich_norm.patch",
    "Lion": "docs/patches/optimizer_lion.patch --optimizer.name lion --optimizer.lr 2.5e-3",
    "LoRA of the attention, rank 4": "docs/patches/attention_lora.patch --model.lora_rank 4",
}
FIRST, TWELVE = "lab-cfd86100/races/7d7ebe7d.json", "lab-50df45da/races/0edc2322.json"
FORTY, TEXT = "lab-9639d31f/races/2206672b.json", "lab-13234a74-flops/races/2bcd2759.json"
RATES = "lab-81aa6a27/races/24060baa.json"
# Forty ideas, and the eighteen of them that raced until Muon won; then it was confirmed.
TUNED, WON = "text_lab-dab94a91/races/a160e681.json", "text_lab-dab94a91/races/c8f8643d.json"
TUNED_IDEAS = {
    "Muon": MUON,
    "Muon with row equilibration": f"ideas/muon_row_equilibration.patch {MUON}",
    "bigram embeddings, 1.62 times the parameters": "benchmarks/known_effects/embedding_bigrams.patch "
    "--model.bigram_rows 1280",
    "SOAP": "docs/patches/optimizer_soap.patch --optimizer.name soap",
    "Muon without momentum": "--optimizer.name muon --optimizer.lr 2e-2 --optimizer.betas [0.0,0.95]",
    "tied embeddings": "--model.tie_embeddings true",
    "half the batch, twice the steps": "--global_batch_size 8 --micro_batch_size 8 --steps 3200 "
    "--schedule.warmup_steps 80",
    "residual of the input": "benchmarks/known_effects/residual_input.patch --model.input_gains true",
    "EMA of the weights": "--evaluation.ema_decay 0.99",
    "value embeddings": "docs/patches/value_embeddings.patch --model.value_embeddings 1",
    "sham": "--optimizer.weight_decay 0.1001",
    "ReLU²": "--model.mlp relu2",
    "weight decay that falls to 0": "docs/patches/schedule_momentum.patch --schedule.final_weight_decay 0",
    "biases": "--model.bias true",
    "QK-norm": QK_NORM,
    "cosine to a tenth": "--schedule.name cosine --schedule.min_lr_ratio 0.1",
    "momentum warm-up": "docs/patches/schedule_momentum.patch --schedule.momentum_warmup_steps 160",
    "soft-capping": "--model.logit_softcap 15",
    "four experts, 2.50 times the parameters": "docs/patches/mlp_experts.patch --model.n_experts 4",
    "cautious weight decay": "benchmarks/known_effects/decay_cautious.patch --optimizer.name cautious",
    "one key-value head": "--model.n_kv_heads 1",
    "z-loss": "docs/patches/loss_z.patch --model.z_loss 1e-4",
    "two heads instead of four": "--model.n_heads 2",
    "betas 0.9 and 0.99": "--optimizer.betas [0.9,0.99]",
    "SwiGLU": SWIGLU,
    "value residual": "benchmarks/known_effects/value_residual.patch --model.value_residual true",
    "zero-initialised projections": "--model.zero_init true",
    "Lion": "docs/patches/optimizer_lion.patch --optimizer.name lion --optimizer.lr 1e-3",
    "LayerNorm": "--model.norm layernorm",
    "GEGLU": "benchmarks/known_effects/mlp_geglu.patch --model.mlp geglu --model.d_ff 171",
    "one layer, wider": "--model.n_layers 1 --model.d_model 88 --model.d_ff 352",
    "inverse square root schedule": "docs/patches/schedule_inverse_sqrt.patch --schedule.name inverse_sqrt",
    "constant learning rate": "--schedule.name constant",
    "parallel blocks": "docs/patches/block_parallel.patch --model.parallel true",
    "dropout 0.1": "--model.dropout 0.1",
    "no warm-up": "--schedule.warmup_steps 0",
    "ALiBi": "docs/patches/position_alibi.patch --model.position alibi",
    "learned positions": "--model.position learned",
    "no positions": "benchmarks/known_effects/position_none.patch --model.position none",
    "LoRA of the attention, rank 8": "docs/patches/attention_lora.patch --model.lora_rank 8",
}
# Digests of the variants of this race with twice the parameters; the folder `configs` has their settings.
TWICE_AS_LARGE = {"baseline": "aafb966d", MUON: "7c838182"}
# Digests of the variants with four times the parameters, of which the folder `configs` has the settings.
LARGE = {"baseline": "45c82694", MUON: "59baf236", BOTH: "acfa8c51", QK_NORM: "6afde28a"}


@pytest.fixture(scope="module")
def races():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw", lambda *_: None)  # no pictures beside the raw rows
        return {name: report.describe_race(RAW / name) for name in (FIRST, TWELVE, FORTY, TEXT, RATES, TUNED, WON)}


def test_figures_of_how_to_and_readme(races):
    printed = "\n".join(report.race_lines(races[FIRST]))
    [block] = re.findall(r"```text\n(Round 1.*?)```", PAGE, re.DOTALL)
    assert joined(block) in joined(printed)
    [table] = re.findall(r"```text\n(idea .*?)```", README, re.DOTALL)
    for line in table.splitlines():  # its first columns
        assert any(joined(row).startswith(joined(line)) for row in printed.splitlines()), line

    race = races[TUNED]
    [half], (muon, *others) = (entry["ideas"] for entry in race["rounds"])
    row_equilibration = next(idea for idea in others if idea["arm_of"] == TUNED_IDEAS["Muon with row equilibration"])
    figures = [
        f"{race['runs']} runs in {hours(race)} CPU hours",
        f"half its learning rate is `{half['verdict']}`, {show(half)}",
        f"{muon['verdict']} after four runs",
        f"{losses(muon, race)}, {show(muon)}",
        show(row_equilibration),
        *confirmed_figures()[:2],
        report.reach_lines(races[WON]["rounds"][1]["ideas"][0])[0].strip(),
    ]
    assert muon["runs"] == 4
    check_figures(joined(PAGE.partition("## An example")[2]), figures)
    assert f"{race['runs']} runs with {hours(race)} CPU hours" in joined(README) and show(muon) in joined(README)
    at_twice_the_size = confirmed_figures()[1].split()[0]
    assert f"shrinks](docs/experiments.md#an-example-forty-ideas-on-text) to {at_twice_the_size}." in README


def test_figures_of_forty_ideas_on_text(races):
    race = races[TUNED]
    ideas = race["rounds"][1]["ideas"]
    best = {idea["arm_of"]: idea for idea in reversed(ideas)}
    assert {*best} == {*TUNED_IDEAS.values()}
    figures = [f"{race['runs']} runs in {hours(race)} CPU hours", *confirmed_figures()]
    for name, text in TUNED_IDEAS.items():
        idea = best[text]
        rate = {1.0: "as given", 0.5: "half"}[idea["factors"]["optimizer.lr"]]
        figures.append(f"| {name} | {rate} | {show(idea)} | {idea['verdict']} | {idea['runs']} |")
    figures.append(f"sham is {percent(best[TUNED_IDEAS['sham']]['effect'])},")
    at_rate_of_baseline = {idea["arm_of"]: idea for idea in ideas if idea["factors"]["optimizer.lr"] == 1}
    figures += [show(at_rate_of_baseline[text]) for text in (QK_NORM, TUNED_IDEAS["zero-initialised projections"])]
    check_figures(joined(RESULTS.partition("### Races on stories")[0]), figures)


def confirmed_figures():
    """Compare the runs of the confirmation of Muon again, and return its figures."""
    folder = (RAW / TUNED).parents[1]
    [file] = (folder / "confirmations").glob("*.json")
    stored, record, results = json.loads(file.read_text()), Record.read(RAW / WON), read_results(folder)
    ideas = record.rounds[1]
    digests = {1.0: {"baseline": ideas.baseline["digest"], MUON: ideas.ideas[ideas.winner]["digest"]}}
    digests[2.0] = TWICE_AS_LARGE
    differences = []
    for size, names in digests.items():
        differences += confirm.compare(size, names, [(MUON, "baseline")], results, record.margin)
    trends = confirm.trends(differences, digests, results)
    assert differences == [pytest.approx(one) for one in stored["differences"]]
    assert trends == [pytest.approx(one) for one in stored["trends"]]
    [trend] = trends
    assert trend["trend"] == "shrinks" and stored["seeds"] == 4
    ends = [percent(trend[name]) for name in ("change", "low", "high")]
    return [*map(show, differences), "{} ({} to {})".format(*ends)]


def test_figures_of_results(races):
    twelve, forty, text = (races[name] for name in (TWELVE, FORTY, TEXT))
    alone, on_muon = ideas_of_rounds(twelve)[:2]
    change = percent(alone[MUON]["loss"] / twelve["rounds"][0]["baseline_loss"] - 1)
    figures = [
        f"{twelve['runs']} runs in {hours(twelve)} CPU hours",
        f"{losses(alone[MUON], twelve)} ({change}), excess loss {show(alone[MUON])}",
        show(on_muon[QK_NORM]),
        *(f"({about(ideas[SWIGLU])} and {about(ideas[HALF_BATCH])}" for ideas in (alone, on_muon)),
    ]

    alone, on_muon, on_both = ideas_of_rounds(forty)
    figures += [
        f"{forty['runs']} runs in {hours(forty)} CPU hours",
        f"excess loss {show(alone[MUON])}",
        show(on_muon[QK_NORM]),
        f"{sum(idea['runs'] for idea in on_both.values())} runs of its ideas",
        f"SwiGLU, with {about(alone[SWIGLU])} alone",
    ]
    assert abs(on_both[SWIGLU]["effect"]) < 0.001, "it gains nothing on top"

    differences = confirm_again(RAW / "lab-9639d31f", "d7aef6fe")
    names = [("Muon + QK-norm", "the baseline"), ("Muon", "the baseline"), ("Muon + QK-norm", "Muon")]
    names += [("Muon + QK-norm", "QK-norm")]
    for (variant, against), small, large in zip(names, differences[:4], differences[4:], strict=True):
        cells = (f"{show(one)}, {one['verdict']}" for one in (small, large))
        figures.append(f"| {variant} | {against} | {' | '.join(cells)} |")
    figures.append(show(confirm_again(RAW / "lab-9639d31f", "9f3d434b")[1]))
    results = read_results(RAW / "lab-9639d31f")
    of_large = runs_of(results, LARGE["baseline"], SEEDS_OF_CONFIRMATIONS[:4])
    figures.append(f"{report.mean_excess(of_large):.4f} nats/token")
    figures.append(f"scatter by {100 * statistics.stdev(group_of(of_large).values):.0f}%")

    rates = races[RATES]
    figures.append(f"{rates['runs']} runs")
    [ideas] = ideas_of_rounds(rates)
    half, twice, thrice = (ideas[f"--optimizer.lr {rate}"] for rate in ("5e-3", "2e-2", "3e-2"))
    figures += [f"half of it is {half['verdict']}: excess loss {show(half)}", show(twice), show(thrice)]
    figures.append(f"at most {-100 * twice['low']:.1f}% and {-100 * thrice['low']:.1f}%")

    [on_text] = ideas_of_rounds(text)
    figures.append(f"{text['runs']} runs in {hours(text)} CPU hours")
    assert {*on_text} == {*IDEAS_ON_TEXT.values()}
    for name, idea in IDEAS_ON_TEXT.items():
        figures.append(f"| {name} | {show(alone[idea])} | {show(on_text[idea])} |")
    effects = [[ideas[idea]["effect"] for idea in on_text] for ideas in (alone, on_text)]
    correlation: Any = spearmanr(effects[0], effects[1])
    figures.append(f"rank correlation is {correlation.statistic:.2f}")
    check_figures(joined(RESULTS.partition("### Races on stories")[2].partition("### Agreement")[0]), figures)


def test_figures_of_agreement():
    rows = [json.loads(line) for line in (RAW.parent / "agreement.jsonl").read_text().splitlines()]
    known = {row["idea"]: row["known"] for row in rows if row["known"]}

    def changes(experiment, rates, seed):
        """The change of the loss against the baseline with the same seed, each at the best of some rates."""
        best: dict[str, float] = {}
        for row in rows:
            # The baselines of the experiment of both halves stand with those of the half that was trained first.
            is_baseline = row["idea"] == "baseline" and row["experiment"] == experiment.replace(
                "report-5e", "choose-5e"
            )
            if (row["experiment"] == experiment or is_baseline) and row["lr"] in rates and row["seed"] == seed:
                best[row["idea"]] = min(row["loss"], best.get(row["idea"], math.inf))
        baseline = best.pop("baseline")
        return {idea: loss / baseline - 1 for idea, loss in best.items()}

    def right(found):
        assert len(found) == 12
        return f"{sum((change < 0) == (known[idea] == 'better') for idea, change in found.items())} of 12"

    losses = {}
    for row in rows:
        if row["experiment"] == "1600-report-5e-3" or (row["experiment"], row["idea"]) == (
            "1600-choose-5e-3",
            "baseline",
        ):
            losses.setdefault(row["idea"], []).append(math.log(row["loss"]))
    baseline = losses.pop("baseline")
    assert len(baseline) == 8 and {len(values) for values in losses.values()} == {4}
    groups = [verdicts.Group(values=values) for values in (baseline, *losses.values())]
    pairs = [(0, number) for number in range(1, len(groups))]
    found = dict(zip(losses, verdicts.find(groups, pairs, 0.015, len(pairs)), strict=True))
    names = {"bigram_embeddings": "bigram embeddings", "relu_squared": "ReLU²", "geglu": "GEGLU", "swiglu": "SwiGLU"}
    names |= {"muon": "Muon", "logit_softcap": "soft-capping", "shallower_wider": "shallower and wider"}
    names |= {"dropout": "dropout in one epoch"}
    table = []
    for idea, finding in found.items():
        low, high = finding.effect - finding.half_width, finding.effect + finding.half_width
        interval = f"{percent(math.expm1(low))} to {percent(math.expm1(high))}"
        cells = [
            names.get(idea, idea.replace("_", " ")),
            known[idea],
            f"{percent(math.expm1(finding.effect))} ({interval})",
        ]
        table.append(f"| {' | '.join(cells)} | {finding.verdict} |")
        assert finding.verdict in (known[idea], "unknown"), "the page says that no verdict is wrong"

    figures = [
        f"| choose | 1 | {right(changes('400', [5e-3, 1e-2, 2e-2], 0))} |",
        f"| choose | 1 | {right(changes('1600-choose', [1e-2], 5000))} |",
        f"is `configs/text_lab.yaml` | choose | 1 | {right(changes('1600-choose-5e-3', [5e-3], 5000))} |",
        f"1,600 steps at 5e-3 | report | 4 | {right({idea: finding.effect for idea, finding in found.items()})} |",
        *table,
    ]
    assert changes("1600-choose-5e-3", [5e-3], 5000)["fewer_wider_heads"] > 0, "the wrong sign"
    check_figures(joined(RESULTS.partition("### Agreement")[2]), figures)


def test_figures_of_many_epochs(monkeypatch):
    monkeypatch.setattr(report, "draw", lambda *_: None)
    race = report.describe_race(RAW / "text-6116f741" / "races" / "fbd9e6ec.json")
    [ideas] = ideas_of_rounds(race)
    figures = [f"{race['runs']} runs, {hours(race)} CPU hours", f"{race['rounds'][0]['baseline_loss']:.3f} nats/byte"]
    for name, idea in ideas.items():
        cells = f"{percent(idea['effect'])} ({interval(idea)}) | {idea['verdict']} | {idea['runs']}"
        figures.append(f"| `{name}` | {cells} |")
    for folder, characters in (("text-e8f38e9e", 200_000), ("text-411eb1c4", 300_000)):
        race = report.describe_race(RAW / folder / "races" / "205063a7.json")
        assert race["runs"] == 8 and hours(race) == "0.26"
        [ideas] = ideas_of_rounds(race)
        effects = (show(ideas[f"{shifted}--model.dropout 0.1"]) for shifted in ("", "--data.crops shifted "))
        loss = f"{race['rounds'][0]['baseline_loss']:.3f}"
        averaged = report.describe_race(RAW / folder / "races" / "dd7829af.json")
        assert sum(not run.is_stopped for run in read_results(RAW / folder).values()) == 12
        [[average]] = [race_of.values() for race_of in ideas_of_rounds(averaged)]
        row = [f"{characters:,}", f"{1_228_800 / characters:.1f}", loss, *effects, show(average)]
        figures.append(f"| {' | '.join(row)} |")
    page = (ROOT / "docs" / "data.md").read_text()
    check_figures(joined(page.partition("### Many epochs")[2].partition("###")[0]), figures)


def test_figures_of_the_shakespeare_recipe(monkeypatch):
    monkeypatch.setattr(report, "draw", lambda *_: None)
    race = report.describe_race(RAW / "shakespeare_best-3bc55b45" / "races" / "0ddbb796.json")
    [ideas] = ideas_of_rounds(race)
    loss = (
        f"{race['rounds'][0]['baseline_loss']:.3f} nats/character, four: {race['runs']} runs in {hours(race)} CPU hours"
    )
    rows = [f"| `{name}` | {show(idea)} | {idea['verdict']} |" for name, idea in ideas.items()]
    page = (ROOT / "docs" / "data.md").read_text()
    check_figures(joined(page.partition("## Recipes")[2].partition("### Many epochs")[0]), [loss, *rows])
    assert race["baseline"].partition(" ")[2] in page and all(f'"{name}"' in page for name in ideas)
    assert {idea["runs"] for idea in ideas.values()} == {1}


def check_figures(text, figures):
    """Check that a text has these figures, and no other effect in percent."""
    for figure in figures:
        assert figure in text, figure
    for figure in sorted(figures, key=len, reverse=True):
        text = text.replace(figure, "")
    assert not re.findall(r"[-+]\d[\d.]*%", text)


def joined(text):
    """Undo line breaks and the alignment of tables."""
    return " ".join(text.split())


def ideas_of_rounds(race):
    return [{idea["idea"]: idea for idea in entry["ideas"]} for entry in race["rounds"]]


def hours(race):
    return f"{race['seconds'] / 3600:.2f}"


def losses(idea, race):
    return f"loss {race['rounds'][0]['baseline_loss']:.4f} -> {idea['loss']:.4f} nats/token"


def about(idea):
    return f"{100 * idea['effect']:+.0f}%"


def show(one):
    values = [one[name] for name in ("effect", "low", "high")]
    shown = [f"{100 * value:+.0f}%" if one["effect"] > 10 else percent(value) for value in values]
    return "{} ({} to {})".format(*shown)


def confirm_again(folder, name):
    """Compare the runs of a confirmation again, check that nothing has changed, and return the differences."""
    stored = json.loads((folder / "confirmations" / f"{name}.json").read_text())
    [race] = (folder / "races").glob("*.json")
    record, results = Record.read(race), read_results(folder)
    keys = {idea.text: key for key, idea in record.ideas.items()}
    first, second, third = record.rounds[:3]
    small = {"baseline": first.baseline["digest"], QK_NORM: first.ideas[keys[QK_NORM]]["digest"]}
    small |= {MUON: second.baseline["digest"], BOTH: third.baseline["digest"]}
    seeds = SEEDS_OF_CONFIRMATIONS[: stored["seeds"]]
    results = {name: run for name, run in results.items() if run.seed in seeds}
    differences = []
    for size, digests in ((1.0, small), (4.0, LARGE)):
        digests = digests | {f"all without {MUON}": digests[QK_NORM], f"{MUON} {QK_NORM}": digests[BOTH]}
        pairs = [(one["variant"], one["against"]) for one in stored["differences"] if one["size"] == size]
        differences += confirm.compare(size, digests, pairs, results, record.margin)
    assert differences == [pytest.approx(one) for one in stored["differences"]]
    return differences
