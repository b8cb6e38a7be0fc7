"""Reinforcement learning of an export by TRL's GRPO: a story earns 1 if the grammar accepts it and a thing is red.

python -m examples.grpo_stories exports/stories exports/red --updates 40. TRL is not a requirement: pip install trl.
"""

import argparse
import re

from data.synthetic.stories import STORIES


def accepted(completions: list[str], **_: object) -> list[float]:
    """Report the share of stories that the grammar accepts; its weight is 0, so it is not part of the reward."""
    return [float(STORIES.grammar.log_probability(text) is not None) for text in completions]


def accepted_and_red(completions: list[str], **_: object) -> list[float]:
    red = [re.search(r"\bred\b", text) is not None for text in completions]
    return [valid * is_red for valid, is_red in zip(accepted(completions), red, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser("examples.grpo_stories", description=__doc__)
    parser.add_argument("export", help="folder that export.py wrote from a run on stories")
    parser.add_argument("out", help="folder to write; sample.py and evaluate.py read it")
    parser.add_argument("--updates", type=int, default=40)
    options = parser.parse_args()
    try:
        from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        parser.error(f"{error}; pip install trl")
    from datasets import Dataset

    batch = dict(per_device_train_batch_size=64, num_generations=16, max_completion_length=96)
    rates = dict(learning_rate=3e-4, lr_scheduler_type="constant", reward_weights=[1.0, 0.0])
    files = dict(output_dir=options.out, save_strategy="no", report_to="none", logging_steps=1)
    config = GRPOConfig(max_steps=options.updates, bf16=False, **batch, **rates, **files)
    prompts = Dataset.from_dict({"prompt": [""] * 64})  # empty: the tokenizer begins every text with end-of-text
    trainer = GRPOTrainer(options.export, [accepted_and_red, accepted], args=config, train_dataset=prompts)
    trainer.train()
    trainer.save_model(options.out)


if __name__ == "__main__":
    main()
