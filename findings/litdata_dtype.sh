#!/usr/bin/env bash
# litdata reads one-dimensional arrays with the type of the first record: other numbers, and another length.
#
# Package:   litdata 0.2.76
# Expected:  Each array comes back with its type and shape, as two-dimensional ones do; or a record whose type differs
#            from that of the first is refused, as a float after an int is.
# What is:   A one-dimensional NumPy array or tensor is stored as bare bytes. The type is kept once, that of the first
#            record. float64 after float32 is read as twice as many wrong numbers, int32 after int64 as half as many.
#            A matrix after a vector comes back flat. No message.
# Met by:    Embeddings, tokens and masks per sequence: a mean over residues is float32, one that was
#            computed by NumPy from a list is float64; token ids come from two tokenizers as int32 and int64.
#            Remedy: .astype() of a fixed type in the function that is given to optimize().
# Source:    litdata/streaming/serializers.py, NoHeaderNumpySerializer and NoHeaderTensorSerializer;
#            litdata/streaming/writer.py, _serialize_with_data_format(), which ignores the type of later records.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
export LITDATA_DISABLE_VERSION_CHECK=1
python_packages venv litdata==0.2.76 torch==2.13.0 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import functools
import importlib.metadata
import litdata
import numpy as np
import torch

PAIRS = {
    "float32, float32": (np.float32([1, 2, 3]), np.float32([4, 5, 6])),
    "float32, float64": (np.float32([1, 2, 3]), np.float64([4, 5, 6])),
    "int64, int32": (np.int64([5, 6, 7, 8]), np.int32([5, 6, 7, 8])),
    "torch.int64, torch.int32": (torch.tensor([5, 6]), torch.tensor([5, 6], dtype=torch.int32)),
    "vector, matrix": (np.float32([1, 2]), np.float32([[1, 2], [3, 4]])),
    "matrix, vector": (np.float32([[1, 2], [3, 4]]), np.float64([1, 2])),
}


def record(name, number):
    return {"x": PAIRS[name][number]}


if __name__ == "__main__":
    print("litdata", importlib.metadata.version("litdata"))
    for count, name in enumerate(PAIRS):
        litdata.optimize(fn=functools.partial(record, name), inputs=[0, 1], output_dir=f"shards{count}",
                         chunk_bytes="1MB", num_workers=1, mode="overwrite")
        second = litdata.StreamingDataset(f"shards{count}")[1]["x"]
        print(f"  RESULT {name:24} second written {PAIRS[name][1].tolist()}, read {second.tolist()}")
PY
cd "$work"
venv/bin/python run.py >log 2>&1 || { cat log; exit 1; }
grep -E '^litdata 0|RESULT' log | sed 's/RESULT //' >seen
compare <<'END'
litdata 0.2.76
  float32, float32         second written [4.0, 5.0, 6.0], read [4.0, 5.0, 6.0]
  float32, float64         second written [4.0, 5.0, 6.0], read [0.0, 2.25, 0.0, 2.3125, 0.0, 2.375]
  int64, int32             second written [5, 6, 7, 8], read [25769803781, 34359738375]
  torch.int64, torch.int32 second written [5, 6], read [25769803781]
  vector, matrix           second written [[1.0, 2.0], [3.0, 4.0]], read [1.0, 2.0, 3.0, 4.0]
  matrix, vector           second written [1.0, 2.0], read [1.0, 2.0]
END
