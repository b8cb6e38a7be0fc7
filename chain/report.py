"""What the commands print."""

import json
from typing import Any

from chain.settings import ChainConfig


def print_result(config: ChainConfig, facts: dict[str, Any], lines: list[str]) -> None:
    """Print lines, or one JSON object if JSON is asked for."""
    print(json.dumps(facts) if config.json else "\n".join(lines))
