"""Write a trained model as a folder in transformers' format, with a model card."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors import SafetensorError

from data.integrity import read_metadata
from data.prepare.chat_template import ChatTemplate
from model.gpt import GPTModel
from model.hf import compare_predictions, compared_inputs, find_unused_tensors, to_transformers
from runtime.config.errors import ConfigError, RunError
from runtime.config.paths import expand_user_path
from runtime.files import copy_folder_permissions
from trainer.checkpoint.manifest import InvalidCheckpoint, Manifest, readable_checkpoints, validate
from trainer.checkpoint.unshard import read_averages
from trainer.pretrained.load import LoadedModel, load_model_from_checkpoint, load_with_source, report_skipped
from trainer.pretrained.settings import ExportConfig, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOLERANCE = 1e-3  # nats; rounding changes log-probabilities by less than 1e-4

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
USAGE = """from transformers import pipeline
generate = pipeline("text-generation", "{name}")
print(generate({prompt}, max_new_tokens=50)[0]["generated_text"])"""
USAGE_WITHOUT_TOKENIZER = """from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("{name}")  # it has no tokenizer"""
TEXT_FORMAT = "Training documents began with an end-of-text token (id {}), which the tokenizer prepends.\n"
CHAT_FORMAT = "Training conversations were formatted by the tokenizer's chat template.\n"


def main(config: ExportConfig) -> None:
    """Load the model, write the folder and, with `push`, upload it.

    Raise ConfigError if the model does not exist or has no counterpart in transformers, or `out` exists or is not
    writable; and RunError if the upload fails.
    """
    out = expand_user_path("out", config.out)
    if out.exists():
        raise ConfigError(f"out: {str(out)!r} exists; name a folder that does not")
    if config.average > 1 and config.checkpoint != "latest":
        raise ConfigError(f"checkpoint: {config.checkpoint!r}, but average takes the newest ones; leave it out")
    loaded, source = load_with_source(config.run, config.checkpoint, weights=config.weights)
    if config.average > 1 and not (Path(config.run).expanduser() / "checkpoints").is_dir():
        raise ConfigError(f"average: {config.average}, but {config.run!r} is not the directory of a run; leave it out")
    sources = [source] if source else []
    if config.average > 1:
        sources = average_newest(loaded, config)
    try:
        if not out.parent.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
        # A second export to `out` uses another temporary folder; the first one to finish is kept.
        with TemporaryDirectory(prefix=f"{out.name}.partial-", dir=out.parent) as folder:
            partial = Path(folder, out.name)
            partial.mkdir()
            write_model(partial, loaded, has_conversations(loaded, sources))
            # Others cannot use an absolute path. Without ./ transformers would look for the name on the Hub.
            path = out.name if Path(config.out).expanduser().is_absolute() else os.path.normpath(config.out)
            names = config.push or out.name, config.push or f"./{path}"
            (partial / "README.md").write_text(model_card(*names, loaded, sources, config.weights))
            os.rename(partial, out)
    except OSError as error:
        raise ConfigError(f"out: {str(out)!r} cannot be written: {error}") from None
    print(f"The model is in {out}.")
    if config.push:
        push(out, config.push)


@torch.no_grad()
def average_newest(loaded: LoadedModel, config: ExportConfig) -> list[tuple[Path, Manifest]]:
    """Replace the weights by their mean over the newest valid checkpoints, summed in float64; return these checkpoints.

    Raise ConfigError if the run has too few.
    """
    mean, path = loaded.model.state_dict(), Path(config.run).expanduser()
    sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in mean.items()}
    sources: list[tuple[Path, Manifest]] = []
    for directory in readable_checkpoints(path / "checkpoints"):
        try:
            manifest = validate(directory)
            weights = load_model_from_checkpoint(directory, manifest, config.weights).model.state_dict()
        except (InvalidCheckpoint, ConfigError, OSError, SafetensorError) as error:
            report_skipped([f"{directory}: {error}"])
            continue
        sources.append((directory, manifest))
        for name, tensor in weights.items():
            sums[name] += tensor
        if len(sources) == config.average:
            break
    else:
        raise ConfigError(
            f"average: {config.average} needs that many valid checkpoints, but {path} has {len(sources)}; use a "
            "smaller number, or train with a larger checkpoint.keep"
        )
    for name, tensor in mean.items():
        tensor.copy_(sums[name] / len(sources))
    return sources


