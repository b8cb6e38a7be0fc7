"""Invalid settings give one message and exit code 2 before anything is written; valid ones are read literally."""

import re
import subprocess

import pytest
import yaml
from pydantic import field_validator

from model.settings import Settings
from runtime.config.errors import ConfigError
from runtime.config.help import all_fields
from runtime.config.parser import FAMILIAR_NAMES, parse_config, parse_tool
from runtime.config.schema import DataConfig, TrainConfig
from runtime.config.unused import unused_settings
from tests.conftest import ROOT, TINY_STORIES, environment, train, train_command

RANDOM_TOKENS = ["--config", str(ROOT / "configs" / "random_tokens.yaml")]

GROWS = ["--schedule.batch_warmup_from", "16", "--schedule.batch_warmup_steps"]


def refusal(*arguments, num_processes=1):
    with pytest.raises(ConfigError) as error:
        parse_config([*RANDOM_TOKENS, *arguments], num_processes)
    return str(error.value)


def test_later_settings_win(tmp_path):
    recipe = tmp_path / "wider.yaml"
    recipe.write_text("model: {d_model: 256}\nsteps: 7\n")
    config = parse_config([*RANDOM_TOKENS, "--config", str(recipe), "--steps", "9"])
    assert (config.model.d_model, config.steps, config.model.n_layers) == (256, 9, 2)
    assert config.name == "wider"
    assert parse_config([*RANDOM_TOKENS, "--steps", "9", "--config", str(recipe)]).steps == 7


