"""Chrome traces of chosen steps, for chrome://tracing and Perfetto."""

from contextlib import nullcontext
from pathlib import Path

from torch.profiler import profile, schedule


def step_profiler(
    steps: tuple[int, int] | None, first_step: int, directory: Path, rank: int
) -> profile | nullcontext[None]:
    """Return a torch profiler that writes a trace of `steps`, first and last; call `step()` before each update.

    Without `steps` return a null context, since an idle torch profiler costs 50 microseconds a step.
    """
    if steps is None:
        return nullcontext()
    first, last = steps
    action = schedule(wait=first - 1, warmup=1, active=last - first + 1, repeat=1)
    path = directory / f"trace-steps-{first}-{last}-rank-{rank}.json"
    return profile(
        schedule=lambda index: action(first_step + index),  # index 0 is before the first update
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(path)),
    )
