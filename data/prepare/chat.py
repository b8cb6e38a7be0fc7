"""Conversations in rows of data, converted from the usual column names to one form.

A conversation is {"messages": [{"role": ..., "content": ..., ...}, ...]}, optionally with "tools" and
"chat_template_kwargs" for the chat template. Its document is that object as JSON.
"""

import json
import re
from typing import Any

BEGIN_OF_MESSAGES = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content|from|value)\1\s*:""")

Message = dict[str, Any]
"""A `role` and a `content`, and other keys that a chat template may render, such as `tool_calls`. An answer whose
`weight` is 0 is not a training target."""

NAMES_OF_ASSISTANT = {"assistant", "model", "ai", "bot", "chatbot", "gpt", "llm"}
"""Roles with these names, in any case, are meant to be `assistant`; as they are, no token would be a target."""

COLUMNS = "messages", "prompt", "response", "completion", "system", "tools", "chat_template_kwargs"
"""Columns that may hold a conversation or a part of it; other columns are ignored."""


def read_document(row: Any, text_column: str) -> tuple[str, bool | None]:
    """Return the document of a row of data, and whether it is a conversation.

    The first of these that is not empty decides: the text column, `messages`, `prompt` with an answer. So rows of
    several forms may be in one table, where each has nulls or empty values in the columns of the others. If all are
    null or the text is empty, the document is empty, "". It may be among texts or conversations, so the second value is
    None.

    Raises:
        ValueError: The row holds no document; the message says what it holds instead.
    """
    if is_messages(row):
        row = {"messages": row}
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.60} is not an object with the key {text_column!r}")
    parsed = {text_column, "messages", "prompt", "response", "completion", "system"} - {"text"}
    row = {name: _parse_messages(name, value) if name in parsed else value for name, value in row.items()}
    answers = [name for name in ("response", "completion") if name in row]
    answer = max(answers, key=lambda name: _fullness(row[name]), default=None)
    if len(answers) == 2 and min(_fullness(row[name]) for name in answers) == 2:
        raise ValueError("the row has a response and a completion; leave one of them null")
    fullness = {name: _fullness(row.get(name)) for name in (text_column, "messages")}
    if "prompt" in row and answer:
        fullness["prompt"] = max(_fullness(row["prompt"]), _fullness(row[answer]))
    name = max(fullness, key=fullness.__getitem__)  # the first of the fullest
    if not fullness[name]:
        if fullness.keys() & row.keys():
            return "", None
        wanted = f"no text_column {text_column!r}, nor messages, nor prompt and response"
        raise ValueError(f"{wanted}; the columns are {list(row)!r:.200}")
    if name == text_column != "messages" and isinstance(row[name], str):
        return (row[name], False) if row[name] else ("", None)
    if name == "prompt" != text_column and answer:
        # An answer inside a prompt is context for the next one, not a training target.
        prompt = [{"weight": 0, **message} for message in _messages("prompt", row["prompt"], role="user")]
        messages = prompt + _messages(answer, row[answer], role="assistant")
    else:
        messages = _messages(name, row[name])
    if row.get("system"):
        if not isinstance(row["system"], str) or any(message["role"] == "system" for message in messages):
            remedy = "it must be a text, and no message may have the role system"
            raise ValueError(f"'system' is {row['system']!r:.60}; {remedy}")
        messages.insert(0, {"role": "system", "content": row["system"]})
    return json.dumps({"messages": messages, **_template_arguments(row)}, ensure_ascii=False), True


def is_messages(value: Any) -> bool:
    """Return whether a value is a list of messages, valid or not: with roles and contents, or in ShareGPT's form."""
    pairs = {"role", "content"}, {"role", "tool_calls"}, {"from", "value"}
    items = value if isinstance(value, list) else []
    return any(isinstance(item, dict) and any(pair <= item.keys() for pair in pairs) for item in items)


def _fullness(value: Any) -> int:
    """Return 0 for null, 1 for an empty list or a text without characters that print, 2 for other values."""
    return 0 if value is None else 1 + ((value.strip() if isinstance(value, str) else value) not in ("", []))


def _parse_messages(name: str, value: Any) -> Any:
    """Return the messages that a text has as JSON, as tables often store them; other values and texts as they are.

    Raises:
        ValueError: The text begins as messages do, but is no JSON: it is cut off, or Python's form of a list.
    """
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        if not BEGIN_OF_MESSAGES.match(value):
            return value
        remedy = "write the whole list with json.dumps"
        raise ValueError(f"{name!r} is {value!r:.60}, which begins as messages do, but is not JSON; {remedy}") from None
    is_one = isinstance(parsed, dict) and name in ("prompt", "response", "completion")
    return parsed if name == "messages" or is_messages([parsed] if is_one else parsed) else value


def _messages(name: str, value: Any, role: str | None = None) -> list[Message]:
    """Return the messages in the column `name`: a list of them or, if it is of one `role`, one message or a text."""
    if role and isinstance(value, str):
        return [{"role": role, "content": value}]
    if role and isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        remedy = "; cast the column to a string, as by pyarrow's cast('string')" if isinstance(value, bytes) else ""
        raise ValueError(f"{name!r} is {value!r:.60}, which is not a text, nor a list of messages{remedy}")
    for message in value:
        fields: list[Any] = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if fields[-1] is None and isinstance(message, dict) and message.get("tool_calls"):
            fields[-1] = ""  # a message that calls a tool may have no content
        if not all(isinstance(text, str) for text in fields):
            raise ValueError(f"{name!r} has {message!r:.60}, which is not a message: a role and a content, both texts")
        if (role_of := message["role"]) != "assistant" and role_of.casefold() in NAMES_OF_ASSISTANT:
            raise ValueError(f"{name!r} has a message of role {role_of!r}; answers must have the role 'assistant'")
        weight = message.get("weight")
        if weight not in (None, 0, 1) or (weight and message["role"] != "assistant"):
            problem = f"{name!r} has a message of role {message['role']!r} with weight {weight!r}"
            raise ValueError(f"{problem}; use 0 or, for role 'assistant', 1")
    return [_without_nulls(message) for message in value]


def _without_nulls(item: dict[str, Any]) -> dict[str, Any]:
    """Remove keys whose value is null: many programs write them for what a message lacks."""
    return {key: value for key, value in item.items() if value is not None}


def without_added_nulls(value: Any) -> Any:
    """Remove keys whose value is null at every depth of a value read from Arrow.

    There, all objects in one place have the same keys, also those that only other rows have.
    """
    if isinstance(value, list):
        return [without_added_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_added_nulls(item) for key, item in value.items() if item is not None}
    return value


def _template_arguments(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row's arguments for the chat template other than the messages; a value may be JSON text."""
    arguments = {}
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        value = row.get(name)
        value = json.loads(value) if isinstance(value, str) and value else value
        if value and not isinstance(value, kind):
            raise ValueError(f"{name!r} is {row[name]!r:.60}, which is not a {kind.__name__}")
        if value:
            arguments[name] = _without_nulls(value) if isinstance(value, dict) else value
    return arguments


def parse_conversation(document: str) -> dict[str, Any]:
    """Return the conversation of a document; one without messages for an empty document."""
    return json.loads(document) if document else {"messages": []}


def get_content(document: str) -> str:
    """Return the contents of all messages of a conversation, joined by newlines."""
    return "\n".join(message.get("content", "") for message in parse_conversation(document)["messages"])


def get_identity(document: str) -> str:
    """Return the roles and contents as JSON, equal for the same conversation in rows of different form."""
    messages = parse_conversation(document)["messages"]
    return json.dumps([(message["role"], message.get("content", "").strip()) for message in messages])


def find_template_keys(conversation: dict[str, Any]) -> set[str]:
    """Return the keys that a chat template should render in addition to roles and contents."""
    message_keys = {key for message in conversation["messages"] for key in message}
    template_keys = {"tools"} & conversation.keys() | conversation.get("chat_template_kwargs", {}).keys()
    return (message_keys | template_keys) - {"role", "content", "weight"}
