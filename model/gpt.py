"""A decoder-only transformer: GPT-2, Qwen3, or a combination of parts of published models (see GPTConfig).

Suffixes name the shape of a tensor: B sequences in the batch, T positions, C d_model, H query heads, K key and value
heads, D size of a head, V size of the vocabulary, S keys (the cached positions and T new ones).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Mask, attention, attention_masks, uses_flex_attention
from model.config import GPTConfig
from model.generate import GenerativeModel, KVCache
from model.loss import NextTokenLoss, soft_cap
from model.seeds import derive_seed

Rope = tuple[Tensor, Tensor]  # cosines and sines, see rope_tables


def rope_tables(positions: Tensor, head_size: int, theta: float) -> Rope:
    """Return cosines and sines of the rotary angles (Su et al. 2021, arXiv:2104.09864) at `positions` [..., T].

    Both are float32 [..., T, D]. Dimensions i and i + D/2 form a pair (as in transformers), which is rotated by
    position / theta^(2i/D). The tables are recomputed in every forward, which is cheap. If they were a buffer, it would
    be cast by model.bfloat16(), uninitialised after construction on the meta device, and broadcast by DDP.
    """
    frequency = 1.0 / theta ** (torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size)
    angle = positions[..., None].float() * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of dimensions of x [B, H, T, D] by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def make_norm(config: GPTConfig) -> nn.Module:
    """Build the normalisation layer that `config.norm` names."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)
    raise ValueError(f"model.norm: {config.norm!r} is not implemented")


class Attention(nn.Module):
    """Causal self-attention, multi-head or grouped-query (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_size = config.head_size
        # training/cpu_kernels.py may replace it with a faster one.
        self.sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention
        self.dropout = config.dropout
        self.q_proj = nn.Linear(config.d_model, config.n_heads * config.head_size, bias=config.bias)
        self.k_proj = nn.Linear(config.d_model, config.kv_heads * config.head_size, bias=config.bias)
        self.v_proj = nn.Linear(config.d_model, config.kv_heads * config.head_size, bias=config.bias)
        self.out_proj = nn.Linear(config.n_heads * config.head_size, config.d_model, bias=config.bias)
        self.q_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x_BTC: Tensor, rope: Rope | None, mask: Mask, cache: KVCache | None = None) -> Tensor:
        q_BTHD = self.q_proj(x_BTC).unflatten(-1, (-1, self.head_size))
        k_BTKD = self.k_proj(x_BTC).unflatten(-1, (-1, self.head_size))
        v_BTKD = self.v_proj(x_BTC).unflatten(-1, (-1, self.head_size))
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast q and k are bfloat16 or float16, but RMSNorm's fused kernel needs the dtype of its weight.
            q_BTHD = self.q_norm(q_BTHD.type_as(self.q_norm.weight))
            k_BTKD = self.k_norm(k_BTKD.type_as(self.k_norm.weight))
        q_BHTD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
        if rope is not None:
            q_BHTD, k_BKTD = rotate(q_BHTD, *rope), rotate(k_BKTD, *rope)
        # The norm and the rotation may have made q and k float32; the kernel needs one dtype.
        q_BHTD, k_BKTD = q_BHTD.type_as(v_BKTD), k_BKTD.type_as(v_BKTD)
        k_BKSD, v_BKSD = (k_BKTD, v_BKTD) if cache is None else cache.append(k_BKTD, v_BKTD)
        y_BHTD = attention(q_BHTD, k_BKSD, v_BKSD, mask, self.dropout if self.training else 0.0, self.sdpa)
        return self.out_proj(y_BHTD.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """GELU (Hendrycks and Gimpel 2016), SwiGLU (Shazeer 2020, arXiv:2002.05202) or ReLU squared (So et al. 2021)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.kind = config.mlp
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=config.bias) if config.mlp == "swiglu" else None
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden = self.up_proj(x_BTC)
        if self.gate_proj is not None:
            hidden = F.silu(self.gate_proj(x_BTC)) * hidden
        elif self.kind == "relu2":
            hidden = F.relu(hidden).square()
        elif self.kind in ("gelu", "gelu_erf"):
            hidden = F.gelu(hidden, approximate="tanh" if self.kind == "gelu" else "none")
        else:
            raise ValueError(f"model.mlp: {self.kind!r} is not implemented")
        return self.down_proj(hidden)


