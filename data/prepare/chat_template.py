"""Conversations rendered by the chat template of a tokenizer, for data.prepare and for chatting with a model."""

import re
from bisect import bisect_right
from collections import Counter
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from data.prepare.chat import Message, find_template_keys, get_content, parse_conversation
from data.tokenizer import open_tokenizer, wrap_tokenizer_errors
from runtime.config.errors import ConfigError
from runtime.files import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Plain characters, so that any tokenizer can encode it; each message ends with the end-of-text token.
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

# First character of a placeholder. Unicode reserves it for internal use; _hide replaces it in messages.
MARK = "\U0010ffff"
# Characters that stand at the begin and the end of an answer while a template is rendered.
BEGIN, END = "\U0010fffe", "\U0010fffd"
# First character of a tag, which tells where the content of a message is in the rendered text.
TAG = "\U0010fffc"
TAGGED = re.compile(TAG + "([\U00100000-\U0010fff0])")
# {% generation %} and {% endgeneration %}, with the signs that strip the whitespace around them.
GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
# Transformers passes any of these keys of a message to the template under all three names.
THOUGHTS = {"reasoning_content", "reasoning", "thinking"}


def open_chat_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Open the tokenizer in a folder; save the default chat template there if it has none."""
    tokenizer = open_tokenizer(folder)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = DEFAULT_TEMPLATE
        # Several processes encode, each with the tokenizer that it opens.
        write_atomically(folder / "chat_template.jinja", DEFAULT_TEMPLATE)
    return tokenizer


class ChatTemplate:
    """The chat template of a tokenizer.

    Conversations are encoded as by apply_chat_template of transformers, except that only the template can produce
    special tokens: one that is spelled in a message is encoded as ordinary characters, as in any other text. For that,
    placeholders (MARK and one more character) replace the spelled tokens while the template is rendered.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.tokenizer: Any = tokenizer  # transformers declares unions that its fast tokenizers never are
        special = [token for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        self._placeholders = {token.content: MARK + chr(0x100000 + index) for index, token in enumerate(special)}
        longest_first = sorted(self._placeholders, key=len, reverse=True)
        spelled = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._spelled, self._spelled_or_placeholder = re.compile(spelled), re.compile(f"({spelled}|{MARK}.)")
        # This tokenizer encodes a special token as characters, and its placeholder as one token.
        self._literal = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        self._literal.encode_special_tokens = True
        self._literal.no_truncation()
        self._literal.no_padding()
        for token in special:
            flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            self._literal.add_tokens([AddedToken(self._placeholders[token.content], special=False, **flags)])
        self._token_of = {
            self._literal.token_to_id(placeholder): tokenizer.convert_tokens_to_ids(content)
            for content, placeholder in self._placeholders.items()
        }

    def encode(
        self, messages: list[Message], tools: list | None = None, chat_template_kwargs: dict[str, Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Encode a conversation; return its tokens, and for each 1 if it belongs to an answer, else 0.

        An answer is the text that the template marks with {% generation %}. Without such marks it is the text that an
        assistant message adds after the generation prompt: the content and the end of the turn. The first token of a
        conversation belongs to no answer, because no token predicts it.

        Raises:
            ConfigError: the template cannot render these messages, the answers cannot be located, or the last token of
                one, whitespace aside, is not in `ends_of_answer`.
        """
        tokens, is_target, last_targets = self._encode(messages, {"tools": tools, **(chat_template_kwargs or {})})
        for last in last_targets:
            if tokens[last] not in self.ends_of_answer:
                raise ConfigError(
                    f"tokenizer: its chat template ends an answer with {self.tokenizer.decode(tokens[last])!r} instead "
                    "of a special token, so a model would not learn where to stop; save the tokenizer, write {{ "
                    "eos_token }} after each answer in its chat_template.jinja, before any {% endgeneration %}, and "
                    "name that folder"
                )
        return tokens, is_target

    def prompt(self, messages: list[Message]) -> list[int]:
        """Return the tokens of a conversation and a generation prompt; raise ConfigError if it cannot be rendered."""
        return self._tokenize(self._render(messages, {}, add_generation_prompt=True)[0])[0]

    @cached_property
    def ends_of_answer(self) -> set[int]:
        """The tokens that end an answer: the end of text, and the special token with which the template ends one."""
        ends = set() if self.tokenizer.eos_token_id is None else {self.tokenizer.eos_token_id}
        if self.tokenizer.chat_template is not None:
            with suppress(ConfigError):  # a template that cannot render a question and its answer
                messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
                tokens, _, last_targets = self._encode(messages, {})
                ends.update({tokens[last] for last in last_targets} & self.tokenizer.added_tokens_decoder.keys())
        return ends

    @cached_property
    def ignores_system(self) -> bool:
        """Whether the template renders a conversation with a system message as if it had none."""
        user = [{"role": "user", "content": "?"}]
        with suppress(ConfigError):  # a template that refuses system messages
            return self._render([{"role": "system", "content": "?"}, *user], {}) == self._render(user, {})
        return False

    def keys_not_rendered(self, conversation: dict[str, Any]) -> set[str]:
        """Return what the template does not render: keys that it does not name, and "system" for such messages."""
        template = self.tokenizer.get_chat_template(tools=conversation.get("tools"))
        named = set(re.findall(r"\w+", template))
        named |= THOUGHTS if named & THOUGHTS else set()
        has_system = any(message["role"] == "system" for message in conversation["messages"])
        return find_template_keys(conversation) - named | ({"system"} if has_system and self.ignores_system else set())

    def _encode(self, messages: list[Message], variables: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
        """Encode a conversation; return tokens and targets as `encode`, and the index of each answer's last token.

        Whitespace at the end of an answer does not count, such as the line break that separates turns.
        """
        text, marked = self._render(messages, variables)
        tokens, spans = self._tokenize(text)
        if marked is None:
            answers = self._find_answers(text, messages, variables)
        else:
            answers = self._weigh(text, marked, messages, variables)
        in_answer = bytearray(len(text) + 1)
        for begin, end in answers:
            in_answer[begin:end] = b"\1" * (end - begin)
        if marked is None:
            # A token that straddles the boundary, such as a double newline, belongs to the prompt.
            is_target = [in_answer[begin] for begin, _ in spans]
        else:
            is_target = [int(any(in_answer[begin : max(end, begin + 1)])) for begin, end in spans]
        begins = [begin for begin, _ in spans]
        last_characters = [begin + len(text[begin:end].rstrip()) - 1 for begin, end in answers]
        last_targets = [max(bisect_right(begins, character) - 1, 0) for character in last_characters]
        return tokens, [0, *is_target[1:]], last_targets

    def _render(
        self,
        messages: list[Message],
        variables: dict[str, Any],
        add_generation_prompt: bool = False,
        with_tags: bool = False,
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Render the template; also return the (begin, end) of answers in the text, None if it does not mark them.

        With tags, TAG and the character of its index stand before and after the content of each message.
        """
        from transformers.utils.chat_template_utils import render_jinja_template  # slow to import

        conversation = f"the conversation that begins {messages[0].get('content')!r:.60}"
        end_of_text = self.tokenizer.eos_token
        if any(f"<|{message['role']}|>" == end_of_text for message in messages):
            raise ConfigError(f"messages: in {conversation} a role spells the end of text, {end_of_text!r}")
        try:
            template = self.tokenizer.get_chat_template(tools=variables.get("tools"))
            # transformers counts positions wrongly inside of {% filter %}, so let the template write marks.
            template, num_marks = GENERATION.subn(_write_mark, template)
            unweighted = [{key: item for key, item in message.items() if key != "weight"} for message in messages]
            hidden = self._hide(unweighted)
            for index, message in enumerate(hidden if with_tags else ()):
                if message.get("content", "").strip():  # a template may render an empty content otherwise
                    tag = TAG + chr(0x100000 + index)
                    message["content"] = tag + message["content"] + tag
            variables = {**self.tokenizer.special_tokens_map, **self._hide(variables)}
            variables["add_generation_prompt"] = add_generation_prompt
            [text], _ = render_jinja_template([hidden], chat_template=template, **variables)
        except Exception as error:  # a template may raise anything
            raise ConfigError(f"messages: the chat template cannot render {conversation}: {error}") from None
        if not num_marks:
            return text, None
        marks = re.findall(f"[{BEGIN}{END}]", text)
        if marks != [BEGIN, END] * (len(marks) // 2):
            problem = "its chat template has a {% generation %} within another or without {% endgeneration %}"
            raise ConfigError(f"tokenizer: {problem}, in {conversation}")
        pieces, marked, length = re.split(f"([{BEGIN}{END}])", text), [], 0
        for piece in pieces:
            if piece == BEGIN:
                marked.append((length, length))
            elif piece == END:
                marked[-1] = marked[-1][0], length
            else:
                length += len(piece)
        return re.sub(f"[{BEGIN}{END}]", "", text), marked

    def _hide(self, value: Any) -> Any:
        """Replace each special token that is spelled in a value by its placeholder."""
        if isinstance(value, str):
            return self._spelled.sub(
                lambda found: self._placeholders[found[0]], re.sub(f"[{MARK}{BEGIN}{END}{TAG}]", "\ufffd", value)
            )
        if isinstance(value, dict):
            return {self._hide(key): self._hide(item) for key, item in value.items()}
        return [self._hide(item) for item in value] if isinstance(value, list) else value

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode rendered text; return the tokens, and the (begin, end) of each in the text."""
        problem = f"messages: the tokenizer has no tokens for a conversation that is rendered as {text[:80]!r} ..."
        if MARK not in text:
            with wrap_tokenizer_errors(problem):
                # verbose=False: it would warn of a text longer than the model's context, which its callers shorten.
                encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            return encoded["input_ids"], encoded["offset_mapping"]
        # `_literal` encodes a placeholder as one token, and a special token as characters. So replace the template's
        # special tokens by placeholders, and the placeholders of spelled ones by their characters.
        swap = self._placeholders | {placeholder: content for content, placeholder in self._placeholders.items()}
        pieces, origins, begin = [], [], 0  # origins: for each character of the pieces, its position in `text`
        for piece in self._spelled_or_placeholder.split(text):
            pieces.append(swap.get(piece, piece))
            origins += [begin] * len(swap[piece]) if piece in swap else range(begin, begin + len(piece))
            begin += len(piece)
        origins.append(len(text))
        with wrap_tokenizer_errors(problem):
            encoded = self._literal.encode("".join(pieces), add_special_tokens=False)
        tokens: list[Any] = [self._token_of.get(token, token) for token in encoded.ids]
        return tokens, [(origins[begin], origins[end]) for begin, end in encoded.offsets]

    def _weigh(
        self, text: str, marked: list[tuple[int, int]], messages: list[Message], variables: dict[str, Any]
    ) -> list[tuple[int, int]]:
        """Return the `marked` spans of `text` without those of answers of weight 0.

        Raises:
            ConfigError: a span has other words than of answers, or it is unknown which span is of which answer.
        """
        answers = [message for message in messages if message["role"] == "assistant"]
        # Other keys, such as thoughts and tool calls, may be in spans of their own.
        only_contents = all(
            answer.get("content", "").strip() and answer.keys() <= {"role", "content", "weight"} for answer in answers
        )
        tagged, spans = self._render(messages, variables, with_tags=True)
        owners = [
            [messages[ord(tag) - 0x100000] for tag in TAGGED.findall(tagged[begin:end])] for begin, end in spans or ()
        ]
        if len(owners) != len(marked):
            problem = "its chat template marks another number of answers when their contents change"
            raise ConfigError(f"tokenizer: {problem}, so it is unknown what it marks")
        kept = []
        for index, ((begin, end), owner) in enumerate(zip(marked, owners, strict=True)):
            if any(message["role"] != "assistant" for message in owner) or (only_contents and not owner):
                problem = f"its chat template marks {text[begin:end]!r:.60} as an answer"
                remedy = "write {% generation %} around the content of the assistant's messages"
                raise ConfigError(f"tokenizer: {problem}, so other words would be training targets; {remedy}")
            owner = owner or (answers[index : index + 1] if len(answers) == len(marked) else answers)
            weights = {message.get("weight", 1) for message in owner}
            if len(weights) > 1:
                problem = f"the chat template marks {text[begin:end]!r:.60}, in which answer is unknown"
                raise ConfigError(f"messages: {problem}, and one of them has weight 0")
            kept += [(begin, end)] * (weights != {0})
        _check_whole(tagged, spans or [], messages)
        return kept

    def _find_answers(self, text: str, messages: list[Message], variables: dict[str, Any]) -> list[tuple[int, int]]:
        """Return the (begin, end) of each answer in `text`, for a template that does not mark them."""
        answers = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            if index == 0:
                problem = f"messages: a conversation begins with an answer, {message.get('content')!r:.60},"
                raise ConfigError(f"{problem} which cannot be located; put a user message before it")
            before = self._render(messages[:index], variables, add_generation_prompt=True)[0]
            after = self._render(messages[: index + 1], variables)[0]
            begin, answer = len(before), after[len(before) :]
            # Qwen3's template renders thoughts only in the last answer. An earlier answer is in `text` without its
            # beginning, from some character at or before its content: try each.
            content_begin = max(0, answer.rfind(self._hide(message.get("content", ""))))
            endings = (answer[i:] for i in range(content_begin + 1))
            found = next((ending for ending in endings if text.startswith(ending, begin)), None)
            if found is None or not (text.startswith(before) and after.startswith(before)):
                raise ConfigError(
                    "tokenizer: its chat template does not render an answer after the generation prompt, or renders it "
                    "differently when more messages follow, so it cannot be located; save the tokenizer, put "
                    "{% generation %} and {% endgeneration %} around answers in its chat_template.jinja, and name that "
                    "folder"
                )
            answers.append((begin, begin + len(found)))
        return answers


def _check_whole(tagged: str, spans: list[tuple[int, int]], messages: list[Message]) -> None:
    """Raise ConfigError if only the begin or the end of an answer's content is in spans, and the other one outside."""
    inside = Counter(tag for begin, end in spans for tag in TAGGED.findall(tagged[begin:end]))
    for tag, count in Counter(TAGGED.findall(tagged)).items():
        if inside[tag] % 2 and inside[tag] < count:
            content = messages[ord(tag) - 0x100000]["content"]
            problem = f"its chat template marks a part of the answer {content!r:.60}, so the rest would be no target"
            raise ConfigError(f"tokenizer: {problem}; write {{% generation %}} around the whole content")


def _write_mark(tag: re.Match[str]) -> str:
    """Return what renders BEGIN or END in place of a generation tag: tags on both sides strip the same whitespace."""
    left, is_end, right = tag.groups()
    if is_end:
        return f"{{%{left} endif %}}{{{{ '{END}' }}}}{{% if true {right}%}}{{% endif %}}"
    return f"{{%{left} if true %}}{{% endif %}}{{{{ '{BEGIN}' }}}}{{% if true {right}%}}"


def encode_row(template: ChatTemplate, document: str, begins: bool = True) -> tuple[str, dict[str, list[int]]]:
    """Return the content of a conversation and its row of a corpus, {column: values}; {} if no answer is a target.

    `begins` is ignored: data.prepare calls encode_row and encode_text alike.
    """
    conversation = parse_conversation(document)
    if not conversation["messages"]:
        return "", {}
    if lost := template.keys_not_rendered(conversation):
        begin = conversation["messages"][0].get("content")
        problem = f"the chat template of the tokenizer does not render {', '.join(map(repr, sorted(lost)))}"
        remedy = "take them out, or name a tokenizer whose template renders them"
        raise ConfigError(f"messages: {problem} of the conversation that begins {begin!r:.60}; {remedy}")
    tokens, answers = template.encode(**conversation)
    columns = {"input_ids": tokens, "assistant_masks": answers}
    return get_content(document), columns if any(answers) else {}
