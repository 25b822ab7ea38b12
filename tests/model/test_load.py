"""Models come back as they were saved, in the right precision, within one shard of memory, or not at all."""

import json
import re
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import COMMON, OTHERS, SEVEN, tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForMaskedLM

from penstock.errors import ModelError
from penstock.model.decoder import find_decoder
from penstock.model.load import drop_dropout, load_config, load_model, load_tokenizer, refuse_lost_scaling
from penstock.recipe.recipe import Recipe

CPU = torch.device("cpu")


def load(said=None, **values):
    recipe = Recipe(**values)
    return load_model(recipe, load_config(recipe), CPU, said.append if said is not None else lambda _: None)


def saved(directory, name, dtype=torch.float32, shard_size="20KB"):
    model = tiny_model(name).to(dtype)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


def assert_same(model, expected):
    weights, others = model.state_dict(), expected.state_dict()
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, others[name].to(weight.dtype)), name


@pytest.mark.parametrize("name", [*SEVEN, *OTHERS])
def test_round_trip(tmp_path, name):
    """Several shards; experts are stored one by one and loaded as one; loaded, saved and loaded again."""
    expected = saved(tmp_path / "first", name)
    model = load(model=str(tmp_path / "first"))
    assert_same(model, expected)
    buffers = dict(expected.named_buffers())
    for name_, buffer in model.named_buffers():  # rotary frequencies: not in the file, and must be right all the same
        assert torch.equal(buffer, buffers[name_]), name_
    model.save_pretrained(tmp_path / "second")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "second"), expected)


@pytest.mark.parametrize("name", SEVEN)
def test_bf16_round_trip_keeps_rotary_frequencies_in_fp32(tmp_path, name):
    expected = saved(tmp_path, name, torch.bfloat16)
    model = load(model=str(tmp_path))
    assert_same(model, expected)
    exact = dict(tiny_model(name).named_buffers())
    for buffer_name, buffer in model.named_buffers():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, exact[buffer_name])


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        (torch.bfloat16, "bf16", torch.bfloat16),
        (torch.bfloat16, "fp32", torch.float32),
        (torch.float32, "bf16", torch.float32),  # the engine keeps the difference in its master weights
        (torch.float16, "bf16", torch.float32),  # bf16 has fewer digits than fp16
    ],
)
def test_precision_is_never_lost_in_loading(tmp_path, stored, wanted, expected):
    model = saved(tmp_path, "llama", stored)
    loaded = load(model=str(tmp_path), dtype=wanted)
    assert {p.dtype for p in loaded.parameters()} == {expected}
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight.double(), model.state_dict()[name].double()), name


def test_a_few_wide_tensors_are_rounded_and_that_is_said(tmp_path, said):
    model = saved(tmp_path, "llama", torch.bfloat16, "1GB")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-4
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load(said, model=str(tmp_path))
    assert loaded.dtype == model.dtype == torch.bfloat16
    assert any("1 of 21 tensors are stored in more than bf16 and are rounded" in line for line in said)


def test_weights_are_not_views_of_the_file(tmp_path):
    """What is trained must not change when the file does, nor the file when it is trained."""
    saved(tmp_path, "llama", torch.bfloat16, "1GB")
    model = load(model=str(tmp_path))
    before = model.lm_head.weight.clone()
    path = tmp_path / "model.safetensors"
    with open(path, "r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\x00" * 4096)
    assert torch.equal(model.lm_head.weight, before)


