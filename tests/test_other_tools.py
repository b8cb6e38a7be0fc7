"""Other programs work with exports and runs as the pages show, by the commands of the pages.

Packages that are missing here are installed by pip into an environment on top of this one, which shares its torch.
Without a network the tests are skipped.
"""

import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import datasets
import pytest
import torch

from tests.conftest import ROOT, TINY_STORIES, commands, environment, python, shell, train
from tests.data.prepare.test_prepare import make, make_documents, write_jsonl
from tests.support.forked import free_port
from tests.test_export import FAMILIES, QWEN3, every_family
from trainer.pretrained.load import load_run

pytestmark = pytest.mark.slow
PAGE = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("using", "comparing", "evaluation")}
HARNESS = commands(PAGE["evaluation"])[2:]
TORCHRUN = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2".split()
LLAMA_CPP = "LLAMA_CPP"  # in the environment: the folder of its sources, which no package has


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a user with a run of stories, one on a text for each family of transformers, and their exports."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "docs").symlink_to(ROOT / "docs")
    (folder / "export.py").symlink_to(ROOT / "export.py")
    train(*TINY_STORIES, "--out_dir", folder / "runs", "--name", "stories")
    make(write_jsonl(folder / "texts.jsonl", make_documents(60)), folder / "corpus", "train:400", validation="hash:0.2")
    text = ["--data.source", "text", "--data.path", folder / "corpus", "--model.d_ff", "64"]
    for family, settings in FAMILIES.items():
        train(*TINY_STORIES, *text, *settings, "--out_dir", folder / "runs", "--name", family)
        python(f"python export.py runs/{family} exports/{family}", folder)
    return folder


def stand_above(place):
    """Make the packages of this environment importable in another, after its own."""
    [packages] = place.glob("lib/python*/site-packages")
    (packages / "below.pth").write_text(site.getsitepackages()[0])


