"""Write docs/lm_eval/story_endings.jsonl, the questions of a task: python -m tests.support.story_endings.

A question is a story of the validation split without its last two sentences, and four endings, of which the grammar
accepts one. Each wrong ending replaces one name, colour or thing, if possible by another one of the same story: a child
who gave her kite away does not hug it at night. So the endings cannot be distinguished without the story.
"""

import json
import random
import re
from itertools import chain
from pathlib import Path

from data.synthetic.stories import STORIES, TABLES, StoriesDataset

QUESTIONS = Path(__file__).parents[2] / "docs" / "lm_eval" / "story_endings.jsonl"
NUM_QUESTIONS, SEED = 100, 0
KINDS = ["GIRL BOY FRIEND", "THING PRESENT", "COLOR", "ELDER", "TRAIT", "PET", "NICK", "WEATHER", "TIME"]


def make_questions() -> str:
    """Return the lines of story_endings.jsonl."""
    stories = StoriesDataset("validation", NUM_QUESTIONS, SEED, 128)
    return "".join(json.dumps(make_question(stories.text(index), index)) + "\n" for index in range(NUM_QUESTIONS))


def make_question(story: str, index: int) -> dict[str, str | list[str] | int]:
    """Return a prompt, four endings and the index of the right one."""
    *before, night, moral = story.split(". ")
    prompt, right = ". ".join(before) + ".", f"{night}. {moral}"
    draw = random.Random(f"{SEED} {index}")
    of_story, of_others = [], []
    for kind in KINDS:
        words = sorted({row[""] for row in chain.from_iterable(TABLES[name] for name in kind.split())})
        for place in re.finditer(rf"\b({'|'.join(words)})\b", right):
            for word in words:
                wrong = right[: place.start()] + word + right[place.end() :]
                if STORIES.grammar.log_probability(f"{prompt} {wrong}") is None:
                    (of_story if re.search(rf"\b{word}\b", prompt) else of_others).append(wrong)
    draw.shuffle(of_story)
    draw.shuffle(of_others)
    answer = draw.randrange(4)
    endings = [*of_story, *of_others][:3]
    return {"prompt": prompt, "endings": [*endings[:answer], right, *endings[answer:]], "answer": answer}


if __name__ == "__main__":
    QUESTIONS.write_text(make_questions())
    print(f"{QUESTIONS}: {NUM_QUESTIONS} questions")