def test_tied_weights_stay_tied(tmp_path):
    saved(tmp_path, "llama-tied")
    model = load(model=str(tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_generation_config_comes_along(tmp_path):
    model = tiny_model("llama")
    model.generation_config.max_new_tokens = 77
    model.save_pretrained(tmp_path)
    assert load(model=str(tmp_path)).generation_config.max_new_tokens == 77


MEMORY = """
    import sys
    import torch
    from penstock.model.load import load_config, load_model
    from penstock.recipe.recipe import Recipe

    def status(field):
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

    say, cpu = lambda _: None, torch.device("cpu")
    shape = "num_hidden_layers=1,hidden_size=64,intermediate_size=64,vocab_size=64"
    warm = Recipe(model="meta-llama/Llama-3.1-8B", init="random", shape=shape)  # so that every import has happened
    load_model(warm, load_config(warm), cpu, say)
    for dtype in ("bf16", "fp32"):  # the larger last: the peak is that of the whole process
        recipe = Recipe(model=sys.argv[1], dtype=dtype)
        config = load_config(recipe)
        before = status("VmRSS")
        model = load_model(recipe, config, cpu, say)
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        print(status("VmHWM") - before - size)
        del model
"""


@pytest.fixture(scope="module")
def sharded_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sharded")
    shape = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 3, "vocab_size": 16384}
    config = AutoConfig.for_model("llama", **COMMON | shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)  # pages of zeros would not count
    model.save_pretrained(directory, max_shard_size="60MB")
    return directory


@pytest.mark.slow
def test_peak_memory_is_the_model_and_less_than_a_shard(sharded_model):
    """All memory counts, that of mapped files too: mapping the shards would show as the whole checkpoint (250 MB)."""
    shards = [p.stat().st_size for p in sharded_model.glob("*.safetensors")]
    assert len(shards) >= 4
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(sharded_model)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    beyond = [int(line) for line in result.stdout.split()]
    assert len(beyond) == 2
    assert max(beyond) < 1.1 * max(shards), f"{beyond} bytes beyond the model, shards of {max(shards)}"


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def quantize_mxfp4(weight):
    """(experts, in, out) to blocks of 32 values along `in`, two a byte, low half first; one power of two a block."""
    blocks = weight.transpose(1, 2).reshape(weight.shape[0], weight.shape[2], -1, 32)
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1) / 6))
    index = (blocks / torch.exp2(exponent)[..., None] - FP4[:, None, None, None, None]).abs().argmin(0).to(torch.uint8)
    return index[..., 0::2] | (index[..., 1::2] << 4), (exponent + 127).to(torch.uint8)


