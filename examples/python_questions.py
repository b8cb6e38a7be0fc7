"""Write questions about Python's library and their answers, as conversations: python -m examples.python_questions FILE.

The answers are the first paragraphs of docstrings, which are parsed and not imported, and of the topics of `help()`.
"""

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from data.prepare.sources import LIBRARY_FOLDER, find_library_files


def find_answers() -> Iterator[tuple[str, str]]:
    """Yield questions and texts whose first paragraph answers them."""
    for topic, text in topics.items():
        yield f'What is "{topic}" in Python?', text.partition("\n\n")[2]  # without the title
    for file in find_library_files():
        module = ".".join(Path(file).relative_to(LIBRARY_FOLDER).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(Path(file).read_bytes())
        yield f"What is the module {module} for?", ast.get_docstring(tree) or ""
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                yield f"What does the {kind} {node.name} of {module} do?", ast.get_docstring(node) or ""


def main(arguments: list[str] | None = None) -> None:
    """Write a line of JSON for each question that has an answer, for questions of the same name the first."""
    parser = argparse.ArgumentParser("python -m examples.python_questions")
    parser.add_argument("file", help="the file to write, a conversation on each line")
    file = parser.parse_args(arguments).file
    answers: dict[str, str] = {}
    for question, text in find_answers():
        if answer := " ".join(text.partition("\n\n")[0].split()):
            answers.setdefault(question, answer)
    with open(file, "w", encoding="utf-8") as out:
        for question, answer in answers.items():
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
