"""Writes a trained model as a folder that transformers opens without remote code: python export.py RUN OUT.

The folder has config.json, model.safetensors, generation_config.json, the tokenizer's files and a model card.
"""

if __name__ == "__main__":  # before anything slow is imported; it calls `main` below and never returns
    from cli.scripts import run_and_exit
    from run.settings import ExportConfig

    run_and_exit("export", ExportConfig)

import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import yaml

from checkpoint.manifest import InvalidCheckpoint, Manifest, readable_checkpoints, validate
from config.errors import ConfigError, RunError
from config.paths import expand_user_path
from data.chat_template import ChatTemplate
from data.files import copy_folder_permissions
from data.integrity import read_metadata
from model.hf import to_transformers
from plotting.run_plots import save_loss_curve
from plotting.style import report_plot_errors
from run.load import Loaded, Weights, find_checkpoint, is_run, load_checkpoint, load_with_source, uses_ema
from run.settings import ExportConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A causal language model of {parameters:,} parameters, {origin}.

```python
{usage}
```
"""
WRITES = """from transformers import pipeline
write = pipeline("text-generation", "{name}")
print(write({prompt}, max_new_tokens=50)[0]["generated_text"])"""
WITHOUT_TOKENIZER = """from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("{name}")  # it has no tokenizer"""
BEGINNING = "In training a text began with an end-of-text token (id {}), which the tokenizer puts before a text.\n"
BEGINNING_OF_CHAT = "In training a conversation was what the chat template of the tokenizer makes of it.\n"


def main(config: ExportConfig) -> None:
    """Load the model, write the folder, and upload it if that is asked for.

    Raises:
        ConfigError: there is no such model, transformers has none like it, or the folder exists or cannot be written.
        RunError: it cannot be uploaded.
    """
    out = expand_user_path("out", config.out)
    if out.exists():
        raise ConfigError(f"out: {str(out)!r} exists; name a folder that does not")
    loaded, source = load_with_source(config.run, config.checkpoint, weights=config.weights)
    sources = [source] if source else []
    if config.average > 1:
        sources = newest(config)
        average(loaded, sources, config.weights)
    try:
        if not out.parent.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
        # Another export to the same place has a folder of its own, and the first to be done wins.
        with TemporaryDirectory(prefix=f"{out.name}.partial-", dir=out.parent) as folder:
            partial = Path(folder, out.name)
            partial.mkdir()
            write(partial, loaded)
            # An absolute path is nobody else's; and without ./ it would be a name on the Hub.
            own = out.name if Path(config.out).expanduser().is_absolute() else os.path.normpath(config.out)
            names = config.push or out.name, config.push or f"./{own}"
            (partial / "README.md").write_text(card(*names, loaded, sources, partial, config.weights))
            os.rename(partial, out)
    except OSError as error:
        raise ConfigError(f"out: {str(out)!r} cannot be written: {error}") from None
    print(f"The model is in {out}.")
    if config.push:
        push(out, config.push)


def export_newest(run_directory: Path) -> tuple[Path, Manifest]:
    """Export the newest checkpoint of a run into a folder of its directory, unless it is there; that and its manifest.

    Raises:
        ConfigError: as main.
    """
    checkpoint, manifest = find_checkpoint(run_directory)
    folder = run_directory / "exports" / checkpoint.name
    if not folder.exists():
        main(ExportConfig(str(checkpoint), str(folder)))
    return folder, manifest


def newest(config: ExportConfig) -> list[tuple[Path, Manifest]]:
    """Return the newest checkpoints of the run, as many as are averaged."""
    path = Path(config.run).expanduser()
    there = []
    for directory in readable_checkpoints(path / "checkpoints") if is_run(path) else ():
        with suppress(InvalidCheckpoint):  # it was said when the newest one was opened
            there.append((directory, validate(directory)))
    if config.checkpoint != "latest" or len(there) < config.average:
        raise ConfigError(
            f"average: {config.average} takes the newest checkpoints of a run, checkpoint: latest, and {path} has "
            f"{len(there)}; checkpoint.keep says how many a training keeps"
        )
    return there[: config.average]


@torch.no_grad()
def average(loaded: Loaded, sources: list[tuple[Path, Manifest]], weights: Weights) -> None:
    """Give the model the mean of the weights of these checkpoints."""
    mean = loaded.model.state_dict()
    sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in mean.items()}
    for directory, manifest in sources:
        for name, tensor in load_checkpoint(directory, manifest, weights).model.state_dict().items():
            sums[name] += tensor
    for name, tensor in mean.items():
        tensor.copy_(sums[name] / len(sources))


