"""The settings of the model; importable without torch, so that settings are checked before slow imports."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import BeforeValidator, PositiveFloat

from model.settings import PositiveInt, Settings, Unused


def current_mlp_name(name: Any) -> Any:
    """Return the name of a value of `mlp`; `gelu` and `gelu_erf` are names of earlier versions."""
    return {"gelu": "gelu_tanh", "gelu_erf": "gelu_exact"}.get(name, name) if isinstance(name, str) else name


Mlp = Annotated[Literal["gelu_tanh", "gelu_exact", "swiglu", "relu2"], BeforeValidator(current_mlp_name)]


class GPTConfig(Settings):
    """A decoder-only transformer; the defaults are a small GPT-2."""

    vocab_size: PositiveInt | None = None
    """Size of the vocabulary. null: the tokenizer's."""

    max_position_embeddings: PositiveInt = 128
    """Longest sequence the model accepts, in tokens."""

    n_layers: PositiveInt = 2
    """Number of transformer blocks."""

    n_heads: PositiveInt = 4
    """Number of query heads in each attention."""

    n_kv_heads: PositiveInt | None = None
    """Number of key and value heads, each shared by n_heads / n_kv_heads query heads (grouped-query attention).
    null: n_heads (multi-head attention)."""

    d_model: PositiveInt = 128
    """Width of the residual stream and the embeddings."""

    d_ff: PositiveInt = 512
    """Hidden width of the MLP. 4 x d_model is common; for swiglu, which has a third matrix, 8/3 x d_model."""

    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Dropout probability of the embeddings, the attention weights, and the output of each attention and MLP."""

    head_dim: PositiveInt | None = None
    """Width of one attention head. null: d_model / n_heads."""

    rope_theta: Annotated[PositiveFloat, Unused("model.position", "learned")] = 10000.0
    """Base of the wavelengths of the rotary positions, 2 pi rope_theta^(2 i / head_dim) tokens."""

    norm_eps: PositiveFloat = 1e-5
    """Constant added to the variance (layernorm) or the mean square (rmsnorm) before the square root."""

    position: Literal["learned", "rope"] = "learned"
    """Position encoding: learned (a table of max_position_embeddings vectors added to the token embeddings) or rope
    (rotary: queries and keys are rotated by an angle proportional to the position)."""

    window: PositiveInt | None = None
    """Sliding-window attention: number of positions that a query attends to, its own and the window - 1 before it
    (Jiang et al. 2023, arXiv:2310.06825). At most max_position_embeddings. null: no window."""

    window_pattern: Annotated[str, Unused("model.window", None)] = "SSL"
    """Which layers have the window: letters that are assigned to the layers in rotation. An S (short) layer has the
    window, and an L (long) layer attends to all earlier positions. The last layer is always long, as with nanochat's
    --window-pattern. SL alternates, as in Gemma 2 (arXiv:2408.00118)."""

    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before each attention and MLP, and before the output projection."""

    mlp: Mlp = "gelu_tanh"
    """Kind of MLP. gelu_tanh: GELU by its tanh approximation, as in GPT-2. gelu_exact: GELU itself. swiglu: a product
    with a SiLU gate, which has three matrices instead of two. relu2: the square of ReLU."""

    qk_norm: bool = False
    """Whether queries and keys are RMS-normalised in each head before their dot product."""

    bias: bool = True
    """Whether linear layers and layernorms have a bias. The output projection never has one."""

    logit_softcap: PositiveFloat | None = None
    """Bound on the absolute value of the logits. Each logit becomes logit_softcap x tanh(logit / logit_softcap), in
    training and inference. Gemma 2 uses 30 (arXiv:2408.00118). null: no bound."""

    tie_embeddings: bool = False
    """Whether the output projection shares its weights with the token embedding, as in the published GPT-2."""

    zero_init: bool = False
    """Whether out_proj and down_proj, which write to the residual stream, are initialised to zero, so that every
    block starts as the identity."""

    @property
    def resolved_head_dim(self) -> int:
        """Width of one attention head: head_dim, or its default."""
        return self.head_dim if self.head_dim is not None else self.d_model // self.n_heads

    @property
    def resolved_n_kv_heads(self) -> int:
        """Number of key and value heads: n_kv_heads, or its default."""
        return self.n_kv_heads if self.n_kv_heads is not None else self.n_heads

    @property
    def windows(self) -> list[int | None]:
        """Sliding window of each layer, in positions; None: full causal attention."""
        letters = (self.window_pattern * self.n_layers)[: self.n_layers - 1] + "L"
        return [self.window if letter == "S" else None for letter in letters]

    def problems(self) -> list[str]:
        """List settings that contradict each other, with their values and a remedy."""
        problems = []
        if self.head_dim is None and self.d_model % self.n_heads:
            below = self.d_model - self.d_model % self.n_heads
            nearest = f"{below} or {below + self.n_heads}" if below else f"{self.n_heads}"
            problems.append(
                f"model.d_model: {self.d_model} is not divisible by model.n_heads: {self.n_heads}; "
                f"use {nearest}, or set model.head_dim"
            )
        elif self.position == "rope" and self.resolved_head_dim % 2:
            origin = "" if self.head_dim is not None else f" (model.d_model {self.d_model} / n_heads {self.n_heads})"
            problems.append(
                f"model.head_dim: {self.resolved_head_dim}{origin} is odd, and model.position rope needs an even one; "
                f"use {self.resolved_head_dim + 1}"
            )
        if self.window is not None and self.window > self.max_position_embeddings:
            problems.append(
                f"model.window: {self.window} is more than model.max_position_embeddings: "
                f"{self.max_position_embeddings}; use at most that, or null for none"
            )
        if not self.window_pattern or set(self.window_pattern) - {"S", "L"}:
            problems.append(
                f"model.window_pattern: {self.window_pattern!r} does not consist of letters S (with the window) "
                "and L (without); use one such as SSL"
            )
        if self.n_heads % self.resolved_n_kv_heads:
            divisors = [str(n) for n in range(1, self.n_heads + 1) if self.n_heads % n == 0]
            problems.append(
                f"model.n_kv_heads: {self.n_kv_heads} does not divide model.n_heads: {self.n_heads}; "
                f"use one of {', '.join(divisors)}"
            )
        return problems


FAMILIES = {
    "gpt2": {"position": "learned", "norm": "layernorm", "mlp": "gelu_tanh", "qk_norm": False, "bias": True},
    "qwen3": {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True, "bias": False},
    "llama": {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "qk_norm": False, "bias": False},
}
"""Settings of each family of models that model/hf.py converts exactly, by the model_type of transformers."""
