"""The report of all experiments in a lab."""

from config.paths import expand_user_path
from experiments.log import publish
from experiments.settings import ReportConfig


def main(config: ReportConfig) -> None:
    """Print the table of all experiments, and write it and the figure into the lab."""
    print(publish(expand_user_path("lab", config.lab)))
