"""Conversion of configs and weights to and from transformers, for the families that have an exact counterpart there.

A converted model opens in AutoModelForCausalLM without remote code, and wherever that format is read.

GPT-2 keeps q, k and v in one matrix and stores its matrices as [in, out]; Qwen3 and Llama differ only in names. Qwen3
is Llama with RMS-normalised queries and keys and, optionally, sliding windows.
transformers is imported inside the functions, because it takes seconds and few commands need it.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call

from model.config import FAMILIES, GPTConfig
from model.gpt import GPTModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

GELUS = {"gelu_tanh": "gelu_new", "gelu_exact": "gelu"}  # names in transformers, whose GPT-2 supports both
MAX_DIFFERENCE = 0.01  # nats; rounding in float32 makes 1e-6 to 1e-3, and a wrong setting much more
# Bounds on the comparison of a model with that of transformers. Each of the two forwards takes about 20 s on one core.
MAX_COMPARED = 4096  # positions; the time of attention grows with their square
COMPARED_WORK = 2**39  # parameters times positions: 920 positions of a model of 0.6 billion parameters
LAST_COMPARED = 16  # positions at the end of a longer context
LOGIT_BYTES = 2**29  # bound on the float32 logits of one model that are compared at once
SHARED = {"vocab_size": "vocab_size", "tie_embeddings": "tie_word_embeddings"}
NAMES_OF_LLAMA = {
    "max_position_embeddings": "max_position_embeddings", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "d_model": "hidden_size", "d_ff": "intermediate_size", "dropout": "attention_dropout",
    "norm_eps": "rms_norm_eps", **SHARED,
}  # fmt: skip
NAMES = {
    "gpt2": {
        "max_position_embeddings": "n_positions", "n_layers": "n_layer", "n_heads": "n_head", "d_model": "n_embd",
        "d_ff": "n_inner", "dropout": "resid_pdrop", "norm_eps": "layer_norm_epsilon", **SHARED,
    },
    "qwen3": NAMES_OF_LLAMA,
    "llama": NAMES_OF_LLAMA,
}  # fmt: skip
# GPT-2 and Llama have defaults: the special tokens of the published models.
NO_SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
# Settings that need no entry in NAMES: they do not change a trained model, or the code below converts them.
HANDLED_SEPARATELY = {
    "zero_init",
    "rope_theta",
    "n_kv_heads",
    "head_dim",
    "window",
    "window_pattern",
}


def find_misfits(config: GPTConfig) -> dict[str, list[str]]:
    """Return for each family the settings that it cannot represent, none for a family that the config fits.

    A setting unknown here, such as one of a fork, must have its default or change no logits.
    """
    misfits = {}
    for family, settings in FAMILIES.items():
        settings = settings | ({"mlp": config.mlp} if family == "gpt2" and config.mlp in GELUS else {})
        known = settings | NAMES[family] | dict.fromkeys(HANDLED_SEPARATELY)
        unknown = {name: field.default for name, field in type(config).model_fields.items() if name not in known}
        misfits[family] = [
            f"model.{name} is {getattr(config, name)}, not {value}"
            for name, value in (settings | unknown).items()
            if getattr(config, name) != value and (name not in unknown or changes_logits(config, name))
        ]
    if config.resolved_n_kv_heads != config.n_heads:
        misfits["gpt2"].append(f"model.n_kv_heads is {config.resolved_n_kv_heads}, not model.n_heads {config.n_heads}")
    if config.resolved_head_dim * config.n_heads != config.d_model:
        misfits["gpt2"].append(f"model.head_dim is {config.resolved_head_dim}, not model.d_model / model.n_heads")
    if config.d_model % config.n_heads:
        misfits["llama"].append(f"model.d_model {config.d_model} is not divisible by model.n_heads {config.n_heads}")
    for family in ("gpt2", "llama"):
        if any(config.windows):
            misfits[family].append(f"model.window is {config.window}, not None")
    if 1 in config.windows:  # transformers' cache keeps the last `window - 1` keys by a slice [-0:], which is all
        misfits["qwen3"].append("model.window is 1, which transformers ignores when it generates; train with 2 or more")
    return misfits


@cache
@torch.no_grad()
def changes_logits(config: GPTConfig, setting: str) -> bool:
    """Return whether a model with random weights computes other logits than with the default of a setting.

    The models have a small vocabulary. The default may need fewer weights, such as none of a part that only the loss
    has. Bits are compared, because a small difference may be a large one with other weights.
    """
    plain_config = {"vocab_size": 64, setting: type(config).model_fields[setting].default}
    with torch.random.fork_rng(devices=[]):
        model = build_perturbed(config.replace(vocab_size=64))
        try:
            plain = GPTModel(config.replace(**plain_config)).eval()
        except ValueError:  # another setting needs this one
            return True
    lacking, _ = plain.load_state_dict(model.state_dict(), strict=False)
    if lacking:
        return True
    return any(not torch.equal(model(**inputs).logits, plain(**inputs).logits) for inputs in compared_inputs(model))


@torch.no_grad()
def build_perturbed(config: GPTConfig, seed: int = 0) -> GPTModel:
    """Build a model in eval mode whose weights are all nonzero and whose attention is not uniform."""
    torch.manual_seed(seed)
    model = GPTModel(config).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def compared_inputs(model: GPTModel) -> list[dict[str, Tensor]]:
    """Return the arguments of the forwards in which a model is compared with another one: always the same tokens.

    They are at as many positions as a minute allows, from the first, and more than the longest window. In a longer
    context the last positions are compared too, where a scaling of positions has the largest effect.
    """
    context, device = model.config.max_position_embeddings, model.output_weight.device
    longest_window = max(window or 0 for window in model.windows)
    length = max(COMPARED_WORK // model.num_parameters(), longest_window + LAST_COMPARED)
    length = min(length, MAX_COMPARED, context)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.output_weight.shape[0], (1, length), generator=generator).to(device)
    inputs = [{"input_ids": tokens}]
    if length < context:
        positions = torch.arange(context - LAST_COMPARED, context, device=device)[None]
        inputs.append({"input_ids": tokens[:, :LAST_COMPARED], "position_ids": positions})
    return inputs


def get_family(config: GPTConfig) -> str:
    """Return the transformers model_type of a config.

    Raises:
        ValueError: the config fits no family; the message names the settings that differ.
    """
    misfits = find_misfits(config)
    for family, reasons in misfits.items():
        if not reasons:
            return family
    explained = "\n".join(f"{family}: {'; '.join(reasons)}" for family, reasons in misfits.items())
    raise ValueError(f"the model has no counterpart in transformers:\n{explained}")


def exported_family(config: GPTConfig) -> str:
    """Return get_family(config).

    Raises:
        ValueError: the config fits no family, or the model does not predict the next token.
    """
    if not GPTModel.predicts_next_token:
        raise ValueError("the model has no counterpart in transformers: it does not predict the next token")
    return get_family(config)


def layer_types(config: GPTConfig) -> list[str]:
    """Return Qwen3's name for the attention of each layer; its window, like ours, includes the query itself."""
    return ["sliding_attention" if window else "full_attention" for window in config.windows]


