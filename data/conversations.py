"""Conversations as the chat template of a tokenizer writes them: for data.prepare, and for whoever talks to a model."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import ConfigError
from data.files import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
"""Who says (`role`) what (`content`)."""

COLUMNS = "messages", "prompt", "response", "completion"
"""What may hold a conversation, or a part of it, in a row of data."""

# Of characters alone, so that any tokenizer can write it; what ends a message is its end of text.
DEFAULT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|' + message['role'] + '|>\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] + eos_token -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""


def document_in(row: Any, text_column: str) -> tuple[str, bool]:
    """The document that a row of data holds, and whether it is a conversation: then as the JSON of its messages.

    Raises:
        ValueError: it holds none.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.60} is not a row, an object with the key {text_column!r}")
    answers = [row[name] for name in ("response", "completion") if name in row]
    if text_column in row:
        name, value = text_column, row[text_column]
    elif "messages" in row:
        name, value = "messages", row["messages"]
    elif "prompt" in row and answers:
        turns = {"user": row["prompt"], "assistant": answers[0]}
        name, value = "prompt", [{"role": role, "content": said} for role, said in turns.items()]
    else:
        wanted = f"no text_column {text_column!r}, nor messages, nor prompt and response"
        raise ValueError(f"{wanted}; there are {list(row)!r:.200}")
    if isinstance(value, str | None):
        return value or "", False  # null is an empty document
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name!r} is {value!r:.60}, which is not a text, nor a list of messages")
    for message in value:
        said = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in said):
            raise ValueError(f"{name!r} has {message!r:.60}, which is not a message: a role and a content, both texts")
    return json.dumps(value, ensure_ascii=False), True


def content_of(document: str) -> str:
    """What is said in a conversation that is written as the JSON of its messages."""
    return "\n".join(message["content"] for message in json.loads(document))


def encode_row(
    tokenizer: "PreTrainedTokenizerBase", document: str, begins: bool = True
) -> tuple[str, dict[str, list[int]]]:
    """What is said in a conversation, and its row in a corpus, by columns: {} without an answer to learn from."""
    tokens, answers = encode(tokenizer, json.loads(document))
    columns = {"input_ids": tokens, "assistant_masks": answers}
    return content_of(document), columns if any(answers) else {}


def open_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer in a folder, which gets the default chat template if it has none."""
    from transformers import AutoTokenizer  # slow to import

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = DEFAULT_TEMPLATE
        write_atomically(folder / "chat_template.jinja", DEFAULT_TEMPLATE)
    return tokenizer


def encode(tokenizer: "PreTrainedTokenizerBase", messages: list[Message]) -> tuple[list[int], list[int]]:
    """The tokens of a conversation, as apply_chat_template gives them, and for each 1 if it is of an answer, else 0.

    Answers are what the template marks with {% generation %} or, where it marks nothing, what a message of the
    assistant adds after the prompt for one: what is said, and what ends it.

    The first token is of none, for nothing predicts it.

    Raises:
        ConfigError: the template does not write these messages, or where it has put an answer cannot be told.
    """
    if re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()):
        encoded = _apply(tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True)
        return encoded["input_ids"], [0, *encoded["assistant_masks"][1:]]
    text = _apply(tokenizer, messages, tokenize=False)
    in_answer = bytearray(len(text) + 1)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            if index == 0:
                problem = f"messages: {str(messages)[:80]} ... begins with an answer, and where it"
                raise ConfigError(f"{problem} is cannot be told; put what it answers before it")
            before = _apply(tokenizer, messages[:index], tokenize=False, add_generation_prompt=True)
            after = _apply(tokenizer, messages[: index + 1], tokenize=False)
            answer = after[len(before) :]
            if not text.startswith(answer, len(before)):  # as Qwen3's, which leaves thoughts to the last answer
                begins = range(answer.rfind(message["content"]) + 1)
                answer = next((answer[i:] for i in begins if text.startswith(answer[i:], len(before))), answer)
            if not (text.startswith(before) and after.startswith(before) and text.startswith(answer, len(before))):
                raise ConfigError(
                    "tokenizer: its chat template does not write an answer as it follows the prompt for one, or not "
                    "the same when more follows, so where it is cannot be told; put {% generation %} and "
                    "{% endgeneration %} around answers in the chat_template.jinja of a folder with it, and name that"
                )
            in_answer[len(before) : len(before + answer)] = b"\1" * len(answer)
    # A token that begins before the answer, as one of two line ends, belongs to what was there.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [0, *(in_answer[begin] for begin, _ in encoded["offset_mapping"][1:])]


def prompt(tokenizer: "PreTrainedTokenizerBase", messages: list[Message]) -> list[int]:
    """The tokens of a conversation that the assistant is to go on with.

    Raises:
        ConfigError: the template does not write these messages.
    """
    return _apply(tokenizer, messages, return_dict=True, add_generation_prompt=True)["input_ids"]


def ends_of_answer(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """The tokens at which an answer is over: the end of text, and what the template sets last after an answer."""
    ends = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    if tokenizer.chat_template is not None:
        with suppress(ConfigError):  # a template for something else than a question and its answer
            row = encode(tokenizer, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
            of_answer = [token for token, answer in zip(*row, strict=True) if answer]
            ends.update([token for token in of_answer if token in tokenizer.added_tokens_decoder][-1:])
    return ends


def _apply(tokenizer: "PreTrainedTokenizerBase", messages: list[Message], **options):
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template may raise what it likes, and tokenizers knows no kinds
        problem = f"the tokenizer has no tokens for the conversation {str(messages)[:80]} ...: {error}"
        raise ConfigError(f"messages: {problem}") from None
