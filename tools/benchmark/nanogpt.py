"""nanoGPT (Karpathy 2022) as a peer: the model.py and train.py of a checkout that the user names."""

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

# On a CPU nanoGPT's train.py enters a nullcontext instead of autocast; this removes it, to measure bfloat16.
RUN_WITH_AUTOCAST = """
import sys
from pathlib import Path
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
source, found = Path(sys.argv[0]).read_text(), "nullcontext() if device_type == 'cpu' else "
assert found in source
exec(compile(source.replace(found, ""), sys.argv[0], "exec"))
"""
RECIPE_FOR_A_CPU = {  # from its README
    **dict(device="cpu", compile=False, eval_iters=20, block_size=64, batch_size=12, n_layer=4, n_head=4, n_embd=128),
    **dict(max_iters=2000, lr_decay_iters=2000, dropout=0.0),
}


def build_peer(
    path: Path, config: GPTConfig, optimizer: OptimizerConfig, device: str = "cpu"
) -> tuple[nn.Module, Optimizer]:
    """Return nanoGPT's model in the shape of `config`, without biases and dropout, and its optimizer."""
    # Imported under another name, because our package is called `model` too.
    spec = importlib.util.spec_from_file_location("nanogpt_model", path / "model.py")
    assert spec, path
    assert spec.loader, path
    theirs = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    sizes = dict(n_layer=config.n_layers, n_head=config.n_heads, n_embd=config.d_model, vocab_size=config.vocab_size)
    peer = theirs.GPTConfig(block_size=config.max_position_embeddings, dropout=0.0, bias=False, **sizes)
    # On the device: initialising a billion weights takes a CPU many seconds. nanoGPT prints while it does.
    with torch.device(device), redirect_stdout(sys.stderr):
        network = theirs.GPT(peer)
        return network, network.configure_optimizers(optimizer.weight_decay, optimizer.lr, optimizer.betas, device)


class NanoGPT:
    """nanoGPT's train.py on the characters of a text, or on random tokens without one."""

    def __init__(self, path: Path, text: Path | None = None):
        self.path, self.folder = path.resolve(), tempfile.TemporaryDirectory()
        self.cwd = Path(self.folder.name)  # train.py reads data/ and configurator.py from its working directory
        (self.cwd / "configurator.py").symlink_to(self.path / "configurator.py")
        (data := self.cwd / "data" / "text").mkdir(parents=True)
        characters = list(text.read_text()) if text else np.random.default_rng(0).integers(0, 65, 1_000_000)
        alphabet, tokens = np.unique(characters, return_inverse=True)
        training = int(0.9 * len(tokens))
        for name, part in {"train": tokens[:training], "val": tokens[training:]}.items():
            part.astype(np.uint16).tofile(data / f"{name}.bin")
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(alphabet)}))

    def command(self, precision: str = "float32", **settings) -> list[str]:
        """Return a command that trains; run it in `cwd`."""
        runner = ["-c", RUN_WITH_AUTOCAST] if precision == "bfloat16" else []
        command = [sys.executable, *runner, str(self.path / "train.py")]
        command += [str(self.path / "config" / "train_shakespeare_char.py"), "--dataset=text"]
        settings = RECIPE_FOR_A_CPU | settings | {"dtype": precision}
        return [*command, *(f"--{name}={value}" for name, value in settings.items())]
