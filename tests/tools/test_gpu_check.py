"""`tools.gpu_check`: parts that are resumed, and a report without names; test_fake_gpus.py rehearses it."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tools import gpu_check
from tools.gpu_check import Part, anonymous, has_result, page, run_parts


@pytest.fixture(autouse=True)
def of_fake_machine(monkeypatch):
    facts = {"gpus": 2, "gpu": "NVIDIA H100", "driver": "580.1", "versions": {"torch": "2.13.0"}}
    monkeypatch.setattr(gpu_check, "machine", lambda: dict(facts))
    return facts


def part(name, result: Any, minutes=1.0, calls=None):
    def run() -> Any:
        if calls is not None:
            calls.append(name)
        if isinstance(result, Exception):
            raise result
        return result() if callable(result) else result

    return Part(name, f"what {name} is", minutes, run)


def test_lists_parts_first_and_reruns_only_those_without_result(tmp_path, capsys):
    calls, report = [], tmp_path / "new" / "report.json"
    parts = [part("one", {"holds": True}, calls=calls), part("two", RuntimeError("first\nlast"), calls=calls)]
    record = run_parts(parts, report, 10)
    out = capsys.readouterr().out
    assert "2 x NVIDIA H100; at most 10 minutes" in out and "1 min  what one is\n         1 min  what two is\n" in out
    assert [has_result(part, record) for part in parts] == [True, False]
    assert "one: holds;" in page(parts, record) and "two: RuntimeError: first ... last" in page(parts, record)
    assert json.loads(report.read_text())["parts"]["two"]["error"] == "RuntimeError: first ... last"
    parts[1] = part("two", {"holds": False}, calls=calls)
    record = run_parts(parts, report, 10)
    assert "has a result  what one is" in capsys.readouterr().out
    assert calls == ["one", "two", "two"] and "two: DOES NOT HOLD" in page(parts, record)


def test_other_machine_starts_new_report(tmp_path, of_fake_machine, monkeypatch):
    calls, report = [], tmp_path / "report.json"
    parts = [part("one", {}, calls=calls)]
    run_parts(parts, report, 10)
    monkeypatch.setattr(gpu_check, "machine", lambda: of_fake_machine | {"driver": "590"})
    run_parts(parts, report, 10)
    assert calls == ["one", "one"]


def test_stops_when_time_is_over(tmp_path):
    """A part is not begun if it would take longer than what is left, and ended if it does."""
    calls = []
    parts = [part("slow", lambda: time.sleep(60), 0.01, calls), part("later", {}, 5, calls)]
    record = run_parts(parts, tmp_path / "report.json", 0.02)
    assert record["parts"]["slow"]["error"].startswith("OutOfTimeError: stopped after 1 s")
    assert calls == ["slow"] and "later: not run yet" in page(parts, record)


def test_part_that_failed_before_comes_last(tmp_path):
    """Also one that took all the time: the next call runs the others first."""
    calls, report = [], tmp_path / "report.json"
    slow, other = part("slow", lambda: time.sleep(60), 0.01, calls), part("other", {}, 0.01, calls)
    run_parts([slow, other], report, 0.015)
    record = run_parts([slow, other], report, 0.03)
    assert calls[:3] == ["slow", "other", "slow"] and has_result(other, record), calls


def test_report_has_no_names_of_machine_user_or_paths(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node12.cluster.example")
    private = [f"{ROOT}/train.py", f"{Path.home()}/x", "/tmp/tmpab12/run", socket.gethostname(), "10.1.2.3:29500"]
    shown = anonymous({"error": f"failed: {' '.join(private)}", "tokens_per_second": [1.5], "kept": "bf16 1/2 fp32"})
    assert shown["error"] == "failed: train.py x run ... ...:29500"
    addresses = anonymous("c10::Error at gpu.cpp:12:34 (node12, [fe80::1a:2b%eth0]:29500) node12.cluster.example")
    assert addresses == "c10::Error at gpu.cpp:12:34 (..., [...%eth0]:29500) ..."
    assert shown["tokens_per_second"] == [1.5] and shown["kept"] == "bf16 1/2 fp32"
