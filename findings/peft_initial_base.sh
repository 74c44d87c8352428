#!/usr/bin/env bash
# A LoRA file trained with init_lora_weights="pissa" or "olora" is not an update of the base model.
#
# Package:   peft 0.21.2 (transformers 5.24.0, torch 2.13.0)
# Expected:  W + scaling * B @ A with the base's W, whatever the initialisation was: that is what LoRA files mean
#            for other readers, merge scripts and inference servers.
# What is:   PiSSA and OLoRA subtract the first B @ A from the base weights before training. The file holds B and A
#            only; to read it, the same subtraction must be computed again from the base (peft does, because of
#            init_lora_weights in adapter_config.json). Shapes, names and target_modules look as usual, so
#            readers that know LoRA alone get other logits without any error.
# Met by:    Adapters of protein models that go to another program. Remedy: save_pretrained(...,
#            path_initial_model_for_weight_conversion=...), or refuse adapters whose init_lora_weights is
#            "pissa", "pissa_niter_N" or "olora".
# Source:    peft documentation, LoRA, "PiSSA" and "OLoRA"; tuners/lora/layer.py, pissa_init(), olora_init().
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv peft==0.21.2 transformers==5.24.0 torch==2.13.0 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import copy
import json
import peft
import torch
import transformers
from safetensors.torch import load_file
from transformers import EsmConfig, EsmForMaskedLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
ids = torch.tensor([[0, 20, 15, 11, 5, 19, 12, 5, 15, 16, 10, 2]])
base = EsmForMaskedLM(EsmConfig(vocab_size=33, mask_token_id=32, pad_token_id=1, hidden_size=32, num_hidden_layers=2,
                                num_attention_heads=4, intermediate_size=64, position_embedding_type="rotary",
                                initializer_range=0.3)).eval()


@torch.no_grad()
def logits(model):
    return model.eval()(ids).logits


print("peft", peft.__version__)
for start in (True, "gaussian", "pissa", "olora"):
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"], init_lora_weights=start)
    trained = peft.get_peft_model(copy.deepcopy(base), config)
    for name, parameter in trained.named_parameters():  # stands for training
        if "lora_B" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    trained.save_pretrained("adapter")
    right = logits(trained)

    reread = peft.PeftModel.from_pretrained(copy.deepcopy(base), "adapter")
    tensors, plain = load_file("adapter/adapter_model.safetensors"), copy.deepcopy(base)
    weights = plain.state_dict()
    for name in [name for name in tensors if ".lora_A." in name]:
        target = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        weights[target] += 8 / 4 * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    with open("adapter/adapter_config.json") as file:
        recorded = json.load(file)["init_lora_weights"]
    print(f"  init_lora_weights {recorded!s:8}: peft reads it right: {torch.allclose(logits(reread), right, atol=1e-3)},"
          f" W + 2 B A is right: {torch.allclose(logits(plain), right, atol=1e-3)}")
PY
cd "$work"
venv/bin/python run.py >seen
compare <<'END'
peft 0.21.2
  init_lora_weights True    : peft reads it right: True, W + 2 B A is right: True
  init_lora_weights gaussian: peft reads it right: True, W + 2 B A is right: True
  init_lora_weights pissa   : peft reads it right: True, W + 2 B A is right: False
  init_lora_weights olora   : peft reads it right: True, W + 2 B A is right: False
END
