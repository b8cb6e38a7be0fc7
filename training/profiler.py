"""Chrome traces of chosen steps, for chrome://tracing and Perfetto."""

from contextlib import nullcontext
from pathlib import Path

from torch.profiler import profile, schedule

from config.schema import TrainConfig


def step_profiler(config: TrainConfig, first_step: int, directory: Path, rank: int) -> profile | nullcontext[None]:
    """Return a torch profiler that writes a trace of the steps `config.profile`; call `step()` after each update.

    Without `config.profile` return a null context, since an idle torch profiler costs 50 microseconds a step.
    """
    if config.profile is None:
        return nullcontext()
    first, last = config.profile
    action = schedule(wait=first - 1, warmup=1, active=last - first + 1, repeat=1)
    path = directory / f"trace-steps-{first}-{last}-rank-{rank}.json"
    return profile(
        schedule=lambda index: action(first_step + 1 + index),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(path)),
    )
