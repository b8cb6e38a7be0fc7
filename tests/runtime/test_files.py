"""Odd file systems, such as those on a network, and folders of somebody else with symbolic links."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime import files
from runtime.config.errors import ConfigError
from runtime.config.parser import parse_config
from runtime.files import temporary_folder
from tests.conftest import ROOT, TINY_STORIES, environment, train, train_command
from tests.data.prepare.test_prepare import make_documents, run, write_jsonl
from tests.support import forked
from trainer.run.directory import Run, Status
from trainer.run.metrics_log import RowWriter
from trainer.run.start import check_run

# Errors of Lustre without -o flock, and of FUSE for fsync of a folder.
NO_LOCKS = "def answer(*_): raise OSError(38, 'Function not implemented')\nimport fcntl\nfcntl.flock = answer\n"
# Of CIFS and gcsfuse.
NO_MODES = """
import os
def answer(*_, **settings): raise PermissionError(1, 'Operation not permitted')
os.chmod = os.fchmod = answer
"""
NO_FSYNC_OF_FOLDERS = """
import os, stat
fsync = os.fsync
def answer(descriptor):
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(22, 'Invalid argument')
    fsync(descriptor)
os.fsync = answer
"""
PRELOADED = """
#include <dirent.h>
#include <errno.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
int flock(int descriptor, int operation) { errno = ENOSYS; return -1; }
int fsync(int descriptor) {
    struct stat facts;
    if (!fstat(descriptor, &facts) && S_ISDIR(facts.st_mode)) { errno = EINVAL; return -1; }
    return syscall(SYS_fsync, descriptor);
}
"""


@pytest.mark.parametrize("without_locks", [False, True])
def test_prepare_without_file_locks(tmp_path, monkeypatch, without_locks):
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(30))
    command = ["--source", source, "--tokenizer", "byte", "--validation", "hash:0.2", "--out", tmp_path / "out"]
    if without_locks:
        monkeypatch.setenv(files.WITHOUT_LOCKS, "1")
    done = run(*command, preamble=NO_LOCKS, exit_code=0 if without_locks else 2)
    assert (tmp_path / "out").exists() == without_locks
    message = f"{tmp_path / 'out.partial' / 'cache'}: its file system has no locks (Function not implemented)"
    assert without_locks or (message in done.stderr and "set MINI_GPT_WITHOUT_LOCKS=1 in the env" in done.stderr)
    assert "Traceback" not in done.stderr


def test_prepare_without_folder_fsync(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(30))
    command = ["--source", source, "--tokenizer", "byte", "--validation", "hash:0.2", "--out", tmp_path / "out"]
    run(*command, preamble=NO_FSYNC_OF_FOLDERS)
    assert json.loads((tmp_path / "out" / "metadata.json").read_text())["train"]["documents"] > 15


@pytest.mark.parametrize("num_workers", [1, 2])
def test_prepare_and_training_without_file_modes(tmp_path, num_workers):
    """Both write files, and training copies the tokenizer of the corpus."""
    source = write_jsonl(tmp_path / "a.jsonl", make_documents(200))
    command = ["--source", source, "--tokenizer", "byte", "--validation", "hash:0.2", "--out", tmp_path / "out"]
    run(*command, "--num_workers", num_workers, preamble=NO_MODES)
    assert json.loads((tmp_path / "out" / "metadata.json").read_text())["train"]["documents"] > 100
    if num_workers == 1:
        arguments = f"--steps 2 --data.source text --data.path {tmp_path / 'out'}"
        arguments += f" --evaluation.num_samples null --out_dir {tmp_path} --name run"
        code = f"{NO_MODES}import runpy, sys; sys.argv[0] = 'train.py'; runpy.run_path('train.py', run_name='__main__')"
        done = forked.run("-c", [code, *TINY_STORIES, *arguments.split()], 0, environment())
        assert done.returncode == 0, done.stderr
        contents = [
            {p.name: p.read_bytes() for p in (tmp_path / name / "tokenizer").iterdir()} for name in ("out", "run")
        ]
        assert contents[0] == contents[1] and len(contents[0]) > 1


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_other_file_system_errors_are_raised(tmp_path, monkeypatch, code):
    """Only fsync of a folder may fail with EINVAL; fsync of a file may not."""

    def answer(*_):
        raise OSError(code, os.strerror(code))

    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(files.os, "fsync", answer)
    monkeypatch.setattr(files.fcntl, "flock", answer)
    for attempt in (lambda: files.fsync(tmp_path), lambda: files.lock(open(tmp_path / "file"))):
        with pytest.raises(OSError, match=os.strerror(code)):
            attempt()
    code = errno.EINVAL
    files.fsync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        files.fsync(tmp_path / "file")


@pytest.mark.parametrize("supported", [True, False])
def test_fsync_flushes_the_drive_on_macos(supported, tmp_path, monkeypatch):
    calls = []

    def fcntl(descriptor, command):
        calls.append(command)
        if not supported:
            raise OSError(errno.ENOTSUP, "a network disk")

    monkeypatch.setattr(files.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(files.fcntl, "fcntl", fcntl)
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: calls.append("fsync"))
    files.write_atomically(tmp_path / "file", "x")
    assert calls == 2 * ([51] if supported else [51, "fsync"]), "of the file and of its folder"


def test_training_without_file_locks(tmp_path):
    arguments = [*TINY_STORIES, "--steps", "2", "--out_dir", str(tmp_path), "--name", "run", "--stop_after", "1"]
    code = f"{NO_LOCKS}{NO_FSYNC_OF_FOLDERS}import sys, runpy; sys.argv[0] = 'train.py'\n"
    code += "runpy.run_path('train.py', run_name='__main__')"
    refused = forked.run("-c", [code, *arguments], 0, environment())
    assert refused.returncode == 2 and refused.stderr.count("has no locks") == 1, refused.stderr
    assert f"{tmp_path / 'run'}: its file system has no locks" in refused.stderr
    done = forked.run("-c", [code, *arguments], 0, environment(MINI_GPT_WITHOUT_LOCKS="1"))
    assert done.returncode == 75, done.stderr
    train(*arguments[:-2])


@pytest.mark.slow
@pytest.mark.linux_only
@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
def test_launched_training_without_file_locks(tmp_path):
    (tmp_path / "less.c").write_text(PRELOADED)
    library = tmp_path / "less.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "less.c"], check=True)
    command = train_command(*TINY_STORIES, "--steps", "2", "--out_dir", tmp_path, "--name", "run", processes=2)
    preloaded = {"LD_PRELOAD": str(library)}
    for locks, expected in (({}, 1), ({"MINI_GPT_WITHOUT_LOCKS": "1"}, 0)):
        env = environment(**preloaded, **locks)
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == expected and ("has no locks" in done.stderr) == bool(expected), done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"


def test_temporary_folder_of_killed_process_is_removed(tmp_path, monkeypatch):
    def killed():
        child = os.fork()
        if not child:
            with temporary_folder(tmp_path, "speed-"):
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)

    (tmp_path / "speed-of-mine").mkdir()
    killed()
    assert len(list(tmp_path.iterdir())) == 2
    with temporary_folder(tmp_path, "speed-") as living, temporary_folder(tmp_path, "speed-") as another:
        assert {*tmp_path.iterdir()} == {tmp_path / "speed-of-mine", living, another}, (
            "only the folder of the killed process is removed"
        )
    assert [*tmp_path.iterdir()] == [tmp_path / "speed-of-mine"]
    killed()
    monkeypatch.setenv("MINI_GPT_WITHOUT_LOCKS", "1")
    with temporary_folder(tmp_path, "speed-"):
        assert len(list(tmp_path.iterdir())) == 3, "without locks it is unknown which processes are alive"


@pytest.fixture
def outside(tmp_path):
    """A file and a folder that nothing may change, and paths that do not exist."""
    (tmp_path / "outside" / "folder").mkdir(parents=True)
    (tmp_path / "outside" / "file").write_text("precious")
    (tmp_path / "outside" / "folder" / "file").write_text("precious")
    before = sorted((tmp_path / "outside").rglob("*"))
    yield tmp_path / "outside"
    assert sorted((tmp_path / "outside").rglob("*")) == before
    assert all(path.read_text() == "precious" for path in before if path.is_file())


@pytest.mark.parametrize("target", ["file", "missing"])
def test_atomic_writes_do_not_follow_links(tmp_path, outside, target):
    mine = tmp_path / "mine"
    mine.mkdir()
    temporary = f"a.json.{socket.gethostname()}-{os.getpid()}-{threading.get_native_id()}.tmp"
    for name in ("a.json", temporary):
        (mine / name).symlink_to(outside / target)
    files.write_atomically(mine / "a.json", "new")
    assert (mine / "a.json").read_text() == "new" and not (mine / "a.json").is_symlink()
    (mine / "folder.tmp").symlink_to(outside / ("folder" if target == "file" else target))
    with files.folder_written_atomically(mine / "folder") as folder:
        folder.mkdir()
        (folder / "file").write_text("new")
    assert (mine / "folder" / "file").read_text() == "new" and {*os.listdir(mine)} == {"a.json", "folder"}


@pytest.mark.parametrize("opener", [files.open_regular, files.open_no_link])
def test_what_is_no_file_is_not_opened(opener, tmp_path):
    """A device may be endless, and a pipe would block."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    reasons = {tmp_path / "pipe": "Is no regular file", tmp_path / "folder": "Is a directory"}
    for path, reason in (reasons | {"/dev/zero": "Is no regular file"}).items():
        with pytest.raises(OSError, match=reason):
            opener(path, os.O_RDONLY)
    (tmp_path / "file").write_text("x")
    with open(tmp_path / "file", opener=opener) as file:
        assert file.read() == "x"


