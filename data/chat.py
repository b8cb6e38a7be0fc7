"""Conversations in rows of data, in one form, whatever the row calls its parts.

A conversation is {"messages": [{"role": who, "content": says what, ...}, ...]}, with what else its template is to know:
"tools" and "chat_template_kwargs". As a document it is the JSON of that.
"""

import json
from collections.abc import Iterable
from typing import Any

Message = dict[str, Any]
"""Who says (`role`) what (`content`); and more, which a chat template may write, such as `tool_calls`. An answer whose
`weight` is 0 is not learnt from."""

BESIDE_MESSAGES = "system", "tools", "chat_template_kwargs"
COLUMNS = "messages", "prompt", "response", "completion", *BESIDE_MESSAGES
"""Columns that may hold a conversation or a part of it."""


def read_document(row: Any, text_column: str) -> tuple[str, bool | None, list[str]]:
    """Return the document of a row of data, whether it is a conversation, and the columns that are no part of one.

    A null is an empty document: "", which may stand among texts (False) or conversations (True), so None.

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
        # An answer that stands in a prompt is what the next one goes on from, and not what is to be learnt.
        asked = [{"weight": 0, **message} for message in _messages(names[0], row[names[0]], role="user")]
        messages = asked + _messages(names[1], row[names[1]], role="assistant")
    if row.get("system"):
        if not isinstance(row["system"], str) or any(message["role"] == "system" for message in messages):
            raise ValueError(f"'system' is {row['system']!r:.60}; it must be a text, and the only one of the system")
        messages.insert(0, {"role": "system", "content": row["system"]})
    conversation = {"messages": messages, **_told_to_the_template(row)}
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
        said: list[Any] = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if said[-1] is None and isinstance(message, dict) and message.get("tool_calls"):
            said[-1] = ""  # what calls a tool may say nothing besides
        if not all(isinstance(text, str) for text in said):
            raise ValueError(f"{name!r} has {message!r:.60}, which is not a message: a role and a content, both texts")
        weight = message.get("weight")
        if weight not in (None, 0, 1) or (weight and message["role"] != "assistant"):
            raise ValueError(f"{name!r} has the weight {weight!r} of {message['role']!r}; it is 0 or, of an answer, 1")
    # Where rows are a table, a key that only others have is null.
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _told_to_the_template(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a row has for the chat template besides messages; each may be given as JSON, as in a table."""
    told = {}
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        value = row.get(name)
        value = json.loads(value) if isinstance(value, str) and value else value
        if value and not isinstance(value, kind):
            raise ValueError(f"{name!r} is {row[name]!r:.60}, which is no {kind.__name__}")
        if value:
            told[name] = (
                value if not isinstance(value, dict) else {key: item for key, item in value.items() if item is not None}
            )
    return told


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
    """Return the keys, besides roles and contents, that a chat template should render."""
    of_messages: Iterable[str] = (key for message in conversation["messages"] for key in message)
    of_template = {"tools"} & conversation.keys() | conversation.get("chat_template_kwargs", {}).keys()
    return {*of_messages, *of_template} - {"role", "content", "weight"}
