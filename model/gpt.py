"""The network: a decoder-only transformer, GPT-2 or Qwen3 or in between, as GPTConfig says.

Names of tensors end in their shape where it helps:
B rows of the batch, T positions, C d_model, H query heads, K key and value heads, D width of a head, V vocabulary.
"""

import functools
import importlib.util
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from model.config import GPTConfig
from model.generate import Generation, LayerCache
from model.kernels import Linear, linear
from model.loss import capped, next_token_loss
from model.seeds import derive_seed

Rope = tuple[Tensor, Tensor] | None  # cosines and sines
Mask = Tensor | BlockMask | None
HAS_TRITON = importlib.util.find_spec("triton") is not None  # not on every ARM machine
# Compiled, for otherwise flex attention keeps all scores in memory; and not before it is needed, for that imports the
# compiler, which takes seconds.
compiled_flex_attention = functools.cache(lambda: torch.compile(flex_attention))


def rope_tables(positions: Tensor, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles (Su et al. 2021, arXiv:2104.09864) at `positions` [..., T].

    Both are float32 [..., T, D]. Dimensions i and i + D/2 make a pair (the convention of transformers), turned by
    position / theta^(2i/D). They are computed anew in each forward, which is cheap: a buffer would be cast by
    model.bfloat16(), left empty by an initialisation on the meta device, and broadcast by DDP.
    """
    frequency = 1.0 / theta ** (torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size)
    angle = positions[..., None].float() * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of dimensions of x [B, H, T, D] by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class PlainAttention(torch.autograd.Function):
    """Attention with all scores in memory, causal or by a mask [T, T]; autograd would pass over them twice as often.

    N is B times H.
    """

    @staticmethod
    def forward(ctx, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask_TT: Tensor | None = None) -> Tensor:
        q_NTD, k_NTD, v_NTD = (x.flatten(0, 1) for x in (q_BHTD, k_BHTD, v_BHTD))
        T, D = q_NTD.shape[1:]
        if mask_TT is None:
            hidden_TT = q_NTD.new_full((T, T), -math.inf).triu(1)
        else:
            hidden_TT = q_NTD.new_zeros(mask_TT.shape).masked_fill_(~mask_TT, -math.inf)
        scores_NTT = torch.baddbmm(hidden_TT, q_NTD, k_NTD.mT, alpha=1 / math.sqrt(D))
        weights_NTT = scores_NTT.softmax(dim=-1, dtype=torch.float32).type_as(v_NTD)
        ctx.save_for_backward(q_NTD, k_NTD, v_NTD, weights_NTT)
        return (weights_NTT @ v_NTD).view(q_BHTD.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient_BHTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_NTD, k_NTD, v_NTD, weights_NTT = ctx.saved_tensors
        gradient_NTD, scale = gradient_BHTD.flatten(0, 1), 1 / math.sqrt(q_NTD.shape[-1])
        of_weights_NTT = gradient_NTD @ v_NTD.mT
        of_scores_NTT = torch._softmax_backward_data(of_weights_NTT, weights_NTT, -1, weights_NTT.dtype)
        of_q_NTD, of_k_NTD = (of_scores_NTT @ k_NTD).mul_(scale), (of_scores_NTT.mT @ q_NTD).mul_(scale)
        gradients_NTD = of_q_NTD, of_k_NTD, weights_NTT.mT @ gradient_NTD
        return *(x.unflatten(0, gradient_BHTD.shape[:2]) for x in gradients_NTD), None


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)
    raise ValueError(f"model.norm: {config.norm!r} is a choice without code")


class Attention(nn.Module):
    """Causal self-attention, multi-head or grouped-query (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_size = config.head_size
        self.groups = config.n_heads // config.kv_heads
        self.dropout = config.dropout
        self.q_proj = Linear(config.d_model, config.n_heads * config.head_size, bias=config.bias)
        self.k_proj = Linear(config.d_model, config.kv_heads * config.head_size, bias=config.bias)
        self.v_proj = Linear(config.d_model, config.kv_heads * config.head_size, bias=config.bias)
        self.out_proj = Linear(config.n_heads * config.head_size, config.d_model, bias=config.bias)
        self.q_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x_BTC: Tensor, rope: Rope, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        q_BTHD = self.q_proj(x_BTC).unflatten(-1, (-1, self.head_size))
        k_BTKD = self.k_proj(x_BTC).unflatten(-1, (-1, self.head_size))
        v_BTKD = self.v_proj(x_BTC).unflatten(-1, (-1, self.head_size))
        if self.q_norm is not None:
            # Under autocast q and k arrive in bfloat16; the fused kernel wants them in the dtype of its weight.
            q_BTHD = self.q_norm(q_BTHD.type_as(self.q_norm.weight))
            k_BTKD = self.k_norm(k_BTKD.type_as(self.k_norm.weight))
        q_BHTD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
        if rope is not None:
            q_BHTD, k_BKTD = rotate(q_BHTD, *rope), rotate(k_BKTD, *rope)
        q_BHTD, k_BKTD = q_BHTD.type_as(v_BKTD), k_BKTD.type_as(v_BKTD)
        if cache is not None:
            k_BKTD, v_BKTD = cache.append(k_BKTD, v_BKTD)
        if isinstance(mask, BlockMask):
            attend = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
            y_BHTD = attend(q_BHTD, k_BKTD, v_BKTD, block_mask=mask, enable_gqa=self.groups > 1)
        elif self.uses_plain_attention(q_BHTD, mask):
            y_BHTD = PlainAttention.apply(q_BHTD, k_BKTD, v_BKTD, mask)
        else:
            dropout, causal = self.dropout if self.training else 0.0, mask is None and q_BHTD.shape[-2] > 1
            kind = {"dropout_p": dropout, "is_causal": causal, "enable_gqa": self.groups > 1}
            y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, attn_mask=mask, **kind)
        return self.out_proj(y_BHTD.transpose(1, 2).flatten(-2))

    def uses_plain_attention(self, q_BHTD: Tensor, mask: Tensor | None) -> bool:
        """On a CPU the fused kernel takes longer on short sequences, with its backward in bfloat16 up to seven times.

        An exact run in float32 keeps to it, whose bits are known on every processor.
        """
        T, exact = q_BHTD.shape[-2], torch.are_deterministic_algorithms_enabled()
        if q_BHTD.dtype == torch.bfloat16:
            short = T <= 256
        else:
            short = q_BHTD.dtype == torch.float32 and 1 < T <= 128 and not exact
        same_for_all_rows = mask is None or mask.dim() == 2  # causal, or with a window
        plain_enough = same_for_all_rows and self.groups == 1 and not (self.training and self.dropout)
        return short and q_BHTD.device.type == "cpu" and plain_enough


class MLP(nn.Module):
    """GELU (Hendrycks and Gimpel 2016), SwiGLU (Shazeer 2020, arXiv:2002.05202) or ReLU squared (So et al. 2021)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.kind = config.mlp
        self.gate_proj = Linear(config.d_model, config.d_ff, bias=config.bias) if config.mlp == "swiglu" else None
        self.up_proj = Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down_proj = Linear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden = self.up_proj(x_BTC)
        if self.kind == "swiglu":
            hidden = F.silu(self.gate_proj(x_BTC)) * hidden
        elif self.kind == "relu2":
            hidden = F.relu(hidden).square()
        elif self.kind in ("gelu", "gelu_erf"):
            hidden = F.gelu(hidden, approximate="tanh" if self.kind == "gelu" else "none")
        else:
            raise ValueError(f"model.mlp: {self.kind!r} is a choice without code")
        return self.down_proj(hidden)


class Block(nn.Module):
    """Attention and MLP, each normalised at its entrance and added to the residual stream."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor, rope: Rope, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), rope, mask, cache))
        return x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))


