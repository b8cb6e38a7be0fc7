"""Text generated during training, logged and scored by the corpus."""

import itertools
from collections.abc import Callable
from contextlib import suppress

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from data.corpus import Corpus
from data.tokenizer import END_OF_TEXT
from model.generate import CannotGenerate
from model.gpt import GPTModel, build_on_meta_device
from model.seeds import derive_seed
from runtime.config.schema import TrainConfig
from runtime.distributed.sharding import full_tensor, is_sharded
from runtime.distributed.signals import Interrupted, never_stop
from trainer.results import mean

TEXTS_PER_BATCH = 50
TEXTS_COMPARED_AT_ONCE = 2_000  # of the training set; generating a story again takes about 0.1 ms
LogTexts = Callable[[int, str, list[str]], None]
"""Function of the step, the name of the metric and the texts."""
MAX_TOKENS_PER_TEXT = 128


def unsharded(network: GPTModel) -> GPTModel:
    """Return the network, or an unsharded copy: generation calls the model unequally often on each process."""
    state = network.state_dict()
    if not any(map(is_sharded, state.values())):
        return network
    whole = build_on_meta_device(network.config)
    whole.load_state_dict({name: full_tensor(tensor) for name, tensor in state.items()}, assign=True)
    return whole


def sample_texts(
    model,
    corpus: Corpus,
    config: TrainConfig,
    accelerator: Accelerator,
    completed_steps: int,
    log_texts: LogTexts,
    should_stop: Callable[[], bool] = never_stop,
) -> dict[str, float]:
    """Generate texts, log them, and after the last step score them; called by all processes together.

    `should_stop` is asked before each token, and has the same answer on all processes.

    Returns:
        An empty dict before the last step, if the corpus scores no texts, for conversations, and if the model cannot
        generate. Otherwise
        `generation/NAME` for each score of the corpus, `generation/distinct`, and `generation/memorized` where the
        corpus has texts: fractions of the samples, which are the same on any number of processes.

    Raises:
        Interrupted: `should_stop()` is true.
    """
    scored = corpus.score_texts is not None and completed_steps == config.steps
    num_texts = config.evaluation.num_scored_generations if scored else config.evaluation.num_logged_generations
    has_texts = corpus.tokenizer is not None and not corpus.has_conversations  # a chat model needs a question
    if num_texts == 0 or not has_texts:
        return {}
    tokenizer = corpus.tokenizer
    assert tokenizer is not None, "it has texts"
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    network = unsharded(accelerator.unwrap_model(model)).eval()
    end_of_text = tokenizer.token_to_id(END_OF_TEXT) if corpus.end_of_text is None else corpus.end_of_text
    assert end_of_text is not None, "all tokenizers here have one"
    max_new_tokens = min(config.seq_len, MAX_TOKENS_PER_TEXT) - 1
    numbered = []
    for first_of_round in range(0, num_texts, num_processes * TEXTS_PER_BATCH):
        first = first_of_round + rank * TEXTS_PER_BATCH
        count = max(0, min(TEXTS_PER_BATCH, num_texts - first))  # 0: other processes generate the last texts
        generator = torch.Generator(accelerator.device).manual_seed(derive_seed(config.seed, "samples", first))
        tokens = [torch.full((count, 1), end_of_text, device=accelerator.device)]
        stream = network.stream(
            tokens[0],
            max_new_tokens,
            temperature=config.evaluation.temperature,
            generator=generator,
            eos_token_id=end_of_text,
        )
        # The compiler would need seconds for shapes that no training step has.
        with torch.compiler.set_stance("force_eager"), accelerator.autocast():
            # The texts of one process may end before those of another, but all processes ask equally often.
            for _ in range(max_new_tokens):
                if should_stop():
                    network.train()
                    raise Interrupted
                with suppress(CannotGenerate):
                    tokens += itertools.islice(stream if count else (), 1)
        if len(tokens) > 1:
            rows = torch.cat(tokens, dim=1).tolist()
            numbered += enumerate(tokenizer.decode_batch(rows, skip_special_tokens=True), start=first)
    network.train()
    texts = [text for _, text in sorted(gather_object(numbered))]
    if not texts:
        return {}
    shown = [f"{text} ({corpus.describe_text(text)})" for text in texts] if corpus.describe_text else texts
    log_texts(completed_steps, f"generation/{config.data.source}", shown)
    if not scored or corpus.score_texts is None:
        return {}
    distinct = set(texts)
    sums = corpus.score_texts(texts) | {"distinct": (len(distinct), num_texts)}
    if get_text := getattr(corpus.train, "text", None):
        found: set[str] = set()
        for first_of_round in range(0, len(corpus.train), num_processes * TEXTS_COMPARED_AT_ONCE):
            if should_stop():
                raise Interrupted
            first = first_of_round + rank * TEXTS_COMPARED_AT_ONCE
            last = min(first + TEXTS_COMPARED_AT_ONCE, len(corpus.train))
            found |= distinct.intersection(get_text(i) for i in range(first, last))
        memorized = set(gather_object(sorted(found)))
        sums["memorized"] = (sum(text in memorized for text in texts), num_texts)
    return {f"generation/{name}": mean([float(total)], [float(count)]) for name, (total, count) in sums.items()}
