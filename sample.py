"""Generate text with a trained model: python sample.py RUN [--prompt TEXT | --chat] [--temperature 0.8] ...

RUN is the directory of a run, a folder in transformers' format, or a name on the Hub.
"""

if __name__ == "__main__":  # before anything slow is imported; it calls `main` below and never returns
    import sys

    sys.path.insert(0, __file__.rpartition("/")[0])  # where PYTHONSAFEPATH is set, Python leaves it out
    from runtime.cli.scripts import run_and_exit
    from trainer.pretrained.settings import SampleConfig

    run_and_exit("sample", SampleConfig)


import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any, cast

import torch
from tokenizers.decoders import DecodeStream

from data.prepare.chat import Message
from data.prepare.chat_template import ChatTemplate
from data.synthetic.stories import get_story_generator
from data.tokenizer import wrap_tokenizer_errors
from model.generate import CannotGenerate
from model.seeds import derive_seed
from runtime.cli.output import printable
from runtime.config.errors import ConfigError, RunError
from runtime.machine.cpu import prepare_cpu
from trainer.pretrained.load import LoadedModel, load_run
from trainer.pretrained.settings import SampleConfig


def main(config: SampleConfig) -> None:
    """Load the model and stream generated text to the terminal; raise ConfigError for settings that do not fit it."""
    prepare_cpu()
    loaded = load_run(config.run, config.checkpoint, weights=config.weights)
    if loaded.tokenizer is None:
        reason = f"its data, data.source: {loaded.config.data.source}, have none; " if loaded.config else ""
        raise ConfigError(f"run: {config.run!r} has no tokenizer; {reason}sample from a model of text")
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
                generate_sample(loaded, prompt, tokens, index, config)
        except KeyboardInterrupt:  # ends this sample only
            print()