def documents_of(position_ids: Tensor) -> Tensor | None:
    """The number of the document that each position [B, T] is of; on a CPU None if no row has a second one."""
    document_BT = (position_ids == 0).cumsum(dim=-1)
    return None if position_ids.device.type == "cpu" and document_BT.max() == 1 else document_BT


def takes_flex_attention(tokens: Tensor, dropout: float, head_size: int) -> bool:
    """Whether flex attention can skip what is masked: on CUDA with Triton, and without what it does not offer, dropout
    of attention weights and heads narrower than 16."""
    return tokens.is_cuda and dropout == 0 and head_size >= 16 and HAS_TRITON


def visible(begin: int, end: int, window: int, document_BT: Tensor | None, device: torch.device) -> Tensor:
    """Which positions before `end` each from `begin` on may attend to: itself and those before it, in its window and of
    its document. bool [T, end], or [B, 1, T, end] with documents."""
    mask = torch.ones(end - begin, end, dtype=torch.bool, device=device).tril(begin).triu(begin - window + 1)
    return mask if document_BT is None else mask & (document_BT[:, None, :, None] == document_BT[:, None, None, :])


def block_mask(end: int, window: int, document_BT: Tensor | None, device: torch.device) -> BlockMask:
    """The same for flex attention, from position 0 on."""

    def sees(b, head, query, key):
        seen = (query >= key) & (query - key < window)
        return seen if document_BT is None else seen & (document_BT[b, query] == document_BT[b, key])

    rows = None if document_BT is None else len(document_BT)
    return create_block_mask(sees, rows, None, end, end, device=device)


