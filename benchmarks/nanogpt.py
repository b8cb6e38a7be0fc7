"""nanoGPT (Karpathy 2022) as the peer of a benchmark: the real train.py of a checkout that the user names."""

import importlib.util
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import numpy as np

# On a CPU its train.py enters a nullcontext in place of autocast: to run it in bfloat16, that is what is replaced.
IN_BFLOAT16 = """
import sys
from pathlib import Path
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
source, found = Path(sys.argv[0]).read_text(), "nullcontext() if device_type == 'cpu' else "
assert found in source
exec(compile(source.replace(found, ""), sys.argv[0], "exec"))
"""
RECIPE_FOR_A_CPU = {  # of its README
    **dict(device="cpu", compile=False, eval_iters=20, block_size=64, batch_size=12, n_layer=4, n_head=4, n_embd=128),
    **dict(max_iters=2000, lr_decay_iters=2000, dropout=0.0),
}


def load_model_file(path: str | Path) -> ModuleType:
    """Its model.py as a module, which is not in the way of our own package of that name."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path, "model.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NanoGPT:
    """Its training runs, on the characters of a text, or on random tokens where there is none."""

    def __init__(self, path: str, text: Path | None = None):
        self.path = Path(path).resolve()
        self.directory = Path(tempfile.mkdtemp())  # it reads data/ and configurator.py where it is started
        (self.directory / "configurator.py").symlink_to(self.path / "configurator.py")
        data = self.directory / "data" / "text"
        data.mkdir(parents=True)
        if text is None:
            vocab_size, tokens = 65, np.random.default_rng(0).integers(0, 65, 1_000_000)
        else:
            characters = text.read_text()
            alphabet = {character: index for index, character in enumerate(sorted(set(characters)))}
            vocab_size, tokens = len(alphabet), np.array([alphabet[character] for character in characters])
        split = int(0.9 * len(tokens))
        tokens[:split].astype(np.uint16).tofile(data / "train.bin")
        tokens[split:].astype(np.uint16).tofile(data / "val.bin")
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))

    def train(self, bfloat16: bool = False, **settings) -> list[tuple[float, str]]:
        """The lines that its train.py prints, each with the seconds since it was launched."""
        command = [sys.executable, "-u", *(["-c", IN_BFLOAT16] if bfloat16 else []), str(self.path / "train.py")]
        settings = RECIPE_FOR_A_CPU | settings | ({"dtype": "bfloat16"} if bfloat16 else {})
        command += [str(self.path / "config" / "train_shakespeare_char.py"), "--dataset=text"]
        command += [f"--{name}={value}" for name, value in settings.items()]
        start, lines = time.perf_counter(), []
        with subprocess.Popen(command, cwd=self.directory, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                lines.append((time.perf_counter() - start, line.rstrip()))
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with exit code {process.returncode}")
        return lines

    def tokens_per_second(self, bfloat16: bool = False, **settings) -> float:
        """The median over its steps, without the first five."""
        lines = self.train(bfloat16, **settings, log_interval=1, eval_iters=1)
        times = [re.search(r"iter (\d+): .*time ([\d.]+)ms", line) for _, line in lines]
        seconds = [float(match[2]) / 1000 for match in times if match and int(match[1]) >= 5]
        settings = RECIPE_FOR_A_CPU | settings
        return settings["batch_size"] * settings["block_size"] / statistics.median(seconds)