def test_one_length_of_the_run(tmp_path, capsys):
    """A later file or the command line replaces a length in another unit; two from one place are refused."""
    (tmp_path / "steps.yaml").write_text("steps: 5")
    (tmp_path / "epochs.yaml").write_text("epochs: 3")
    files = ["--config", str(tmp_path / "steps.yaml"), "--config", str(tmp_path / "epochs.yaml")]
    notices = []
    assert parse_config(files, notify=notices.append).epochs == 3
    assert notices == [f"{files[1]}: left out, because it has no effect: steps (epochs: 3)"]
    config = parse_config([*files, "--tokens", "1e4"])
    assert (config.epochs, config.tokens) == (None, 1e4)
    config = parse_config([*files, "--steps", "7"])
    assert (config.steps, config.epochs) == (7, None)
    for words in ("--steps 5 --epochs 3", "--tokens 1e4 --epochs 3", "--steps 5 --tokens 1e4 --epochs 3"):
        with pytest.raises(ConfigError, match="the length of the run; give only one of them") as error:
            parse_config(words.split())
        assert str(error.value).count("\n") == 0
    (tmp_path / "both.yaml").write_text("epochs: 3\ntokens: 9")
    with pytest.raises(ConfigError, match="both.yaml: epochs: 3 and tokens: 9: the length of the run"):
        parse_config(["--config", str(tmp_path / "both.yaml")])
    with pytest.raises(SystemExit):
        parse_config([*files, "--print_config"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert parse_config(["--config", str(tmp_path / "printed.yaml")]).epochs == 3


def test_parsed_numbers_are_plain():
    """torch.compile in torch 2.11 splits the graph of a block at a subclass of float, which is slow."""
    config = parse_config(
        [*RANDOM_TOKENS, *"--model.window 8 --checkpoint.keep 3 --exact true --global_batch_size 8".split()]
    )
    sections = [config, *(value for value in vars(config).values() if isinstance(value, Settings))]
    numbers = [value for section in sections for value in vars(section).values() if isinstance(value, int | float)]
    assert len(numbers) > 40 and {type(number) for number in numbers} == {int, float, bool}


@pytest.mark.parametrize(
    "words, message",
    {
        "--steps 0": "steps: 0 must be a positive integer",
        "--seed -1": "seed: -1 must be a non-negative integer",
        "--model.dropout x": "model.dropout: x must be a number of at least 0 and below 1",
        "--data.num_workers 257": "data.num_workers: 257 must be an integer of at least 0 and at most 256",
        "--optimizer.lr -1": "optimizer.lr: -1 must be a non-negative number",
        "--compile maybe": "compile: maybe must be true or false",
        "--data.packing foo": "data.packing: foo must be one of concat, isolated, padded",
        "--evaluation.num_samples -1": "evaluation.num_samples: -1 must be a positive integer or null",
        "--profile 3": "profile: 3 must be [a positive integer, a positive integer] or null",
        "--resume maybe": "resume: maybe must be one of auto, never",
        "--config /nowhere.yaml": "config: /nowhere.yaml: No such file or directory",
    }.items(),
)
def test_refusal_names_setting_value_and_remedy(words, message):
    assert refusal(*words.split()) == message


@pytest.mark.parametrize(
    "content, message",
    {
        "": "no line has the form `setting: value`",
        "# nothing yet": "no line has the form `setting: value`",
        "steps: many": "steps: many must be a positive integer",
        "stepz: 3": "stepz is not a setting; did you mean steps? --help lists all",
        "model: {mpl: relu2}": "model.mpl is not a setting; did you mean model.mlp? --help lists all",
        "qk_norm: true": "qk_norm is not a setting; did you mean model.qk_norm? --help lists all",
        "optimizer: {learning_rate: 3}": "optimizer.learning_rate is not a setting; --help lists all",
    }.items(),
)
def test_refusal_names_the_config_file(content, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    assert refusal("--config", str(file), "--seed", "9") == refusal(f"--config={file}") == f"{file}: {message}"


@pytest.mark.parametrize("print_config", [(), ("--print_config",)])
def test_unknown_option_names_the_nearest_setting(print_config):
    message = "model.mpl is not a setting; did you mean model.mlp? --help lists all"
    assert refusal("--model.mpl", "relu2", *print_config) == refusal("--model.mpl=relu2", *print_config) == message


def test_default_config_file_is_stories():
    config = parse_config([])
    assert (config.name, config.data.source) == ("stories", "stories")


def test_print_config_refuses_what_a_run_would(capsys):
    contradiction = ["--schedule.warmup_steps", "500", "--steps", "100"]
    assert refusal(*contradiction, "--print_config") == refusal(*contradiction)
    assert not capsys.readouterr().out


def test_print_config_is_a_config(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        parse_config([*RANDOM_TOKENS, "--steps", "9", "--print_config"])
    assert exit.value.code == 0
    recipe = tmp_path / "random_tokens.yaml"
    recipe.write_text(capsys.readouterr().out)
    assert parse_config(["--config", str(recipe)]) == parse_config([*RANDOM_TOKENS, "--steps", "9"])


def test_every_setting_is_documented(capsys):
    with pytest.raises(SystemExit) as exit:
        parse_config(["--steps", "9", "--help"])
    assert exit.value.code == 0
    _, *entries = capsys.readouterr().out.split("\n  --")
    documented = {entry.split()[0]: entry for entry in entries}
    assert documented.keys() == parse_config([]).flat().keys()
    assert not [name for name, entry in documented.items() if len(entry.rpartition("(")[0].split()) < 5]
    assert "(a positive integer; default 1000)" in documented["steps"]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--optimizer.betas", "[0.9, 1.0]"], ["optimizer.betas", "1.0"]),
        (["--optimizer.betas", "[0.9]"], ["optimizer.betas: [0.9] must be"]),
        (["--model.d_model", "130"], ["model.d_model", "130", "128", "132"]),
        (["--seq_len", "256"], ["seq_len", "256", "model.max_position_embeddings", "128"]),
        (["--seq_len", "1"], ["seq_len", "1"]),
        (["--exact", "true", "--tf32", "true"], ["exact", "tf32"]),
        (["--cuda_graph", "true", "--activation_checkpointing", "true"], ["cuda_graph", "activation_checkpointing"]),
        (
            ["--exact", "true", "--global_batch_size", "null"],
            ["global_batch_size: null is 8 here", "set it, such as to 8"],
        ),
        (["--global_batch_size", "20"], ["global_batch_size", "20", "16", "24"]),
        (["--checkpoint.every", "10", "--checkpoint.keep_every", "25"], ["checkpoint.keep_every", "25", "10"]),
        (["--schedule.warmup_steps", "51"], ["schedule.warmup_steps", "51", "50"]),
        (["--schedule.batch_warmup_from", "8"], ["schedule.batch_warmup_from: 8 needs schedule.batch_warmup_steps"]),
        (["--schedule.batch_warmup_steps", "9"], ["schedule.batch_warmup_steps: 9 needs schedule.batch_warmup_from"]),
        ([*GROWS, "51"], ["schedule.batch_warmup_steps: 51: more than steps: 50"]),
        ([*GROWS, "9", "--global_batch_size", "8"], ["schedule.batch_warmup_from: 16", "global_batch_size: 8"]),
        (
            [*GROWS, "9", "--global_batch_size", "40"],
            ["global_batch_size: 40 is not a multiple of schedule.batch_warmup_from: 16", "32 or 48"],
        ),
        (
            [*GROWS, "9", "--global_batch_size", "48", "--micro_batch_size", "3"],
            ["schedule.batch_warmup_from: 16 is not a multiple of micro_batch_size * processes = 3 * 1", "15 or 18"],
        ),
        (["--model.vocab_size", "null"], ["model.vocab_size", "random"]),
        (["--model.window", "9", "--model.window_pattern", "LS", "--model.n_layers", "2"], ["model.window: 9 has no"]),
        (["--model.window", "9", "--model.n_layers", "1"], ["model.window: 9 has no effect", "none of 1 layers"]),
        (["--name", "a/b"], ["name", "a/b", "out_dir"]),
        (["--name", ".."], ["name", "..", "out_dir"]),
        (["--name", ""], ["name: '' must be a non-empty string"]),
        (["--out_dir="], ["out_dir: '' must be a non-empty string"]),
        (["--help=false"], ["--help=false: --help takes no value"]),
        (["configs/lab.yaml"], ["not an option", "--config configs/lab.yaml"]),
        (["--learning_rate", "1"], ["learning_rate is not a setting; did you mean optimizer.lr?"]),
        (["--config", "seed: 7"], ["config", "seed: 7", "No such file"]),
        (["--name", "~"], ["name", "'~'"]),
        (["--name", "a\nb"], ["name", "printed"]),
        (["--schedule.min_lr_ratio", "1.5"], ["schedule.min_lr_ratio", "1.5", "1"]),
        (
            ["--evaluation.every", "1", "--evaluation.num_samples", "null"],
            ["evaluation.num_samples", "null", "random is endless"],
        ),
        (["--out_dir", "~nouser/x"], ["out_dir", "~nouser/x"]),
        (["--out_dir", "${PATH}/x"], ["out_dir: '${PATH}/x' has a variable that only a shell expands"]),
    ],
)
def test_wrong_setting_is_refused_with_its_value(arguments, named):
    message = refusal(*arguments)
    assert all(word in message for word in named), message


def test_config_file_that_is_not_yaml_is_refused(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: [1")
    assert "line 1" in refusal("--config", str(recipe))
    recipe.write_bytes(b"name: \xff")
    assert "utf-8" in refusal("--config", str(recipe))


def test_null_is_refused_where_it_has_no_meaning(tmp_path):
    recipe = tmp_path / "nulls.yaml"
    recipe.write_text("steps:\nmodel: {dropout: null}\ndata: {source: ~}\nname: null")
    message = refusal("--config", str(recipe))
    assert all(f"{recipe}: {name}: null must be" in message for name in ("steps", "model.dropout", "data.source"))
    assert ": name:" not in message
    assert "steps: null must be" in refusal("--steps", "null")


@pytest.mark.parametrize("text", ["#x", "a: b", "[1]", "'x'", "~/x y", "*a"])
def test_text_on_command_line_is_literal(text):
    assert parse_config([*RANDOM_TOKENS, "--tracking.project", text]).tracking.project == text
    assert parse_config([*RANDOM_TOKENS, f"--tracking.project={text}"]).tracking.project == text


def test_empty_section_is_refused(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {}\noptimizer:\n  # lr: 1.0e-3\ntracking:\nsteps: 5")
    message = refusal("--config", str(recipe))
    assert "optimizer: null" in message and "tracking: null" in message and "model" not in message


def test_forked_data_source_may_be_evaluated_on_all_its_samples():
    data = DataConfig.model_construct(source="csv")
    config = parse_config([*RANDOM_TOKENS]).model_copy(update={"data": data})
    config = config.model_copy(update={"evaluation": config.evaluation.replace(num_samples=None)})
    assert config.problems(1) == []


def test_forked_data_source_may_use_path_settings():
    files = {"path": "a.csv", "hash": "0123", "packing": "isolated"}
    config = TrainConfig(data=DataConfig(**files))
    assert [setting.name for setting in unused_settings(config)] == [f"data.{n}" for n in ("path", "packing", "hash")]
    config = config.model_copy(update={"data": DataConfig.model_construct(source="csv", **files)})
    assert list(unused_settings(config)) == []


ON_TEXT = "--data.source text --data.path corpus --model.vocab_size null --data.facts 0".split()


def test_typed_default_without_effect_is_refused(tmp_path):
    """Who types the number of samples believes that so many of the text are used; a file may list all settings."""
    message = "data.num_samples: 1000 has no effect with data.source: text"
    assert message in refusal(*ON_TEXT, "--data.num_samples", "1000")
    with pytest.raises(ConfigError, match=message):  # configs/stories.yaml, which is read here, has 24,000
        parse_config([*ON_TEXT, "--data.num_samples", "1000"])
    (recipe := tmp_path / "all.yaml").write_text("data: {num_samples: 1000}\n")
    assert parse_config([*RANDOM_TOKENS, "--config", str(recipe), *ON_TEXT]).data.source == "text"


def test_typed_default_takes_back_value_without_effect(tmp_path):
    """A value that would be refused: of the command line, or of a file that itself makes it useless."""
    assert parse_config([*RANDOM_TOKENS, "--data.num_samples", "9", *ON_TEXT, "--data.num_samples", "1000"])
    (recipe := tmp_path / "teacher.yaml").write_text("teacher: {weight: 0.7}\n")
    with pytest.raises(ConfigError, match=r"teacher\.weight: 0\.7 has no effect"):
        parse_config([*RANDOM_TOKENS, "--config", str(recipe)])
    assert parse_config([*RANDOM_TOKENS, "--config", str(recipe), "--teacher.weight", "0.5"])


def test_wrong_values_are_reported_together(tmp_path):
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("stepz: 3\nmodel: {n_layers: x, dropout: 2}\n")
    words = ["--config", str(recipe), "--seed", "-1", "--optimizer.lr", "x", "--modle.d_ff", "3", "--compile", "stray"]
    message = refusal(*words, "--optimizer.lr=nan", "--name").splitlines()
    assert [line.removeprefix(f"{recipe}: ").split()[0] for line in message] == (
        ["name:", "stepz", "modle.d_ff", "seed:", "compile:", "model.n_layers:", "model.dropout:", "optimizer.lr:"]
    ), message
    assert [line for line in message if str(recipe) in line] == [message[1], *message[5:7]]


class Fork(Settings):
    """A fork with a validator."""

    width: int = 4
    kernel: int = 3

    @field_validator("width")
    @classmethod
    def _is_even(cls, width: int) -> int:
        if width % 2:
            raise ValueError(f"width: {width} is odd; use {width + 1}")
        return width


def test_message_of_a_validator_is_shown():
    with pytest.raises(ConfigError, match=r"^width: 5 is odd; use 6\nkernel: x must be an integer$"):
        parse_tool(Fork, "fork.py", ["--width", "5", "--kernel", "x"])
    assert parse_tool(Fork, "fork.py", ["--width=6"]).replace(kernel=1) == Fork(width=6, kernel=1)


def test_command_line_takes_whole_sections():
    config = parse_config([*RANDOM_TOKENS, "--optimizer", "{lr: 1e-2, betas: [0.8, 0.9]}"])
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.grad_clip) == (0.01, (0.8, 0.9), 1.0)


def test_batch_must_be_divisible_by_processes():
    message = refusal("--global_batch_size", "24", "--micro_batch_size", "8", num_processes=2)
    assert "16 or 32" in message and "numbers of processes that can split it: 1, 3" in message
    assert "; or set micro_batch_size to 4" in message
    assert parse_config([*RANDOM_TOKENS, "--global_batch_size", "24"], num_processes=3).global_batch_size == 24
    assert parse_config([*RANDOM_TOKENS, "--global_batch_size", "24", "--micro_batch_size", "4"], num_processes=2)


@pytest.mark.parametrize(
    ("recipe", "micro_batch_size", "with_eight"),
    [("stories", 8, 2), ("lab", 16, 2), ("text", 16, 2), ("gpt2_124m", 32, 32), ("random_tokens", 8, 8)],
)
def test_recipe_for_fewer_processes_has_smaller_micro_batches(recipe, micro_batch_size, with_eight):
    """As in the first command of the README on a machine with eight GPUs."""
    file, notices = str(ROOT / "configs" / f"{recipe}.yaml"), []
    words = ["--config", file, *(["--data.path", "corpus"] if recipe in ("text", "gpt2_124m") else [])]
    alone, config = (parse_config(words, n, notify=notices.append) for n in (1, 8))
    assert (alone.micro_batch_size, config.micro_batch_size) == (micro_batch_size, with_eight)
    assert config.replace(micro_batch_size=micro_batch_size) == alone, "nothing else changes"
    reason = f"instead of {micro_batch_size}, because 8 processes share global_batch_size: 16"
    lines = [f"{file}: micro_batch_size: {with_eight} {reason}"] if with_eight < micro_batch_size else []
    assert notices == lines


def test_other_micro_batches_are_not_made_smaller():
    """Those that the user gave, that do not fit one process either, or whose number decides the bits of the run."""
    stories = ["--config", str(ROOT / "configs" / "stories.yaml")]
    for words, processes in (
        (["--micro_batch_size", "8"], 8),
        (["--exact", "true"], 8),
        (["--global_batch_size", "12"], 1),
        ([], 3),
    ):
        with pytest.raises(ConfigError, match="is not a multiple of micro_batch_size"):
            parse_config([*stories, *words], num_processes=processes)


def test_refusal_names_micro_batch_size_for_both_batches():
    """The batch of the warm-up, 4, needs a smaller micro-batch than the global batch."""
    words = "--global_batch_size 24 --schedule.batch_warmup_from 4 --schedule.batch_warmup_steps 2".split()
    given = [*words, "--micro_batch_size", "8"]
    assert re.findall(r"micro_batch_size to (\d+)", refusal(*given, num_processes=2)) == ["2", "2"]
    assert parse_config([*RANDOM_TOKENS, *words, "--micro_batch_size", "2"], num_processes=2)


def test_resuming_from_nowhere_is_refused(runs):
    done = train(*RANDOM_TOKENS, "--branch_from", "nowhere", "--out_dir", runs, exit_code=2)
    assert "branch_from: 'nowhere' is not the directory of a checkpoint" in done.stderr
    assert not runs.exists()


def test_exit_code_2_one_message_nothing_written(runs):
    done = train(*RANDOM_TOKENS, "--model.d_model", "130", "--out_dir", runs, exit_code=2)
    assert done.stderr.count("model.d_model") == 1 and "Traceback" not in done.stderr and not done.stdout
    assert not runs.exists()


def test_two_processes_print_one_message(runs):
    wrong = [*RANDOM_TOKENS, "--global_batch_size", "20", "--out_dir", runs]
    done = train(*wrong, processes=2, exit_code=1)
    assert (done.stdout + done.stderr).count("the nearest multiples: 16 or 32") == 1
    assert not runs.exists()


def test_unwritable_out_dir_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = train(*RANDOM_TOKENS, "--out_dir", tmp_path / "file" / "runs", exit_code=2)
    assert "out_dir" in done.stderr and str(tmp_path / "file") in done.stderr
    assert (tmp_path / "file").read_text() == "in the way"


def test_too_short_sequences_for_stories_are_refused(runs):
    done = train(*TINY_STORIES, "--seq_len", "50", "--out_dir", runs, exit_code=2)
    assert "seq_len" in done.stderr and "50" in done.stderr
    assert not runs.exists()


LAUNCH_FILE = yaml.safe_load((ROOT / "accelerate_configs" / "cpu.yaml").read_text())


@pytest.mark.slow  # tests/runtime/distributed/test_launch_checks.py has one process
def test_unsupported_launch_file_is_refused_in_one_message(tmp_path, runs):
    """All problems are in one message."""
    launch_file = tmp_path / "launch.yaml"
    changes = {
        "mixed_precision": "fp16",
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_verison": 2},  # Accelerate ignores it, and its default is version 1
        "dynamo_config": {"dynamo_backend": "INDUCTOR"},
    }
    launch_file.write_text(yaml.safe_dump(LAUNCH_FILE | changes))
    done = train(*RANDOM_TOKENS, "--out_dir", runs, processes=2, launch_file=launch_file, exit_code=1)
    assert done.stderr.count("train.py: error:") == 1 and not runs.exists()
    assert done.stderr.count("exitcode: 2") + done.stderr.count("exitcode  : 2") >= 1  # the launcher itself returns 1
    message = done.stderr.partition("train.py: error:")[2].splitlines()[:5]
    for words in (
        ["mixed_precision", "fp16", "on_nonfinite: skip"],
        ["dynamo_backend", "INDUCTOR", "--compile"],
        ["fsdp_version: 1", "fsdp_version: 2"],
    ):
        assert any(all(word in line for word in words) for line in message), (words, done.stderr)


def test_help_needs_no_model_or_device():
    done = subprocess.run(train_command("--help"), cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "--model.n_layers" in done.stdout


def test_familiar_names_lead_to_settings():
    fields = dict(all_fields(TrainConfig))
    for name, setting in FAMILIAR_NAMES.items():
        assert name not in fields
        assert setting.split()[0] in fields or setting.startswith("accelerate launch --"), name


@pytest.mark.parametrize("program", ["train.py", "tools.experiment"])
def test_help_fits_the_terminal(program, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse_config(["--help"], program=program)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: {program}") and max(map(len, lines)) <= 80