class GPTModel(Generation, nn.Module):
    """A language model: token ids in, logits and loss out.

    Raises ValueError, with every problem of the config, if it is inconsistent or its vocab_size is not yet known.
    """

    _no_split_modules = ["Block"]  # what Accelerate shards as a unit

    def __init__(self, config: GPTConfig):
        super().__init__()
        problems = config.problems()
        if config.vocab_size is None:
            problems.append("model.vocab_size is null: set it to the tokenizer's before the model is built")
        if problems:
            raise ValueError("\n".join(problems))
        self.config = config
        self.windows = config.windows
        # How it is computed, training/prepare_model.py chooses.
        self.next_token_loss = functools.partial(next_token_loss, softcap=config.logit_softcap)
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.max_position_embeddings, config.d_model)
        elif config.position != "rope":
            raise ValueError(f"model.position: {config.position!r} is a choice without code")
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.final_norm = make_norm(config)
        if not config.tie_embeddings:
            self.lm_head = Linear(config.d_model, config.vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Sets every parameter, as a function of torch's seed and of its name alone (Radford et al. 2019, section 2.3):

        | parameter                                            | value                               |
        |------------------------------------------------------|-------------------------------------|
        | token_embedding, position_embedding, lm_head         | normal, std 0.02                    |
        | q_proj, k_proj, v_proj, gate_proj, up_proj           | normal, std 0.02                    |
        | out_proj, down_proj                                  | normal, std 0.02 / sqrt(2 n_layers) |
        | attention_norm, mlp_norm, final_norm, q_norm, k_norm | 1                                   |
        | bias                                                 | 0                                   |

        out_proj and down_proj write to the residual stream: 2 n_layers of them add up there, and the smaller std keeps
        the sum from growing with depth. With zero_init they are 0 (Zhang et al. 2019, "Fixup", arXiv:1901.09321).
        Each is drawn apart, so that a new layer moves the start of no other one: with the same seed two models begin
        alike in all that they share.
        """
        for name, parameter in self.named_parameters():
            draws = torch.Generator("cpu" if parameter.is_meta else parameter.device)
            draws.manual_seed(derive_seed(torch.initial_seed(), "initial weights", name))
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith(("out_proj.weight", "down_proj.weight")):
                std = 0.0 if self.config.zero_init else 0.02 / math.sqrt(2 * self.config.n_layers)
                parameter.normal_(std=std, generator=draws)
            else:
                parameter.normal_(std=0.02, generator=draws)

    @property
    def output_weight(self) -> Tensor:
        """The matrix [V, C] from the last hidden state to the logits."""
        return self.token_embedding.weight if self.config.tie_embeddings else self.lm_head.weight

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        logits_to_keep: int | None = None,
        position_ids: Tensor | None = None,
        cache: list[LayerCache] | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The logits and the loss, as transformers' causal language models define them.

        Args:
            input_ids: tokens, int64 [B, T].
            attention_mask: 1 where there is a token and 0 where there is padding, [B, T]. Positions are counted
                from the first column, padding or not. Without padding leave it out: with a mask the fast attention
                kernels cannot run, and looking whether it is all ones makes a GPU wait.
            labels: int64 [B, T], equal to input_ids but -100 where there is nothing to learn. Position t predicts
                label t + 1, so pass them unshifted.
            num_items_in_batch: what the sum of the loss over targets is divided by, such as the number of targets
                in the whole global batch. Default: the number here, so that the loss is the mean (nan without any).
            logits_to_keep: return the logits of so many last positions; 0 is all. Default: all without labels, none
                with labels, because they are by far the largest tensor of a training step.
            position_ids: int64 [B, T], counting up within each document from 0 at its beginning, which must be that of
                the row for the first one. Attention stays inside a document. Not together with attention_mask.
            cache: one for each block, which has what came before input_ids and takes these too. Without the two masks.

        Returns:
            logits [B, positions kept, V] in the dtype of the computation, or None; loss, 0-dim and at least
            float32, in nats, or None without labels.

            A model may return a third thing, numbers to be logged: {name: (sum, count)}, 0-dim tensors or plain
            numbers, not divided by num_items_in_batch, always the same names. Each is added up over the micro-batches
            and processes of a step, and sum / count is logged as train/NAME; over the validation set, as val/NAME.
            `loss` is what is differentiated, and reported as train/loss and val/loss too, unless there is a (sum,
            count) of that name, as next_token_loss gives it. So a term that is only to help training, a mean over the
            targets here, is added to the loss that is returned, times their number / num_items_in_batch (as it is,
            if that is None), and the cross-entropy without it is returned as "loss".

        Raises:
            ValueError: the sequence is longer than max_position_embeddings.
        """
        begin, limit = cache[0].length if cache else 0, self.config.max_position_embeddings
        seq_len = begin + input_ids.shape[1]
        if seq_len > limit:
            raise ValueError(f"a sequence of {seq_len} tokens, but model.max_position_embeddings is {limit}")
        masks = self.masks(begin, input_ids, attention_mask, position_ids)

        rope = None
        x_BTC = self.token_embedding(input_ids)
        positions = torch.arange(begin, seq_len, device=input_ids.device) if position_ids is None else position_ids
        if self.config.position == "rope":
            rope = rope_tables(positions.unsqueeze(-2), self.config.head_size, self.config.rope_theta)
        else:
            x_BTC = x_BTC + self.position_embedding(positions)
        x_BTC = self.dropout(x_BTC)
        for index, block in enumerate(self.blocks):
            x_BTC = block(x_BTC, rope, masks[self.windows[index]], cache[index] if cache else None)
        x_BTC = self.final_norm(x_BTC)

        logits, loss = None, None
        if labels is not None:
            loss, _ = self.next_token_loss(x_BTC, self.output_weight, labels, num_items_in_batch)
        if labels is None or logits_to_keep is not None:
            logits = capped(linear(x_BTC[:, -(logits_to_keep or 0) :], self.output_weight), self.config.logit_softcap)
        return logits, loss

    def masks(
        self, begin: int, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> dict[int | None, Mask]:
        """For each window of the layers, which positions attention may see, if not simply all before; see forward."""
        end, device = begin + input_ids.shape[1], input_ids.device
        real_BT = None if attention_mask is None or attention_mask.all() else attention_mask.bool()
        document_BT = None if position_ids is None else documents_of(position_ids)
        dropout = self.config.dropout if self.training else 0.0
        flex = begin == 0 and real_BT is None and takes_flex_attention(input_ids, dropout, self.config.head_size)
        several_after_others = 0 < begin < end - 1
        masks = {}
        for window in set(self.windows):
            width = end if window is None else min(window, end)
            if width == end and document_BT is None and real_BT is None and not several_after_others:
                masks[window] = None
            elif flex:
                masks[window] = block_mask(end, width, document_BT, device)
            else:
                mask = visible(begin, end, width, document_BT, device)
                # A query that sees no key at all (padding on the left) gets zeros from the kernel, since torch 2.5.
                masks[window] = mask if real_BT is None else mask & real_BT[:, None, None, :]
        return masks

    def num_parameters(self, lookups: bool = True) -> int:
        """Number of parameters; lookups=False counts those that a token is multiplied by: each as often as layers have
        it, not the tables of nn.Embedding, of which it looks up a row, and the output projection whatever it is."""
        if lookups:
            return sum(parameter.numel() for parameter in self.parameters())
        layers = [
            layer
            for _, layer in self.named_modules(remove_duplicate=False)
            if not isinstance(layer, nn.Embedding) or (self.config.tie_embeddings and layer is self.token_embedding)
        ]
        return sum(parameter.numel() for layer in layers for parameter in layer.parameters(recurse=False))

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations to train on one token, forward and backward (PaLM, appendix B, arXiv:2204.02311).

        6 for each parameter that is multiplied, and for the attention scores and their weighted sum 12 n_heads head_dim
        for each position in a layer's window, or seq_len, which by convention counts the masked half as well.
        """
        multiplied = self.num_parameters(lookups=False)
        seen = sum(min(window or seq_len, seq_len) for window in self.windows)
        return 6 * multiplied + 12 * self.config.n_heads * self.config.head_size * seen
