"""Lets a trained model write: python sample.py RUN [--prompt TEXT | --chat] [--temperature 0.8] ...

RUN is the directory of a run, a folder in transformers' format, or a name on the Hub.
"""

from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt


@dataclass
class SampleConfig:
    """Lets a trained model write."""

    run: str
    """The directory of a run or of a checkpoint, a folder in transformers' format, or a name on the Hub."""

    prompt: str | None = None
    """What the text begins with. Default null: on a terminal it is asked for, again and again; elsewhere, nothing, or
    with chat the lines of the input."""

    special_tokens: bool = False
    """Whether special tokens that are spelt in the prompt, such as <|endoftext|>, are these tokens. Default false: they
    are the characters that they are spelt with, as in the text that a model learns from."""

    chat: bool = False
    """Talk: a line is what the user says, and the model answers all that was said, by its tokenizer's chat template."""

    system: str | None = None
    """With chat: the system message before all that is said, which is never forgotten. null: none."""

    checkpoint: Literal["latest", "best"] | NonNegativeInt = "latest"
    """Of a run: latest, best (by validation loss), or a step."""

    weights: Literal["evaluated", "trained"] = "evaluated"
    """Of a run with evaluation.ema_decay: its average, which val/loss is of, or the weights that are trained."""

    num_samples: PositiveInt = 1
    """Texts for each prompt."""

    max_new_tokens: PositiveInt = 200
    """Tokens that a text gets at most; it ends earlier at an end-of-text token, or where an answer is over."""

    temperature: NonNegativeFloat = 0.8
    """0 takes the likeliest token; 1 draws with the model's probabilities; above, likelier ones are preferred less."""

    top_k: PositiveInt | None = None
    """Draw from so many likeliest tokens. null: from all."""

    top_p: NonNegativeFloat = 1.0
    """Draw from the fewest tokens that together have this probability."""

    seed: NonNegativeInt = 0
    """Of the draws: text i of a prompt is a function of the seed and i."""


if __name__ == "__main__":  # before anything slow is imported
    from cli.scripts import run_and_exit

    run_and_exit("sample", SampleConfig)

import sys
from collections.abc import Collection, Iterator
from contextlib import suppress

import torch
from tokenizers.decoders import DecodeStream

from config.errors import ConfigError
from data.chat import Message
from data.chat_template import ChatTemplate
from data.synthetic.stories import get_story_generator
from data.tokenizer import wrap_tokenizer_errors
from distributed.cpu import prepare_cpu
from model.seeds import derive_seed
from run.load import Loaded, load_run


def main(config: SampleConfig) -> None:
    """Load the model and write to the terminal, each piece of text as soon as it is there.

    Raises:
        ConfigError: there is no such model, or a setting or a prompt does not fit it.
    """
    if not 0 < config.top_p <= 1:
        raise ConfigError(f"top_p: {config.top_p} must be above 0 and at most 1; 1 draws from all tokens")
    if config.chat and config.special_tokens:
        raise ConfigError("special_tokens: true, but in a chat they come from the chat template alone; leave it out")
    if config.system is not None and not config.chat:
        raise ConfigError(f"system: {config.system!r} is a message of a chat; give --chat too, or leave it out")
    prepare_cpu()
    loaded = load_run(config.run, config.checkpoint, weights=config.weights)
    if loaded.tokenizer is None:
        raise ConfigError(f"run: {config.run!r} has no tokenizer, as a model of random tokens has none")
    loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
    if config.chat:
        converse(loaded, config)
        return
    for prompt in prompts(config.prompt):
        try:
            tokens = encode(loaded, prompt, config.special_tokens)
        except ConfigError as error:
            if config.prompt is not None:
                raise
            print(error, file=sys.stderr)
            continue
        try:
            for index in range(config.num_samples):
                write(loaded, prompt, tokens, index, config)
        except KeyboardInterrupt:  # of the text, not of the conversation
            print()