def window_pattern(layer_types: list[str]) -> str:
    """Invert layer_types: return the shortest pattern that repeats."""
    letters = "".join("S" if kind == "sliding_attention" else "L" for kind in layer_types)
    count = len(letters)
    return next(letters[:n] for n in range(1, count + 1) if (letters[:n] * count)[: count - 1] == letters[:-1])


def config_to_transformers(config: GPTConfig) -> "PretrainedConfig":
    """Return the GPT2Config, Qwen3Config or LlamaConfig of the same model.

    Special tokens belong to the tokenizer and stay unset. Qwen3 and Llama have dropout in their attention only, so that
    dropout of embeddings and residuals is lost: the model is the same in evaluation, not in training.

    Raises:
        ValueError: the config fits no family, or the model does not predict the next token.
    """
    from transformers import GPT2Config, LlamaConfig, Qwen3Config

    family = exported_family(config)
    config = config.replace(n_kv_heads=config.resolved_n_kv_heads, head_dim=config.resolved_head_dim)
    settings = {there: getattr(config, here) for here, there in NAMES[family].items()}
    if family == "gpt2":
        settings |= {"embd_pdrop": config.dropout, "attn_pdrop": config.dropout}
        settings["activation_function"] = GELUS[config.mlp]
        settings["n_ctx"] = config.max_position_embeddings  # as in the published config; llama.cpp reads it
        return GPT2Config(**settings, **NO_SPECIAL_TOKENS)
    if any(config.windows):
        settings |= {"use_sliding_window": True, "sliding_window": config.window, "layer_types": layer_types(config)}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    config_class = {"qwen3": Qwen3Config, "llama": LlamaConfig}[family]
    hf_config = config_class(**settings, **NO_SPECIAL_TOKENS)
    hf_config.rope_theta = config.rope_theta  # transformers 4 reads this attribute, whose default is 10,000
    return hf_config


