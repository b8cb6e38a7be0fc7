"""Stories that the model writes, judged by the grammar that wrote its training data."""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from config import TrainConfig
from data.corpus import Corpus
from data.order import derive_seed
from data.stories import END_OF_TEXT, log_prob
from training.tracking import Tracker

STORIES_PER_BATCH = 50


def sample_stories(
    model, corpus: Corpus, config: TrainConfig, accelerator: Accelerator, tracker: Tracker
) -> dict[str, float]:
    """Sample stories from the trained model, show some and judge all; called by all processes together.

    Returns:
        `sample/accepted`, `sample/distinct` and `sample/in_training_set`: shares of the sampled stories, which are
        the same ones on any number of processes.
    """
    num_stories = config.evaluation.num_story_samples
    if num_stories == 0:
        return {}
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    network = accelerator.unwrap_model(model).eval()
    end_of_text = corpus.tokenizer.token_to_id(END_OF_TEXT)
    numbered = []
    for first in range(rank * STORIES_PER_BATCH, num_stories, num_processes * STORIES_PER_BATCH):
        count = min(STORIES_PER_BATCH, num_stories - first)
        generator = torch.Generator(accelerator.device).manual_seed(derive_seed(config.seed, "samples", first))
        rows = network.generate(
            torch.full((count, 1), end_of_text, device=accelerator.device),
            max_new_tokens=corpus.train.seq_len - 1,
            temperature=config.evaluation.temperature,
            generator=generator,
            eos_token_id=end_of_text,
        )
        texts = corpus.tokenizer.decode_batch(rows.tolist(), skip_special_tokens=True)
        numbered += enumerate(texts, start=first)
    network.train()
    stories = [story for _, story in sorted(gather_object(numbered))]
    wanted = set(stories)
    seen = {story for i in range(rank, len(corpus.train), num_processes) if (story := corpus.train.text(i)) in wanted}
    from_training = set(gather_object(sorted(seen)))
    tracker.log_texts(config.steps, "sample/stories", stories)
    return {
        "sample/accepted": sum(log_prob(story) is not None for story in stories) / num_stories,
        "sample/distinct": len(wanted) / num_stories,
        "sample/in_training_set": sum(story in from_training for story in stories) / num_stories,
    }