@pytest.mark.parametrize("target", ["file", "missing"])
@pytest.mark.parametrize("name", [".lock", "status.json", "metrics.jsonl", "sessions.jsonl"])
def test_no_file_of_a_run_is_opened_through_a_link(tmp_path, outside, monkeypatch, target, name):
    run = Run(tmp_path / "run")
    run.path.mkdir()
    (run.path / name).symlink_to(outside / target)
    if name == "status.json":  # written in place if the disk has no room for a second file
        monkeypatch.setattr("trainer.run.directory.write_atomically", lambda *_: open("/nowhere/file"))
        run.write_status(Status("running", 0))
    elif name == ".lock":
        with pytest.raises(OSError, match="symbolic links"):
            run.lock()
        assert not run.is_locked(), "no process can have locked it"
    else:
        with pytest.raises(OSError, match="symbolic links"):
            RowWriter(run.path / name)


@pytest.mark.parametrize("name", ["config.yaml.tmp", "metrics.jsonl", "checkpoints", "trace-steps-2-2-rank-0.json"])
def test_run_with_a_link_is_refused(tmp_path, outside, name):
    config = parse_config([*TINY_STORIES, "--out_dir", str(tmp_path), "--name", "run"])
    run = Run.from_config(config)
    run.path.mkdir()
    check_run(run, config)
    link = run.path / name
    link.symlink_to(outside / ("folder" if name == "checkpoints" else "file"))
    with pytest.raises(ConfigError, match=f"name: {link} is a link to {os.readlink(link)}, but a run writes only into"):
        check_run(run, config)