def config_from_transformers(hf_config: "PretrainedConfig") -> GPTConfig:
    """Return the GPTConfig of a GPT2Config, Qwen3Config or LlamaConfig.

    Raises:
        ValueError: the model is of another family, or has settings that GPTModel does not support; the message names
            them.
    """
    family = hf_config.model_type
    if family not in FAMILIES:
        raise ValueError(f"a transformers model of type {family}: only {', '.join(FAMILIES)} can be read")
    settings = {here: getattr(hf_config, there) for here, there in NAMES[family].items()}
    values = hf_config.to_dict()
    if family == "gpt2":
        settings["d_ff"] = hf_config.n_inner or 4 * hf_config.n_embd
        settings["mlp"] = "gelu_exact" if hf_config.activation_function == "gelu" else "gelu_tanh"
        required = {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "reorder_and_upcast_attn": (False,),
            "add_cross_attention": (False,),
            "attn_pdrop": (hf_config.resid_pdrop,),
            "embd_pdrop": (hf_config.resid_pdrop,),
        }
    else:
        values |= hf_config.rope_parameters
        settings["rope_theta"] = values["rope_theta"]
        required = {"hidden_act": ("silu",), "attention_bias": (False,), "rope_type": ("default",)}
        if family == "llama":
            required["mlp_bias"] = (False,)
        else:
            if "sliding_attention" in hf_config.layer_types:
                if not hf_config.sliding_window:  # null where use_sliding_window is false
                    raise ValueError("its layer_types name sliding_attention, but it has no sliding_window")
                settings["window"] = min(hf_config.sliding_window, hf_config.max_position_embeddings)
                settings["window_pattern"] = window_pattern(hf_config.layer_types)
            required["layer_types"] = (layer_types(GPTConfig(**settings)),)
    misfits = [
        f"{name} is {values[name]}, not {' or '.join(map(str, allowed))}"
        for name, allowed in required.items()
        if values[name] not in allowed
    ]
    if misfits:
        raise ValueError(f"this {family} model has settings that GPTModel lacks: {'; '.join(misfits)}")
    return GPTConfig(**FAMILIES[family] | settings)


def tensor_names(config: GPTConfig) -> Iterator[tuple[str, list[str], bool]]:
    """Yield every tensor as (name in transformers, names here, transposed).

    Several tensors here are stacked along their first dimension; if transposed, the result is [in, out] there.
    """
    if get_family(config) == "gpt2":
        yield "transformer.wte.weight", ["token_embedding.weight"], False
        yield "transformer.wpe.weight", ["position_embedding.weight"], False
        for kind in ("weight", "bias"):
            matrix = kind == "weight"
            for i in range(config.n_layers):
                there, here = f"transformer.h.{i}", f"blocks.{i}"
                yield f"{there}.ln_1.{kind}", [f"{here}.attention_norm.{kind}"], False
                yield f"{there}.attn.c_attn.{kind}", [f"{here}.attention.{x}_proj.{kind}" for x in "qkv"], matrix
                yield f"{there}.attn.c_proj.{kind}", [f"{here}.attention.out_proj.{kind}"], matrix
                yield f"{there}.ln_2.{kind}", [f"{here}.mlp_norm.{kind}"], False
                yield f"{there}.mlp.c_fc.{kind}", [f"{here}.mlp.up_proj.{kind}"], matrix
                yield f"{there}.mlp.c_proj.{kind}", [f"{here}.mlp.down_proj.{kind}"], matrix
            yield f"transformer.ln_f.{kind}", [f"final_norm.{kind}"], False
    else:
        yield "model.embed_tokens.weight", ["token_embedding.weight"], False
        for i in range(config.n_layers):
            there, here = f"model.layers.{i}", f"blocks.{i}"
            yield f"{there}.input_layernorm.weight", [f"{here}.attention_norm.weight"], False
            for name in ("q_proj", "k_proj", "v_proj", *(("q_norm", "k_norm") if config.qk_norm else ())):
                yield f"{there}.self_attn.{name}.weight", [f"{here}.attention.{name}.weight"], False
            yield f"{there}.self_attn.o_proj.weight", [f"{here}.attention.out_proj.weight"], False
            yield f"{there}.post_attention_layernorm.weight", [f"{here}.mlp_norm.weight"], False
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield f"{there}.mlp.{name}.weight", [f"{here}.mlp.{name}.weight"], False
        yield "model.norm.weight", ["final_norm.weight"], False
    if not config.tie_embeddings:
        yield "lm_head.weight", ["lm_head.weight"], False


