"""A trained model as a folder that `transformers` opens."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from gossamer.data.tokenizer import Tokenizer
from gossamer.errors import ConfigError
from gossamer.models.llama import INIT_STD, NORM_EPS, ROPE_THETA, Llama
from gossamer.models.sizes import in_subspace
from gossamer.record.whole_files import atomic_write, make_folder, writing

_MODULE = "modeling_bottleneck.py"
"""The module that a model with residual bottlenecks needs in `transformers`."""


def export(model: Llama, folder: Path, tokenizer: Tokenizer) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` open.

    Prompts begin with the tokens that began documents in training, generation ends at their end token, and batches are
    padded on the left. A byte tokenizer is written as a tokenizer file too. The model's parameters may be views of a
    flat buffer. A model with a subspace is written as the equivalent plain Llama, up to rounding; one with residual
    bottlenecks comes with a module, so that opening it takes `trust_remote_code=True`; one with experts is written as a
    Mixtral.

    Raises: DiskError when writing fails. Cost: one more copy of the parameters during the write.
    """
    make_folder(folder)
    tensors = {_name(name): tensor.clone() for name, tensor in model.state_dict().items()}
    tensors |= _spread(model)
    if model.config.tie_embeddings:
        del tensors["lm_head.weight"]
    with writing(folder / "model.safetensors"):
        try:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from None
    special = {"bos": tokenizer.before[0] if tokenizer.before else None, "eos": tokenizer.end, "pad": tokenizer.pad}
    known = {name: token for name, token in special.items() if token is not None}
    documents = {
        # Without a padding token: torch would stop training its embedding, and it may be the end token.
        "config.json": {**_config(model), "bos_token_id": special["bos"], "eos_token_id": special["eos"]},
        "generation_config.json": {f"{name}_token_id": token for name, token in known.items()},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": tokenizer.token(token) for name, token in known.items()},
            "padding_side": "left",
            "model_max_length": model.seq_len,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, document in documents.items():
        atomic_write(folder / name, f"{json.dumps(document, indent=2)}\n".encode())
    atomic_write(folder / "tokenizer.json", tokenizer.json().encode())
    if model.model.cuts:
        atomic_write(folder / _MODULE, files("gossamer.models").joinpath(_MODULE).read_bytes())


def export_state(model: nn.Module, folder: Path) -> None:
    """Writes a model that is not Gossamer's: by its own `save_pretrained`, or as `model.safetensors` with its state.

    Raises: DiskError when writing fails. Cost: one more copy of the parameters during the write.
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


def write_card(folder: Path, title: str, facts: Mapping[str, str], *, opens: bool, needs_code: bool = False) -> None:
    """Writes README.md, the model card that the Hugging Face Hub shows: how the model was trained, and how it is opened.

    Args:
        facts: rows of a table.
        opens: whether `transformers` opens the folder, with `trust_remote_code` if it `needs_code`.
    Raises: DiskError when the disk refuses.
    """
    front = ["library_name: transformers", "pipeline_tag: text-generation"] if opens else []
    code = ", trust_remote_code=True" if needs_code else ""
    how = (
        "\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("."{code})\ntokenizer = AutoTokenizer.from_pretrained(".")\n```\n'
    )
    rows = "".join(f"| {key} | {value.replace('|', '&#124;')} |\n" for key, value in facts.items())
    text = (
        "\n".join(["---", *front, "tags: [gossamer, pretrained]", "---", ""])
        + f"\n# {title}\n\nThe mean model of a run of Gossamer: pretrained from random initial values, on text alone; it follows "
        f"no instructions and was not examined for what it may say.\n\n| | |\n|---|---|\n{rows}{how if opens else ''}"
    )
    atomic_write(folder / "README.md", text.encode())


def push_to_hub(folder: Path, repository: str, *, private: bool) -> str:
    """Uploads an exported model to the Hugging Face Hub, and returns its address.

    Args: `repository` is `USER/NAME`, which is created if it does not exist.
    Raises: ConfigError without `huggingface_hub` or permission, and where the Hub cannot be reached.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ConfigError(
            f"'{repository}' is pushed by huggingface_hub, which is not installed; pip install huggingface_hub"
        ) from None
    hub = HfApi()
    try:
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Mean model of a run of Gossamer")
    except Exception as error:  # of the Hub's own, of a file, or of whichever HTTP library it uses
        why = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"'{repository}' was not pushed to the Hugging Face Hub: {why}; name it USER/NAME, and log in by "
            "'hf auth login' or HF_TOKEN"
        ) from None
    return str(address)


@torch.no_grad()
def _spread(model: Llama) -> dict[str, Tensor]:
    """The weights that write into the subspace, in the form of a plain Llama: `U W`, and `F + E Uᵀ`."""
    if model.subspace is None:
        return {}
    basis, table = model.subspace.basis, model.subspace.table
    weights = {"model.embed_tokens.weight": table + model.model.embed_tokens.weight @ basis.T}
    for k in range(in_subspace(model.config)):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{k}.{name}.weight"] = basis @ model.model.layers[k].get_parameter(f"{name}.weight")
    return weights


_OF_MIXTRAL = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts": "block_sparse_moe.experts",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def _name(name: str) -> str:
    """The name of a parameter in the files of `transformers`."""
    if ".mlp.router." not in name and ".mlp.experts." not in name:
        return name
    for name_here, mixtral_name in _OF_MIXTRAL.items():
        name = name.replace(name_here, mixtral_name)
    return name


def _architecture_entries(model: Llama) -> dict[str, Any]:
    """The configuration's entries on the architecture and an accompanying module."""
    narrow, experts = model.config.bottleneck, model.config.experts
    if experts is not None:
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": experts.count,
            "num_experts_per_tok": experts.active,
            "router_aux_loss_coef": experts.balance,
            "sliding_window": None,
        }
    if narrow is None or narrow.cuts is None:
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return {
        "architectures": ["BottleneckLlama"],
        "model_type": "llama",
        "auto_map": {"AutoModelForCausalLM": f"{_MODULE.removesuffix('.py')}.BottleneckLlama"},
        "bottleneck": {"cuts": [*narrow.cuts], "width": narrow.width, "kind": narrow.kind},
    }


def _config(model: Llama) -> dict[str, Any]:
    """The model's shape as a `transformers` configuration, of version 4 (rope_theta) as well as 5 (rope_parameters)."""
    shape = model.config.shape
    return {
        **_architecture_entries(model),
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
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
