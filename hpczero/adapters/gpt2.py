"""The names and shapes that Hugging Face's GPT-2 has for the parameters of ``hpczero.models.GPT``.

Our linear layers store weights as (out, in). Theirs in the blocks are ``Conv1D``, which stores (in, out).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpczero.checkpoint.disk.format import NAMED, some
from hpczero.errors import CheckpointMismatch, ConfigError
from hpczero.files.regular import shown
from hpczero.models.config import gpt_shapes

OURS = {
    "wte": "wte",
    "wpe": "wpe",
    "ln_f": "final_norm",
    "lm_head": "lm_head",
}
OURS_IN_BLOCK = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.projection",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.expansion",
    "mlp.c_proj": "mlp.projection",
}
THEIRS = {ours: theirs for theirs, ours in OURS.items()}
THEIRS_IN_BLOCK = {ours: theirs for theirs, ours in OURS_IN_BLOCK.items()}
HEAD, TABLE, PREFIX = "lm_head.weight", "wte.weight", "transformer."

# What must stand in a config.json for the two models to give the same logits; absent means the first.
FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}

_OURS = re.compile(r"blocks\.([0-9]{1,9})\.(.+)\.(weight|bias)")
_THEIRS = re.compile(r"h\.([0-9]{1,9})\.(.+)\.(weight|bias)")
_MASK = re.compile(r"h\.[0-9]{1,9}\.attn\.(bias|masked_bias)")

Shape = tuple[int, ...]


def is_transposed(name: str) -> bool:
    """Whether GPT-2 stores our parameter ``name`` transposed."""
    found = _OURS.fullmatch(name)
    return found is not None and found[3] == "weight" and not found[2].endswith("_norm")


def their_name(name: str) -> str:
    """GPT-2's name of our parameter ``name``, which ``check`` has let through."""
    found = _OURS.fullmatch(name)
    if found:
        return f"{PREFIX}h.{found[1]}.{THEIRS_IN_BLOCK[found[2]]}.{found[3]}"
    module, _, leaf = name.rpartition(".")
    return f"{'' if name == HEAD else PREFIX}{THEIRS[module]}.{leaf}"


def file_name(name: str) -> str:
    """GPT-2's name of a parameter as most programs write it to files; a name that is none of ours stays as it is."""
    try:
        return their_name(name).removeprefix(PREFIX)
    except KeyError:
        return name


def our_name(key: str) -> str | None:
    """Our name of their tensor ``key``; None for a mask, which is no weight. An unknown key stays as it is."""
    plain = key.removeprefix(PREFIX)
    if _MASK.fullmatch(plain):
        return None
    found = _THEIRS.fullmatch(plain)
    if found:
        ours = OURS_IN_BLOCK.get(found[2])
        return f"blocks.{found[1]}.{ours}.{found[3]}" if ours else key
    module, _, leaf = plain.rpartition(".")
    return f"{OURS[module]}.{leaf}" if module in OURS else key


def looks_like(names: Mapping[str, Any]) -> bool:
    """Whether the keys are GPT-2's. Other models have blocks ``h.0`` too, but with other modules in them."""
    found = (_THEIRS.fullmatch(name.removeprefix(PREFIX)) for name in names)
    return any(match and "c_attn" in match[2] and match[2] in OURS_IN_BLOCK for match in found)


