"""The fitted laws of a ladder and their predictions, as text and as JSON."""

from tools.scale.ladder import EXTRAPOLATION, LadderRun, Measurement, base_config, facts_read
from tools.scale.law import LawFit, fit_with_uncertainty, power_law_exponent, unseen_fact_probability
from tools.scale.recipe import format_count

KNOWN, FITTED = "known entropy", "fitted irreducible loss"
SCOPES = ("all", "answers")


class Report:
    """The law of a ladder, with known entropy and with fitted irreducible loss, and the predicted loss of `target`.

    Its scope is `all` tokens or the `answers` of facts alone, which the theory is about.
    """

    def __init__(self, measurements: list[Measurement], target: LadderRun, scope: str):
        self.measurements, self.target, self.scope = measurements, target, scope
        tokens = [run.tokens for run in measurements]
        columns = [run.parameters for run in measurements], tokens, [run.excess_loss(scope) for run in measurements]
        self.entropy = measurements[0].entropy if scope == "all" else 0.0
        self.fits: dict[str, LawFit] = {
            KNOWN: fit_with_uncertainty(*columns),
            FITTED: fit_with_uncertainty(*columns, hidden_entropy=self.entropy),
        }
        self.predictions = {
            name: fitted.predict(target.parameters, target.tokens) for name, fitted in self.fits.items()
        }
        data = base_config().data
        counts = [facts_read(min(tokens)), facts_read(max(tokens))]
        # `theory` holds in the limit of infinitely many facts, `theory_beta_here` for as many as these runs have read.
        self.theory = {"alpha": data.zipf - 1, "beta": (data.zipf - 1) / data.zipf}
        self.theory_beta_here = power_law_exponent(counts, unseen_fact_probability(data.facts, data.zipf, counts))

    def lines(self) -> list[str]:
        heading = f"Scaling law of {'all tokens' if self.scope == 'all' else 'answers'}"
        lines = [f"\n{heading}: entropy {self.entropy:.4f} nats/token. Loss = E + A N^-alpha + B D^-beta:"]
        for name, fitted in self.fits.items():
            exponents = [
                f"{letter} = {getattr(fitted.law, letter):.3f} ({low:.3f} to {high:.3f})"
                for letter in ("alpha", "beta")
                for low, high in [fitted.interval(lambda law, letter=letter: getattr(law, letter))]
            ]
            lines.append(f"  {name} {self.entropy + fitted.law.irreducible:.4f}: {', '.join(exponents)}")
        lines.append(
            f"  theory: alpha = {self.theory['alpha']:.3f}, beta = {self.theory['beta']:.3f} in the limit; "
            f"beta = {self.theory_beta_here:.3f} for as many facts as these runs have read"
        )
        largest = max(self.measurements, key=lambda run: run.flops)
        parameters, tokens = self.fits[KNOWN].law.compute_optimal(largest.parameters * largest.tokens)
        ratio = float(tokens / parameters)
        is_determined = 1e-3 < ratio < 1e6
        optimum = f"{ratio:.3g} tokens per parameter" if is_determined else "tokens per parameter not determined"
        lines.append(f"Compute-optimal at {largest.flops:.2g} FLOPs: {optimum}")
        size = f"{format_count(self.target.parameters)} parameters, {format_count(self.target.tokens)} tokens"
        lines.append(f"Predicted excess loss at {EXTRAPOLATION} times the FLOPs of the largest run ({size}):")
        for name, (expected, low, high) in self.predictions.items():
            lines.append(f"  {name}: {expected:.4f} nats/token ({low:.4f} to {high:.4f})")
        return lines

    def outcome_lines(self, outcome: Measurement) -> list[str]:
        excess = outcome.excess_loss(self.scope)
        lines = [f"Measured excess loss ({self.scope}): {excess:.4f} nats/token"]
        for name, (expected, low, high) in self.predictions.items():
            inside = "inside" if low <= excess <= high else "outside"
            lines.append(f"  {name}: prediction off by {expected / excess - 1:+.1%}, {inside} the interval")
        return lines

    def as_dict(self, outcome: Measurement | None = None) -> dict:
        return {
            "fits": {name: {**vars(fitted.law), "noise": fitted.noise} for name, fitted in self.fits.items()},
            "target": {"parameters": self.target.parameters, "tokens": self.target.tokens},
            "predictions": self.predictions,
            "outcome": outcome and outcome.excess_loss(self.scope),
        }


def format_table(measurements: list[Measurement]) -> list[str]:
    """Return the runs of a ladder as lines of a table, losses in nats/token."""
    columns = f"{'parameters':>12} {'tokens':>10} {'FLOPs':>9} {'seed':>5} {'loss':>8}"
    lines = [f"{columns} {'excess loss':>16} {'answers':>8}"]
    for run in sorted(measurements):
        lines.append(
            f"{run.parameters:>12,} {format_count(run.tokens):>10} {run.flops:>9.2g} {run.seed:>5} {run.loss:>8.4f} "
            f"{run.excess_loss('all'):>16.4f} {run.excess_loss('answers'):>8.4f}"
        )
    return lines
