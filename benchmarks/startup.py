"""How long one waits for --help, and for the first step: python -m benchmarks.startup [--quick]

From launch to the line of the first step, by `python` and by `accelerate launch` with two processes, with and without
W&B, and compiled with an empty and with a filled cache. Beside them what torch alone, and what train.py imports, take
to load. All by turns, medians of three; about three and a half minutes on two cores.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import record
from benchmarks.measure import alternate, arguments, launch, run, started, wait_for_line

RECIPE = ["--config", "configs/stories.yaml"]
SMALL = "--data.num_samples 50 --model.d_model 16 --model.d_ff 32 --model.n_heads 2 --model.n_layers 1".split()


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    run(command)
    return time.perf_counter() - start


def seconds_to_first_step(processes: int, *settings: str, **env: str) -> float:
    """From launch until the program says that the first step is done; it is stopped then."""
    with tempfile.TemporaryDirectory() as directory:
        command = [*launch(processes, "train.py"), *settings, "--out_dir", directory, "--tracking.log_every", "1"]
        start = time.perf_counter()
        with started(command, **env) as process:
            wait_for_line(process, "[step 1 /")
            return time.perf_counter() - start


class Compiled:
    """Starts of a compiled run, with caches of compiled code below `folder`."""

    def __init__(self, folder: Path, recipe: list[str], env: dict[str, str]):
        self.folder, self.recipe, self.env, self.caches = folder, [*recipe, "--compile", "true"], env, 0

    def warm(self) -> float:
        cache = str(self.folder / str(self.caches))
        return seconds_to_first_step(0, *self.recipe, TORCHINDUCTOR_CACHE_DIR=cache, **self.env)

    def cold(self) -> float:
        self.caches += 1
        return self.warm()


def cases(folder: Path, quick: bool) -> dict[str, Callable[[], float]]:
    """What is measured, in an order in which the warm cache is the one that the cold start before it filled."""
    recipe, quiet = RECIPE + SMALL * quick, ["--tracking.wandb", "disabled"]
    # Compiling the smallest model takes half a minute; without a compiler train.py says so and goes on.
    compiled = Compiled(folder, recipe, {"CXX": "no-such-compiler"} if quick else {})
    return {
        "help": lambda: seconds([sys.executable, "train.py", "--help"]),
        "import_torch": lambda: seconds([sys.executable, "-c", "import torch"]),
        "import_train": lambda: seconds([sys.executable, "-c", "import train"]),
        "first_step_1_process": lambda: seconds_to_first_step(0, *recipe),
        "first_step_1_process_without_wandb": lambda: seconds_to_first_step(0, *recipe, *quiet),
        "first_step_2_processes": lambda: seconds_to_first_step(2, *recipe),
        "first_step_2_processes_without_wandb": lambda: seconds_to_first_step(2, *recipe, *quiet),
        "first_step_compiled_cold": compiled.cold,
        "first_step_compiled_warm": compiled.warm,
    }


def main() -> None:
    quick = arguments(__doc__).quick
    with tempfile.TemporaryDirectory() as folder:
        medians = alternate(cases(Path(folder), quick), rounds=1 if quick else 3)
    figures = {f"{name}_seconds": round(value, 2) for name, value in medians.items()}
    record.save("startup", figures, quick)


if __name__ == "__main__":
    main()
