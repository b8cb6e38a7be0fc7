"""tools.research: ideas are tested, kept and dropped, and nothing is lost on the way."""

import json
import os
import re
import signal
import threading
import time

import pytest

from tests.conftest import environment
from tests.support import forked
from tests.tools.experiment.conftest import fake_scorer
from tools.experiment import experiment, score
from tools.experiment.experiment import Experiment
from tools.research import attempt, code, head, ledger
from tools.research.ledger import locked_ledger
from tools.research.log import collect
from tools.research.state import Chain

COLUMNS = (
    "id time kind parent commit candidate idea note diff settings status decision loss difference low high "
    "seeds_baseline seeds_candidate p level wealth seconds cpu_seconds parameters flops speed verify message log"
)


def interrupted(*_):
    """In place of a function during which the process is killed."""
    raise KeyboardInterrupt


@pytest.fixture
def decided(research, monkeypatch):
    """Return a function that adds an idea with a result to a chain, without training."""
    monkeypatch.setattr(head, "measure_baseline", lambda config, chain: chain.rows[0] | {"loss": "1", "message": ""})
    research.start()

    def test(self, changed):
        with locked_ledger(self.lab) as file:
            number = 1 + max([0, *(int(row["id"]) for row in file.rows if row["id"])])
            cells = self.cells | {"id": number, "candidate": f"digest {number}", "level": 0.001}
            return file.append(**cells, status=decided.status)

    monkeypatch.setattr(attempt.Attempt, "test", test)

    def decided(idea, status="better", *words):
        decided.status = status
        found = research("try", idea, *words)
        return int(research.rows()[-1]["id"]) if found.out.startswith("#") else found

    return decided


def test_better_idea_is_kept_on_the_branch(research):
    started = research.start()
    assert "with 80% power by 12 seeds" in started.text and research.git("branch", "--show-current") == "research/lab"
    found = research("try", "--model.mlp relu2", "--note=more zeros", "--jobs=2")
    assert found.code == 0 and "#1 better: --model.mlp relu2 changes the loss by -" in found.text
    assert len(found.out) < 1000
    kept = research("keep", "1", "--jobs=2")
    assert kept.code == 0 and "baseline: loss" in kept.text
    assert (research.root / "configs" / "lab.yaml").read_text().endswith("mlp: relu2\n")
    assert not research.git("status", "--porcelain") and "more zeros" in research.git("log", "-1")
    last = research.rows()[-1]
    assert last["commit"] == research.git("rev-parse", "HEAD") and float(last["difference"]) < -5
    # the new baseline has the digest of the candidate, and seeds that its selection has not seen
    assert {name.rpartition("-")[2] for name in research.started()} == {"10000", "10001", "10002"}
    assert last["candidate"] == research.rows()[3]["candidate"]
    assert " ".join(last) == COLUMNS, "people's scripts read these columns"
    table = research("log").out
    assert re.search(r"#1 --model.mlp relu2 +20\S+ \S+ +start +better +kept +-", table) and "1 ideas, 1 better" in table
    spent, heads, claims, ideas = collect(Chain(research.lab, research.rows()))
    assert len(heads) == 2 and claims == ideas["kept"] and claims[0][1] < heads[0][1]
    assert heads[1][0] == pytest.approx(spent) and (research.lab / "chain.png").stat().st_size > 1000


def test_ideas_without_a_result_cost_no_wealth(research):
    research.start()
    assert research("try", "--optimizer.lr 0").code == 11
    failed = research.rows()[-1]
    assert (failed["status"], failed["wealth"]) == ("failed", "0.025") and "the loss is nan" in failed["message"]
    for status, outcome in {"failed": "failed", "identical": "identical", "futile": "other"}.items():
        rows = [row | {"status": status} if row["kind"] == "try" else row for row in research.rows()]
        assert list(collect(Chain(research.lab, rows))[3]) == [outcome], "futile after one run, without a mean"
    assert research("try", "--model.mlp typo").code == 2
    assert research("try", "--model.mlp relu2", "--jobs=2").code == 0
    again = research("try", "--model.mlp=relu2", "--json")
    assert json.loads(again.out)["tried_before"] and not research.started()
    tested = research.rows()[-1]
    assert (tested["id"], tested["level"]) == ("2", failed["level"]) and float(tested["p"]) < float(tested["level"])