def tensors_to_transformers(config: GPTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename, stack and transpose the tensors of GPTModel (weights or gradients) into those of transformers.

    Raises:
        ValueError: the model has other tensors than its family, as a fork may.
    """
    result, names = {}, list(tensor_names(config))
    if different := sorted({name for _, here, _ in names for name in here} ^ tensors.keys()):
        problem = f"it and its family differ in {len(different)} tensors, such as {different[0]}"
        raise ValueError(f"the model has no counterpart in transformers: {problem}")
    for there, here, transposed in names:
        stacked = torch.cat([tensors[name] for name in here])
        result[there] = stacked.T.contiguous() if transposed else stacked
    return result


def tensors_from_transformers(config: GPTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Invert tensors_to_transformers."""
    result = {}
    for there, here, transposed in tensor_names(config):
        stacked = tensors[there].T if transposed else tensors[there]
        for name, part in zip(here, stacked.chunk(len(here)), strict=True):
            result[name] = part.contiguous()
    return result


def to_transformers(model: GPTModel) -> "PreTrainedModel":
    """Return the same model in transformers, such as a GPT2LMHeadModel, in eval mode, with copies of the weights.

    Tensors that transformers lacks are left out if they change no logits (find_unused_tensors).

    Raises:
        ValueError: the config fits no family, the model does not predict the next token, or it has other tensors.
    """
    from transformers import AutoModelForCausalLM

    hf_config = config_to_transformers(model.config)
    hf_model = AutoModelForCausalLM.from_config(hf_config, dtype=model.token_embedding.weight.dtype)
    unused = find_unused_tensors(model)
    used = {name: tensor for name, tensor in model.state_dict().items() if name not in unused}
    tensors = tensors_to_transformers(model.config, used)
    if model.config.tie_embeddings:  # one parameter under two names there
        tensors["lm_head.weight"] = model.token_embedding.weight
    hf_model.load_state_dict(tensors)
    return hf_model.to(model.token_embedding.weight.device).eval()


@torch.no_grad()
def find_unused_tensors(model: GPTModel) -> list[str]:
    """Return the names of tensors that transformers lacks, if none of them changes a logit; otherwise none.

    A head that predicts further tokens in training has such tensors. All are replaced by NaN for one forward. The graph
    of autograd would not tell: it does not contain a router that chooses an expert by argmax.
    """
    in_family = {name for _, here, _ in tensor_names(model.config) for name in here}
    added = {name: tensor for name, tensor in model.state_dict().items() if name not in in_family}
    if not added or not all(tensor.is_floating_point() for tensor in added.values()):
        return []
    not_a_number = {name: torch.full_like(tensor, torch.nan) for name, tensor in added.items()}
    was_training = model.training
    model.eval()
    are_equal = [
        torch.equal(*(functional_call(model, replaced, (), inputs).logits for replaced in ({}, not_a_number)))
        for inputs in ({**inputs, "logits_to_keep": LAST_COMPARED} for inputs in compared_inputs(model))
    ]
    model.train(was_training)
    return list(added) if all(are_equal) else []


def from_transformers(hf_model: "PreTrainedModel") -> GPTModel:
    """Return the same model as a GPTModel in eval mode, with copies of the weights.

    Raises:
        ValueError: it is of another family, has settings that GPTModel does not support, or predicts otherwise here.
    """
    config = config_from_transformers(hf_model.config)
    # transformers keeps a second output projection, such as PEFT trains with modules_to_save=["lm_head"], although the
    # config says that the projection is tied to the embedding.
    tied = [hf_model.get_input_embeddings(), hf_model.get_output_embeddings()]
    if not torch.equal(*(layer.state_dict()["weight"] for layer in tied)):
        config = config.replace(tie_embeddings=False)
    model = GPTModel(config).to(hf_model.device, hf_model.dtype)
    model.load_state_dict(tensors_from_transformers(config, hf_model.state_dict()))
    difference = compare_predictions(model.eval(), hf_model.eval())
    if not difference < MAX_DIFFERENCE:
        raise ValueError(
            f"its log-probabilities here differ from those in transformers by {difference:.2g} nats, so it has a part "
            "that GPTModel lacks"
        )
    return model


@torch.no_grad()
def compare_predictions(model: GPTModel, hf_model: "PreTrainedModel") -> float:
    """Return the largest difference of the log-probabilities of both models at `compared_inputs`, in nats.

    It is NaN if one of them gives NaN. Raise ValueError if both do.
    """
    differences, num_kept = [], max(1, LOGIT_BYTES // (4 * model.output_weight.shape[0]))
    for inputs in compared_inputs(model):
        for end in range(inputs["input_ids"].shape[1], 0, -num_kept):
            begin = {name: tensor[:, :end] for name, tensor in inputs.items()}
            ours, theirs = (each(**begin, logits_to_keep=num_kept).logits.float() for each in (model, hf_model))
            if not (ours.isfinite().all() or theirs.isfinite().all()):
                raise ValueError("its weights give NaN or infinite logits, in transformers too")
            differences.append(log_probability_difference(ours, theirs))
    return torch.tensor(differences).max().item()  # unlike the maximum of Python, NaN if there is one


def log_probability_difference(logits: Tensor, other_logits: Tensor) -> float:
    """Return the largest difference of the log-probabilities of two tensors of logits, in nats.

    It is NaN if one tensor has NaN. A constant that is added to all logits changes nothing.
    """
    return logits.log_softmax(-1).sub_(other_logits.log_softmax(-1)).abs_().max().item()  # in place: they may be large