def converse(loaded: LoadedModel, config: SampleConfig) -> None:
    """Answer user messages, one per line; drop the oldest exchanges when the context is full.

    The system message is never dropped, so a question that leaves no room for it and an answer is refused.
    """
    assert loaded.tokenizer is not None, "main checks it"
    if loaded.tokenizer.chat_template is None:
        problem = f"the tokenizer of {config.run!r} has no chat template"
        raise ConfigError(f"chat: {problem}; train on conversations (docs/using.md), or leave it out")
    limit = loaded.model.config.max_position_embeddings
    room = max(limit - config.max_new_tokens, limit // 2)
    template, history = ChatTemplate(loaded.tokenizer), []
    ends, system = template.ends_of_answer, []
    if config.system is not None:
        system = [{"role": "system", "content": config.system}]
        check_system(system, template, room)
    for turn, line in enumerate(prompts(config.prompt, config.chat)):
        history.append({"role": "user", "content": line})
        try:
            while len(tokens := template.prompt(system + history)) > room and len(history) > 2:
                del history[:2]
            if system and len(tokens) > room:
                problem = f"prompt: {len(tokens)} tokens with the system message and the template"
                raise ConfigError(f"{problem}, but a conversation has room for {room}; ask a shorter question")
            answer = generate_sample(loaded, "", tokens, turn, config, ends)
            history.append({"role": "assistant", "content": answer})
        except ConfigError as error:
            if config.prompt is not None:
                raise
            print(error, file=sys.stderr)
            history.pop()
        except KeyboardInterrupt:  # ends this answer only
            print()
            history.pop()


def check_system(system: list[Message], template: ChatTemplate, room: int) -> None:
    """Raise ConfigError if the template ignores the system message, or if it has more than `room` tokens."""
    if template.ignores_system:
        raise ConfigError("system: the chat template of this tokenizer ignores system messages; leave it out")
    num_tokens = len(template.prompt([*system, {"role": "user", "content": ""}]))
    if num_tokens > room:
        raise ConfigError(f"system: {num_tokens} tokens, but a conversation has room for {room}; shorten the message")


def prompts(given: str | None, chat: bool = False) -> Iterator[str]:
    """Yield the given prompt, else lines typed at the terminal; without a terminal, "" or, for chat, stdin's lines."""
    with suppress(AttributeError):  # invalid UTF-8 must not end the chat; a notebook's stdin is not a byte stream
        sys.stdin.reconfigure(errors="surrogateescape")  # pyright: ignore[reportAttributeAccessIssue] suppressed
    is_terminal = sys.stdin is not None and sys.stdin.isatty()  # None: stdin is closed
    if given is not None or not (chat or is_terminal):
        yield given or ""
        return
    if not is_terminal:
        yield from (line.rstrip("\n") for line in sys.stdin or ())
        return
    with suppress(ImportError):
        import readline  # noqa: F401 -- line editing and history
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def encode(loaded: LoadedModel, prompt: str, special_tokens: bool = False) -> list[int]:
    """Return the token ids of the token that begins every document in training, and the prompt.

    It is end-of-text in a run; a model of transformers may have a token of its own for it (bos), as Llama has.
    """
    tokenizer: Any = loaded.tokenizer  # transformers declares unions that its fast tokenizers never are
    begins = [None if loaded.config else tokenizer.bos_token_id, tokenizer.eos_token_id]
    begin = [token for token in begins if token is not None][:1]
    settings = {"add_special_tokens": False, "split_special_tokens": not special_tokens, "verbose": False}
    with wrap_tokenizer_errors(f"prompt: the tokenizer has no tokens for {prompt!r}"):
        tokens = tokenizer(prompt, **settings)["input_ids"] if prompt else []
    if not begin + tokens:
        raise ConfigError("prompt: empty, and this tokenizer has no end-of-text token to start from; give a prompt")
    return begin + tokens


@torch.no_grad()
def generate_sample(
    loaded: LoadedModel, prompt: str, tokens: list[int], index: int, config: SampleConfig, ends: Collection[int] = ()
) -> str:
    """Print the prompt and a continuation of `tokens`; for stories, also log-probabilities.

    `index` seeds the random draws, and `ends` are stop tokens in addition to end-of-text. Control characters are
    escaped, because a terminal would execute them. Return the printed text.
    """
    model, tokenizer = loaded.model, cast(Any, loaded.tokenizer)
    device, vocab_size = model.token_embedding.weight.device, model.config.vocab_size
    assert vocab_size is not None, "it is set before a model is built"
    ends = {tokenizer.eos_token_id, *ends}
    generator = torch.Generator(device).manual_seed(derive_seed(config.seed, "samples", index))
    decoder, pieces, ids = DecodeStream(skip_special_tokens=True), [prompt], list(tokens)
    print(printable(prompt, kept="\n\t"), end="", flush=True)
    settings: dict[str, Any] = dict(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
    if max(tokens, default=0) >= vocab_size:
        raise ConfigError(
            f"run: the prompt has token {max(tokens)}, but the model has {vocab_size} tokens; check its tokenizer"
        )
    for token in tokens:  # so that generated tokens are decoded in their context
        decoder.step(tokenizer.backend_tokenizer, token)
    tokens_1T = torch.tensor([tokens], device=device)
    try:
        for next_11 in model.stream(tokens_1T, config.max_new_tokens, generator=generator, **settings):
            ids.append(int(next_11.item()))
            if ids[-1] in ends:
                break
            if piece := decoder.step(tokenizer.backend_tokenizer, ids[-1]):
                pieces.append(piece)
                print(printable(piece, kept="\n\t"), end="", flush=True)
    except CannotGenerate as error:
        print()
        raise ConfigError(f"run: {config.run!r} cannot generate: {error}") from None
    except FloatingPointError as error:
        print()
        raise RunError(f"run: {config.run!r}: {error}; try an earlier --checkpoint, saved before it diverged") from None
    text = "".join(pieces)
    print()
    if model.predicts_next_token and loaded.config is not None and (data := loaded.config.data).source == "stories":
        describe = get_story_generator(data.facts, data.zipf, data.seed or 0).describe_text
        limit = model.config.max_position_embeddings
        ids_1T = torch.tensor([ids[:limit]], device=device)
        _, loss, metrics = model(ids_1T, labels=ids_1T, num_items_in_batch=1)
        # A model with auxiliary losses returns the cross-entropy separately.
        nats, _ = metrics.get("loss", (loss, 1))
        scope = f", of its first {limit} tokens" if len(ids) > limit else ""
        print(f"  ({describe(text)}; the model's {-float(nats):.2f}{scope})")
    return text
