"""docs/settings.md has every setting, as the parser knows it."""

import json
import re

from jsonargparse import ArgumentParser

from config import TrainConfig
from docs import settings


def test_the_page_is_that_of_the_settings():
    assert settings.PAGE.read_text() == settings.page(), "run python -m docs.settings"


def test_every_setting_of_the_parser_is_there_with_its_default():
    parser = ArgumentParser()
    parser.add_class_arguments(TrainConfig, as_group=False)
    defaults = parser.get_defaults().as_flat()
    written = dict(re.findall(r"^- \*\*`([\w.]+)`\*\* \(.*?; default (.*?)\): \w", settings.PAGE.read_text(), re.M))
    assert written.keys() == vars(defaults).keys() and len(written) > 60
    for name, value in vars(defaults).items():
        assert written[name] == (value if isinstance(value, str) else json.dumps(value)).replace("1e-05", "1.0e-05"), (
            name
        )


def test_a_choice_and_a_section_are_explained():
    page = settings.page()
    assert "- **`model.position`** (learned or rope; default learned): How the model knows order" in page
    assert "\n## schedule\n\nThe learning rate as a function of the step.\n" in page
