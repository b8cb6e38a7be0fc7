"""A setting without effect is refused or left out with a line, by a rule that stands beside the setting."""

import pytest
import yaml

from model.settings import Unused
from runtime.config.errors import ConfigError
from runtime.config.help import all_fields, section_class
from runtime.config.parser import parse_config, parse_tool
from runtime.config.schema import TrainConfig
from trainer.pretrained.settings import SampleConfig

FIELDS = dict(all_fields(TrainConfig))
RULES = [(name, rule) for name, field in FIELDS.items() for rule in field.metadata if isinstance(rule, Unused)]


@pytest.mark.parametrize(("name", "rule"), RULES)
def test_rule_names_a_setting_and_values_that_it_can_have(name, rule):
    if rule.also is not None:
        test_rule_names_a_setting_and_values_that_it_can_have(name, rule.also)
    assert not section_class(FIELDS[rule.name])
    for value in rule.values:
        section, _, setting = rule.name.rpartition(".")
        TrainConfig.model_validate({section: {setting: value}} if section else {setting: value})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--data.source text --data.path x --data.num_samples 50", "data.num_samples: 50 .* data.source: text; leave"),
        ("--data.zipf 1.5", "data.zipf: 1.5 has no effect with data.facts: 0; leave it out, or change the other"),
        ("--model.window_pattern LS", "model.window_pattern: LS has no effect with model.window: null"),
        ("--model.rope_theta 500", "model.rope_theta: 500.0 has no effect with model.position: learned"),
        ("--schedule.name constant --schedule.min_lr_ratio 0.1", "min_lr_ratio: 0.1 .* schedule.name: constant"),
        ("--max_skipped_in_a_row 3", "max_skipped_in_a_row: 3 has no effect with on_nonfinite: stop"),
        ("--teacher.weight 0.75", "teacher.weight: 0.75 has no effect with teacher.path: null"),
        ("--tracking.tracker tensorboard --tracking.project p", "tracking.project: p has no effect with tracking.tr"),
        ("--evaluation.num_samples 50", "evaluation.num_samples: 50 has no effect with evaluation.every: 0"),
        ("--evaluation.micro_batch_size 50", "evaluation.micro_batch_size: 50 has no effect with evaluation.every: 0"),
        ("--data.source random --evaluation.temperature 1", "evaluation.temperature: 1.0 .* data.source: random"),
        (
            "--evaluation.temperature 1 --evaluation.num_logged_generations 0 --evaluation.num_scored_generations 0",
            "temperature: 1.0 .* evaluation.num_logged_generations: 0 and evaluation.num_scored_generations: 0; leave",
        ),
        (
            "--evaluation.num_logged_generations 5",
            "_generations: 5 .* evaluation.every: 0 and data.source: stories; le",
        ),
        (
            "--evaluation.temperature 1 --evaluation.num_scored_generations 0",
            "temperature: 1.0 .* evaluation.num_scored_generations: 0 and evaluation.every: 0 and data.source: stories",
        ),
        ("--init_hash 0123", "init_hash: 0123 has no effect with init_from: null"),
    ],
)
def test_command_line_is_refused(arguments, problem, tmp_path):
    (tmp_path / "empty.yaml").write_text("model: {position: learned, vocab_size: 16}")
    with pytest.raises(ConfigError, match=problem):
        parse_config(["--config", str(tmp_path / "empty.yaml"), *arguments.split()])


def test_one_file_is_refused_by_its_name(tmp_path):
    (tmp_path / "zipf.yaml").write_text("data: {zipf: 1.5}")
    with pytest.raises(ConfigError, match=r"zipf.yaml: data.zipf: 1.5 has no effect with data.facts: 0"):
        parse_config(["--config", str(tmp_path / "zipf.yaml")])


def test_settings_of_a_file_that_others_make_useless_are_left_out_with_a_line(tmp_path):
    """Also a setting that only another one needs that was left out."""
    (tmp_path / "facts.yaml").write_text("steps: 7\ndata: {facts: 8, zipf: 1.5, num_samples: 50}")
    notices = []
    arguments = ["--config", str(tmp_path / "facts.yaml"), "--data.source", "text", "--data.path", "corpus"]
    config = parse_config(arguments, notify=notices.append)
    assert (config.steps, config.data.facts, config.data.zipf, config.data.num_samples) == (7, 0, 1.3, 1000)
    (notice,) = notices
    assert notice.startswith(f"{tmp_path}/facts.yaml: left out, because it has no effect: data.")
    for words in (
        "data.facts (data.source: text)",
        "data.num_samples (data.source: text)",
        "data.zipf (data.facts: 0)",
    ):
        assert words in notice


def test_file_after_a_file_leaves_out_what_it_makes_useless(tmp_path):
    (tmp_path / "teacher.yaml").write_text("teacher: {path: runs/teacher, weight: 0.75}")
    (tmp_path / "alone.yaml").write_text("teacher.path: null")
    notices = []
    files = ["--config", str(tmp_path / "teacher.yaml"), "--config", str(tmp_path / "alone.yaml")]
    assert parse_config(files, notify=notices.append).teacher.weight == 0.5
    assert notices == [
        f"{tmp_path}/teacher.yaml: left out, because it has no effect: teacher.weight (teacher.path: null)"
    ]


@pytest.mark.parametrize("arguments", [[], ["--data.source", "text", "--data.path", "x"]])
def test_printed_config_is_a_config_file(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse_config([*arguments, "--print_config"], num_processes=2)
    printed = capsys.readouterr().out
    assert printed.startswith("# A run on 2 process(es) fills in name: stories")
    (tmp_path / "printed.yaml").write_text(printed)
    notices = []
    config = parse_config(["--config", str(tmp_path / "printed.yaml")], num_processes=2, notify=notices.append)
    assert config.replace(name=None).model_dump(mode="json") == yaml.safe_load(printed) and not notices


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (". --temperature 0 --top_k 5", "top_k: 5 has no effect with temperature: 0.0; leave it out"),
        (". --chat --num_samples 2", "num_samples: 2 has no effect with chat: true"),
        (". --chat --special_tokens", "special_tokens: true has no effect with chat: true"),
        (". --system a", "system: a has no effect with chat: false"),
    ],
)
def test_tool_refuses_settings_without_effect(words, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_tool(SampleConfig, "tool.py", words.split())
