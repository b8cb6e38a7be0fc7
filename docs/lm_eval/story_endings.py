"""Writes the questions of the task story_endings: python -m docs.lm_eval.story_endings

A question is a story of the validation split without its last two sentences, and four ends of which the grammar accepts
one. The wrong ones have another name, colour or thing in one place, one that the story speaks of too where it has one:
who gave the kite away does not hug it at night. So none is told from the others by the sentences themselves.
"""

import json
import random
import re
from itertools import chain
from pathlib import Path

from data.synthetic.stories import TABLES, StoriesDataset, log_prob

QUESTIONS = Path(__file__).with_name("story_endings.jsonl")
NUM_QUESTIONS, SEED = 100, 0
KINDS = "GIRL BOY FRIEND,THING PRESENT,COLOR,ELDER,TRAIT,PET,NICK,WEATHER,TIME".split(",")


def questions() -> str:
    """The lines of the file."""
    stories = StoriesDataset("validation", NUM_QUESTIONS, SEED, 128)
    return "".join(json.dumps(question(stories.text(index), index)) + "\n" for index in range(NUM_QUESTIONS))


def question(story: str, index: int) -> dict[str, str | list[str] | int]:
    """The question of a story, whose right ending is one of its four `endings`, number `answer`."""
    *before, night, moral = story.split(". ")
    prompt, right = ". ".join(before) + ".", f"{night}. {moral}"
    draw = random.Random(f"{SEED} {index}")
    of_story, of_others = [], []
    for kind in KINDS:
        words = sorted({row[""] for row in chain.from_iterable(TABLES[name] for name in kind.split())})
        for place in re.finditer(rf"\b({'|'.join(words)})\b", right):
            for word in words:
                wrong = right[: place.start()] + word + right[place.end() :]
                if log_prob(f"{prompt} {wrong}") is None:
                    (of_story if re.search(rf"\b{word}\b", prompt) else of_others).append(wrong)
    draw.shuffle(of_story)
    draw.shuffle(of_others)
    answer = draw.randrange(4)
    endings = [*of_story, *of_others][:3]
    return {"prompt": prompt, "endings": [*endings[:answer], right, *endings[answer:]], "answer": answer}


if __name__ == "__main__":
    QUESTIONS.write_text(questions())
    print(f"{QUESTIONS}: {NUM_QUESTIONS} questions")