def write(folder: Path, loaded: Loaded) -> None:
    """Write all but the model card.

    Raises:
        ConfigError: no architecture of transformers is this model, with the settings that keep it out.
        OSError: it cannot be written.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        hf_model = to_transformers(loaded.model)
    except ValueError as error:
        raise ConfigError(f"run: {error}") from None
    if (tokenizer := loaded.tokenizer) is not None:
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        for settings in (hf_model.config, hf_model.generation_config):
            settings.bos_token_id, settings.eos_token_id = begin, tokenizer.eos_token_id
        if len(ends := ChatTemplate(tokenizer).ends_of_answer()) > 1:
            hf_model.generation_config.eos_token_id = sorted(ends)
        hf_model.generation_config.pad_token_id = tokenizer.eos_token_id
        prepare_tokenizer(tokenizer, loaded)
    try:
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
            settings = folder / "tokenizer_config.json"  # the name of the class that transformers 4 knows too
            settings.write_text(settings.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
        hf_model.save_pretrained(folder)
        for file in folder.glob("*.safetensors"):
            copy_folder_permissions(file)
    except Exception as error:  # for a full disk tokenizers and safetensors have kinds of their own
        raise OSError(str(error)) from None


def prepare_tokenizer(tokenizer: "PreTrainedTokenizerBase", loaded: Loaded) -> None:
    """Make a tokenizer encode as in training.

    It truncates at the model's context length and, without a chat template, begins every text with end-of-text.
    """
    for where_from in ("is_local", "local_files_only"):  # it was opened; no fact of a tokenizer
        tokenizer.init_kwargs.pop(where_from, None)
    tokenizer.model_max_length = loaded.model.config.max_position_embeddings
    # transformers 4 adds token_type_ids unless told, which its GPT-2 adds to the embeddings.
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names = ["input_ids", "attention_mask"]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if loaded.config is not None and tokenizer.chat_template is None:
        tokenizer.bos_token = tokenizer.eos_token
        tokenizer.add_bos_token = True


def card(
    name: str, place: str, loaded: Loaded, sources: list[tuple[Path, Manifest]], folder: Path, weights: Weights
) -> str:
    """Write the figure of the model card into `folder` and return the card; its code loads the model from `place`."""
    tokenizer = loaded.tokenizer
    usage = (WRITES if tokenizer else WITHOUT_TOKENIZER).format(name=place, prompt=example_prompt(loaded))
    steps = " and ".join(str(manifest.step) for _, manifest in sources)
    origin = "converted from another folder in transformers' format"
    if sources:
        origin = f"trained with Accelerate; the weights are those of step {steps}" + ", averaged" * (len(sources) > 1)
        if loaded.config and uses_ema(loaded.config, weights):
            origin += ", each an exponential average of the weights that were trained (evaluation.ema_decay)"
    lines = [CARD.format(name=name, parameters=loaded.model.num_parameters(), origin=origin, usage=usage)]
    if loaded.config is None:
        return lines[0]
    if tokenizer is not None:
        lines.append(BEGINNING_OF_CHAT if tokenizer.chat_template else BEGINNING.format(tokenizer.eos_token_id))
    directory, manifest = sources[0]
    numbers = [f"| {name} | {value:.6g} |" for name, value in manifest.metrics.items() if isinstance(value, float)]
    if numbers:
        averaged = ", of the newest checkpoint alone" if len(sources) > 1 else ""
        lines.append("\n".join([f"## Numbers at step {manifest.step}{averaged}\n", "| | |", "|---|---|", *numbers, ""]))
    if (run := directory.resolve().parent.parent / "metrics.jsonl").exists():
        with report_plot_errors("The loss curve"):
            save_loss_curve(run.parent, folder / "loss.png")  # the run may be somebody else's, to be read alone
            lines.append("![Training and validation loss](loss.png)\n")
    lines.append(f"## Data\n\n{data_facts(loaded)}\n")
    made_by = {**manifest.provenance, "mixed_precision": manifest.mixed_precision, "processes": manifest.processes}
    lines.append("## Made with\n\n" + "\n".join(f"- {name}: {value}" for name, value in made_by.items()) + "\n")
    recipe = yaml.safe_dump(without_folders({**manifest.config, "out_dir": "runs"}), sort_keys=False)
    lines.append(f"## Recipe\n\nThe settings of the run, a `--config` of its `train.py`:\n\n```yaml\n{recipe}```\n")
    return "\n".join(lines)


def example_prompt(loaded: Loaded) -> str:
    """Return the prompt of the example in the card."""
    if loaded.tokenizer is not None and loaded.tokenizer.chat_template:
        return '[{"role": "user", "content": "Hello"}]'
    of_stories = loaded.config is not None and loaded.config.data.source == "stories"  # whose words are few
    return '"Meet a"' if of_stories else '"Once upon a time"'


def without_folders(setting: Any) -> Any:
    """Replace absolute paths in settings by their last component, because a card may be published."""
    if isinstance(setting, dict):  # the keys of data.mix are paths, of which two may have the same last name
        names = [without_folders(name) for name in setting]
        names = [f"{name}-{i}" if name in names[:i] else name for i, name in enumerate(names)]
        return dict(zip(names, map(without_folders, setting.values()), strict=True))
    return Path(setting).name if isinstance(setting, str) and setting.startswith(("/", "~")) else setting


def data_facts(loaded: Loaded) -> str:
    """Describe the training data."""
    assert loaded.config is not None, "only runs are described"
    data = loaded.config.data
    if data.source != "text":
        return f"The generated source `{data.source}` of this repository, {data.num_samples:,} samples an epoch."
    facts = [f"Content hash of the tokens and the tokenizer: `{data.hash}`."]
    for path in data.corpora:
        try:
            metadata = read_metadata(Path(path).expanduser())
            if metadata["hash"] not in str(data.hash).split("+"):
                raise ConfigError(f"{path} is another corpus now")
            train, tokenizer = metadata["train"], metadata["tokenizer"]["name"]
            kind = "conversations" if metadata.get("conversations") else "documents"
            facts.append(
                f"- `{Path(path).name}`: {train['documents']:,} {kind}, {train['tokens']:,} tokens by `{tokenizer}`"
            )
        except (ConfigError, KeyError):  # gone or replaced since, which takes nothing from the model
            facts.append(f"- `{Path(path).name}`")
    return "\n".join(facts)


def push(folder: Path, repository: str) -> None:
    """Upload the folder.

    Raises:
        RunError: it cannot be uploaded; the folder stays.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # of the network, of the name, of who one is
        raise RunError(f"push: {folder} is written, but not uploaded to {repository!r}: {error}") from None
    print(f"It is at https://huggingface.co/{repository}.")
