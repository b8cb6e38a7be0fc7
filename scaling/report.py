"""What the ladder of scale.py --law says, in words and figures."""

from scaling.ladder import FACTS, FACTS_A_STORY, SEQ_LEN, TIMES, ZIPF, Point, Rung
from scaling.law import Fitted, fit_with_uncertainty, slope, unread_mass
from scaling.recipe import short

EXACT, FREE = "exact floor", "floor fitted"


class Report:
    """The law of a ladder, fitted with the exact floor and a free one, and what it predicts of the run `beyond`.

    Of `all` tokens or of the `answers` alone, which is what the theory speaks of.
    """

    def __init__(self, points: list[Point], beyond: Rung, kind: str):
        self.points, self.beyond, self.kind = points, beyond, kind
        parameters, tokens, seeds = ([getattr(p, name) for p in points] for name in ("parameters", "tokens", "seed"))
        columns = parameters, tokens, [point.excess(kind) for point in points], seeds
        self.floor = points[0].floor if kind == "all" else 0.0
        self.fits: dict[str, Fitted] = {
            EXACT: fit_with_uncertainty(*columns),
            FREE: fit_with_uncertainty(*columns, known_floor=self.floor),
        }
        self.predictions = {
            name: fitted.prediction(beyond.parameters, beyond.tokens) for name, fitted in self.fits.items()
        }
        told = [number / SEQ_LEN * FACTS_A_STORY for number in (min(tokens), max(tokens))]
        # In the limit of many facts read, and over those that these runs have read.
        self.theory = {"alpha": ZIPF - 1, "beta": (ZIPF - 1) / ZIPF}
        self.theory_here = slope(told, unread_mass(FACTS, ZIPF, told))

    def lines(self) -> list[str]:
        """The law and the prediction."""
        lines = [
            f"\nOf {self.kind}: floor {self.floor:.4f} nats a token, exactly. Loss = floor + A N^-alpha + B D^-beta:"
        ]
        for name, fitted in self.fits.items():
            law = fitted.law
            exponents = [
                f"{letter} = {getattr(law, letter):.3f} ({low:.3f} to {high:.3f})"
                for letter in ("alpha", "beta")
                for low, high in [fitted.interval(lambda law, letter=letter: getattr(law, letter))]
            ]
            lines.append(f"  {name} {self.floor + law.floor:.4f}: {', '.join(exponents)}")
        lines.append(
            f"  theory: alpha = {self.theory['alpha']:.3f}, beta = {self.theory['beta']:.3f} in the limit; "
            f"beta = {self.theory_here:.3f} for so many facts"
        )
        ratio = self.best_ratio()
        told = f"{ratio:.3g} tokens a parameter" if 1e-3 < ratio < 1e6 else "how many tokens a parameter is not told"
        lines.append(f"Best at {max(p.flops for p in self.points):.2g} FLOP: {told}")
        size = f"{short(self.beyond.parameters)} parameters, {short(self.beyond.tokens)} tokens"
        lines.append(f"Predicted of a run of {TIMES} times the FLOPs of the largest, {size}:")
        for name, (expected, low, high) in self.predictions.items():
            lines.append(f"  {name}: {expected:.4f} above the floor ({low:.4f} to {high:.4f})")
        return lines

    def best_ratio(self) -> float:
        """Tokens a parameter of the least excess, for as many FLOPs as the largest run."""
        largest = max(self.points, key=lambda point: point.flops)
        parameters, tokens = self.fits[EXACT].law.best_split(largest.parameters * largest.tokens)
        return tokens / parameters

    def outcome(self, point: Point) -> list[str]:
        """What came of the prediction."""
        excess = point.excess(self.kind)
        lines = [f"Outcome, of {self.kind}: {excess:.4f} above the floor."]
        for name, (expected, low, high) in self.predictions.items():
            inside = "inside" if low <= excess <= high else "outside"
            lines.append(f"  {name}: off by {expected / excess - 1:+.1%}, {inside} the interval")
        return lines

    def figures(self, outcome: Point | None = None) -> dict:
        """All of it, for a file."""
        return {
            "fits": {name: {**vars(fitted.law), "noise": fitted.noise} for name, fitted in self.fits.items()},
            "predicted": dict(zip(("parameters", "tokens"), (self.beyond.parameters, self.beyond.tokens), strict=True)),
            "predictions": self.predictions,
            "outcome": outcome and outcome.excess(self.kind),
        }


def table(points: list[Point]) -> list[str]:
    """The runs of a ladder."""
    lines = [
        f"{'parameters':>12} {'tokens':>10} {'FLOP':>9} {'seed':>5} {'loss':>8} {'above the floor':>16} {'answers':>8}"
    ]
    for point in sorted(points):
        lines.append(
            f"{point.parameters:>12,} {short(point.tokens):>10} {point.flops:>9.2g} {point.seed:>5} {point.loss:>8.4f} "
            f"{point.excess('all'):>16.4f} {point.excess('answers'):>8.4f}"
        )
    return lines
