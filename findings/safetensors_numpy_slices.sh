#!/usr/bin/env bash
# safetensors 0.8 writes wrong numbers for NumPy arrays that are slices or transposed, without an error.
#
# Package:   safetensors 0.8.0 (numpy 2.4.6); 0.7.0 is right
# Expected:  save_file() writes the values of the array, or refuses arrays that are not contiguous, as
#            safetensors.torch.save_file does.
# What is:   0.8.0 writes the memory behind the array's first element in C order with the array's shape. For
#            embeddings[:, 1:-1] (the rows without <cls> and <eos>), x.T, x[::2] and np.asfortranarray(x) (scikit-learn's
#            PCA returns such), other numbers are in the file; shape and dtype are right.
# Met by:    Embeddings stored for a later head, projections, re-written weights. Nothing fails later either: the head
#            trains on shifted rows. Remedy: numpy.ascontiguousarray() before saving; or 0.7.0.
# Source:    safetensors/numpy.py, _flatten() (data_ptr=tensor.ctypes.data); safetensors/safetensors, issue 825.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages old safetensors==0.7.0 numpy==2.4.6
python_packages new safetensors==0.8.0 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

print("safetensors", safetensors.__version__)
layers = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)  # sequence, token (<cls> first, <eos> last), feature
for name, array in {
    "contiguous": layers,
    "layers[:, 1:-1]": layers[:, 1:-1],
    "layers[0].T": layers[0].T,
    "layers[:, ::2]": layers[:, ::2],
    "asfortranarray(layers[0])": np.asfortranarray(layers[0]),
}.items():
    save_file({"x": array}, "x.safetensors")
    loaded = load_file("x.safetensors")["x"]
    equal = np.array_equal(loaded, array)
    last = [x.reshape(-1, x.shape[-1])[-1].astype(int).tolist() for x in (array, loaded)]
    print(f"  {name:26} {'equal' if equal else 'WRONG'}  last row {last[0]} is read as {last[1]}")
PY
for venv in old new; do (cd "$work" && "$venv/bin/python" run.py); done >"$work/seen"
compare <<'END'
safetensors 0.7.0
  contiguous                 equal  last row [27, 28, 29] is read as [27, 28, 29]
  layers[:, 1:-1]            equal  last row [24, 25, 26] is read as [24, 25, 26]
  layers[0].T                equal  last row [2, 5, 8, 11, 14] is read as [2, 5, 8, 11, 14]
  layers[:, ::2]             equal  last row [27, 28, 29] is read as [27, 28, 29]
  asfortranarray(layers[0])  equal  last row [12, 13, 14] is read as [12, 13, 14]
safetensors 0.8.0
  contiguous                 equal  last row [27, 28, 29] is read as [27, 28, 29]
  layers[:, 1:-1]            WRONG  last row [24, 25, 26] is read as [18, 19, 20]
  layers[0].T                WRONG  last row [2, 5, 8, 11, 14] is read as [10, 11, 12, 13, 14]
  layers[:, ::2]             WRONG  last row [27, 28, 29] is read as [15, 16, 17]
  asfortranarray(layers[0])  WRONG  last row [12, 13, 14] is read as [8, 11, 14]
END