def test_run_of_a_stranger_changes_nothing_outside(tmp_path, outside):
    """The run has links with the names of files that train.py and evaluate.py write."""
    arguments = [*TINY_STORIES, "--steps", "2", "--out_dir", str(tmp_path), "--name", "run"]
    train(*arguments)
    (tmp_path / "run" / "evaluation.json").symlink_to(outside / "file")
    train(tmp_path / "run", "--num_samples", "2", script="evaluate.py")
    assert "val/loss" in json.loads((tmp_path / "run" / "evaluation.json").read_text())
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".lock").symlink_to(outside / "file")
    assert f"{tmp_path / 'run' / '.lock'} is a link" in train(*arguments, exit_code=2).stderr


WRITE = "import sys, pathlib, runtime.files as files; files.write_atomically(pathlib.Path(sys.argv[1]), 'theirs')"


@pytest.mark.parametrize("other", ["thread", "process"])
def test_two_writers_of_one_file_leave_a_whole_one(other, tmp_path, monkeypatch):
    """As evaluate.py does when it runs twice on one run: here the second writes while the first is about to replace."""
    file, flush = tmp_path / "a.json", files.flush_to_disk
    file.write_text("old")

    def write_meanwhile(descriptor):
        monkeypatch.setattr(files, "flush_to_disk", flush)
        assert file.read_text() == "old"
        if other == "process":
            subprocess.run([sys.executable, "-c", WRITE, file], cwd=ROOT, check=True)
        else:
            with ThreadPoolExecutor(1) as executor:
                executor.submit(files.write_atomically, file, "theirs").result()
        assert file.read_text() == "theirs"
        flush(descriptor)

    monkeypatch.setattr(files, "flush_to_disk", write_meanwhile)
    files.write_atomically(file, "ours")
    assert file.read_text() == "ours" and [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = socket.gethostname()
    for number in (dead.pid, os.getpid()):
        (tmp_path / f"a.json.{host}-{number}-1.tmp").touch()
    files.write_atomically(tmp_path / "a.json", "new")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", f"a.json.{host}-{os.getpid()}-1.tmp"}