@pytest.mark.parametrize(
    ("idea", "message"),
    [
        ("--steps 200", "steps x global_batch_size x seq_len: 1,600 training tokens instead of 800"),
        ("--global_batch_size 2", "1,600 training tokens instead of 800"),
        ("--steps 50 --global_batch_size 2", None),
        ("--data.num_samples 50", "data.num_samples: the recipe fixes the data"),
        ("--evaluation.num_samples 4", "evaluation.num_samples: the recipe fixes"),
        ("--optimizer.lr 2 --seed 3", "seed: is set for each run"),
        ("--init_from gpt2", "init_from: the recipe fixes the data, the evaluation and the initial weights"),
        ("--global_batch_size null", "3,200 training tokens instead of 800"),
        ("--global_batch_size 4 --steps 30", "960 training tokens instead of 800"),
        ("--global_batch_size 4 --steps 30 --schedule.batch_warmup_from 2 --schedule.batch_warmup_steps 10", None),
    ],
)
def test_idea_keeps_the_task_and_the_training_tokens(idea, message, research, monkeypatch):
    research.start()
    monkeypatch.setattr(Experiment, "compare", interrupted)
    num_rows, found = len(research.rows()), research("try", idea)
    assert found.code == (2 if message else 130) and (not message or message in found.text)
    assert len(research.rows()) == num_rows + (not message), "a refused idea has no number"


def test_killed_test_resumes_with_its_number_and_level(research, monkeypatch):
    research.start()
    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "compare", interrupted)
        assert research("try", "--model.mlp relu2").code == 130
    assert research.rows()[-1]["status"] == "running"
    assert json.loads(research("log", "--json").out)["running"] == [1]
    research("try", "--optimizer.lr 2.0", "--jobs=2")
    assert research("try", "--model.mlp relu2", "--jobs=2").code == 0
    (first,) = (row for row in research.rows() if row["id"] == "1" and row["status"] == "running")
    last = research.rows()[-1]
    assert (last["id"], last["status"], last["level"]) == ("1", "better", first["level"])


def test_undecided_idea_continues_with_more_seeds(research, monkeypatch):
    research.start()
    monkeypatch.setattr(experiment, "decide", lambda *_: "unknown")
    monkeypatch.setattr(experiment, "conditional_power", lambda *_: 1.0)
    assert research("try", "--optimizer.lr 1.1", "--max_seeds=3", "--jobs=2").code == 10
    level = research.rows()[-1]["level"]
    assert research("try", "--optimizer.lr 1.1", "--max_seeds=4", "--jobs=2").code == 10
    last = research.rows()[-1]
    assert (last["id"], last["seeds_candidate"], last["level"]) == ("1", "4", level)


def test_keep_commits_edits_and_drop_undoes_them(research, decided):
    train, other = research.root / "train.py", research.root / "new.py"
    before = train.read_text()
    train.write_text(before + "# faster\n")
    other.write_text("new\n")
    number = decided(".")
    other.write_text("newer\n")
    assert "the working tree has other changes in new.py" in research("keep", str(number)).text
    other.write_text("new\n")
    assert research("keep", str(number)).code == 0
    assert research.git("show", "HEAD:train.py").endswith("# faster") and not research.git("status", "--porcelain")
    train.write_text(before + "# slower\n")
    other.unlink()
    number = decided(". --optimizer.lr 2", "worse", "--note=slower")
    assert f"#{number} . --optimizer.lr 2 (slower)" in research("log").out
    assert "removed from the working tree" in research("drop", str(number)).text
    assert train.read_text() == before + "# faster\n" and other.read_text() == "new\n"
    assert not research.git("status", "--porcelain")
    assert research("drop", str(number)).code == 0, "again"