def has_conversations(loaded: LoadedModel, sources: list[tuple[Path, Manifest]]) -> bool:
    """Return whether the model was trained on conversations, else on texts.

    Where the manifest does not record it, and for a model of transformers, the chat template of the tokenizer tells.
    """
    recorded = sources[0][1].conversations if sources else None
    return bool(loaded.tokenizer and loaded.tokenizer.chat_template) if recorded is None else recorded


def write_model(folder: Path, loaded: LoadedModel, conversations: bool) -> None:
    """Write the weights, the configs and the tokenizer; `conversations`: whether it was trained on these.

    Raise ConfigError if transformers has no such model, or its model computes other logits.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        hf_model = to_transformers(loaded.model)
    except ValueError as error:
        raise ConfigError(f"run: {error}") from None
    check_same_logits(loaded.model, hf_model)
    if unused := find_unused_tensors(loaded.model):
        print(f"{len(unused)} tensors that change no logits are left out, such as {unused[0]}.")
    if (tokenizer := loaded.tokenizer) is not None:
        prepare_tokenizer(tokenizer, loaded, begins_texts=loaded.config is not None and not conversations)
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        for settings in (hf_model.config, hf_model.generation_config):
            settings.bos_token_id, settings.eos_token_id = begin, tokenizer.eos_token_id
        if len(ends := ChatTemplate(tokenizer).ends_of_answer) > 1:
            hf_model.generation_config.eos_token_id = sorted(ends)
        hf_model.generation_config.pad_token_id = tokenizer.eos_token_id
    try:
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
            settings = folder / "tokenizer_config.json"  # transformers 4 has only this name of the class
            settings.write_text(settings.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
        hf_model.save_pretrained(folder)
        for file in folder.glob("*.safetensors"):
            copy_folder_permissions(file)
    except Exception as error:  # on a full disk tokenizers and safetensors raise types of their own
        raise OSError(str(error)) from None


def check_same_logits(model: GPTModel, hf_model: "PreTrainedModel") -> None:
    """Raise ConfigError if both predict other tokens, as after an edit in model/ that no setting describes.

    Print how many positions of a long context are not compared.
    """
    try:
        difference = compare_predictions(model, hf_model)
    except ValueError as error:
        raise ConfigError(f"run: {error}") from None
    if not difference <= TOLERANCE:  # NaN, too
        family = hf_model.config.model_type
        raise ConfigError(
            f"run: its log-probabilities differ by up to {difference:.2g} nats from those of transformers' "
            f"{family}: model/ has been edited, and no model of transformers computes the same"
        )
    first, *last = (inputs["input_ids"].shape[1] for inputs in compared_inputs(model))
    if last:
        compared = f"the first {first:,} positions and the last {last[0]}"
        others = model.config.max_position_embeddings - first - last[0]
        print(f"Its logits equal those of transformers at {compared}; the other {others:,} were not compared.")


def prepare_tokenizer(tokenizer: "PreTrainedTokenizerBase", loaded: LoadedModel, begins_texts: bool) -> None:
    """Make a tokenizer truncate at the model's context length and, with `begins_texts`, prepend end-of-text."""
    for name in ("is_local", "local_files_only"):  # arguments of from_pretrained, not properties
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.model_max_length = loaded.model.config.max_position_embeddings
    # By default transformers 4 returns token_type_ids, which its GPT-2 adds to the embeddings.
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names = ["input_ids", "attention_mask"]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if begins_texts:
        tokenizer.bos_token = tokenizer.eos_token
        tokenizer.add_bos_token = True


