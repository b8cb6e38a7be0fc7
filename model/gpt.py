"""A decoder-only transformer: GPT-2, Llama, Qwen3, or a combination of parts of published models (see GPTConfig).

The main tensors have their shape as a suffix: x_BTC is [B, T, C]. The letters are

    B  sequences in the batch
    C  d_model, the width of the residual stream
    D  head_dim, the width of a head
    F  d_ff, the hidden width of the MLP
    H  n_heads, the query heads
    K  n_kv_heads, the key and value heads
    N  B x T, the positions of all sequences, flattened
    S  positions of the keys: the cached ones and T new ones
    T  positions of `input_ids`
    V  vocab_size
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Mask, attention_masks, dot_product_attention, uses_flex_attention
from model.config import GPTConfig
from model.generate import GenerativeModel, KVCache
from model.loss import MetricSums, NextTokenLoss, soft_cap
from model.seeds import derive_seed

Rope = tuple[Tensor, Tensor]  # cosines and sines, see rope_tables


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> Rope:
    """Return cosines and sines of the rotary angles (Su et al. 2021, arXiv:2104.09864) at `positions` [..., T].

    Both are float32 [..., T, D]. Dimensions i and i + D/2 form a pair (as in transformers), which is rotated by
    position / theta^(2i/D). The tables are recomputed in every forward, which is cheap. A buffer would be cast by
    model.bfloat16(), uninitialised after construction on the meta device, and broadcast by DDP.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim  # [D/2]
    frequencies = 1.0 / theta**exponents  # [D/2]
    angles = positions[..., None].float() * frequencies  # [..., T, D/2]
    angles = torch.cat((angles, angles), dim=-1)  # [..., T, D]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of dimensions of x, [B, H, T, D] or [B, K, T, D], by the angle of its position."""
    first, second = x.chunk(2, dim=-1)  # [B, H, T, D/2] each
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
        self.dropout, self.head_dim = config.dropout, config.resolved_head_dim
        # trainer/cpu_kernels.py may replace `sdpa` by a faster function.
        self.sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention
        q_width, kv_width = config.n_heads * self.head_dim, config.resolved_n_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.d_model, q_width, bias=config.bias)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.out_proj = nn.Linear(q_width, config.d_model, bias=config.bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x_BTC: Tensor, rope: Rope | None, mask: Mask, cache: KVCache | None = None) -> Tensor:
        # Queries, keys and values.
        q_BTHD = self.q_proj(x_BTC).unflatten(-1, (-1, self.head_dim))
        k_BTKD = self.k_proj(x_BTC).unflatten(-1, (-1, self.head_dim))
        v_BTKD = self.v_proj(x_BTC).unflatten(-1, (-1, self.head_dim))

        # QK norm, in the dtype of its weight: under autocast q and k are not float32, and RMSNorm's fused kernel needs
        # one dtype; with two, torch warns and runs slower, unfused operations.
        if self.q_norm and self.k_norm:
            q_BTHD = self.q_norm(q_BTHD.type_as(self.q_norm.weight))
            k_BTKD = self.k_norm(k_BTKD.type_as(self.k_norm.weight))

        # Rotary positions.
        q_BHTD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
        if rope is not None:
            q_BHTD, k_BKTD = rotate(q_BHTD, *rope), rotate(k_BKTD, *rope)

        # Attention over the cached and the new positions.
        q_BHTD, k_BKTD = q_BHTD.type_as(v_BKTD), k_BKTD.type_as(v_BKTD)  # the norm may have made them float32
        k_BKSD, v_BKSD = (k_BKTD, v_BKTD) if cache is None else cache.append(k_BKTD, v_BKTD)
        y_BHTD = dot_product_attention(q_BHTD, k_BKSD, v_BKSD, mask, self.dropout if self.training else 0.0, self.sdpa)

        # Join the heads and project to the residual stream.
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
        hidden_BTF = self.up_proj(x_BTC)
        if self.gate_proj is not None:
            hidden_BTF = F.silu(self.gate_proj(x_BTC)) * hidden_BTF
        elif self.kind == "relu2":
            hidden_BTF = F.relu(hidden_BTF).square()
        elif self.kind in ("gelu_tanh", "gelu_exact"):
            hidden_BTF = F.gelu(hidden_BTF, approximate="tanh" if self.kind == "gelu_tanh" else "none")
        else:
            raise ValueError(f"model.mlp: {self.kind!r} is not implemented")
        return self.down_proj(hidden_BTF)


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x_BTC: Tensor,
        rope: Rope | None,
        mask: Mask,
        cache: KVCache | None = None,
        position_ids: Tensor | None = None,  # int64 [B, T]; attention has them in its mask and rope
    ) -> Tensor:
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), rope, mask, cache))
        return x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))