@pytest.mark.parametrize("command", ["keep", "drop", "combine"])
def test_moved_lab_without_commits_has_ideas(command, research, decided):
    train = research.root / "train.py"
    before = train.read_text()
    train.write_text(before + "# faster\n")
    decided(". --optimizer.lr 2")
    research.git("reflog", "expire", "--expire=now", "--all")
    research.git("gc", "--quiet", "--prune=now")
    research.lab.rename(moved := research.lab.with_name("moved"))
    assert research(command, "1", f"--lab={moved}").code == 0
    assert train.read_text() == before + "# faster\n" * (command != "drop")
    if command == "keep":
        assert not research.git("status", "--porcelain") and "lr: 2" in research.git("show", "HEAD:configs/lab.yaml")


def test_keep_refuses_what_is_not_better(decided, research):
    decided("--optimizer.lr 2", "unknown")
    assert "1 is unknown, not better; --unproven accepts it" in research("keep", "1").text
    assert research("keep", "1", "--unproven").code == 0
    assert research.rows()[-1]["decision"] == "kept unproven"
    decided("--optimizer.lr 3", "failed")
    assert research("keep", "2", "--unproven").code == 2


def test_dropped_idea_can_be_kept(decided, research):
    number = str(decided("--optimizer.lr 2"))
    assert research("drop", number).code == research("keep", number).code == 0
    assert research.rows()[-1]["decision"] == "kept" and "lr: 2" in research.git("show", "HEAD:configs/lab.yaml")


def test_second_of_two_keeps_is_refused(decided, research):
    first, second = decided("--optimizer.lr 2"), decided("--optimizer.lr 3")
    assert research("keep", str(second)).code == 0
    refused = research("keep", str(first))
    assert refused.code == 2 and "try it again" in refused.text
    assert research.git("rev-list", "--count", "main..research/lab") == "1"


@pytest.mark.parametrize("place", ["before the files", "before the branch"])
def test_killed_keep_is_finished_by_the_next_command(decided, research, monkeypatch, place):
    decided("--optimizer.lr 2")
    with monkeypatch.context() as patch:
        if place == "before the files":
            patch.setattr(head, "move_branch", interrupted)
        else:
            git = code.git
            patch.setattr(code, "git", lambda *words: interrupted() if words[0] == "update-ref" else git(*words))
        assert research("keep", "1").code == 130
    assert research.git("rev-list", "--count", "main..research/lab") == "0"
    assert research("log").code == 0
    assert research.git("rev-parse", "research/lab") == research.rows()[-1]["commit"]
    assert not research.git("status", "--porcelain")


def test_edits_after_a_killed_keep_survive(decided, research, monkeypatch):
    decided("--optimizer.lr 2")
    with monkeypatch.context() as patch:
        patch.setattr(head, "move_branch", interrupted)
        research("keep", "1")
    recipe = research.root / "configs" / "lab.yaml"
    recipe.write_text(edited := recipe.read_text() + "# edited\n")
    found = research("log")
    assert found.code == 2 and "other changes in configs/lab.yaml; stash them first" in found.text
    assert recipe.read_text() == edited


@pytest.mark.usefixtures("ascii_locale")
def test_recipe_keeps_its_comments_in_another_locale(decided, research):
    recipe = research.root / "configs" / "lab.yaml"
    recipe.write_bytes(recipe.read_bytes() + "# é\n".encode())
    decided(". --optimizer.lr 2")
    assert research.git("show", f"{research.rows()[-1]['commit']}:configs/lab.yaml").endswith("# é")


def test_combined_ideas_are_one_candidate(decided, research):
    train = research.root / "train.py"
    text = train.read_text()
    train.write_text("# above\n" + text)
    decided(". --optimizer.lr 2")
    research("drop", "1")
    train.write_text(text + "# below\n")
    decided(". --model.mlp relu2")
    assert research("combine", "1", "2").code == 0
    row = research.rows()[-1]
    assert (row["kind"], row["idea"]) == ("combine", "#1 + #2")
    combined = research.git("show", f"{row['commit']}:train.py")
    assert combined.startswith("# above\n") and combined.endswith("\n# below")
    assert "lr: 2\nmodel:\n  mlp: relu2" in research.git("show", f"{row['commit']}:configs/lab.yaml")
    assert research("combine", "1", "x").code == research("combine", "1", "9").code == 2


