"""A settings file is read like the command line, and survives a round trip."""

import random

import pytest
import yaml

from evaluate import EvaluateConfig
from runtime.config.errors import ConfigError
from runtime.config.parser import parse_config, parse_tool
from runtime.config.schema import DataConfig, OptimizerConfig, TrackingConfig, TrainConfig
from runtime.config.stored_settings import read_settings
from sample import SampleConfig
from tests.conftest import TINY_STORIES, thinned

WORDS = "010 1:30 1e3 1.0 1e-3 12e5 1_000 0x10 +5 .5 010.5 yes True off .inf nan 1e999 2020-01-01 = <<".split()
ODD = ["~a", "null", "a: b", "a #b", "#a", "'a", '"', "- a", "[1]", "{a", "*a", "&a", "%"]
SETTINGS = {
    "steps": "steps: {}",
    "model.n_layers": "model: {{n_layers: {}}}",
    "optimizer.lr": "optimizer: {{lr: {}}}",
    "name": "name: {}",
    "tracking.project": "tracking: {{project: {}}}",
    "compile": "compile: {}",
}


def outcome(*arguments):
    """Return the settings, or the message with which they are refused."""
    try:
        return parse_config([*TINY_STORIES, "--name", "x", *arguments]).model_dump()
    except ConfigError as refused:
        return str(refused)


@pytest.mark.parametrize("setting", thinned(SETTINGS, 3))
def test_file_value_means_the_same_as_command_line(setting, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    for word in WORDS:
        recipe.write_text(SETTINGS[setting].format(word))
        in_file = outcome("--config", str(recipe))
        if isinstance(in_file, str):
            in_file = in_file.removeprefix(f"{recipe}: ")
        assert in_file == outcome(f"--{setting}", word), word


@pytest.mark.parametrize("word", ["1:30", "1e3", "1.5", "0x10"])
def test_integer_is_written_in_decimal_digits(word, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"steps: {word}")
    assert outcome("--config", str(recipe)) == f"{recipe}: steps: {word} must be a positive integer"
    recipe.write_text("steps: 010")
    assert outcome("--config", str(recipe))["steps"] == 10


def odd_text(chance):
    if chance.random() < 0.5:
        return chance.choice([*WORDS, *ODD])
    return "".join(chance.choice("aZ0-e.:_ #'\"[]{}*&!%@,ü中|>?~") for _ in range(chance.randrange(1, 8)))


def odd_config(chance):
    return TrainConfig(
        name="n" + odd_text(chance),
        out_dir=odd_text(chance),
        seed=chance.randrange(2**63),
        global_batch_size=8,
        profile=chance.choice([None, (8, 64)]),
        compile=chance.random() < 0.5,
        chunked_loss=chance.choice([None, True, False]),
        data=DataConfig(
            source="text",
            seed=chance.randrange(2**63),
            mix={odd_text(chance): chance.random() * 10 ** chance.randrange(-30, 30) for _ in range(3)},
            num_samples=chance.choice([1, 8, 10**17]),
        ),
        tracking=TrackingConfig(
            group="g" + odd_text(chance),
            tags=[odd_text(chance) for _ in range(3)],
            project=odd_text(chance),
            wandb=chance.choice(["disabled", "offline", "online"]),
        ),
        optimizer=OptimizerConfig(
            lr=chance.choice([0.0, 1.0, 1e-5, 12e5, 1e22, 3e-320, chance.random()]),
            betas=(chance.random(), chance.choice([0.0, 1e-9])),
            grad_clip=chance.choice([None, 1e-7]),
        ),
    )


@pytest.mark.parametrize("seed", range(20))
def test_stored_config_is_read_back_unchanged(seed, tmp_path, monkeypatch):
    """Unusual values of every type, read by `--config` and on resuming."""
    from trainer.run.start import settings_to_store

    config = odd_config(random.Random(seed))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings_to_store(config), sort_keys=False))
    monkeypatch.setattr(TrainConfig, "problems", lambda *_, **__: [])
    monkeypatch.setattr("runtime.config.parser.unused_settings", lambda *_, **__: [])
    assert parse_config(["--config", str(file)]) == config
    assert read_settings(file) == config.flat()


FLOATS = [name for name, value in TrainConfig().flat().items() if isinstance(value, float)]
WHOLE = [name for name, value in TrainConfig().flat().items() if isinstance(value, int) and not isinstance(value, bool)]


@pytest.mark.parametrize("setting", [*FLOATS, "data.mix"])
def test_float_settings_are_finite(setting):
    assert len(FLOATS) > 7
    for word in ("inf", "1e999", "nan", "9" * 400):
        value = f"{{a: {word}}}" if setting == "data.mix" else word
        message = outcome(f"--{setting}={value}")
        assert isinstance(message, str) and setting in message, message