def model_card(
    name: str, place: str, loaded: LoadedModel, sources: list[tuple[Path, Manifest]], weights: Weights
) -> str:
    """Return the model card, whose example loads the model from `place`."""
    # The example.
    tokenizer, prompt = loaded.tokenizer, '"Once upon a time"'
    if conversations := has_conversations(loaded, sources):
        prompt = '[{"role": "user", "content": "Hello"}]'
    elif loaded.config is not None and loaded.config.data.source == "stories":  # a small vocabulary
        prompt = '"Meet a"'
    usage = (USAGE if tokenizer else USAGE_WITHOUT_TOKENIZER).format(name=place, prompt=prompt)

    # Where the weights come from, and the average of them that the checkpoint has, if any.
    steps = " and ".join(str(manifest.step) for _, manifest in sources)
    origin, averaged = "converted from another folder in transformers' format", ""
    if sources:
        if loaded.config is not None and read_averages(*sources[0]):
            averaged = f"the average that the optimizer ({loaded.config.optimizer.name}) keeps"
            if loaded.config.evaluation.ema_decay is not None:
                averaged = "an exponential moving average (EMA)"
        kind = "mean of the weights after steps" if len(sources) > 1 else "weights after step"
        origin = f"trained with Accelerate; {kind} {steps}"
        if averaged and weights == "evaluated":
            origin += f", each {averaged} of the trained weights"
    lines = [CARD.format(name=name, parameters=loaded.model.num_parameters(), origin=origin, usage=usage)]
    if loaded.config is None:
        return lines[0]

    # The run: the format of its texts, its metrics, data, environment and settings.
    if tokenizer is not None:
        lines.append(CHAT_FORMAT if conversations else TEXT_FORMAT.format(tokenizer.eos_token_id))
    _, manifest = sources[0]
    measured = {name: value for name, value in manifest.metrics.items() if isinstance(value, float)}
    if averaged and weights == "trained":  # evaluations measured the average
        measured = {name: value for name, value in measured.items() if not name.startswith(("val/", "generation/"))}
    if numbers := [f"| {name} | {value:.6g} |" for name, value in measured.items()]:
        note = " (of the newest checkpoint)" if len(sources) > 1 else ""
        lines.append("\n".join([f"## Metrics at step {manifest.step}{note}\n", "| | |", "|---|---|", *numbers, ""]))
    lines.append(f"## Data\n\n{describe_data(loaded)}\n")
    environment = {**manifest.provenance, "mixed_precision": manifest.mixed_precision, "processes": manifest.processes}
    lines.append("## Environment\n\n" + "\n".join(f"- {name}: {value}" for name, value in environment.items()) + "\n")
    recipe = yaml.safe_dump(without_folders({**manifest.config, "out_dir": "runs"}), sort_keys=False)
    lines.append(f"## Recipe\n\nThe settings of the run, for `train.py --config`:\n\n```yaml\n{recipe}```\n")
    return "\n".join(lines)


def without_folders(setting: Any) -> Any:
    """Replace absolute paths in settings by their last component, because a card may be published."""
    if isinstance(setting, dict):  # the keys of data.mix are paths, of which two may have the same last name
        names = [without_folders(name) for name in setting]
        names = [f"{name}-{i}" if name in names[:i] else name for i, name in enumerate(names)]
        return dict(zip(names, map(without_folders, setting.values()), strict=True))
    return Path(setting).name if isinstance(setting, str) and setting.startswith(("/", "~")) else setting


def describe_data(loaded: LoadedModel) -> str:
    """Describe the training data."""
    assert loaded.config is not None, "only cards of runs describe data"
    data = loaded.config.data
    if data.source != "text":
        return f"The synthetic source `{data.source}` of this repository, {data.num_samples:,} samples per epoch."
    lines = [f"Content hash of the tokens and the tokenizer: `{data.hash}`."]
    for path in data.corpora:
        try:
            metadata = read_metadata(Path(path).expanduser())
            if metadata["hash"] not in str(data.hash).split("+"):
                raise ConfigError(f"{path} is another corpus now")
            train, tokenizer = metadata["train"], without_folders(metadata["tokenizer"]["name"])
            kind = "conversations" if metadata.get("conversations") else "documents"
            lines.append(
                f"- `{Path(path).name}`: {train['documents']:,} {kind}, {train['tokens']:,} tokens by `{tokenizer}`"
            )
        except (ConfigError, KeyError):  # the corpus was moved or replaced; the export does not need it
            lines.append(f"- `{Path(path).name}`")
    return "\n".join(lines)


def push(folder: Path, repository: str) -> None:
    """Upload the folder to the Hub; raise RunError, and keep the folder, if that fails."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # network, name or authentication
        raise RunError(f"push: {folder} is complete, but the upload to {repository!r} failed: {error}") from None
    print(f"Uploaded to https://huggingface.co/{repository}.")