def test_rewritten_branch_is_refused(decided, research):
    decided("--optimizer.lr 2")
    research.git("commit", "--quiet", "--allow-empty", "--message", "by hand")
    for command in (("try", "--optimizer.lr 3"), ("keep", "1"), ("log",)):
        found = research(*command)
        remedy = re.search(r"`git (update-ref refs/heads/research/lab \w+)`", found.text)
        assert found.code == 2 and remedy, found.text
    research.git(*remedy[1].split())
    assert research("log").code == 0, "while the branch is checked out"
    research.git("checkout", "--quiet", "main")
    research.git("branch", "--quiet", "-D", "research/lab")
    assert "no commit" in research("keep", "1").text


def test_unusable_lab_is_refused(research, tmp_path):
    (tmp_path / "file").touch()
    config = f"--config={research.root / 'configs' / 'lab.yaml'}"
    for command, lab, message in (
        (["log"], "typo", "has no chain"),
        (["log"], "file/lab", "has no chain"),
        (["start", config], "file/lab", "cannot be created: Not a directory"),
    ):
        found = research(*command, f"--lab={tmp_path / lab}")
        assert found.code == 2 and message in found.text
    assert not (tmp_path / "typo").exists()


def test_start_refuses_dirty_tree_and_second_chain(research):
    config = f"--config={research.root / 'configs' / 'lab.yaml'}"
    (research.root / "train.py").write_text("")
    assert "commit or stash" in research("start", config).text
    assert not (research.lab / "ledger.tsv").read_text()
    research.git("checkout", "train.py")
    assert "tracked by git" in research("start", "--config=/dev/null").text
    assert "no chain" in research("log").text
    assert research("start", config, "--seeds=2").code == 2
    assert "not a valid branch name" in research("start", config, "--branch=bad name").text
    research.start()  # nothing is left of the attempts above
    assert "choose another --lab" in research("start", config, "--branch=other").text


def test_incomplete_last_row_is_ignored_and_replaced(decided, research):
    decided("--optimizer.lr 2")
    path = research.lab / "ledger.tsv"
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1][:30])
    found = research("log")
    assert found.code == 0 and "ignoring an incomplete last row" in found.text
    assert research("drop", "1").code == 0
    assert path.read_text().startswith(whole) and research.rows()[-1]["decision"] == "dropped"
    damaged = path.read_bytes().replace(b"optimizer", b"\xff")
    path.write_bytes(damaged)
    assert research("keep", str(decided("--optimizer.lr 3"))).code == 0 and path.read_bytes().startswith(damaged)
    path.write_text(whole.replace("\tbetter\t", "\t") + "x\n")
    found = research("drop", "1")
    assert found.code == 2 and "line 3 has 28 cells instead of 29" in found.text


def test_full_disk_leaves_the_ledger_as_it_was(tmp_path, monkeypatch):
    with locked_ledger(tmp_path) as file:
        file.append(idea="first")
        before = (tmp_path / "ledger.tsv").read_bytes()
        write = os.write

        def write_part(descriptor, content):
            write(descriptor, content[:5])
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(ledger.os, "write", write_part)
            with pytest.raises(ledger.RunError, match="No space left"):
                file.append(idea="second")
        assert (tmp_path / "ledger.tsv").read_bytes() == before
        file.append(idea="a\tb\nc", note=None, level=0.123456789)
    with locked_ledger(tmp_path) as file:
        assert [row["idea"] for row in file.rows] == ["first", "a b c"] and file.rows[1]["level"] == "0.123457"


def test_ledger_is_locked_while_it_is_open(tmp_path):
    entered = threading.Event()

    def second():
        with locked_ledger(tmp_path) as file:
            entered.set()
            assert [row["idea"] for row in file.rows] == ["first"]

    with locked_ledger(tmp_path) as file:
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
        file.append(idea="first")
    thread.join()
    assert entered.is_set()


