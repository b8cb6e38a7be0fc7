"""train.py on fake devices; writes to EVENTS.RANK.json what the emulator reports in three steps that log
nothing, and the timeouts of NCCL's groups."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import train
from runtime.cli import scripts
from tests.fake_cuda import device

BEGIN, END = 4, 7  # steps, counted from 0; step 3 is logged


def recorded_step(state, step, *arguments, **more):
    if step == BEGIN:
        device.start_recording()
    if step == END:
        device.stop_recording()
        rows = [[*event, count] for event, count in device.events.items()]
        rows += [["group", f"timeout {timeout.seconds} s", "", 1] for timeout in device.group_timeouts]
        Path(f"{os.environ['EVENTS']}.{os.environ.get('RANK', 0)}.json").write_text(json.dumps(rows))
    return train_step(state, step, *arguments, **more)


if __name__ == "__main__":
    train_step, train.train_step = train.train_step, recorded_step
    scripts.run_and_exit("train")
