"""train.py with faults: FAULTS="kill:1:3 hang:0:5" kills process 1 in step 3 of the first start, and stops process 0 in
step 5 of the second, which an elastic launcher makes after the first has failed. Started like train.py."""

import hashlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import train
from data.synthetic.stories import StoriesDataset
from runtime import files
from runtime.cli import scripts
from runtime.distributed import collectives
from runtime.distributed.sharding import is_sharded
from runtime.distributed.signals import StopSignal
from trainer.checkpoint import saver

FAULTS = os.environ["FAULTS"].split()
RESTART = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
KIND, RANK, STEP = FAULTS[RESTART].split(":") if RESTART < len(FAULTS) else ("none", "0", "0")
FAULTY_STEPS = {int(step) for step in STEP.split(",")}  # counted from 1, as in metrics.jsonl
MINE = RANK in ("all", os.environ.get("RANK", "0"))


class Model(train.GPTModel):
    """Multiplies its loss by NaN in the faulty steps."""

    step = None

    def __init__(self, config):
        super().__init__(config)
        Model.instance = self

    def forward(self, *arguments, **named):
        if MINE and not self.training and (Model.step or 0) in FAULTY_STEPS:
            if KIND == "stop_in_evaluation":
                os.kill(os.getpid(), signal.SIGTERM)
            if KIND == "stop_in_generation" and "cache" in named:
                os.kill(os.getpid(), signal.SIGTERM)
            if KIND == "kill_in_evaluation":
                os.kill(os.getpid(), signal.SIGKILL)
        output = super().forward(*arguments, **named)
        if KIND == "nan" and MINE and self.training and Model.step in FAULTY_STEPS:
            output = output._replace(loss=output.loss * float("nan"))
        return output


def local_part(tensor):
    return tensor.to_local() if is_sharded(tensor) else tensor


def faulty_step(state, step, micro_batches, stop, **more):
    Model.step = step + 1
    if MINE and Model.step in FAULTY_STEPS:
        inject_fault(state.optimizer)
    train_step(state, step, micro_batches, stop=stop or StopSignal.received, **more)


def inject_fault(optimizer):
    if KIND == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    while KIND == "await_signal" and not StopSignal.received:
        time.sleep(0.01)
    if KIND in ("flip", "flip_and_stop"):
        with torch.no_grad():
            local_part(Model.instance.blocks[1].mlp.down_proj.weight).view(torch.int32)[3, 5] ^= 1 << 20
    if KIND in ("flip_and_stop", "stop"):
        os.kill(os.getpid(), signal.SIGTERM)
    if KIND == "weigh":
        moments = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.dim()]
        held = [sum(local_part(x).numel() for x in group) for group in (Model.instance.parameters(), moments)]
        print(f"process {os.environ['RANK']} holds {held[0]} weights and {held[1]} moments")
    if KIND == "free":
        Path(os.environ["BALLAST"]).unlink()
    if KIND == "fill":  # to the last byte, and free it again at the next faulty step
        if Path(os.environ["BALLAST"]).exists():
            Path(os.environ["BALLAST"]).unlink()
        else:
            fill(os.environ["BALLAST"])
    if KIND == "gone":
        os.rename(os.environ["RUN"], os.environ["RUN"] + "-deleted")  # at once: a save may be writing into it
        shutil.rmtree(os.environ["RUN"] + "-deleted", ignore_errors=True)


def stopping(original):
    """A function during whose first call this process gets a signal, such as one that reads a text of the training set.

    With several processes, those that RANK names.
    """

    def call(*arguments):
        if MINE and not StopSignal.received:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    return call


class SlowHash:
    """Takes STEP seconds for each part of a file; for "slow_hash", of the first part that is hashed."""

    num_slept = 0

    def __init__(self):
        self.sha256 = hashlib.sha256()
        self.hexdigest = self.sha256.hexdigest

    def update(self, content):
        if KIND == "stop_in_hash" or SlowHash.num_slept == 0:
            SlowHash.num_slept += 1
            time.sleep(int(STEP))
        self.sha256.update(content)


def fill(path):
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def dying(original):
    """A function of a save during which the process dies: in the faulty step or, if the disk is slow, in the next."""

    def call(*arguments):
        if MINE and (Model.step or 0) >= min(FAULTY_STEPS):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    return call


train_step, train.train_step = train.train_step, faulty_step
train.GPTModel = Model
if KIND == "kill_after_shards":
    saver.sha256 = dying(saver.sha256)
if KIND == "kill_before_rename":
    saver.os.rename = dying(os.rename)
if KIND == "stop_in_scan":
    StoriesDataset.text = stopping(StoriesDataset.text)
if KIND == "stop_in_hash":  # which takes hours; the process of RANK reads files, or waits for the one that does
    files.CHUNK_BYTES = 16
    files.hashlib = SimpleNamespace(sha256=stopping(SlowHash) if os.environ.get("WORLD_SIZE", "1") == "1" else SlowHash)
    collectives.gather_object = stopping(collectives.gather_object)
if KIND == "slow_hash" and MINE:
    files.hashlib = SimpleNamespace(sha256=SlowHash)
if os.environ.get("LIE_ABOUT_FREE_SPACE"):
    shutil.disk_usage = lambda path: shutil._ntuple_diskusage(10**12, 0, 10**12)

if __name__ == "__main__":
    scripts.run_and_exit("train")