def test_confirm_uses_reserved_seeds_once(decided, research):
    assert "no idea is accepted" in research("confirm").text
    research("keep", str(decided("--model.mlp relu2")))
    research("keep", str(decided("--optimizer.lr 2.0")))
    found = research("confirm", "--seeds=3", "--jobs=2", "--data_seed=1", "--json")
    assert found.code == 0, found.text
    rows = json.loads(found.out)["rows"]
    assert [row["status"] for row in rows] == ["better", "better", "better", "worse"]
    assert all(int(name.rpartition("-")[2]) >= 10**9 for name in research.started())
    assert float(rows[0]["difference"]) == pytest.approx(-5.6, abs=2)
    num_rows = len(research.rows())
    assert research("confirm", "--seeds=3", "--data_seed=1").code == 0, "the same answer"
    assert len(research.rows()) == num_rows and not research.started()
    assert "can be used only once" in research("confirm", "--seeds=4").text
    research("keep", str(decided("--optimizer.lr 1.2")))
    found = research("confirm", "--seeds=3", "--jobs=2", "--json")
    rows = json.loads(found.out)["rows"]
    assert [row["status"] for row in rows] == ["better", "better", "not separable", "better"]
    assert "neither code that trains nor a setting" in rows[2]["message"], "the third idea overrides the second"
    assert all(int(name.rpartition("-")[2]) >= 10**9 + 10**4 for name in research.started())
    assert research("log").code == 0


@pytest.mark.slow
def test_kill_at_any_moment_loses_nothing(research):
    """Each command is killed after longer and longer times, until it ends before that."""
    research.start()
    for words in (("try", "--model.mlp relu2", "--jobs=2"), ("keep", "1", "--jobs=2")):
        delay = 0.05
        while not ends_within(delay, lambda words=words: research(*words)):
            delay *= 1.3
    kinds = [row["kind"] for row in research.rows()]
    assert kinds == ["start", "baseline", "try", "try", "keep", "baseline"]
    assert research.rows()[3]["status"] == "better" and research.rows()[2]["level"] == research.rows()[3]["level"]
    assert research.git("rev-parse", "HEAD") == research.rows()[-1]["commit"]
    assert not research.git("status", "--porcelain")


def ends_within(seconds, function):
    """Call a function in a process that is killed after a time; return whether it ended before that."""
    child = os.fork()
    if child == 0:
        function()
        os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return True
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize("words", [["try", "--json"], ["log", "--json", "--size", "2"], ["keep", "x", "--json=true"]])
def test_wrong_arguments_give_one_json_object(words):
    done = forked.run("tools.research", words, 0, environment())
    assert done.returncode == 2 and json.loads(done.stdout)["message"] in done.stderr


def test_log_reports_a_failed_figure(decided, research):
    (research.lab / "chain.png").mkdir()
    assert "chain.png cannot be plotted" in research("log").out


def test_output_of_failed_idea_is_short(research, monkeypatch):
    research.start()
    monkeypatch.setattr(experiment, "describe_failure", lambda _: "does not train: " + 400 * "long " + "log: x.log")
    found = research("try", "--optimizer.lr 0")
    assert found.code == 11 and len(found.out) < 1000 and "does not train: long" in found.out
    assert found.out.endswith("log: x.log")


def test_json_has_one_object_for_exceptions(research, monkeypatch):
    monkeypatch.setattr(score, "run_scorer", lambda arm, *words: fake_scorer(arm, *words) | {"is_causal": False})
    found = research("start", f"--config={research.root / 'configs' / 'lab.yaml'}", "--seeds=3", "--jobs=2", "--json")
    assert found.code == 1 and "depend on later tokens" in json.loads(found.out)["message"]
    assert "tools.research: error: the head or the start of the chain: the logits" in found.text
    monkeypatch.setattr(attempt, "parse_idea", interrupted)
    found = research("try", "--optimizer.lr 2", "--json")
    assert found.code == 130 and json.loads(found.out)["message"] == "KeyboardInterrupt"