def expected_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes of all parameters of the GPT that ``shapes`` come nearest to, in our layout, its untied head included."""
    vocab_size, hidden = _pair(shapes.get(TABLE))
    context, _ = _pair(shapes.get("wpe.weight"))
    ffn, _ = _pair(shapes.get("blocks.0.mlp.expansion.weight"))
    layers = 1 + max(
        (int(found[1]) for name in shapes if (found := _OURS.fullmatch(name))), default=-1
    )
    layers = min(layers, len(shapes))  # a name may say anything
    return dict(gpt_shapes(vocab_size, context, layers, hidden, ffn))


def sizes_of(expected: Mapping[str, Shape]) -> dict[str, int]:
    """Fields of ``GPTConfig`` that follow from the shapes of a whole GPT-2."""
    vocab_size, hidden = expected[TABLE]
    return {
        "vocab_size": vocab_size,
        "context": expected["wpe.weight"][0],
        "layers": sum(name.endswith(".attention.qkv.weight") for name in expected),
        "hidden": hidden,
    }


def _pair(shape: Shape | None) -> tuple[int, int]:
    return (shape[0], shape[1]) if shape is not None and len(shape) == 2 else (0, 0)


def check(
    shapes: Mapping[str, Shape],
    tied: Mapping[str, str],
    model: Mapping[str, Any],
    *,
    rotary: bool = False,
) -> None:
    """Refuse what GPT-2 has no place for, or with ``rotary`` what GPT-NeoX has none for.

    Args:
        shapes: of all parameters and buffers, in our layout; a tied head under its own name too.
        tied: further names of parameters, each with the name it is tied to.
        model: known fields of ``GPTConfig``.
        rotary: whether positions are, as those of GPT-NeoX.

    Raises:
        ConfigError: the message names what does not fit.
    """
    positions = model.get("positions", "learned")
    expected = expected_shapes(shapes)
    faults = []
    if rotary:
        del expected["wpe.weight"]
    elif positions != "learned":
        faults = [f"positions are {positions!r}, expected 'learned'; give --layout transformers"]
    missing = [name for name in expected if name not in shapes]
    if missing:
        faults.append(f"there is no {some(missing)}")
    foreign = [name for name in shapes if name not in expected]
    if foreign:
        faults.append(f"{'GPT-NeoX' if rotary else 'GPT-2'} has no {some(foreign)}")
    faults += [
        f"{name} is {shapes[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ][:NAMED]
    faults += [
        f"{alias} is tied to {name}"
        for alias, name in tied.items()
        if (alias, name) != (HEAD, TABLE)
    ]
    if faults:
        raise ConfigError(
            f"the model is not a {'GPT-NeoX' if rotary else 'GPT-2'} ({'; '.join(faults)}); export it with "
            "--layout hpczero, or a model that came from a Hugging Face folder with hpczero.hf.export"
        )


def their_config(
    shapes: Mapping[str, Shape], model: Mapping[str, Any], *, heads: int | None, tied: bool
) -> dict[str, Any]:
    """What ``config.json`` says of a model that ``check`` has let through, which has the same arguments.

    Args:
        shapes: as in ``check``.
        model: as in ``check``.
        heads: attention heads, where ``model`` does not have them; they do not follow from shapes.
        tied: whether the head is the token embedding.

    Raises:
        ConfigError: the number of heads is unknown, differs from that in ``model``, or does not divide the width.
    """
    vocab_size, hidden = shapes[TABLE]
    count = heads_of(hidden, model, heads)
    layers = sum(name.endswith(".attention.qkv.weight") for name in shapes)
    dropout = float(model.get("dropout", 0.0))
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": shapes["wpe.weight"][0],
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": count,
        "n_inner": shapes["blocks.0.mlp.expansion.weight"][0] if layers else None,
        **{name: values[0] for name, values in FIXED.items()},
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "resid_pdrop": dropout,
        "tie_word_embeddings": tied,
        # The tokenizer's business; the defaults of GPT-2 may lie beyond this vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def heads_of(hidden: int, model: Mapping[str, Any], heads: int | None) -> int:
    """Attention heads: of ``model``, or ``heads``; raises as ``their_config``."""
    known = model.get("heads")
    if known is None and heads is None:
        raise ConfigError(
            "the checkpoint does not say how many attention heads the model has, and shapes do not tell; give --heads"
        )
    if known is not None and heads not in (None, known):
        raise ConfigError(f"heads: got {heads}, and the checkpoint says {known}; leave --heads out")
    count = int(heads if known is None else known)  # type: ignore[arg-type]  # one of them is there
    if count < 1 or hidden % count:
        raise ConfigError(f"heads: got {count}, expected a divisor of the hidden size {hidden}")
    return count


def our_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``GPTConfig`` from a ``config.json`` of theirs.

    Raises:
        CheckpointMismatch: the file is not of a GPT-2, or of one that our GPT cannot compute.
    """
    faults = [
        f"{name} is {shown(config[name])}, expected {values[0]!r}"
        for name, values in FIXED.items()
        if name in config and config[name] not in values
    ]
    sizes = {"n_embd": 768, "vocab_size": 50257, "n_positions": 1024, "n_layer": 12, "n_head": 12}
    sizes |= {name: config[name] for name in sizes if name in config}
    sizes["n_inner"] = config.get("n_inner") or 0  # null: 4 * n_embd
    faults += [
        f"{name} is {shown(value)}, expected a whole number above 0"
        for name, value in sizes.items()
        if type(value) is not int or not (name != "n_inner") <= value < 2**40
    ]
    dropout = config.get("resid_pdrop", 0.1)
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        faults.append(f"resid_pdrop is {shown(dropout)}, expected 0 to 1")
    if config.get("model_type") != "gpt2":
        faults.insert(0, f"model_type is {shown(config.get('model_type'))}, expected 'gpt2'")
    hidden = sizes["n_embd"]
    inner = sizes["n_inner"] or 4 * hidden
    if not faults and inner % hidden:
        faults.append(f"n_inner is {inner}, expected a multiple of n_embd, which is {hidden}")
    if faults:
        raise CheckpointMismatch(
            f"hpczero.models.GPT would not give the same logits: {'; '.join(faults)}"
        )
    return {
        "vocab_size": sizes["vocab_size"],
        "context": sizes["n_positions"],
        "layers": sizes["n_layer"],
        "hidden": hidden,
        "heads": sizes["n_head"],
        "ffn_multiple": inner // hidden,
        "positions": "learned",
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
        "dropout": float(dropout),
    }


