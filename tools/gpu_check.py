"""Test this repository on the GPUs of this machine, and measure its speed there: python -m tools.gpu_check one|several.

`make test-gpu` (one) and `make test-gpus` (several) run it. The work is divided into parts, and the report, a JSON
file, is written after each. A part that has a result there is not run again, so the same command continues where the
last one stopped. The report has no names of hosts, users or paths.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch

from runtime.config.help import wrapped
from runtime.files import write_atomically
from tools.benchmark import gpu, programs, tables
from tools.benchmark.__main__ import run_interleaved
from tools.benchmark.programs import ROOT, Program
from trainer.checkpoint.provenance import provenance
from trainer.run.metrics_log import read_rows

Result = dict[str, Any]


class Part(NamedTuple):
    """A test or a measurement."""

    name: str
    what: str
    minutes: float
    """An estimate: a part whose estimate exceeds the time that is left waits for the next call."""
    run: Callable[[], Result]


# One GPU


def parts_of_one(options: argparse.Namespace) -> list[Part]:
    """Return the tests marked `cuda`, and the groups of the benchmarks `cuda_graph` and `gpu`."""
    # Two parts, because together they may take longer than a call.
    chosen = {"tests": "not cuda_graph", "tests of cuda_graph": "cuda_graph"}
    if options.quick:
        chosen = {"tests": "chunked_loss or tree_sum"}
    parts = [
        Part(name, f"the tests that need a GPU, {words}", 6, partial(run_marked_tests, words))
        for name, words in chosen.items()
    ]
    for name in ("cuda_graph", "gpu"):
        groups = list(getattr(gpu, name)(options))
        for group, cases, baselines in groups[: 1 if options.quick else None]:
            what = f"tokens/s and memory of {group}: {', '.join(cases)}"

            def measure(cases: dict = cases, baselines: dict = baselines) -> Result:
                figures = run_interleaved(cases, baselines, 1)
                errors = [case["error"] for case in figures.values() if "error" in case]
                return {"figures": figures} | ({"error": errors[0]} if errors else {})

            parts.append(Part(f"{name}, {group}", what, 0.6 * len(cases), measure))
    return parts


def run_marked_tests(chosen: str) -> Result:
    """Run the tests that pytest selects by these words."""
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.cuda" in file.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-k", chosen, "-rfE", "-q", *files]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines() or [""]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", lines[-1])}
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"tests": counts, "failures": failures, "holds": not failures and counts.get("passed", 0) > 0}


# Several GPUs

# Eight steps with dropout, of which all numbers of processes up to 16 make the same global batches.
SMALL = [
    *("--config", "configs/stories.yaml", "--steps", "8", "--global_batch_size", "16", "--micro_batch_size", "1"),
    *("--model.dropout", "0.1", "--schedule.warmup_steps", "2", "--checkpoint.every", "2", "--evaluation.every", "0"),
    *("--evaluation.num_scored_generations", "0", "--evaluation.num_logged_generations", "0"),
    *("--tracking.wandb", "disabled", "--tracking.log_every", "1"),
]
EXACT = [*SMALL, "--exact", "true"]


def parts_of_several(options: argparse.Namespace) -> list[Part]:
    """Return the parts for all GPUs of this machine."""
    gpus = torch.cuda.device_count()
    counts = [count for count in (1, 2, 4, 8) if count <= gpus]
    most = counts[-1]  # `exact` needs a power of two
    parts = [
        Part("nccl", f"sums of NCCL on {gpus} GPUs, and how fast they are", 1, lambda: run_nccl(gpus, options)),
        Part("equal bits", f"`exact` on 1 and {most} GPUs", 1, lambda: compare_bits(most)),
        Part("equal losses", f"DDP and FSDP2 on {most} GPUs against one, in fp32", 1.5, lambda: compare_losses(most)),
        Part("kill and resume", f"kill -9 of {most} processes, and a resume", 1.5, lambda: resume(most, options)),
    ]
    for launch_file, count in [*(("multi_gpu", count) for count in counts), ("fsdp2", most)]:
        name = f"{'DDP' if launch_file == 'multi_gpu' else 'FSDP2'} on {count}"
        run = partial(measure_speed, launch_file, count, options)
        parts.append(Part(name, f"tokens/s of GPT-2 124M, {name} GPU(s)", 1, run))
    return parts


def launched(launch_file: str, count: int, precision: str, *settings: str) -> Program:
    """Return train.py under `accelerate launch` with a launch file of this repository."""
    launcher = [str(Path(sys.executable).with_name("accelerate")), "launch"]
    launcher += ["--config_file", f"accelerate_configs/{launch_file}.yaml", "--num_processes", str(count)]
    return Program([sys.executable, *launcher, "--mixed_precision", precision, "train.py", *settings, "--name", "run"])


def train(launch_file: str, count: int, precision: str, *settings: str) -> list[dict[str, Any]]:
    """Train in a temporary folder, and return the logged metrics."""
    with tempfile.TemporaryDirectory() as folder:
        launched(launch_file, count, precision, *settings, "--out_dir", folder).run()
        return read_log(folder)


def read_log(folder: str) -> list[dict[str, Any]]:
    """Return the metrics that the run in `folder` has logged so far."""
    log = Path(folder) / "run" / "metrics.jsonl"
    return [*read_rows(log)] if log.exists() else []


def compare_bits(most: int) -> Result:
    """Train with `exact` on one GPU and on `most`."""
    digests = {count: train("multi_gpu", count, "no", *EXACT)[-1]["state/digest"] for count in (1, most)}
    return {"digests": digests, "holds": len(set(digests.values())) == 1}


def compare_losses(most: int) -> Result:
    """Train with DDP on one GPU and on `most`, and with FSDP2."""
    ways = {"1 GPU": ("multi_gpu", 1), "DDP": ("multi_gpu", most), "FSDP2": ("fsdp2", most)}
    losses = {}
    for way, (launch_file, count) in ways.items():
        losses[way] = [row["train/loss"] for row in train(launch_file, count, "no", *SMALL) if "train/loss" in row]
    errors = {way: max(abs(a / b - 1) for a, b in zip(losses[way], losses["1 GPU"], strict=True)) for way in losses}
    return {"largest_relative_difference": errors, "holds": max(errors.values()) < 1e-4}


def resume(most: int, options: argparse.Namespace) -> Result:
    """Kill a run, start it again, and compare it with a run that was not killed."""
    settings = [*EXACT, "--steps", "24" if options.quick else "200"]
    with tempfile.TemporaryDirectory() as folder:
        killed = launched("multi_gpu", most, "no", *settings, "--out_dir", folder)
        kill_after_step(killed, 6, folder)
        printed = "\n".join(line for _, line in killed.run())
        digests = [read_log(folder)[-1]["state/digest"]]
    digests.append(train("multi_gpu", most, "no", *settings)[-1]["state/digest"])
    resumed = [int(step) for step in re.findall(r"resumed at step (\d+)", printed)]
    return {"resumed_at_step": resumed, "digests": digests, "holds": len(resumed) == 1 and len({*digests}) == 1}


def kill_after_step(program: Program, step: int, folder: str) -> None:
    """Start a program and kill all of its processes when it has logged this step."""
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(program.command, cwd=ROOT, start_new_session=True, stdout=nowhere, stderr=nowhere)
    try:
        while not any(row["step"] >= step for row in read_log(folder)):
            if process.poll() is not None:
                raise RuntimeError(f"exit code {process.poll()} before it was killed")
            time.sleep(0.1)
    finally:
        # The launcher's workers have sessions of their own.
        launcher = psutil.Process(process.pid) if process.poll() is None else None
        for victim in [launcher, *launcher.children(recursive=True)] if launcher else []:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        process.wait()


def measure_speed(launch_file: str, count: int, options: argparse.Namespace) -> Result:
    """Train GPT-2 124M, 32 sequences on each GPU; with --quick, a tiny model, uncompiled."""
    shape, batch, log_every = (programs.TINY, 2, 1) if options.quick else (gpu.GPT2_124M, 32, 10)
    settings = f"--model.vocab_size {256 if options.quick else 50304} --compile {str(not options.quick).lower()}"
    words = programs.random_settings(shape, batch, log_every, f"{settings} --global_batch_size {batch * count}")
    rows = train(launch_file, count, "bf16", *words.split())[programs.WARM_UP :]
    return {
        "tokens_per_second": float(f"{median(row['perf/tokens_per_second'] for row in rows):.5g}"),
        "peak_mib": round(max(row.get("perf/peak_memory_bytes", 0) for row in rows) / 2**20),
    }


def run_nccl(gpus: int, options: argparse.Namespace) -> Result:
    """Run `check_nccl` on all GPUs."""
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={gpus}",
        "-m",
        "tools.gpu_check",
        "nccl",
    ]
    lines = Program([sys.executable, *command, *["--quick"] * options.quick]).run()
    return json.loads(next(line for _, line in lines if line.startswith("{")))


def check_nccl(options: argparse.Namespace) -> None:
    """Check collective operations against their definition, and time all-reduces; called by each process."""
    import torch.distributed as dist

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    elements = 2**10 if options.quick else 2**26  # 256 MiB of float32
    numbers = torch.arange(elements, device="cuda").remainder(1_000).float()  # sums of these are exact
    wrong = []

    # Each process contributes its rank + 1 times the same numbers, so the sum is known.
    total, expected = numbers * (rank + 1), numbers * (count * (count + 1) // 2)
    dist.all_reduce(total)
    if not torch.equal(total, expected):
        wrong.append("all_reduce")
    gathered = [torch.empty_like(numbers) for _ in range(count)]
    dist.all_gather(gathered, numbers * (rank + 1))
    if not all(torch.equal(part, numbers * (other + 1)) for other, part in enumerate(gathered)):
        wrong.append("all_gather")
    received = torch.empty_like(numbers)
    exchange = [dist.P2POp(dist.isend, numbers * (rank + 1), (rank + 1) % count)]
    exchange.append(dist.P2POp(dist.irecv, received, (rank - 1) % count))
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    if not torch.equal(received, numbers * ((rank - 1) % count + 1)):
        wrong.append("send and receive")

    # The bus bandwidth of an all-reduce, as nccl-tests define it.
    repeats, seconds = 10, 0.0
    for measured in (False, True):  # the first round is a warm-up
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats if measured else 1):
            dist.all_reduce(total)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / repeats
    bandwidth = 4 * elements * 2 * (count - 1) / count / seconds / 1e9
    everywhere: list[Any] = [None] * count
    dist.all_gather_object(everywhere, wrong)
    if rank == 0:
        wrong = sorted({name for names in everywhere for name in names})
        result = {"wrong": wrong, "holds": not wrong, "all_reduce_gb_per_second": float(f"{bandwidth:.4g}")}
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


# The report


def machine() -> Result:
    """Return what results depend on: GPUs, driver, processor and versions."""
    driver = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0].strip()
    import torch.cuda.nccl

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    facts = {"gpus": torch.cuda.device_count(), "driver": driver, "cuda": torch.version.cuda, "nccl": nccl}
    return tables.machine() | facts | {"versions": provenance()}


def anonymous(value: Any) -> Any:
    """Return a copy of a result without the names of this machine, its user and its paths, and without addresses."""
    if isinstance(value, dict):
        return {name: anonymous(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [anonymous(part) for part in value]
    if not isinstance(value, str):
        return value
    for known in (ROOT, Path.home(), Path(sys.prefix)):
        value = value.replace(f"{known}/", "")
    value = re.sub(r"(?<![\w.])/[\w.+@~-]+(/[\w.+@~-]+)+", lambda match: match[0].rpartition("/")[2], value)
    host = socket.gethostname()
    private_names = {host, host.partition(".")[0], Path.home().name} - {"root", ""}
    for private in sorted(private_names, key=len, reverse=True):
        value = re.sub(rf"\b{re.escape(private)}\b", "...", value)
    value = re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "...", value)
    return re.sub(r"(?i)(?<![\w:])[\da-f]{0,4}(:[\da-f]{0,4}){2,7}(?![\w:])", "...", value)  # IPv6


def summarized(output: str) -> str:
    """Return the first line of what a failed program printed, and the last lines with an error, or of all."""
    first, *others = output.strip().splitlines() or [""]
    errors = [line.strip() for line in others if re.search(r"[Ee]rror: ", line)]
    return " ... ".join([first, *(errors or others)[-3:]])


class OutOfTimeError(BaseException):
    """Not an Exception, which `run_interleaved` would record as the failure of a case."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in this block after so many seconds."""

    def stop(*_: object) -> None:
        raise OutOfTimeError(f"stopped after {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def has_result(part: Part, record: Result) -> bool:
    """Return whether a part has run to its end; one that raised is run again."""
    return "error" not in record["parts"].get(part.name, {"error": "not run yet"})


def run_parts(parts: list[Part], report: Path, minutes: float) -> Result:
    """Run the parts without a result, as far as the time goes, and return the report.

    Parts that an earlier call has tried in vain come last, so that one that always fails does not use up every call.
    """
    deadline, facts = time.monotonic() + 60 * minutes, anonymous(machine())
    record: Result = json.loads(report.read_text()) if report.exists() else {}
    if record.get("machine") != facts:
        record = {"machine": facts, "parts": {}}
    print(f"{facts['gpus']} x {facts.get('gpu')}; at most {minutes:g} minutes; the report is {report}")
    for part in parts:
        print(f"  {'has a result' if has_result(part, record) else f'{part.minutes:.2g} min':>12}  {part.what}")
    print(flush=True)
    for part in sorted(parts, key=lambda part: part.name in record["parts"]):
        left = deadline - time.monotonic()
        if has_result(part, record) or left < 60 * min(part.minutes, minutes / 2):
            continue
        print(f"{part.name} ...", file=sys.stderr, flush=True)
        start = time.monotonic()
        try:
            with time_limit(left):
                result = part.run()
        except (Exception, OutOfTimeError) as error:
            result = {"error": f"{type(error).__name__}: {summarized(str(error))}"}
        record["parts"][part.name] = anonymous(result) | {"seconds": round(time.monotonic() - start, 1)}
        report.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(report, tables.to_json(record))
    return record


def page(parts: list[Part], record: Result) -> str:
    """Return the results, a line or a table for each part."""
    facts = record["machine"]
    lines = [f"{facts['gpus']} x {facts.get('gpu')}, driver {facts['driver']}, torch {facts['versions']['torch']}", ""]
    for part in parts:
        result = record["parts"].get(part.name, {"error": "not run yet"})
        if "figures" in result:
            quantities = tables.SPEED | {"mfu": "MFU"} | tables.MEMORY
            rows = tables.table_rows({part.name: result["figures"]}, quantities)
            lines += ["  ".join(filter(None, row)) for row in rows[1:]]
        elif "error" in result:
            lines.append(f"{part.name}: {result['error']}")
        else:
            verdict = {True: "holds; ", False: "DOES NOT HOLD; ", None: ""}[result.get("holds")]
            shown = {name: value for name, value in result.items() if name not in ("holds", "seconds")}
            lines.append(f"{part.name}: {verdict}{json.dumps(shown)[1:-1].replace(chr(34), '')}")
    return "\n".join(lines)


def main() -> int:
    """Run the parts and print the page; return 1 if a part failed, 0 also if the time was too short for some."""
    parser = argparse.ArgumentParser(
        "tools.gpu_check", description=wrapped(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gpus", choices=("one", "several", "nccl"), help="nccl: a process of a part of `several`")
    parser.add_argument("--minutes", type=float, help="when to stop; default: 15 for one, 10 for several")
    parser.add_argument("--report", type=Path, help="default: runs/gpu_check_one.json or runs/gpu_check_several.json")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to compare with")
    parser.add_argument("--quick", action="store_true", help="a rehearsal: tiny models, and the first groups alone")
    options = parser.parse_args()
    if options.gpus == "nccl":
        check_nccl(options)
        return 0
    needed = 1 if options.gpus == "one" else 2
    if (found := torch.cuda.device_count()) < needed:
        parser.error(
            f"{options.gpus} needs {needed} NVIDIA GPU(s) or more; torch {torch.__version__} finds {found} here"
        )
    report = options.report or ROOT / "runs" / f"gpu_check_{options.gpus}.json"
    with tempfile.TemporaryDirectory() as folder:
        options.scratch, options.text = Path(folder), None
        parts = (parts_of_one if options.gpus == "one" else parts_of_several)(options)
        record = run_parts(parts, report, options.minutes or (15 if options.gpus == "one" else 10))
    print(page(parts, record))
    complete = all(has_result(part, record) for part in parts)
    if options.gpus == "one" and complete and not options.quick:
        for name in ("cuda_graph", "gpu"):
            groups = {part.name.split(", ")[1]: part.name for part in parts if part.name.startswith(f"{name}, ")}
            tables.write_result(name, {group: record["parts"][part]["figures"] for group, part in groups.items()})
        tables.PAGE.write_text(tables.render_page())
    if not complete:
        print("\nRun the same command again for the parts without a result.")
    elif options.gpus == "several":
        print(f"\nPlease attach {report} to an issue (form: results of several GPUs).")
    results = record["parts"].values()
    return int(any("error" in result or result.get("holds") is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