def installed(command, folder):
    """Run a command of pip, as a page shows it."""
    done = subprocess.run(shlex.split(command), cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing to be had by {command}: {done.stderr[-300:]}")


@pytest.fixture(scope="module")
def environment_with(tmp_path_factory):
    """Return a function that makes an environment with packages and returns the folder of its programs."""

    def make_one(*packages):
        place = tmp_path_factory.mktemp("environment")
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        stand_above(place)
        installed(shlex.join([f"{place}/bin/pip", "install", "--quiet", *packages]), place)
        return place / "bin"

    return make_one


def test_lm_evaluation_harness_opens_an_export(folder):
    export, make_environment, install, evaluate = HARNESS
    shell(export, folder)
    shell(make_environment, folder)
    stand_above(folder / "lm_eval_environment")
    installed(install, folder)
    done = shell(evaluate, folder, HF_HUB_OFFLINE="1")
    assert re.search(r"\|story_endings\|.*\|acc +\|.*\|0\.\d", done.stdout)


READ = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
texts = json.loads(sys.argv[2])
batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
with torch.no_grad():
    loss = model(**batch, labels=labels).loss.item()
written = model.generate(**tokenizer(texts[0], return_tensors="pt"), max_new_tokens=20, do_sample=False)
found = {"loss": loss, "tokens": batch.input_ids.tolist(), "written": tokenizer.decode(written[0])}
print(json.dumps(found | {"version": transformers.__version__}))
"""


@pytest.fixture(scope="module")
def transformers_4(environment_with):
    return environment_with("transformers==4.57.*")


@every_family
def test_transformers_4_reads_an_export_as_5_does(family, folder, transformers_4):
    texts = ["the cat's 12345", "don’t " + "食べる x=y; the " * 80]  # the second is longer than the model
    found = []
    for interpreter in (sys.executable, transformers_4 / "python"):
        command = [interpreter, "-c", READ, folder / "exports" / family, json.dumps(texts)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    new, old = found
    assert new.pop("version").startswith("5.") and old.pop("version").startswith("4.57.")
    assert old.pop("loss") == pytest.approx(new.pop("loss"), rel=1e-5)
    assert old == new and len(new["tokens"][1]) == 128


@contextmanager
def serving(command, programs, folder, **env):
    """Yield the address that a server prints, and stop it at the end of the block."""
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    env = environment(PATH=path, BROWSER="true", PYTHONUNBUFFERED="1", **env)
    server = subprocess.Popen(
        shlex.split(command), cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    try:
        for line in server.stdout:
            lines.append(line)
            if address := re.search(r"http://(?:localhost|127\.0\.0\.1):\d+", line):
                yield address[0]
                break
        else:
            pytest.fail("".join(lines))
    finally:
        server.terminate()  # SIGINT is ignored by what a shell has started in the background
        server.communicate(timeout=60)


def answer(address, body=None):
    """What a server answers to a GET, or to a POST of JSON."""
    request = urllib.request.Request(address, body and body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


def shown(program):
    """The command that a page shows for a tracker."""
    return re.search(rf"`({program} [^`]+)`", PAGE["comparing"].replace("\n", " "))[1]


def test_tensorboard_shows_a_run(folder):
    tracker = ["--tracking.tracker", "tensorboard", "--out_dir", folder / "runs", "--name", "board"]
    train(*TINY_STORIES, *tracker)
    with serving(shown("tensorboard") + " --port 0", Path(sys.executable).parent, folder) as address:
        known = json.loads(answer(f"{address}/data/plugin/scalars/tags"))
        assert "val/loss" in known["board/tensorboard"]


# What the script `transformers` does, which pip has put into the environment below.
TRANSFORMERS = "from importlib.metadata import entry_points as e; [s] = e(group='console_scripts', name='transformers')"
TRANSFORMERS += "; s.load()()"


def test_transformers_serves_an_export(folder, environment_with):
    """It completes a text as `generate` does, and without a chat template it refuses to chat."""
    programs = environment_with("transformers[serving]")
    serve, path, body = re.search(
        r"\n    (transformers serve .*)\n    curl localhost:8000(\S+) .*-d '(.*)'\n", PAGE["using"]
    ).groups()
    shutil.copytree(folder / "exports" / "qwen3", folder / json.loads(body)["model"])
    command = shlex.join([f"{programs}/python", "-c", TRANSFORMERS, *serve.split()[1:], "--port", str(free_port())])
    with serving(command, programs, folder) as address:
        [choice] = json.loads(answer(address + path, json.dumps(json.loads(body) | {"temperature": 0})))["choices"]
        chat = {"model": json.loads(body)["model"], "messages": [{"role": "user", "content": "Meet a brave girl"}]}
        with pytest.raises(urllib.error.HTTPError):
            answer(address + "/v1/chat/completions", json.dumps(chat))
    text = json.loads(body)["prompt"]
    command = [sys.executable, "-c", READ, folder / "exports" / "qwen3", json.dumps([text])]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    _, _, continuation = json.loads(done.stdout.splitlines()[-1])["written"].partition(text)
    assert continuation and choice["text"].startswith(continuation)


LOSSES = """
import json, os, torch
from transformers import AutoModelForCausalLM
torch.manual_seed(0)
MODEL
optimizer = torch.optim.SGD(model.parameters(), 0.1)
tokens = torch.arange(40).reshape(2, 20)
losses = []
for _ in range(3):
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
shards = [getattr(weight, "_local_tensor", weight).numel() for weight in model.parameters()]
if not int(os.environ.get("RANK", 0)):
    print(json.dumps({"losses": losses, "weights": sum(shards)}))
"""


def test_export_trains_with_tensor_parallelism(folder, tmp_path):
    """On two processes, each with a part of the weights, the losses are those of one."""
    train(*TINY_STORIES, *QWEN3, "--model.n_heads", "2", "--out_dir", tmp_path / "runs", "--name", "stories")
    python(f"python export.py {tmp_path}/runs/stories {tmp_path}/exports/stories", ROOT)
    [sharded] = re.findall(r"\n    (model = .*tp_plan.*)\n", PAGE["using"])
    found = []
    for launch, line in ([], sharded.replace(', tp_plan="auto"', "")), (TORCHRUN, sharded):
        (tmp_path / "losses.py").write_text(LOSSES.replace("MODEL", line))
        command = [sys.executable, *launch, "losses.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    one, two = found
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5) and one["losses"][2] < one["losses"][0]
    assert two["weights"] < 0.9 * one["weights"]


ADAPTER = """
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained("exports/text")
model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
for name, weight in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(weight, std=0.1)
tokens = torch.arange(30)[None]
print(model(tokens, labels=tokens).loss.item())
model.save_pretrained("adapter")
"""


def test_peft_adapter_is_merged_as_documented(folder, environment_with):
    programs = environment_with("peft")
    shutil.copytree(folder / "exports" / "qwen3", folder / "exports" / "text")

    def run(code):
        done = subprocess.run([programs / "python", "-c", code], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    loss = float(run(ADAPTER).split()[-1])
    words = [*TINY_STORIES, "--data.source", "text", "--data.path", folder / "corpus", "--out_dir", folder / "runs"]
    words = [word for word in words if word != TINY_STORIES[1]]
    recipe = folder / "recipe.yaml"
    recipe.write_text(re.sub(r"(?m)^model: .*\n", "", Path(TINY_STORIES[1]).read_text()))
    words.insert(1, recipe)
    refused = train(*words, "--name", "merged", "--init_from", folder / "adapter", exit_code=2).stderr
    assert "is a PEFT adapter" in refused
    [code] = re.findall(r"\n(    from peft import .*?)\n(?=\S)", PAGE["using"], re.DOTALL)
    run(textwrap.dedent(code))
    loss_here = run(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import torch; from trainer.pretrained.load import load_run;"
        "tokens = torch.arange(30)[None]; print(load_run('merged').model(tokens, labels=tokens)[1].item())"
    )
    assert float(loss_here) == pytest.approx(loss, rel=1e-4)
    train(*words, "--name", "merged", "--init_from", folder / "merged")


LEARN = """
import sys, datasets
from trl import SFTConfig, SFTTrainer
rows = datasets.concatenate_datasets([datasets.Dataset.from_file(file, in_memory=True) for file in sys.argv[2:]])
settings = {"max_steps": 1, "logging_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": len(rows)}
settings |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
settings |= {"report_to": "none", "save_strategy": "no"}
trainer = SFTTrainer(sys.argv[1], SFTConfig("trained", max_length=None, **settings), train_dataset=rows)
trainer.train()
print(trainer.state.log_history[0]["loss"])
"""


def test_trl_learns_from_the_answers_of_a_corpus(folder, environment_with):
    programs = environment_with("trl")
    pairs = [{"prompt": f"{i}?", "response": "It is." + i * "!"} for i in range(8)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    make(folder / "answers.jsonl", folder / "answers", "train:300")
    words = f"--data.source text --data.path {folder / 'answers'} --model.dropout 0 --evaluation.every 0".split()
    train(*TINY_STORIES, *words, "--out_dir", folder / "runs", "--name", "answers")
    python("python export.py runs/answers exports/answers", folder)
    files = list(map(str, (folder / "answers" / "train").glob("*.arrow")))
    learn = [programs / "python", "-c", LEARN, folder / "exports" / "answers", *files]
    done = subprocess.run(learn, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model, nats, targets = load_run(folder / "runs" / "answers").model, 0.0, 0
    for row in datasets.concatenate_datasets(list(map(datasets.Dataset.from_file, files))):
        tokens, mask = (torch.tensor([row[name]]) for name in ("input_ids", "assistant_masks"))
        nats += model(tokens, labels=tokens.where(mask == 1, -100), num_items_in_batch=1)[1].item()
        targets += mask[:, 1:].sum().item()
    assert float(done.stdout.split()[-1]) == pytest.approx(nats / targets, rel=1e-4)


@pytest.mark.skipif(LLAMA_CPP not in os.environ, reason="the sources of llama.cpp are not named in the environment")
def test_llama_cpp_converts_an_export(folder):
    """With `gguf` from its sources."""
    shutil.copytree(os.environ[LLAMA_CPP], folder / "llama.cpp", ignore=shutil.ignore_patterns(".git", "build*"))
    shutil.copytree(folder / "exports" / "gpt2", folder / "exports" / "mine")
    published, cut_as_gpt2 = re.findall(r"(?<=\n    )(python llama.*|cd llama.*\n.*)", PAGE["using"])
    shell(textwrap.dedent(cut_as_gpt2), folder)
    assert (folder / "mine.gguf").stat().st_size > 1000
    with pytest.raises(AssertionError, match="pre-tokenizer"):
        shell(published, folder)


def copy_of_the_repository(place):
    folders = [path for path in ROOT.iterdir() if (path / "__init__.py").exists() or path.name.endswith("configs")]
    for path in (*ROOT.glob("*.py"), *folders):
        if path.name != "examples":  # the notebook is written there
            (place / path.name).symlink_to(path)
    (place / "examples").mkdir()
    return place


@pytest.mark.skipif(not (ROOT / "examples").exists(), reason="examples/ was removed")
def test_notebook_runs_and_fails_with_its_training(environment_with, tmp_path):
    programs, place = environment_with("nbconvert", "ipykernel"), copy_of_the_repository(tmp_path)
    written = (ROOT / "examples" / "quickstart.ipynb").read_text()
    assert written.count("STEPS = 1200") == 1
    convert = [programs / "python", *"-m nbconvert --to notebook --execute --output done examples/short.ipynb".split()]
    for steps, exit_code in ((120, 0), (0, 1)):
        (place / "examples" / "short.ipynb").write_text(written.replace("STEPS = 1200", f"STEPS = {steps}"))
        done = subprocess.run(convert, cwd=place, env=environment(), capture_output=True, text=True)
        assert done.returncode == exit_code, done.stderr
    assert "steps: 0 must be" in done.stderr
    cells = json.loads((place / "examples" / "done.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert printed.count("Training finished.") == 2
    assert "Meet a brave girl" in printed and "reproduced bitwise" in printed, printed
