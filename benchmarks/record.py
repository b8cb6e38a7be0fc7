"""Where figures go: benchmarks/results/NAME.json, {group: {case: {quantity: value}}}, with where they come from.

A list holds the value of every round; {"median", "rounds"} is of rounds that were not kept; anything else is a fact.
"""

import json
import os
import platform
import re
import sys
from datetime import date
from pathlib import Path

import psutil
import torch

from training.provenance import provenance

RESULTS = Path(__file__).parent / "results"
Figures = dict[str, dict[str, dict]]


def machine() -> dict[str, str | int | float]:
    """What the figures were measured on."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    facts = {
        "cpu": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        facts |= {"cudnn": torch.backends.cudnn.version()}
    return facts


def write(path: Path, figures: Figures, left_out: list[str]) -> None:
    """Write the figures to `path`, with where they come from, and the groups for which no time was left."""
    record = {
        "command": " ".join(["python", *(Path(word).name if "/" in word else word for word in sys.orig_argv[1:])]),
        "date": str(date.today()),
        "machine": machine(),
        "versions": provenance(),
        **({"left_out": left_out} if left_out else {}),
        "figures": figures,
    }
    path.write_text(dump(record) + "\n")


def dump(record: dict) -> str:
    """As JSON, a figure on one line."""
    figure = r"\[[^\[\]{}]*\]|\{\s*\"median\"[^{}]*\}"
    return re.sub(figure, lambda found: json.dumps(json.loads(found[0])), json.dumps(record, indent=2))
