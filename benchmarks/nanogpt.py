"""nanoGPT (Karpathy 2022) as the peer of a benchmark: the real train.py of a checkout that the user names."""

import importlib.util
import pickle
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from config.schema import OptimizerConfig
from model.config import GPTConfig

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
ENDLESS = dict(max_iters=10**6, eval_interval=10**6, eval_iters=1)  # it always evaluates before the first step


def build_peer(
    path: Path, config: GPTConfig, optimizer: OptimizerConfig, device: str = "cpu"
) -> tuple[nn.Module, Optimizer]:
    """Its model of the sizes of one of ours of the GPT-2 kind, without biases and dropout, and its optimizer."""
    # By a name of its own, not to be in the way of our package `model`.
    spec = importlib.util.spec_from_file_location("nanogpt_model", path / "model.py")
    theirs = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    sizes = dict(n_layer=config.n_layers, n_head=config.n_heads, n_embd=config.d_model, vocab_size=config.vocab_size)
    peer = theirs.GPTConfig(block_size=config.max_position_embeddings, dropout=0.0, bias=False, **sizes)
    # On the device, because random numbers for a billion weights take a CPU many seconds. It prints what it makes.
    with torch.device(device), redirect_stdout(sys.stderr):
        network = theirs.GPT(peer)
        return network, network.configure_optimizers(optimizer.weight_decay, optimizer.lr, optimizer.betas, device)


class NanoGPT:
    """Its train.py, on the characters of a text, or on random tokens where there is none."""

    def __init__(self, path: Path, text: Path | None = None):
        self.path, self.folder = path.resolve(), tempfile.TemporaryDirectory()
        self.cwd = Path(self.folder.name)  # where it is started, it reads data/ and configurator.py
        (self.cwd / "configurator.py").symlink_to(self.path / "configurator.py")
        (data := self.cwd / "data" / "text").mkdir(parents=True)
        characters = list(text.read_text()) if text else np.random.default_rng(0).integers(0, 65, 1_000_000)
        alphabet, tokens = np.unique(characters, return_inverse=True)
        training = int(0.9 * len(tokens))
        for name, part in {"train": tokens[:training], "val": tokens[training:]}.items():
            part.astype(np.uint16).tofile(data / f"{name}.bin")
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(alphabet)}))

    def command(self, precision: str = "float32", **settings) -> list[str]:
        """To be started in `cwd`."""
        runner = ["-c", IN_BFLOAT16] if precision == "bfloat16" else []
        command = [sys.executable, *runner, str(self.path / "train.py")]
        command += [str(self.path / "config" / "train_shakespeare_char.py"), "--dataset=text"]
        settings = RECIPE_FOR_A_CPU | settings | {"dtype": precision}
        return [*command, *(f"--{name}={value}" for name, value in settings.items())]