def dequantize_mxfp4(blocks, scales):
    """The definition, apart from transformers' own code."""
    values = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_mxfp4_is_dequantized_and_saves_as_plain_weights(tmp_path, dtype):
    config = AutoConfig.for_model("gpt_oss", **SEVEN["gpt_oss"] | {"intermediate_size": 64})
    weights = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    stored, expected = {}, {}
    for name, weight in weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = quantize_mxfp4(weight.float())
            stored |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
            expected[name] = dequantize_mxfp4(blocks, scales)
        else:
            stored[name] = expected[name] = weight
    assert sum(name.endswith("_blocks") for name in stored) == 4
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    values = config.to_dict() | {"quantization_config": quantization, "architectures": ["GptOssForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values))

    model = load(model=str(tmp_path), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16 if dtype == "bf16" else torch.float32}
    for name, weight in model.state_dict().items():
        assert torch.equal(weight.float(), expected[name].float()), name
    find_decoder(model)
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert_same(load(model=str(tmp_path / "plain"), dtype=dtype), model)


def write_gguf(path, model, **others):
    """A Llama in GGUF, with llama.cpp's order of the rows of queries and keys, and a tokenizer of single letters."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<pad>", "<s>", "</s>", *(chr(33 + i) for i in range(config.vocab_size - 4)), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 3, 3] + [1] * (config.vocab_size - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        for ours, theirs in sorted(names.items(), key=lambda pair: -len(pair[0])):
            name = name.replace(ours, theirs)
        writer.add_tensor(name, weight.numpy())
    for name, values in others.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(tmp_path, said, capfd):
    expected = tiny_model("llama").requires_grad_(False)
    write_gguf(tmp_path / "tiny.gguf", expected)
    path = str(tmp_path / "tiny.gguf")
    model = load(said, model=path)
    assert model.dtype == torch.float32
    assert_same(model, expected)
    assert all(p.requires_grad for p in model.parameters())
    assert any("unpacking tiny.gguf" in line for line in said)
    assert capfd.readouterr().err == "", "no bar in a log"
    tokenizer = load_tokenizer(Recipe(model=path))
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.eos_token_id) == ("</s>", "<pad>", 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    assert_same(load(model=str(tmp_path / "plain")), expected)
    assert load_tokenizer(Recipe(model=str(tmp_path / "plain"))).chat_template == tokenizer.chat_template


def test_gguf_of_llama_3_1_is_refused(tmp_path):
    """It would be trained with the positions of Llama 3."""
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama").requires_grad_(False), rope_freqs=np.ones(4, np.float32))
    with pytest.raises(ModelError, match=r"RoPE: rope_freqs\.weight\).*\n.*the model that the file was made from"):
        load(model=str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(
    ("tensor", "scaling", "lost"),
    [
        ("rope_freqs.weight", None, "rope_freqs.weight"),
        ("rope_factors_long.weight", None, "rope_factors_long.weight"),
        (None, "yarn", "llama.rope.scaling.type = yarn"),
        (None, "none", None),
        (None, None, None),
    ],
)
def test_gguf_with_positions_that_transformers_does_not_scale_is_refused(tmp_path, tensor, scaling, lost):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    if tensor:
        writer.add_tensor(tensor, np.ones(4, np.float32))
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    by_layer = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    scaled = tiny_config("llama", rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    refuse_lost_scaling(path, scaled)
    refuse_lost_scaling(path, tiny_config("gemma3_text", rope_parameters=by_layer))
    for name in ("llama", "gemma3_text"):
        refused = pytest.raises(ModelError, match=re.escape(f"RoPE: {lost}")) if lost else nullcontext()
        with refused:
            refuse_lost_scaling(path, tiny_config(name))


SMALL = "num_hidden_layers=2,hidden_size=64,intermediate_size=64,vocab_size=128"


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B", "openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B"])
def test_random_weights_need_no_network_and_follow_the_seed(model):
    shape = f"{SMALL},num_local_experts=4" if "Llama" not in model else SMALL
    one, same, other = (load(model=model, init="random", shape=shape, seed=seed) for seed in (1, 1, 2))
    assert_same(one, same)
    assert one.dtype == torch.bfloat16
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.lm_head.weight.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(one.model.norm.weight, torch.ones(64, dtype=torch.bfloat16))
    assert one.model.rotary_emb.inv_freq.dtype == torch.float32
    assert one.model.rotary_emb.inv_freq[0] == 1


def test_random_weights_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(model="meta-llama/Llama-3.1-8B", init="random", shape=SMALL)
    assert torch.equal(torch.rand(3), expected)


def test_random_weights_by_the_config_of_a_directory(tmp_path):
    tiny_config("qwen3").save_pretrained(tmp_path)
    model = load(model=str(tmp_path), init="random", dtype="fp32", shape="num_hidden_layers=3")
    assert (model.config.model_type, len(model.model.layers), model.dtype) == ("qwen3", 3, torch.float32)


def test_dropout_is_switched_off_and_that_is_said(said):
    model = load(said, model="ByteDance-Seed/Seed-OSS-36B-Instruct", init="random", shape=SMALL)
    assert model.config.attention_dropout == model.config.residual_dropout == 0.0
    assert sum("trains without dropout" in line for line in said) == 2


def test_layers_are_not_dropped(said):
    config = tiny_config("opt", layerdrop=0.1)
    drop_dropout(config, said.append)
    assert config.layerdrop == 0.0
    assert said == ["  layerdrop = 0.1 in the model's config is set to 0: Penstock trains without dropout of layers"]


def edit_config(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_missing_weights_are_refused(tmp_path):
    saved(tmp_path, "llama", shard_size="1GB")
    edit_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"the checkpoint lacks model\.layers\.2\..* and 6 more"):
        load(model=str(tmp_path))


def test_weights_of_another_shape_are_refused(tmp_path):
    saved(tmp_path, "llama", shard_size="1GB")
    edit_config(tmp_path, vocab_size=97)
    with pytest.raises(ModelError, match=r"2 weights have another shape: lm_head\.weight is \[96, 32\].*\[97, 32\]"):
        load(model=str(tmp_path))


def test_unused_weights_are_said(tmp_path, said):
    saved(tmp_path, "llama", shard_size="1GB")
    edit_config(tmp_path, num_hidden_layers=1)
    load(said, model=str(tmp_path))
    assert any("does not use" in line and "model.layers.1" in line for line in said)


def test_a_directory_without_config(tmp_path):
    with pytest.raises(ModelError, match=r"there is no config\.json"):
        load(model=str(tmp_path))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model_type": "no-such-model"}', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_broken_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="the config cannot be used"):
        load(model=str(tmp_path))


def test_a_model_that_is_no_decoder_is_refused(tmp_path):
    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is not a causal language model \(BertForMaskedLM\)"):
        load(model=str(tmp_path))


def test_an_encoder_decoder_is_refused(tmp_path):
    AutoConfig.for_model("t5", num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is not a causal language model"):
        load_config(Recipe(model=str(tmp_path)))


def test_other_quantizations_are_refused(tmp_path):
    saved(tmp_path, "llama")
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match=r"quantized \(gptq\)"):
        load(model=str(tmp_path))


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class TinyConfig(LlamaConfig):
    model_type = "tiny-remote"

class TinyModel(LlamaForCausalLM):
    config_class = TinyConfig
"""


def test_code_of_the_model_runs_only_when_asked_for_and_loudly(tmp_path, said, own_modules):
    directory = tmp_path / "model"
    expected = saved(directory, "llama", shard_size="1GB")
    (directory / "tiny_remote.py").write_text(REMOTE)
    auto_map = {"AutoConfig": "tiny_remote.TinyConfig", "AutoModelForCausalLM": "tiny_remote.TinyModel"}
    edit_config(directory, auto_map=auto_map, model_type="tiny-remote", architectures=["TinyModel"])
    with pytest.raises(ModelError, match=r"needs Python code of its own to run\n.*--trust-remote-code"):
        load(model=str(directory))
    model = load(said, model=str(directory), trust_remote_code=True)
    assert type(model).__name__ == "TinyModel"
    assert_same(model, expected)
    assert any(line.startswith("WARNING: running Python code") for line in said)
    assert type(load(model=str(directory), trust_remote_code=True, init="random")).__name__ == "TinyModel"


def test_no_tokenizer(tmp_path):
    saved(tmp_path, "llama")
    with pytest.raises(ModelError, match=r"there is no tokenizer\n.*--tokenizer"):
        load_tokenizer(Recipe(model=str(tmp_path)))


def test_a_broken_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        load_tokenizer(Recipe(model=str(tmp_path)))


def test_the_tokenizer_may_come_from_elsewhere(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama").requires_grad_(False))
    load_tokenizer(Recipe(model=str(tmp_path / "tiny.gguf"))).save_pretrained(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(Recipe(model="meta-llama/Llama-3.1-8B", tokenizer=str(tmp_path / "tokenizer")))
    assert tokenizer.convert_tokens_to_ids("</s>") == 2


def test_the_embedded_demo_loads(said):
    import penstock

    if not (Path(penstock.__file__).parent / "demo" / "model").is_dir():
        pytest.skip("the demo model has not been made yet")
    model = load(said, model="demo")
    tokenizer = load_tokenizer(Recipe(model="demo"))
    assert len(tokenizer) <= model.get_input_embeddings().weight.shape[0]
