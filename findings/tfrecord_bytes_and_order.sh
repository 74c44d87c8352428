#!/usr/bin/env bash
# tfrecord (PyPI) shortens byte strings in a list by their zeros at the end, and begins anywhere if it has an index.
#
# Package:   tfrecord 1.14.6
# Expected:  A list of byte strings comes back as written, as a list of one does. The README recommends to create an
#            index file; with it, records come in the order of the file unless shuffle_queue_size is given.
# What is:   Two or more byte strings become a NumPy array of type "S", which drops zero bytes at the end: rows of
#            tokens lose their padding, or their last tokens if one is 0. With index_path and without shard, each pass
#            begins at a random record and goes round; without index_path, it begins at the first. No message.
# Met by:    Alignments, or several arrays per record. Embeddings and predictions that are joined by position with a
#            list of identifiers or labels: right in a test without an index, wrong with one.
#            Remedy: one byte string per feature; shard=(0, 1) keeps the order; store the identifier in the record.
# Source:    tfrecord/reader.py: process_feature() (numpy.array with dtype bytes), tfrecord_iterator() (random choice of
#            a place of the index). TFRecordDataset passes a shard only in workers of a DataLoader. README and
#            docstrings mention neither.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv tfrecord==1.14.6 numpy==2.4.6 protobuf==7.36.2

cat >"$work/run.py" <<'PY'
import importlib.metadata
import warnings
import numpy as np
import tfrecord
from tfrecord.tools import tfrecord2idx

warnings.simplefilter("error")  # a warning would end the script


def read(name, index=None, **options):
    return list(tfrecord.tfrecord_loader(name, index, **options))


print("tfrecord", importlib.metadata.version("tfrecord"))
rows = [[5, 9, 7, 0], [5, 0, 0, 0], [0, 9, 7, 8]]
for count in (1, 3):
    writer = tfrecord.TFRecordWriter("rows")
    writer.write({"rows": ([np.uint8(row).tobytes() for row in rows[:count]], "byte")})
    writer.close()
    value = read("rows", description={"rows": "byte"})[0]["rows"]
    back = [list(each) for each in (value if count > 1 else [value])]
    print(f"  {count} written {rows[:count]}, read {back}")

writer = tfrecord.TFRecordWriter("records")
for number in range(6):
    writer.write({"number": (number, "int")})
writer.close()
tfrecord2idx.create_index("records", "index")
np.random.seed(0)
for what, arguments in {
    "without index": {},
    "with index": {"index": "index"},
    "again": {"index": "index"},
    "with index, shard=(0, 1)": {"index": "index", "shard": (0, 1)},
}.items():
    print(f"  {what:25}", *(int(record["number"][0]) for record in read("records", **arguments)))
PY
cd "$work"
venv/bin/python run.py >seen 2>log || { cat log; exit 1; }
[ ! -s log ] || { cat log; exit 1; }
compare <<'END'
tfrecord 1.14.6
  1 written [[5, 9, 7, 0]], read [[5, 9, 7, 0]]
  3 written [[5, 9, 7, 0], [5, 0, 0, 0], [0, 9, 7, 8]], read [[5, 9, 7], [5], [0, 9, 7, 8]]
  without index             0 1 2 3 4 5
  with index                4 5 0 1 2 3
  again                     5 0 1 2 3 4
  with index, shard=(0, 1)  0 1 2 3 4 5
END
