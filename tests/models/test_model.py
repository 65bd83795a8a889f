"""The built-in model: its sizes, that it opens elsewhere, its loss, and that threads do not change its gradients."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import rng
from gossamer.data.tokenizer import load_tokenizer
from gossamer.errors import ConfigError
from gossamer.layout import attach, layout_of
from gossamer.models.export import export
from gossamer.models.llama import build_model, loss
from gossamer.models.sample import sample
from gossamer.models.sizes import SIZES, BottleneckConfig, ModelConfig, parameter_count

TINY = ModelConfig(size="0.2m")


def batch(seed: int = 0, sequences: int = 4, seq_len: int = 32, vocab_size: int = 256) -> Tensor:
    return torch.randint(0, vocab_size, (sequences, seq_len + 1), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        ModelConfig(size="0.2m", tie_embeddings=True),
        ModelConfig(size="1m", heads=8, kv_heads=2),
        ModelConfig(size="0.2m", hidden_size=48, layers=1, heads=3, kv_heads=1, intermediate_size=80),
    ],
)
def test_the_parameter_count_is_that_of_the_built_model(config: ModelConfig) -> None:
    built = sum(p.numel() for p in build_model(config, 300, 16, 0).parameters())
    assert parameter_count(config, 300) == built


def test_every_size_has_about_as_many_parameters_as_its_name_says() -> None:
    for name in SIZES:
        nominal = float(name[:-1]) * (1e9 if name.endswith("b") else 1e6)
        vocab_size = 256 if nominal < 1e8 else 32_000
        assert parameter_count(ModelConfig(size=name), vocab_size) == pytest.approx(nominal, rel=0.15)


def test_equal_seeds_give_bitwise_equal_models_and_other_seeds_others() -> None:
    first, again, other = (build_model(TINY, 256, 32, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_building_a_model_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    build_model(TINY, 256, 32, 0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "config",
    [TINY, ModelConfig(size="0.2m", tie_embeddings=True), ModelConfig(size="1m", heads=8, kv_heads=2)],
    ids=["plain", "tied", "grouped"],
)
def test_parameters_logits_and_gradients_are_those_of_transformers_to_the_last_bit(
    config: ModelConfig, autocast: bool
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = config.shape
    theirs_config = LlamaConfig(
        vocab_size=256,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=32,
        tie_word_embeddings=config.tie_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(3, "model"))
        theirs = LlamaForCausalLM(theirs_config)
    ours, tokens = build_model(config, 256, 32, 3), batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = theirs(input_ids=tokens[:, :-1]).logits
        assert torch.equal(logits, ours(tokens[:, :-1]))
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        loss(ours, tokens).backward()
    mine = dict(ours.named_parameters())
    assert list(mine) == [name for name, _ in theirs.named_parameters()]
    for name, p in theirs.named_parameters():
        assert torch.equal(p, mine[name]), name
        assert p.grad is not None and torch.equal(p.grad, mine[name].grad), name


def test_the_model_never_attends_to_the_future() -> None:
    model = build_model(TINY, 256, 32, 0)
    tokens = batch(seq_len=15)
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-3)


def test_the_loss_is_the_hand_written_cross_entropy() -> None:
    model, tokens = build_model(TINY, 256, 32, 0), batch()
    value = loss(model, tokens)
    logits = model(tokens[:, :-1]).double()
    chosen = torch.gather(torch.log(logits.exp() / logits.exp().sum(-1, keepdim=True)), 2, tokens[:, 1:, None])
    assert value.item() == pytest.approx(-chosen.mean().item(), rel=1e-6)
    assert value.item() == pytest.approx(math.log(256), abs=0.2)  # nats: a new model knows nothing


def test_the_loss_is_fp32_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(build_model(TINY, 256, 32, 0), batch())
    assert value.dtype is torch.float32


def test_replicas_on_two_threads_have_bitwise_the_gradients_of_one_thread() -> None:
    replicas, steps = 6, 3
    layout = layout_of(build_model(TINY, 256, 32, 0))

    def trained(lanes: int) -> list[list[Tensor]]:
        rows = torch.empty(replicas, layout.numel)
        models = [build_model(TINY, 256, 32, seed) for seed in range(replicas)]
        for model, row in zip(models, rows, strict=True):
            attach(model, layout, row)

        def work(index: int) -> list[Tensor]:
            model, found = models[index], []
            for step in range(steps):
                model.zero_grad()
                loss(model, batch(index * steps + step)).backward()
                found += gradients(model)
            return found

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(lanes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return list(pool.map(work, range(replicas)))
        finally:
            torch.set_num_threads(before)

    for one, two in zip(trained(1), trained(2), strict=True):
        assert len(one) == steps * len(layout.leaves)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_model_opens_elsewhere_with_equal_logits(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = build_model(ModelConfig(size="0.2m", tie_embeddings=tied), 256, 32, 3)
    attach(model, layout_of(model))
    export(model, tmp_path, load_tokenizer("bytes"))
    assert (tmp_path / "model.safetensors").stat().st_size < 4.1 * sum(p.numel() for p in model.parameters())
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = batch(seq_len=31)
    with torch.no_grad():
        assert torch.equal(opened(input_ids=tokens).logits, model(tokens))
    assert opened.generation_config.eos_token_id == 0

    text = "def f(ä):\n\t# 中文 Āā 🦋 \x00  end\r\n"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_an_export_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = build_model(TINY, 256, 32, 3)
    x = attach(model, layout_of(model))
    before = x.clone()
    export(model, tmp_path, load_tokenizer("bytes"))
    x.mul_(2)
    assert torch.equal(x, before * 2)
    assert torch.equal(model.lm_head.weight.flatten(), x[-model.lm_head.weight.numel() :])


def test_samples_are_repeatable_and_continue_the_prompt_past_the_trained_length() -> None:
    model, endless = build_model(TINY, 256, 16, 0), load_tokenizer("bytes")._replace(after=(), decode=list)
    first = sample(model, endless, "def ", 40, seed=1)
    assert first[:4] == list(b"def ") and len(first) == 44
    assert first == sample(model, endless, "def ", 40, seed=1)
    assert first != sample(model, endless, "def ", 40, seed=2)


def test_a_cold_sample_takes_the_most_likely_token_of_the_whole_context() -> None:
    model, endless = build_model(TINY, 256, 32, 0), load_tokenizer("bytes")._replace(after=(), decode=list)
    ids = list(b"abc")
    for _ in range(8):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert sample(model, endless, "abc", 8, seed=0, temperature=1e-6) == ids


def test_a_sample_stops_where_the_model_ends_the_document() -> None:
    model = build_model(TINY, 256, 32, 0)
    end = int(model(torch.tensor([list(b"abc")]))[0, -1].argmax())
    ending = load_tokenizer("bytes")._replace(after=(end,))
    assert sample(model, ending, "abc", 8, seed=0, temperature=1e-6) == "abc"


def test_sampling_refuses_an_empty_prompt_and_a_temperature_of_zero() -> None:
    model, bytewise = build_model(TINY, 256, 32, 0), load_tokenizer("bytes")
    with pytest.raises(ConfigError, match="prompt '' has 0 tokens"):
        sample(model, bytewise, "", 3, seed=0)
    with pytest.raises(ConfigError, match="temperature is 0"):
        sample(model, bytewise, "a", 3, seed=0, temperature=0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": "1mm"}, "did you mean '1m'"),
        ({"layers": 0}, "model.layers is 0"),
        ({"heads": 3}, "multiple of 6"),
        ({"hidden_size": 132}, "33 per head"),
        ({"kv_heads": 3}, "does not divide the 4 heads"),
        ({"heads": 0}, "model.heads is 0"),
    ],
)
def test_impossible_shapes_are_refused_with_a_sentence(options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ModelConfig(**options)


def test_dropout_does_not_lead_out_of_the_subspace_that_layers_write_into():
    narrow = BottleneckConfig(name="subspace", width=8)
    model = build_model(ModelConfig(size="0.2m", bottleneck=narrow, dropout=0.5), 256, 32, seed=0)
    assert model.subspace is not None
    added: list[Tensor] = []
    model.model.layers[0].register_forward_hook(lambda layer, given, out: added.append(out - given[0]))
    with torch.no_grad():
        model.train()(batch()[:, :-1])
    basis = model.subspace.basis
    outside = added[0] - added[0] @ basis @ basis.T
    assert added[0].abs().max() > 0.01 and outside.abs().max() < 1e-5
