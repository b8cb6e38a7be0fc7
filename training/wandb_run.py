"""Weights & Biases, in a thread of its own: it takes seconds to start, for which training need not wait."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from uuid import uuid4

from config import ConfigError, TrainConfig
from training.provenance import provenance


def check_wandb(mode: str) -> None:
    """Refuse `tracking.wandb: online` where W&B would ask at the terminal who the user is.

    Raises:
        ConfigError: there is no API key.
    """
    if mode != "online":
        return
    with suppress(ImportError):
        import wandb

        if not wandb.api.api_key:
            raise ConfigError(
                "tracking.wandb: online needs an API key: run `wandb login`, or set WANDB_API_KEY; offline needs none"
            )


class WandbRun:
    """One run of W&B in `directory`, over all starts of ours. What is logged before it has started waits for it.

    Without wandb, or after an error of it, nothing is logged any more and `say` tells why, once.
    """

    def __init__(self, config: TrainConfig, directory: Path, say: Callable[[str], None]):
        self.say, self.run = say, None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="wandb")
        self.thread.submit(self._try, lambda: self._start(config, directory))

    def log(self, values: dict[str, float]) -> None:
        """Add a point."""
        self._later(lambda: self.run.log(values))

    def log_texts(self, step: int, name: str, texts: list[str]) -> None:
        """Add a table of texts."""
        rows = [[text] for text in texts]
        self._later(lambda: self.run.log({"step": step, name: import_module("wandb").Table(["text"], rows)}))

    def finish(self, exit_code: int) -> None:
        """Return when all is written."""
        self._later(lambda: self.run.finish(exit_code=exit_code))
        self.thread.shutdown()

    def _later(self, action: Callable[[], object]) -> None:
        self.thread.submit(lambda: self._try(action) if self.run else None)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except ImportError:
            self.say("wandb is not installed: metrics go to metrics.jsonl only.")
        except Exception as error:  # whatever it is, it is no reason to stop training
            self.run = None
            self.say(f"W&B has failed, metrics go to metrics.jsonl only: {type(error).__name__}: {error}")

    def _start(self, config: TrainConfig, directory: Path) -> None:
        import wandb

        (directory / "wandb").mkdir(exist_ok=True)
        id_file = directory / "wandb" / "run_id"
        if not id_file.exists():
            id_file.write_text(uuid4().hex)
        run = wandb.init(
            project=config.tracking.project,
            name=config.name,
            id=id_file.read_text(),
            resume="allow",
            dir=directory,
            mode=config.tracking.wandb,
            config={**asdict(config), "provenance": provenance()},
            settings=wandb.Settings(silent=True, console="off"),
        )
        # W&B's own step can only grow, so after a rewind it would drop the points that are done again.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self.run = run
