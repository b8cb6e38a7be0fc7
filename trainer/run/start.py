"""Start a training in the directory of a run, and record how it ends. The main process alone writes there."""

import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from accelerate import Accelerator
from accelerate.utils import gather_object

from model.gpt import build_on_meta_device
from runtime.config.errors import ConfigError, OtherRunError, RunError, error_kind
from runtime.config.schema import TrainConfig
from runtime.distributed.collectives import wait_for_work
from runtime.distributed.signals import Interrupted, Preempted, never_stop
from runtime.distributed.world import is_main_process, process_rank
from runtime.files import copy_contents, folder_written_atomically, move_aside, open_no_link, write_atomically
from trainer.checkpoint.provenance import launch_facts, provenance, uncommitted_changes
from trainer.run.directory import LOCK_FILE, Branch, Run, Status
from trainer.run.metrics_log import RowWriter, truncate_after_step
from trainer.run.resume import StartingPoint, choose_starting_point, resumed_settings, starts_afresh


def check_run(run: Run, config: TrainConfig) -> None:
    """Raise ConfigError if the directory cannot be written or has links, or there is no `branch_from` for a new run.

    Every process calls it before the process group exists; nothing is written.
    """
    existing = run.path
    if run.path.is_symlink() and not run.path.exists():
        raise ConfigError(
            f"name: {run.path} is a link to {os.readlink(run.path)}, which does not exist; remove the link"
        )
    try:
        existing = next(path for path in (run.path, *run.path.parents) if path.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise ConfigError(f"out_dir: {config.out_dir!r}: cannot write in {existing}: {error.strerror}") from None
    if links := [path for path in run.path.glob("*") if path.is_symlink()]:
        problem = f"{links[0]} is a link to {os.readlink(links[0])}, but a run writes only into its own folder"
        raise ConfigError(f"name: {problem}; put the content here, or remove the link")
    is_new = resumed_settings(run, config) is None
    if is_new and config.branch_from is not None and not os.path.isdir(config.branch_from):
        raise ConfigError(f"branch_from: {config.branch_from!r} is not the directory of a checkpoint")


def open_run(
    run: Run, config: TrainConfig, accelerator: Accelerator, stop_requested: Callable[[], bool] = never_stop
) -> StartingPoint:
    """Lock the directory, choose the checkpoint to start from and write the resolved config.

    Called by all processes together, however long the checksums of large files take.

    Raises:
        ConfigError: on all processes; another process trains the run, no valid checkpoint is left, it does not fit the
            settings, or a copy of the corpus is damaged.
        RunError: on all processes; the directory cannot be read or written.
        Preempted: a process was asked to stop while files were read.
    """
    facts = launch_facts(accelerator)

    def on_main(work: Callable[[Callable[[], bool]], Any]) -> Any:
        """Call `work` on the main process, and return its result on all."""

        def with_run_error(should_stop: Callable[[], bool]) -> Any:
            try:
                return work(should_stop)
            except OSError as problem:
                error = RunError(f"{run.path} cannot be prepared: {problem}")
                error.kind = error_kind(problem)
                raise error from None

        return wait_for_work(with_run_error if accelerator.is_main_process else None, stop_requested)[0]

    try:
        start, recorded = on_main(lambda should_stop: lock_and_choose(run, config, facts, should_stop))
        facts["corpus_stamp"] = check_corpora(config, recorded, stop_requested)
        on_main(lambda _: write_start(run, config, start, facts))
    except Interrupted:
        raise Preempted("stopped before the first step, while files were read; run the same command again") from None
    # The main process has just added a row. A folder of another machine may have files of an earlier start.
    rows = run.path / "sessions.jsonl"
    if len({*gather_object([rows.read_bytes() if rows.exists() else None])}) > 1:
        raise ConfigError(f"out_dir: {config.out_dir!r} is not the same directory on every machine of this run")
    return start


@contextmanager
def record_outcome(run: Run) -> Iterator[None]:
    """Write the outcome of this session into status.json, once it has locked the run: finished, preempted or failed.

    A session that fails because the run has other settings writes nothing: the run itself has not failed.
    """
    try:
        yield
    except Preempted as preempted:
        if run.has_lock():
            run.write_outcome("preempted", str(preempted))
        raise
    except BaseException as error:
        if run.has_lock() and not isinstance(error, OtherRunError):
            run.write_outcome("failed", f"{type(error).__name__}: {error}", error_kind(error))
        raise
    else:
        if run.has_lock():
            run.write_outcome("finished")
    finally:
        run.unlock()


class RecordedCorpus(NamedTuple):
    """Copies of the corpus whose contents were compared, or trusted, at the last start."""

    stamps: frozenset[str]
    """Their `stamp_files`; none for a new run."""
    name: str
    """The run that recorded them."""


def lock_and_choose(
    run: Run, config: TrainConfig, facts: dict[str, Any], should_stop: Callable[[], bool] = never_stop
) -> tuple[StartingPoint, RecordedCorpus]:
    """Lock the directory, move an old run aside with `resume: never`, and choose the checkpoint."""
    # Lock the directory, and then the new one if the old one is moved aside.
    is_locked = run.lock()
    if is_locked and starts_afresh(config) and any(entry.name != LOCK_FILE for entry in run.path.iterdir()):
        print(f"The existing run was moved to {move_aside(run.path)}.")
        is_locked = run.lock()
    if not is_locked:
        raise ConfigError(f"{run.path} is in use: another training is running in it; choose another name")
    start = choose_starting_point(run, config, facts | provenance(), should_stop)

    # The copies of the corpus that the last session read.
    sessions, name = run.sessions() if config.data.source == "text" else [], "this run"
    if start.parent and not sessions:  # a new branch: the sessions of its parent that read the same corpus
        rows, name = start.parent.sessions(), str(start.parent.path)
        sessions = [row for row in rows if row.config and row.config["data"].get("hash") == config.data.hash]
    stamps = [session.corpus_stamp.split("+") for session in sessions[-1:] if session.corpus_stamp]
    return start, RecordedCorpus(frozenset(chain.from_iterable(stamps)), name)


def check_corpora(config: TrainConfig, recorded: RecordedCorpus, stop_requested: Callable[[], bool]) -> str | None:
    """Compare the contents of each copy of the corpus that the last session did not read with their checksums.

    Machines may have their own copies; the first process of each reads it. Return the stamps of all copies.

    Raises:
        ConfigError: on all processes, a copy is damaged or cannot be read.
        Interrupted: a process was asked to stop.
    """
    if config.data.source != "text":
        return None
    from data.integrity import stamp_files, verify  # imports pyarrow

    folders = [Path(corpus).expanduser() for corpus in config.data.corpora]
    stamps = wait_for_work(lambda should_stop: stamp_files(folders))
    first_ranks = {stamp: stamps.index(stamp) for stamp in stamps}
    if not recorded.stamps and len(first_ranks) == 1:
        return stamps[0]  # of a new run, the only copy is the one that data.prepare wrote
    to_read = sorted(rank for stamp, rank in first_ranks.items() if stamp not in recorded.stamps)
    if to_read and is_main_process():
        problem = f"The corpus was modified since the last start of {recorded.name}"
        if not recorded.stamps or to_read[0] > 0:
            problem = f"Process(es) {to_read} have their own copies of the corpus"
        print(f"{problem}; comparing the contents of its files ...", flush=True)

    def compare(should_stop: Callable[[], bool]) -> None:
        for folder in folders:
            try:
                verify(folder, should_stop)
            except ConfigError as error:
                where = f" (as process {process_rank()} on {socket.gethostname()} reads it)" if process_rank() else ""
                raise ConfigError(f"{error}{where}") from None

    wait_for_work(compare if process_rank() in to_read else None, stop_requested)
    return "+".join(sorted(first_ranks))


def write_start(run: Run, config: TrainConfig, start: StartingPoint, facts: dict[str, Any]) -> None:
    """Write the files of a session that is about to start, and a row of sessions.jsonl with its `facts`."""
    parent = start.parent
    facts = facts | provenance()
    corpora = [Path(corpus).expanduser() for corpus in config.data.corpora if config.data.source == "text"]
    if corpora:
        from data.integrity import hash_validation_text  # imports pyarrow

        facts |= {"validation_text": hash_validation_text(corpora)}

    # Remove the rows that this session will log again, and store its settings.
    run.checkpoints.mkdir(exist_ok=True)
    last_kept = start.step if start.evaluated else start.step - 1  # `train` logs the row again, with its evaluation
    truncate_after_step(run.path / "metrics.jsonl", last_kept, one_per_step=True)
    truncate_after_step(run.path / "generations.jsonl", last_kept)
    if start.evaluated and start.metrics and not parent and run.newest_metrics()["step"] < start.step:
        # The run was killed after its checkpoint was complete, and before the row of that step was on the disk.
        with closing(RowWriter(run.path / "metrics.jsonl")) as file:
            file.append({"step": start.step, **start.metrics})
    truncate_after_step(run.path / "sessions.jsonl", config.steps)  # only to remove an incomplete line
    write_atomically(run.path / "config.yaml", yaml.safe_dump(settings_to_store(config), sort_keys=False))

    # Facts about the network and the data. The tokenizer is copied, so that the model can be used without the corpus.
    network = build_on_meta_device(config.model)
    facts |= {"parameters": network.num_parameters(), "flops_per_token": network.flops_per_token(config.seq_len)}
    if corpora and not (run.path / "tokenizer").exists():
        # The tokenizers of a mixture are equal, but one may lack a chat template.
        tokenizers = [corpus / "tokenizer" for corpus in corpora]
        with_template = [folder for folder in tokenizers if (folder / "chat_template.jinja").exists()]
        with folder_written_atomically(run.path / "tokenizer") as folder:
            copy_contents((with_template or tokenizers)[0], folder)

    # Append the row of this session, which names a file with the uncommitted changes of the code.
    patch_name = None
    if changes := uncommitted_changes():
        patch_name = f"code-{sha256(changes).hexdigest()[:8]}.diff"
        write_atomically(run.path / patch_name, changes)
    row = {"step": start.step, **facts, "config": settings_to_store(config), "uncommitted_changes": patch_name}
    if parent:
        branch = Branch(str(parent.path), start.step, start.metrics.get("state/digest"), start.tokens)
        row["branched_from"] = asdict(branch)
    with open(run.path / "sessions.jsonl", "a", opener=open_no_link) as file:
        file.write(json.dumps(row) + "\n")
    run.write_status(Status("running", start.step))


def settings_to_store(config: TrainConfig) -> dict[str, Any]:
    """Return the nested settings for YAML and JSON, with lists for tuples; `resume: never` becomes auto."""
    settings = config.model_dump(mode="json")
    return settings | ({"resume": "auto"} if config.resume == "never" else {})