class Output(NamedTuple):
    """The results of GPTModel.forward.

    Attributes:
        logits: [B, kept positions, V] in the dtype of the computation (float32 from a model that Accelerate prepared
            without FSDP2); None with labels, unless requested.
        loss: the training objective, 0-dim, at least float32, in nats: the cross-entropy, mixed with the divergence
            from the teacher if there is one, plus the auxiliary terms if there are any. None without labels.
        metrics: auxiliary metrics {name: (sum, count)}, detached; often empty (docs/forking.md). One that is named
            "loss" is logged in place of the objective.
    """

    logits: Tensor | None
    loss: Tensor | None
    metrics: MetricSums


class Teacher:
    """The model from which another one learns by distillation (`teacher.path`).

    trainer/pretrained/load.py loads it in eval mode, and trainer/prepare_model.py freezes it. This class is not an
    nn.Module, so the state_dict of the model that learns, and its checkpoints, omit the teacher.
    """

    def __init__(self, model: "GPTModel", weight: float, temperature: float):
        self.model, self.weight, self.temperature = model, weight, temperature

    def targets(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> dict[str, Any]:
        """Return the fields of model.loss.Targets that the teacher provides."""
        # The teacher's parameters need no gradient, so this forward records no graph.
        logits_BTV = self.model(input_ids, attention_mask, position_ids=position_ids).logits
        return {
            "teacher_NV": logits_BTV.flatten(0, 1),
            "teacher_weight": self.weight,
            "temperature": self.temperature,
        }


class GPTModel(GenerativeModel):
    """A language model: token ids in, logits and loss out.

    Attributes:
        teacher: gives the targets of distillation, in training and in the evaluations of train.py; None: no
            distillation. It is not saved: train.py attaches it again.
        windows: the window of sliding-window attention of each block; None: full causal attention.
        predicts_next_token: whether the logits at a position predict the next token. A fork whose model is of another
            kind, such as masked diffusion, sets it to False: then the target of a position is its own label, and what
            needs a next token is omitted or refused (docs/forking_reference.md).

    Raises:
        ValueError: the config is inconsistent (the message names every problem), or its vocab_size is unknown.
    """

    # With `fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP`, Accelerate's FSDP2 shards each of these as a unit, unless
    # the launch file names others.
    _no_split_modules = ["Block"]

    predicts_next_token = True

    def __init__(self, config: GPTConfig):
        super().__init__()
        if problems := config.problems():
            raise ValueError("\n".join(problems))
        if config.vocab_size is None:  # allowed in a config until the tokenizer is known
            raise ValueError("model.vocab_size is null: set it to the size of the tokenizer's vocabulary")
        self.config = config
        self.windows = config.windows
        # trainer/prepare_model.py chooses whether the loss is chunked and compiled.
        self.next_token_loss = NextTokenLoss(config, predicts_next_token=self.predicts_next_token)
        self.teacher: Teacher | None = None
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.max_position_embeddings, config.d_model)
        elif config.position != "rope":
            raise ValueError(f"model.position: {config.position!r} is not implemented")
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.final_norm = make_norm(config)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if not self.token_embedding.weight.is_meta:  # meta tensors have no values, and the loop would take time
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise the weights (Radford et al. 2019, section 2.3).

        Each nn.Linear and nn.Embedding weight has its own random generator, seeded by the parameter's name and the seed
        that was last given to torch.manual_seed. So two variants of a model, built with the same seed, have equal
        initial values for each weight in the table below that has the same name, shape and standard deviation in both.
        Another n_layers changes the standard deviation of out_proj and down_proj.

        | parameter                                            | value                               |
        |------------------------------------------------------|-------------------------------------|
        | token_embedding, position_embedding, lm_head         | normal, std 0.02                    |
        | q_proj, k_proj, v_proj, gate_proj, up_proj           | normal, std 0.02                    |
        | out_proj, down_proj                                  | normal, std 0.02 / sqrt(2 n_layers) |
        | attention_norm, mlp_norm, final_norm, q_norm, k_norm | 1, as torch sets it                 |
        | bias                                                 | 0                                   |

        The residual stream is the sum of the embeddings and of 2 n_layers outputs of out_proj and down_proj. The
        smaller std of these projections keeps the variance of their sum independent of depth. With zero_init they are 0
        (Zhang et al. 2019, "Fixup", arXiv:1901.09321). An nn.Linear or nn.Embedding that a fork adds follows
        the row of its name; under a name that is not in the table, its std is 0.02. Parameters of other modules
        keep the values that their module gave them. Random ones come from torch's global generator, so they depend on
        the layers that were built before.
        """
        for path, module in self.named_modules():
            if not isinstance(module, nn.Linear | nn.Embedding):
                continue

            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()

            std = 0.02
            if path.rpartition(".")[-1] in ("out_proj", "down_proj"):
                std = 0.0 if self.config.zero_init else 0.02 / math.sqrt(2 * self.config.n_layers)
            weight = module.weight
            generator = torch.Generator(weight.device)
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
            attention_mask: [B, T], 1 for tokens and 0 for padding. Padding occupies positions, so padding on the left
                shifts the positions of the tokens. Omit the mask if there is no padding: checking it for zeros makes
                the host wait for the GPU.
            labels: int64 [B, T], the same tokens as `input_ids` (they are shifted here, unless `predicts_next_token` is
                False); -100 is ignored.
            num_items_in_batch: divisor of the summed loss. Default: the number of targets in `labels`, so that the loss
                is their mean (NaN if there are none). Training passes 1 and divides by the targets of the global batch.
            logits_to_keep: n: return the logits of the last n positions; 0: of all. None: of all without `labels`, of
                none with them, because with a large vocabulary logits are by far the largest tensor of a training step.
            position_ids: int64 [B, T], restarting from 0 at each document: a text or a conversation. Attention stays
                within a document, but the last token of a document predicts the first token of the next. A text
                begins with an end-of-text token, so the model learns where the text before it ends. The first token of
                a conversation is not a target. Not supported together with `attention_mask`.
            cache: one KVCache per block with the keys and values of the positions before `input_ids`; those of
                `input_ids` are appended. Not supported together with `attention_mask` or `position_ids`, nor with
                `labels` if there is a teacher.

        Raises:
            ValueError: the sequence is longer than max_position_embeddings, or these arguments are not supported
                together.
        """
        # Check the arguments.
        if sum(argument is not None for argument in (attention_mask, position_ids, cache)) > 1:
            raise ValueError("attention_mask, position_ids, cache: give at most one of them")
        if cache is not None and labels is not None and self.teacher is not None:
            raise ValueError("cache: the teacher has none, so it does not know the earlier tokens; give no labels")
        num_cached = cache[0].length if cache else 0
        limit = self.config.max_position_embeddings
        seq_len = num_cached + input_ids.shape[1]
        if seq_len > limit:
            raise ValueError(f"input_ids: {seq_len} tokens, more than model.max_position_embeddings {limit}")

        # Build the attention masks, keyed by window: layers with the same window share a mask. Plain causal attention
        # needs none, except for several tokens after cached ones.
        dropout = self.dropout.p if self.training else 0.0  # the same in all modules; a schedule may change it
        use_flex = uses_flex_attention(input_ids, dropout, self.config.resolved_head_dim)
        masks = attention_masks(self.windows, input_ids, num_cached, attention_mask, position_ids, use_flex)

        # Compute the last hidden states.
        positions = torch.arange(num_cached, seq_len, device=input_ids.device) if position_ids is None else position_ids
        x_BTC, rope = self.embed(input_ids, positions)
        x_BTC = self.final_norm(self.run_blocks(x_BTC, rope, masks, cache, position_ids))

        # Compute the loss. NextTokenLoss may work in chunks; a teacher's logits are always whole.
        loss: Tensor | None = None
        metrics: MetricSums = {}
        if labels is not None:
            teacher_targets = self.teacher.targets(input_ids, attention_mask, position_ids) if self.teacher else {}
            loss, loss_metrics = self.next_token_loss(
                x_BTC, self.output_weight, labels, num_items_in_batch, **teacher_targets
            )
            metrics |= loss_metrics

        # Compute the logits, if they are requested, of the last positions (`logits_to_keep` 0: of all).
        logits = None
        if logits_to_keep is None and labels is None:
            logits_to_keep = 0
        if logits_to_keep is not None:
            logits = self.project(x_BTC[:, -logits_to_keep:] if logits_to_keep else x_BTC)
        return Output(logits, loss, metrics)

    def embed(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, Rope | None]:
        """Return the input of the first block, [B, T, C], and the rotary tables (None with learned positions).

        `positions` are int64 [T] or [B, T].
        """
        x_BTC = self.token_embedding(input_ids)
        if self.config.position == "learned":
            return self.dropout(x_BTC + self.position_embedding(positions)), None
        # [1, T] or [B, 1, T], so that the tables broadcast over the heads.
        rope = rope_tables(positions.unsqueeze(-2), self.config.resolved_head_dim, self.config.rope_theta)
        return self.dropout(x_BTC), rope

    def run_blocks(
        self,
        x_BTC: Tensor,
        rope: Rope | None,
        masks: dict[int | None, Mask],
        cache: list[KVCache] | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after the last block, [B, T, C].

        Args:
            x_BTC: the input of the first block.
            rope: the rotary tables; None for learned positions.
            masks: the attention mask of each window (attention_masks).
            cache: one for each block; None: `x_BTC` has all positions.
            position_ids: int64 [B, T], restarting at each document; None: attention crosses the documents of a row.

        It also adds the new positions to the `length` of each cache, after all blocks, since a layer need not have
        keys.
        """
        for index, block in enumerate(self.blocks):
            layer_cache = cache[index] if cache else None
            x_BTC = block(x_BTC, rope, masks[self.windows[index]], layer_cache, position_ids)
        for layer_cache in cache or []:
            layer_cache.length += x_BTC.shape[1]
        return x_BTC

    def project(self, x_BTC: Tensor) -> Tensor:
        """Return the logits [B, T, V] of the last hidden states [B, T, C]."""
        return soft_cap(F.linear(x_BTC, self.output_weight), self.config.logit_softcap)

    def num_parameters(self) -> int:
        """Count the parameters; shared ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def num_matmul_parameters(self) -> int:
        """Count the parameters that are multiplied with every token, for FLOPs and scaling laws.

        Embedding tables do not count, because they are only looked up. All other parameters do: the weights of matrix
        products, including an output projection that is tied to the embedding, and the norms and biases, which are
        negligible. A layer that is registered under several names counts once per name: the forward runs it as often.
        """
        count = 0
        for _, layer in self.named_modules(remove_duplicate=False):
            is_output_projection = self.config.tie_embeddings and layer is self.token_embedding
            if not isinstance(layer, nn.Embedding) or is_output_projection:
                count += sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        return count

    def flops_per_token(self, seq_len: int) -> int:
        """Count the floating-point operations to train on one token (PaLM, appendix B, arXiv:2204.02311).

        Forward and backward together take 6 per matmul parameter. In each layer, attention scores and the weighted sum
        of values take 12 n_heads head_dim per position of the window, or of seq_len without a window; by convention
        this is not halved for causal attention. The forward of a teacher, and the second forward of activation
        checkpointing, are not counted. All experts of a fork count, unless it subtracts the idle ones.
        """
        attended = sum(min(window or seq_len, seq_len) for window in self.windows)  # positions, over all layers
        attention_flops = 12 * self.config.n_heads * self.config.resolved_head_dim * attended
        return 6 * self.num_matmul_parameters() + attention_flops


def build_on_meta_device(config: GPTConfig) -> GPTModel:
    """Build a model without allocating its weights, to count parameters and FLOPs or to load weights into it."""
    with torch.device("meta"):
        return GPTModel(config)
