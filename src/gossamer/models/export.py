"""A trained model as a folder that `transformers` opens."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file, save_model
from torch import nn

from gossamer.data.tokenizer import Tokenizer
from gossamer.models.llama import INIT_STD, NORM_EPS, ROPE_THETA, Llama
from gossamer.record.files import atomic_write, make_folder, writing

__all__ = ["export", "export_state"]


def export(model: Llama, folder: Path, tokenizer: Tokenizer) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` open.

    Bytes too are written as a tokenizer file. The model's parameters may be views of a flat buffer.

    Raises: DiskError when the disk refuses. Cost: one more copy of the parameters while they are written.
    """
    make_folder(folder)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del tensors["lm_head.weight"]
    with writing(folder / "model.safetensors"):
        try:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from None
    documents = {
        "config.json": _config(model),
        "generation_config.json": {"eos_token_id": tokenizer.end},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, document in documents.items():
        atomic_write(folder / name, f"{json.dumps(document, indent=2)}\n".encode())
    atomic_write(folder / "tokenizer.json", tokenizer.json().encode())


def export_state(model: nn.Module, folder: Path) -> None:
    """Writes a model that is not Gossamer's: by its own `save_pretrained`, or as `model.safetensors` with its state.

    Raises: DiskError when the disk refuses. Cost: one more copy of the parameters while they are written.
    """
    make_folder(folder)
    with writing(folder / "model.safetensors"):
        try:
            if callable(save := getattr(model, "save_pretrained", None)):
                save(folder)
            else:
                save_model(model, str(folder / "model.safetensors"))
        except SafetensorError as error:
            raise OSError(str(error)) from None


def _config(model: Llama) -> dict[str, Any]:
    """The model's shape in the words of `transformers`, of version 4 (rope_theta) as well as 5 (rope_parameters)."""
    shape = model.config.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden_size // shape.heads,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": model.seq_len,
        "tie_word_embeddings": model.config.tie_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "initializer_range": INIT_STD,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