# The names and shapes that Hugging Face's GPT-NeoX has for a GPT of ours with rotary positions.
#
# Source: transformers 5.23, models/gpt_neox; Black et al., GPT-NeoX-20B, arXiv 2204.06745, sec. 2.1.

NEOX = {
    "wte": "gpt_neox.embed_in",
    "final_norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
}
NEOX_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.projection": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.expansion": "mlp.dense_h_to_4h",
    "mlp.projection": "mlp.dense_4h_to_h",
}


def neox_name(name: str) -> str:
    """GPT-NeoX's name of our parameter ``name``, which ``check`` has let through."""
    found = _OURS.fullmatch(name)
    if found:
        return f"gpt_neox.layers.{found[1]}.{NEOX_IN_BLOCK[found[2]]}.{found[3]}"
    module, _, leaf = name.rpartition(".")
    return f"{NEOX[module]}.{leaf}"


def grouped(name: str, shape: Shape, heads: int) -> Shape | None:
    """``shape`` as (3, heads, head size, ...) where theirs has heads first; None where the order is ours."""
    if ".attention.qkv." not in name:
        return None
    return (3, heads, shape[0] // (3 * heads), *shape[1:])


def neox_config(
    shapes: Mapping[str, Shape], model: Mapping[str, Any], *, heads: int, tied: bool
) -> dict[str, Any]:
    """What ``config.json`` says of a model that ``check`` has let through; arguments as of ``their_config``."""
    vocab_size, hidden = shapes[TABLE]
    layers = sum(name.endswith(".attention.qkv.weight") for name in shapes)
    dropout = float(model.get("dropout", 0.0))
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": vocab_size,
        "max_position_embeddings": model["context"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": shapes["blocks.0.mlp.expansion.weight"][0] if layers else 4 * hidden,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": False,
        "rotary_pct": 1.0,
        "rotary_emb_base": 10000,
        "attention_bias": True,
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "tie_word_embeddings": tied,
        # The tokenizer's business; the defaults may lie beyond this vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }
