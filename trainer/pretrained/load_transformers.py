"""Load a model and its tokenizer from a folder in transformers' format or from the Hub, without running their code."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from data.tokenizer import open_tokenizer
from model.gpt import GPTModel
from model.hf import config_from_transformers, from_transformers
from runtime.config.errors import ConfigError
from runtime.files import folder_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACCEPTED = "the directory of a run or of a checkpoint, a folder in transformers' format, or a name on the Hub"
# A folder with a tokenizer has at least one of these; old folders of GPT-2 have no tokenizer.json.
TOKENIZER_FILES = "tokenizer.json", "tokenizer_config.json", "vocab.json"
# Constants that GPT-2 had in transformers before 4.27, so that most models saved then have them. No model reads them.
FORMER_CONSTANT = re.compile(r".*\.attn\.masked_bias")


def load_transformers(name: str, setting: str = "run") -> "tuple[GPTModel, PreTrainedTokenizerBase | None]":
    """Load a model in eval mode, in float32, on the CPU, and its tokenizer, from a folder or from the Hub.

    Raise ConfigError, which names `setting`, if there is no such model or GPTModel cannot represent it.
    """
    local = Path(name).is_dir()
    if (Path(name) / "adapter_config.json").exists():
        raise ConfigError(f"{setting}: {name!r} is a PEFT adapter; merge it into its model first (docs/using.md)")
    lacks_model = local and not (Path(name) / "config.json").exists()
    if problems := [f"{name!r} has no model"] if lacks_model else folder_problems(name):  # without a request to the Hub
        raise ConfigError(f"{setting}: {problems[0]}; name {ACCEPTED}")
    from transformers import AutoConfig, AutoModelForCausalLM  # slow to import
    from transformers.utils.logging import set_tqdm_hook

    # "Loading weights", which every process would print; the Hub's progress bars of a download stay.
    set_tqdm_hook(lambda make_bar, args, options: make_bar(*args, **options | {"disable": True}))
    exists = local
    try:
        # The config first, so that the weights of an unsupported model are not downloaded.
        hf_config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        exists = True
        config_from_transformers(hf_config)
        hf_model, loading = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues] a pair
            name, config=hf_config, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
        tokenizer = None
        if not local or any((Path(name) / file).exists() for file in TOKENIZER_FILES):
            tokenizer = open_tokenizer(name)
        model = from_transformers(hf_model)
    except Exception as error:  # a download fails with many types of exception
        where = "" if exists else "; it is neither a directory nor a readable name on the Hub"
        raise ConfigError(f"{setting}: {name!r} cannot be opened{where}: {error}") from None
    if unexpected := sorted(key for key in map(str, loading["unexpected_keys"]) if not FORMER_CONSTANT.fullmatch(key)):
        problem = f"has {len(unexpected)} tensors that its model lacks, such as {unexpected[0]}"
        raise ConfigError(f"{setting}: {name!r} {problem}; were they merged into the model when it was saved?")
    if lacking := sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]])):
        raise ConfigError(f"{setting}: {name!r} lacks {len(lacking)} tensors of its model, such as {lacking[0]}")
    return model, tokenizer
