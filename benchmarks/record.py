"""Where a benchmark's figures go: benchmarks/results/NAME.json, beside the machine, the versions and the command."""

import json
import os
import platform
import sys
from datetime import date
from pathlib import Path

import psutil
import torch

from training.provenance import provenance

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, str | int | float]:
    """What the figures were measured on."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    facts = {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / 2**30, 1)}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def write(path: Path, figures: dict) -> None:
    """Write the figures to `path`, with where they come from."""
    record = {
        "command": " ".join(["python", *(Path(word).name if "/" in word else word for word in sys.orig_argv[1:])]),
        "date": str(date.today()),
        "machine": machine(),
        "versions": provenance(),
        "figures": figures,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def save(name: str, figures: dict, quick: bool = False) -> None:
    """Print the figures and write them to benchmarks/results/NAME.json; those of a quick run are only printed."""
    if not quick:
        write(RESULTS / f"{name}.json", figures)
    print(json.dumps(figures, indent=2))
