"""Conversations in rows of data, converted from the usual column names to one form.

A conversation is {"messages": [{"role": ..., "content": ..., ...}, ...]}, optionally with "tools" and
"chat_template_kwargs" for the chat template. Its document is that object as JSON.
"""

import json
from collections.abc import Iterable
from typing import Any

Message = dict[str, Any]
"""A `role` and a `content`, and other keys that a chat template may render, such as `tool_calls`. An answer whose
`weight` is 0 is not a training target."""

BESIDE_MESSAGES = "system", "tools", "chat_template_kwargs"
COLUMNS = "messages", "prompt", "response", "completion", *BESIDE_MESSAGES
"""Columns that may hold a conversation or a part of it."""


def read_document(row: Any, text_column: str) -> tuple[str, bool | None, list[str]]:
    """Return the document of a row of data, whether it is a conversation, and the unused columns.

    A null is an empty document, "". It may be among texts or conversations, so the second value is None.

    Raises:
        ValueError: The row holds no document; the message says what it holds instead.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.60} is not a row, an object with the key {text_column!r}")
    answers = [name for name in ("response", "completion") if name in row]
    if text_column in row:
        names = [text_column]
    elif "messages" in row:
        names = ["messages"]
    elif "prompt" in row and answers:
        names = ["prompt", answers[0]]
    else:
        wanted = f"no text_column {text_column!r}, nor messages, nor prompt and response"
        raise ValueError(f"{wanted}; there are {list(row)!r:.200}")
    if len(names) == 1 and isinstance(row[names[0]], str | None):
        return row[names[0]] or "", None if row[names[0]] is None else False, []
    if len(names) == 1:
        messages = _messages(names[0], row[names[0]])
    else:
        # An answer inside a prompt is context for the next one, not a training target.
        prompt = [{"weight": 0, **message} for message in _messages(names[0], row[names[0]], role="user")]
        messages = prompt + _messages(names[1], row[names[1]], role="assistant")
    if row.get("system"):
        if not isinstance(row["system"], str) or any(message["role"] == "system" for message in messages):
            raise ValueError(f"'system' is {row['system']!r:.60}; it must be a text, and the only one of the system")
        messages.insert(0, {"role": "system", "content": row["system"]})
    conversation = {"messages": messages, **_template_arguments(row)}
    unused = [name for name in row if name not in (*names, *BESIDE_MESSAGES)]
    return json.dumps(conversation, ensure_ascii=False), True, unused


def _messages(name: str, value: Any, role: str | None = None) -> list[Message]:
    """Return the messages in the column `name`.

    It is a list of them or, where all are of one `role`, a text.
    """
    if role and isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name!r} is {value!r:.60}, which is not a text, nor a list of messages")
    for message in value:
        fields: list[Any] = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if fields[-1] is None and isinstance(message, dict) and message.get("tool_calls"):
            fields[-1] = ""  # a message that calls a tool may have no content
        if not all(isinstance(text, str) for text in fields):
            raise ValueError(f"{name!r} has {message!r:.60}, which is not a message: a role and a content, both texts")
        weight = message.get("weight")
        if weight not in (None, 0, 1) or (weight and message["role"] != "assistant"):
            raise ValueError(f"{name!r} has the weight {weight!r} of {message['role']!r}; it is 0 or, of an answer, 1")
    # In a table, keys that only other rows have are null.
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _template_arguments(row: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template in a row in addition to messages; each may be encoded as JSON."""
    arguments = {}
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        value = row.get(name)
        value = json.loads(value) if isinstance(value, str) and value else value
        if value and not isinstance(value, kind):
            raise ValueError(f"{name!r} is {row[name]!r:.60}, which is not a {kind.__name__}")
        if value:
            arguments[name] = (
                value if not isinstance(value, dict) else {key: item for key, item in value.items() if item is not None}
            )
    return arguments


def parse_conversation(document: str) -> dict[str, Any]:
    """Return the conversation of a document; one without messages for an empty document."""
    return json.loads(document) if document else {"messages": []}


def get_content(document: str) -> str:
    """Return the contents of all messages of a conversation, joined by line ends."""
    return "\n".join(message.get("content", "") for message in parse_conversation(document)["messages"])


def get_identity(document: str) -> str:
    """Return the roles and contents as JSON, equal for the same conversation in rows of different form."""
    messages = parse_conversation(document)["messages"]
    return json.dumps([(message["role"], message.get("content", "").strip()) for message in messages])


def find_template_keys(conversation: dict[str, Any]) -> set[str]:
    """Return the keys that a chat template should render in addition to roles and contents."""
    message_keys: Iterable[str] = (key for message in conversation["messages"] for key in message)
    template_keys = {"tools"} & conversation.keys() | conversation.get("chat_template_kwargs", {}).keys()
    return {*message_keys, *template_keys} - {"role", "content", "weight"}