def converse(loaded: Loaded, config: SampleConfig) -> None:
    """Answer what is said, line by line. What has no room any more is forgotten, the oldest line and answer first.

    Raises:
        ConfigError: the tokenizer has no chat template, or a setting does not fit.
    """
    if loaded.tokenizer.chat_template is None:
        raise ConfigError(
            f"chat: the tokenizer of {config.run!r} has no chat template; train on conversations (docs/using.md), or "
            "leave --chat out"
        )
    if config.num_samples > 1:
        raise ConfigError(f"num_samples: {config.num_samples}, but chat gives one answer; leave it out")
    limit = loaded.model.config.max_position_embeddings
    room = max(limit - config.max_new_tokens, limit // 2)
    template, said = ChatTemplate(loaded.tokenizer), []
    ends, system = template.ends_of_answer(), []
    if config.system is not None:
        system = [{"role": "system", "content": config.system}]
        check_system(system, template, room)
    for turn, line in enumerate(prompts(config.prompt, config.chat)):
        said.append({"role": "user", "content": line})
        try:
            while len(tokens := template.prompt(system + said)) > room and len(said) > 2:
                del said[:2]
            answer = write(loaded, "", tokens, turn, config, ends)
            said.append({"role": "assistant", "content": answer})
        except ConfigError as error:
            if config.prompt is not None:
                raise
            print(error, file=sys.stderr)
            said.pop()
        except KeyboardInterrupt:  # of the answer, not of the conversation
            print()
            said.pop()


def check_system(system: list[Message], template: ChatTemplate, room: int) -> None:
    """Refuse a system message that the model would not see.

    Raises:
        ConfigError: its template writes none, or it has more than `room` tokens.
    """
    line = [{"role": "user", "content": ""}]
    tokens = template.prompt(system + line)
    if tokens == template.prompt(line):
        raise ConfigError("system: the chat template of this tokenizer writes no system message; leave it out")
    if len(tokens) > room:
        raise ConfigError(f"system: it takes {len(tokens)} tokens, and a conversation has room for {room}; shorten it")


def prompts(given: str | None, chat: bool = False) -> Iterator[str]:
    """The given prompt; without one, what is typed; where nobody types, none or, in a chat, the lines of the input."""
    with suppress(AttributeError):  # of what is no stream of bytes; elsewhere a line of wrong ones must not end it
        sys.stdin.reconfigure(errors="surrogateescape")
    typed = sys.stdin is not None and sys.stdin.isatty()  # None: it was closed
    if given is not None or not (chat or typed):
        yield given or ""
        return
    if not typed:
        yield from (line.rstrip("\n") for line in sys.stdin or ())
        return
    with suppress(ImportError):
        import readline  # noqa: F401 -- lines can be edited and called back
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def encode(loaded: Loaded, prompt: str, special_tokens: bool = False) -> list[int]:
    """The tokens that the model goes on from: those of the prompt, after the end of text that a text begins with.

    Args:
        special_tokens: whether one that is spelt in the prompt is meant.

    Raises:
        ConfigError: the tokenizer has no tokens for it.
    """
    tokenizer = loaded.tokenizer
    begin = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    settings = {"add_special_tokens": False, "split_special_tokens": not special_tokens}
    with wrap_tokenizer_errors(f"prompt: the tokenizer has no tokens for {prompt!r}"):
        tokens = tokenizer(prompt, **settings)["input_ids"] if prompt else []
    if not begin + tokens:
        raise ConfigError("prompt: this tokenizer has no end-of-text token that a text could begin with; give a prompt")
    return begin + tokens


@torch.no_grad()
def write(
    loaded: Loaded, prompt: str, tokens: list[int], index: int, config: SampleConfig, ends: Collection[int] = ()
) -> str:
    """Write text `index` of a prompt, up to an end of text or one of the tokens `ends`, and return it; of stories, with
    the grammar's verdict and log-probabilities."""
    model, tokenizer = loaded.model, loaded.tokenizer
    device, vocab_size = model.token_embedding.weight.device, model.config.vocab_size
    ends = {tokenizer.eos_token_id, *ends}
    generator = torch.Generator(device).manual_seed(derive_seed(config.seed, "samples", index))
    decoder, written, ids = DecodeStream(skip_special_tokens=True), [prompt], list(tokens)
    print(prompt, end="", flush=True)
    settings = dict(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
    if max(tokens, default=0) >= vocab_size:
        raise ConfigError(f"run: the tokenizer gives token {max(tokens)}, and the model has {vocab_size} tokens")
    for token in tokens:  # so that what follows is decoded as its continuation
        decoder.step(tokenizer.backend_tokenizer, token)
    tokens_1T = torch.tensor([tokens], device=device)
    for next_11 in model.stream(tokens_1T, config.max_new_tokens, generator=generator, **settings):
        ids.append(next_11.item())
        if ids[-1] in ends:
            break
        if piece := decoder.step(tokenizer.backend_tokenizer, ids[-1]):
            written.append(piece)
            print(piece, end="", flush=True)
    text = "".join(written)
    print()
    if loaded.config is not None and (data := loaded.config.data).source == "stories":
        verdict = get_story_generator(data.facts, data.zipf, data.seed or 0).verdict
        limit = model.config.max_position_embeddings
        ids_1T = torch.tensor([ids[:limit]], device=device)
        _, loss, *sums = model(ids_1T, labels=ids_1T, num_items_in_batch=1)
        # Where a model adds terms that help its training, it gives the loss without them apart.
        nats, _ = dict(*sums).get("loss", (loss, 1))
        of = f", of its first {limit} tokens" if len(ids) > limit else ""
        print(f"  ({verdict(text)}; the model's {-float(nats):.2f}{of})")
    return text