@pytest.mark.parametrize("setting", ["optimizer.lr", "optimizer.betas", "data.mix", "steps"])
@pytest.mark.parametrize("word", ["1e-400", "1_0.5", "1_00", "0.000_1", "-1e-999"])
def test_number_that_would_be_read_as_another_is_refused(setting, word, tmp_path):
    value = {"optimizer.betas": f"[0.9, {word}]", "data.mix": f"{{a: {word}}}"}.get(setting, word)
    message = outcome(f"--{setting}={value}")
    assert isinstance(message, str) and message.startswith(f"{setting}: ") and word in message, message
    (tmp_path / "recipe.yaml").write_text(f"{setting}: {value}")
    assert outcome("--config", str(tmp_path / "recipe.yaml")) == f"{tmp_path / 'recipe.yaml'}: {message}"


@pytest.mark.parametrize(
    ("word", "expected"), [("1_000.5", 1000.5), ("0e-400", 0.0), ("1e-320", 1e-320), ("0.0", 0.0), ("1_000e-3", 1.0)]
)
def test_numbers_that_are_read_as_written(word, expected):
    assert outcome("--optimizer.lr", word)["optimizer"]["lr"] == expected
    assert outcome("--steps", "1_000_000")["steps"] == 10**6
    assert outcome("--tracking.project", "1_0.5")["tracking"]["project"] == "1_0.5"


@pytest.mark.parametrize("setting", [*WHOLE, "global_batch_size", "data.seed"])
def test_integer_settings_fit_into_64_bits(setting):
    assert len(WHOLE) > 20
    for value in (2**63, 10**400):
        message = outcome(f"--{setting}", str(value))
        assert f"{setting}: {value} " in message
        assert "is too large; use one below 2**63" in message or "must be an integer of at least" in message


def test_timeout_has_a_limit():
    assert outcome("--timeout_seconds", "99999999999999").endswith(
        "must be an integer of at least 1 and at most 1000000"
    )
    assert outcome("--timeout_seconds", str(10**6))["timeout_seconds"] == 10**6


@pytest.mark.parametrize(
    "kind, words",
    {
        SampleConfig: ["RUN", "--temperature", "inf"],
        EvaluateConfig: ["RUN", "--data", "corpus", "--micro_batch_size", str(2**63)],
    }.items(),
)
def test_tool_numbers_are_finite_and_bounded(kind, words):
    with pytest.raises(ConfigError, match="temperature: inf|too large"):
        parse_tool(kind, "tool.py", words)


def test_missing_argument_has_one_message():
    with pytest.raises(ConfigError, match=r"^run: has no value; give one as --run=VALUE$"):
        parse_tool(SampleConfig, "tool.py", ["--run"])
    with pytest.raises(ConfigError, match=r"^run: missing; it must be a string$"):
        parse_tool(SampleConfig, "tool.py", [])


def test_setting_given_twice_in_a_file_is_refused(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    for text, line, name in [
        ("steps: 3\nseed: 1\nsteps: 4\n", 3, "steps"),
        ("model:\n  n_layers: 3\n  n_layers: 4\n", 3, "n_layers"),
        ("model: {n_layers: 3}\nmodel: {dropout: 0.0}\n", 2, "model"),
        ("data:\n  source: text\n  mix: {a: 1, a: 2}\n", 3, "a"),
    ]:
        recipe.write_text(text)
        assert outcome("--config", str(recipe)) == f"{recipe}: line {line}: {name} is set twice"
    recipe.write_text("optimizer.lr: 2e-3\noptimizer:\n  lr: 1e-3\n")
    assert outcome("--config", str(recipe)) == f"{recipe}: optimizer.lr is set twice"
    recipe.write_text("? [steps, seed]\n: 1\n")
    assert outcome("--config", str(recipe)).startswith(f"{recipe}: line 1: ")
    recipe.write_text("optimizer.lr: 2e-3\noptimizer: {weight_decay: 0}\n")
    assert outcome("--config", str(recipe))["optimizer"]["lr"] == 2e-3


def test_keys_of_a_mix_are_text():
    settings = outcome("--data.source", "text", "--data.mix", "{1: 2, true: 1, 1e3: 3, 010: 4}")
    assert settings["data"]["mix"] == {"1": 2, "true": 1, "1e3": 3, "010": 4}
    for keys in ("{[1]: 2}", "{null: 1}", "{{a: 1}: 2}"):
        assert outcome("--data.source", "text", "--data.mix", keys).startswith("data.mix: ")
