"""Cases of accelerate and transformers run on a CPU, with small models that no hub has to give."""

import os
import tempfile
from functools import cache
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers as hf
from transformers.models.auto.auto_factory import _BaseAutoModelClass

_GPT = {"n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 1000, "n_positions": 64}
_WIDTHS = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 128,
}
_KINDS = {
    "gpt2": hf.GPT2Config(**_GPT, bos_token_id=1, eos_token_id=2),
    "gptj": hf.GPTJConfig(**_GPT, rotary_dim=4),
    "t5": hf.T5Config(
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        vocab_size=128,
        decoder_start_token_id=0,
    ),
    "qwen": hf.Qwen2MoeConfig(
        **_WIDTHS, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=2
    ),
    "mobilevit": hf.MobileViTConfig(),
}


@cache
def _folder(kind):
    place = tempfile.mkdtemp(prefix=f"peers-{kind}-")
    config = _KINDS[kind]
    if kind == "mobilevit":
        config.save_pretrained(place)
    else:
        heads = hf.AutoModelForSeq2SeqLM if kind == "t5" else hf.AutoModelForCausalLM
        heads.from_config(config).save_pretrained(place)
    return place


def _without_a_hub(load):
    def loaded(cls, name, *args, **named):
        plain = str(name).lower().replace("-", "").replace("_", "")
        kind = next((kind for kind in _KINDS if kind in plain), None)
        if kind is not None and not Path(str(name)).exists():
            name = _folder(kind)
        return load.__func__(cls, name, *args, **named)

    return classmethod(loaded)


for _class in (hf.PreTrainedModel, hf.PreTrainedConfig, hf.AutoConfig, _BaseAutoModelClass):
    _class.from_pretrained = _without_a_hub(vars(_class)["from_pretrained"])

_check = hf.TrainingArguments.__post_init__


def _on_the_cpu(self):
    self.use_cpu = True  # else bf16 needs a GPU
    _check(self)


hf.TrainingArguments.__post_init__ = _on_the_cpu