class BlockOutput(NamedTuple):
    """What Block.forward returns in place of a tensor if it also reports something.

    Attributes:
        x_BTC: the residual stream.
        auxiliary: weighted terms of the training objective by name, 0-dim means (docs/forking.md).
        metrics: auxiliary metrics {name: (sum, count)}, detached.
    """

    x_BTC: Tensor
    auxiliary: dict[str, Tensor]
    metrics: dict[str, tuple[Tensor, Tensor]]

    def add_to(self, auxiliary: dict[str, Tensor], metrics: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        """Add the terms and metrics to those of the same name of other blocks, and return the residual stream."""
        for name, term in self.auxiliary.items():
            auxiliary[name] = auxiliary[name] + term if name in auxiliary else term
        for name, (total, count) in self.metrics.items():
            other_total, other_count = metrics.get(name, (0, 0))
            metrics[name] = other_total + total, other_count + count
        return self.x_BTC


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream; `index` counts the blocks from 0."""

    def __init__(self, config: GPTConfig, index: int):
        super().__init__()
        self.index = index
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor, rope: Rope | None, mask: Mask, cache: KVCache | None = None) -> Tensor:
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), rope, mask, cache))
        return x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))


class Output(NamedTuple):
    """The results of GPTModel.forward.

    Attributes:
        logits: [B, kept positions, V] in the dtype of the computation; None with labels, unless requested.
        loss: 0-dim, at least float32, in nats; None without labels.
        metrics: auxiliary metrics {name: (sum, count)}, detached; often empty (docs/forking.md).
    """

    logits: Tensor | None
    loss: Tensor | None
    metrics: dict[str, tuple[Tensor, Tensor]]


class Teacher:
    """A frozen model from which another one learns (`teacher.path`); it belongs to no nn.Module, so it is never saved.

    `model` is a GPTModel in eval mode without gradients, `weight` and `temperature` are settings.
    """

    def __init__(self, model: "GPTModel", weight: float, temperature: float):
        self.model, self.weight, self.temperature = model, weight, temperature

    def targets(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> dict[str, Any]:
        """Return the fields of model.loss.Targets that the teacher provides."""
        logits_BTV = self.model(input_ids, attention_mask, position_ids=position_ids).logits
        predictions = {"teacher_NV": logits_BTV.flatten(0, 1), "teacher_weight": self.weight}
        return predictions | {"temperature": self.temperature}


class GPTModel(GenerativeModel):
    """A language model: token ids in, logits and loss out.

    Attributes:
        teacher: gives the soft targets of distillation; None: there is no teacher, as always after training.

    Raises:
        ValueError: the config is inconsistent, or its vocab_size is unknown; the message names every problem.
    """

    _no_split_modules = ["Block"]  # Accelerate's FSDP2 shards each of these as a unit

    def __init__(self, config: GPTConfig):
        super().__init__()
        problems = config.problems()
        if config.vocab_size is None:
            problems = [*problems, "model.vocab_size is null: set it to the size of the tokenizer's vocabulary"]
            raise ValueError("\n".join(problems))
        if problems:
            raise ValueError("\n".join(problems))
        self.config = config
        self.windows = config.windows
        # training/prepare_model.py chooses whether the loss is chunked and compiled.
        self.next_token_loss = NextTokenLoss(config)
        self.teacher: Teacher | None = None
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.max_position_embeddings, config.d_model)
        elif config.position != "rope":
            raise ValueError(f"model.position: {config.position!r} is not implemented")
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layers))
        self.final_norm = make_norm(config)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise the weights (Radford et al. 2019, section 2.3), from the seed of torch.manual_seed.

        Each weight has its own random generator, seeded by torch's seed and the parameter's name. Adding a parameter
        therefore does not change the others: with the same seed, variants of a model start from the same weights.

        | parameter                                            | value                               |
        |------------------------------------------------------|-------------------------------------|
        | token_embedding, position_embedding, lm_head         | normal, std 0.02                    |
        | q_proj, k_proj, v_proj, gate_proj, up_proj           | normal, std 0.02                    |
        | out_proj, down_proj                                  | normal, std 0.02 / sqrt(2 n_layers) |
        | attention_norm, mlp_norm, final_norm, q_norm, k_norm | 1, as torch sets it                 |
        | bias                                                 | 0                                   |

        The residual stream is a sum of 2 n_layers outputs of out_proj and down_proj; their smaller std keeps its
        variance independent of depth. With zero_init they are 0 (Zhang et al. 2019, "Fixup", arXiv:1901.09321).
        Any other nn.Linear or nn.Embedding is drawn with std 0.02, and parameters of other modules keep the values
        that their module gave them.
        """
        for path, module in self.named_modules():
            if not isinstance(module, nn.Linear | nn.Embedding):
                continue
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
            std = 0.02
            if path.endswith(("out_proj", "down_proj")):
                std = 0.0 if self.config.zero_init else 0.02 / math.sqrt(2 * self.config.n_layers)
            weight = module.weight
            generator = torch.Generator("cpu" if weight.is_meta else weight.device)
            generator.manual_seed(derive_seed(torch.initial_seed(), "initial weights", f"{path}.weight"))
            weight.normal_(std=std, generator=generator)

    @property
    def output_weight(self) -> Tensor:
        """The output projection [V, C], from the last hidden state to the logits."""
        return self.token_embedding.weight if self.config.tie_embeddings else self.lm_head.weight

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        logits_to_keep: int | None = None,
        position_ids: Tensor | None = None,
        cache: list[KVCache] | None = None,
    ) -> Output:
        """Compute logits and loss. The arguments are named as in transformers, except `cache`.

        Args:
            input_ids: tokens, int64 [B, T].
            attention_mask: [B, T], 1 for tokens and 0 for padding; padding takes up positions, too. Omit it if there
                is no padding: checking that it is all ones synchronises with the GPU.
            labels: int64 [B, T], the same tokens as `input_ids` (they are shifted here); -100 is ignored.
            num_items_in_batch: divisor of the summed loss. Default: the number of targets in `labels`, so that the loss
                is their mean (NaN if there are none). Training passes 1 and divides by the targets of the global batch.
            logits_to_keep: number of last positions for which logits are returned; 0: all. Default: all without
                `labels`, none with them, because logits are by far the largest tensor of a training step.
            position_ids: int64 [B, T], restarting from 0 at each document. Attention stays within a document. Not
                supported together with `attention_mask`.
            cache: one KVCache per block with the keys and values of the positions before `input_ids`; those of
                `input_ids` are appended. Not supported together with `attention_mask` or `position_ids`.

        Raises:
            ValueError: the sequence is longer than max_position_embeddings.
        """
        num_cached = cache[0].length if cache else 0
        limit = self.config.max_position_embeddings
        seq_len = num_cached + input_ids.shape[1]
        if seq_len > limit:
            raise ValueError(f"input_ids: {seq_len} tokens, more than model.max_position_embeddings {limit}")
        use_flex = uses_flex_attention(input_ids, self.dropout.p if self.training else 0.0, self.config.head_size)
        # `masks` is keyed by window; layers with the same window share a mask.
        masks = attention_masks(self.windows, input_ids, num_cached, attention_mask, position_ids, use_flex)

        rope = None
        x_BTC = self.token_embedding(input_ids)
        positions = torch.arange(num_cached, seq_len, device=input_ids.device) if position_ids is None else position_ids
        if self.config.position == "rope":
            # [1, T] or [B, 1, T], so that the tables broadcast over the heads.
            rope = rope_tables(positions.unsqueeze(-2), self.config.head_size, self.config.rope_theta)
        else:
            x_BTC = x_BTC + self.position_embedding(positions)
        x_BTC = self.dropout(x_BTC)
        auxiliary: dict[str, Tensor] = {}  # terms of the training objective by name, 0-dim means (docs/forking.md)
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        for index, block in enumerate(self.blocks):
            x_BTC = block(x_BTC, rope, masks[self.windows[index]], cache[index] if cache else None)
            if isinstance(x_BTC, BlockOutput):
                x_BTC = x_BTC.add_to(auxiliary, metrics)
        x_BTC = self.final_norm(x_BTC)

        logits, loss = None, None
        if labels is not None:
            further = self.teacher.targets(input_ids, attention_mask, position_ids) if self.teacher else {}
            loss, loss_metrics = self.next_token_loss(
                x_BTC, self.output_weight, labels, num_items_in_batch, auxiliary, **further
            )
            metrics = loss_metrics | metrics
        if labels is None or logits_to_keep is not None:
            kept_BTC = x_BTC[:, -(logits_to_keep or 0) :]  # 0 or None: all positions
            logits = soft_cap(F.linear(kept_BTC, self.output_weight), self.config.logit_softcap)
        return Output(logits, loss, metrics)

    def num_parameters(self) -> int:
        """Count the parameters; shared ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def num_compute_parameters(self) -> int:
        """Count the parameters used in the computation of every token, for FLOPs and scaling laws.

        Embedding tables do not count, because they are only looked up. All other parameters do, including norms and
        biases (negligible) and the output projection, even if it is tied to the embedding. A layer that is registered
        under several names counts once per name.
        """
        layers = [
            layer
            for _, layer in self.named_modules(remove_duplicate=False)
            if not isinstance(layer, nn.Embedding) or (self.config.tie_embeddings and layer is self.token_embedding)
        ]
        return sum(parameter.numel() for layer in layers for parameter in layer.parameters(recurse=False))

    def flops_per_token(self, seq_len: int) -> int:
        """Count the floating-point operations to train on one token (PaLM, appendix B, arXiv:2204.02311).

        Forward and backward together take 6 per compute parameter. In each layer, attention scores and the weighted sum
        of values take 12 n_heads head_size per position of the window, or of seq_len without a window; by convention
        this is not halved for causal attention.
        """
        attended = sum(min(window or seq_len, seq_len) for window in self.windows)
        attention_flops = 12 * self.config.n_heads * self.config.head_size * attended
        return 6 * self.num_compute_parameters() + attention_flops


def build_on_meta_device(config: GPTConfig) -> GPTModel:
    """Build a model without allocating its weights, to count parameters and FLOPs or to load weights into it."""
    with torch.device("meta"):
        return GPTModel(config)
