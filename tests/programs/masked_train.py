"""A fork that fills in masked tokens from both sides instead of predicting the next one; runs train.py or verify.py.

Every third token of a row is masked, and is a target.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import model.gpt
from data.synthetic.stories import StoriesDataset
from runtime.cli import scripts
from trainer.checks.short_run import parse_short_run

MASK = 0


def bidirectional_masks(windows, input_ids, num_cached, attention_mask, position_ids, use_flex):
    """Let all positions of a document attend to each other."""
    starts = torch.zeros_like(input_ids) if position_ids is None else (position_ids == 0).cumsum(-1)
    return dict.fromkeys(windows, (starts[:, None, :, None] == starts[:, None, None, :]))


def masked_arrays(self, indices):
    batch = arrays(self, indices)
    is_masked = (torch.arange(self.seq_len) % 3 == 0).numpy()
    batch["labels"][:, ~is_masked] = -100
    batch["input_ids"][:, is_masked] = MASK
    return batch


if __name__ == "__main__":
    arrays, StoriesDataset.arrays = StoriesDataset.arrays, masked_arrays
    model.gpt.attention_masks = bidirectional_masks
    model.gpt.GPTModel.predicts_next_token = False
    if "--verify_steps" in sys.argv:
        scripts.run_and_exit("verify", parse_short_run)
    scripts.run_and_exit("train")
