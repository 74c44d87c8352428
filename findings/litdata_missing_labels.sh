#!/usr/bin/env bash
# litdata 0.2.76 turns missing labels (None, or an absent key) into 0 if the first record has a label.
#
# Package:   litdata 0.2.76; 0.2.70 refused None behind a number
# Expected:  {"label": None} and a record without the key come back as None, as NaN or without the key, or are refused.
# What is:   The first record decides the fields and types of a shard. A later None or absent key is read as 0.0, 0,
#            False or "". If the first record has no such key, the labels of all others are dropped; if its label
#            is None, all are kept. So the outcome depends on the order. No message.
# Met by:    Sets with gaps (Tox21, protein stability, several assays) as streamed shards: a regression is trained on
#            zeros, a classification on class 0. Remedy: write float("nan"), which is kept, and mask it.
# Source:    litdata/streaming/writer.py, BinaryWriter.serialize(); seen by running it.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
export LITDATA_DISABLE_VERSION_CHECK=1
python_packages venv litdata==0.2.76 torch==2.13.0 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import functools
import importlib.metadata
import litdata


def label(value):
    return {"none": None, "nan": float("nan")}.get(value, value)


def record(values, number):
    return {"id": f"P{number}"} | ({} if values[number] == "absent" else {"label": label(values[number])})


if __name__ == "__main__":
    print("litdata", importlib.metadata.version("litdata"))
    for count, values in enumerate((
        (1.5, "none", 2.5), (1.5, "absent", 2.5), (1.5, "nan", 2.5), ("none", 1.5, 2.5), ("absent", 1.5, 2.5), (1, "none", 2),
    )):
        litdata.optimize(fn=functools.partial(record, values), inputs=[0, 1, 2], output_dir=f"shards{count}",
                         chunk_bytes="1MB", num_workers=1, mode="overwrite")
        read = [str(item.get("label", "no key")) for item in litdata.StreamingDataset(f"shards{count}")]
        print(f"  RESULT written {', '.join(map(str, values)):18} read {', '.join(read)}")
PY
cd "$work"
venv/bin/python run.py >log 2>&1 || { cat log; exit 1; }
grep -E '^litdata 0|RESULT' log | sed 's/RESULT //' >seen
compare <<'END'
litdata 0.2.76
  written 1.5, none, 2.5     read 1.5, 0.0, 2.5
  written 1.5, absent, 2.5   read 1.5, 0.0, 2.5
  written 1.5, nan, 2.5      read 1.5, nan, 2.5
  written none, 1.5, 2.5     read None, 1.5, 2.5
  written absent, 1.5, 2.5   read no key, no key, no key
  written 1, none, 2         read 1, 0, 2
END
